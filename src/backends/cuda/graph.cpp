// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "backends/cuda/cuda_backend.h"
#include "backends/cuda/driver_log.h"
#include "metrale/log.h"

namespace metrale::cuda {

namespace {

constexpr std::string_view kHowToJoin = "let the stream wait for an event recorded last on each stream that joined";

/// A captured graph, destroyed at the end of the scope.
class Template {
 public:
  Template(const Driver& driver, CUgraph graph) noexcept : driver_(driver), graph_(graph) {}
  ~Template() {
    if (graph_ != nullptr) static_cast<void>(give_back_insisting([&] { return driver_.cuGraphDestroy_(graph_); }));
  }
  Template(const Template&) = delete;
  Template& operator=(const Template&) = delete;

 private:
  const Driver& driver_;
  const CUgraph graph_;
};

/// Every word of the kernels' parameters that may be an address. What cannot be read is left out; `problem` tells of it.
class AddressScan {
 public:
  explicit AddressScan(const Driver& driver) noexcept : driver_(driver) {}

  void graph(CUgraph graph) {
    std::size_t count = 0;
    if (!succeeded(driver_.cuGraphGetNodes_(graph, nullptr, &count), "cuGraphGetNodes") || count == 0) return;
    std::vector<CUgraphNode> nodes(count);
    if (!succeeded(driver_.cuGraphGetNodes_(graph, nodes.data(), &count), "cuGraphGetNodes")) return;
    nodes.resize(std::min(count, nodes.size()));
    for (const CUgraphNode node : nodes) {
      CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
      if (!succeeded(driver_.cuGraphNodeGetType_(node, &type), "cuGraphNodeGetType")) continue;
      if (type == CU_GRAPH_NODE_TYPE_KERNEL) kernel(node);
      if (type == CU_GRAPH_NODE_TYPE_GRAPH) {
        CUgraph child = nullptr;
        if (succeeded(driver_.cuGraphChildGraphNodeGetGraph_(node, &child), "cuGraphChildGraphNodeGetGraph")) this->graph(child);
      }
    }
  }

  std::vector<DevicePtr> take() {
    std::sort(found_.begin(), found_.end());
    found_.erase(std::unique(found_.begin(), found_.end()), found_.end());
    return std::move(found_);
  }
  /// The first failure that is not the end of a list, nor something that this driver does not tell.
  std::optional<Error> problem() const {
    if (problem_ == CUDA_SUCCESS) return std::nullopt;
    return driver_error(driver_, problem_, asked_);
  }

 private:
  bool succeeded(CUresult code, std::string_view what) noexcept {
    if (code == CUDA_SUCCESS) return true;
    if (problem_ == CUDA_SUCCESS && code != CUDA_ERROR_INVALID_VALUE && code != CUDA_ERROR_NOT_SUPPORTED) {
      problem_ = code;
      asked_ = what;
    }
    return false;
  }

  void kernel(CUgraphNode node) {
    CUDA_KERNEL_NODE_PARAMS params{};
    if (!succeeded(driver_.cuGraphKernelNodeGetParams_(node, &params), "cuGraphKernelNodeGetParams")) return;
    if (params.kernelParams != nullptr) {
      const std::vector<std::size_t>& sizes = param_bytes(params);
      for (std::size_t i = 0; i < sizes.size(); ++i) words(params.kernelParams[i], sizes[i]);
    } else if (params.extra != nullptr) {
      packed(params.extra);
    }
  }

  /// Sizes of the parameters of a node's kernel, as far as the driver tells them. Most kernels have many nodes; each is asked once.
  const std::vector<std::size_t>& param_bytes(const CUDA_KERNEL_NODE_PARAMS& params) {
    const ExpectedRefusal end_of_list;
    const auto [entry, is_new] = param_bytes_.try_emplace({params.func, params.kern});
    std::vector<std::size_t>& sizes = entry->second;
    if (!is_new) return sizes;
    std::size_t offset = 0;
    std::size_t bytes = 0;
    while (succeeded(param_info(params, sizes.size(), offset, bytes), "cuFuncGetParamInfo")) sizes.push_back(bytes);
    return sizes;
  }

  CUresult param_info(const CUDA_KERNEL_NODE_PARAMS& params, std::size_t index, std::size_t& offset, std::size_t& bytes) const {
    if (params.func != nullptr) return driver_.cuFuncGetParamInfo_(params.func, index, &offset, &bytes);
    if (params.kern == nullptr || driver_.cuKernelGetParamInfo_ == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    return driver_.cuKernelGetParamInfo_(params.kern, index, &offset, &bytes);
  }

  void packed(void* const* extra) {
    const void* buffer = nullptr;
    std::size_t bytes = 0;
    for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
      if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) buffer = extra[1];
      if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE) bytes = *static_cast<const std::size_t*>(extra[1]);
    }
    if (buffer != nullptr) words(buffer, bytes);
  }

  void words(const void* at, std::size_t bytes) {
    for (std::size_t i = 0; i + sizeof(std::uint64_t) <= bytes; i += sizeof(std::uint64_t)) {
      std::uint64_t word = 0;
      std::memcpy(&word, static_cast<const std::byte*>(at) + i, sizeof(word));
      if (word != 0) found_.push_back({word});
    }
  }

  const Driver& driver_;
  CUresult problem_ = CUDA_SUCCESS;
  std::string_view asked_;
  std::map<std::pair<CUfunction, CUkernel>, std::vector<std::size_t>> param_bytes_;
  std::vector<DevicePtr> found_;
};

}  // namespace

Result<> CudaBackend::do_begin_capture(NativeStream stream) {
  METRALE_TRY(context_->make_current());
  // Called under the lock of `work()`, which the context's own check takes to name kernels.
  const auto begin = [&]() -> Result<> {
    return cuda::check(driver_, driver_.cuStreamBeginCapture_(stream_of(stream), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
                       "cuStreamBeginCapture");
  };
  StreamRecord* record = work().find(stream_of(stream), this);
  METRALE_TRY(noted(record == nullptr ? begin() : work().capturing(*record, begin)));
  num_captures_.fetch_add(1, std::memory_order_release);
  ++OutsideCapture::num_on_thread();
  return {};
}

void CudaBackend::leave_capture() noexcept {
  num_captures_.fetch_sub(1, std::memory_order_release);
  // Of another thread's capture only that thread keeps count.
  if (int& count = OutsideCapture::num_on_thread(); count > 0) --count;
}

Result<NativeGraph> CudaBackend::do_end_capture(NativeStream stream) {
  METRALE_TRY(context_->make_current());
  leave_capture();
  // Where the driver cannot tell, it alone looks for streams that were not joined.
  const std::size_t num_unjoined = joins_.end(work().capture_of(stream_of(stream)).value_or(0));
  CUgraph graph = nullptr;
  const CUresult ended = work().end_capture(stream_of(stream), &graph);
  const Template destroyed(driver_, graph);
  if (ended != CUDA_SUCCESS) {
    Error error = context_->error(ended, "cuStreamEndCapture");
    // A refusal that is not the capture's own leaves it open.
    CUgraph left = nullptr;
    if (work().is_captured(stream_of(stream)).value_or(false) && work().end_capture(stream_of(stream), &left) == CUDA_SUCCESS) {
      const Template discarded(driver_, left);
    }
    if (ended == CUDA_ERROR_STREAM_CAPTURE_UNJOINED) error = std::move(error).with_note(std::string(kHowToJoin));
    return error;
  }
  if (num_unjoined != 0) {
    return Error(Errc::invalid_argument,
                 fmt::format("end_capture: {} of the streams that joined were not joined back; {}", num_unjoined, kHowToJoin));
  }
  GraphRecord* const made = keep_graph();
  AddressScan scan(driver_);
  scan.graph(graph);
  made->addresses = scan.take();
  if (const auto problem = scan.problem()) {
    log(LogLevel::warning, fmt::format("a captured graph may not name all memory that its kernels use: {}", problem->to_string()));
  }
  if (const CUresult code = driver_.cuGraphInstantiateWithFlags_(&made->exec, graph, 0); code != CUDA_SUCCESS) {
    forget_graph(made);
    return context_->error(code, "cuGraphInstantiateWithFlags");
  }
  return NativeGraph{reinterpret_cast<std::uintptr_t>(made)};
}

GraphRecord* CudaBackend::keep_graph() {
  auto made = std::make_unique<GraphRecord>();
  GraphRecord* const graph = made.get();
  std::lock_guard lock(graphs_mutex_);
  graphs_.emplace(graph, std::move(made));
  return graph;
}

void CudaBackend::forget_graph(const GraphRecord* graph) noexcept {
  std::lock_guard lock(graphs_mutex_);
  graphs_.erase(graph);
}

Result<> CudaBackend::do_abort_capture(NativeStream stream) {
  METRALE_TRY(context_->make_current());
  leave_capture();
  joins_.end(work().capture_of(stream_of(stream)).value_or(0));
  for (int round = 0;; ++round) {
    CUgraph graph = nullptr;
    const CUresult code = work().end_capture(stream_of(stream), &graph);
    const Template discarded(driver_, graph);
    if (code == CUDA_SUCCESS) return {};
    // That it was broken or not joined says nothing here: it has ended.
    if (!work().is_captured(stream_of(stream)).value_or(true) && !is_sticky(code)) return {};
    if (round != 0 || is_sticky(code)) return check(code, "cuStreamEndCapture");
  }
}

Result<bool> CudaBackend::do_stream_is_capturing(NativeStream stream) {
  METRALE_TRY(context_->make_current());
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  METRALE_TRY(check(driver_.cuStreamIsCapturing_(stream_of(stream), &status), "cuStreamIsCapturing"));
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

Result<> CudaBackend::do_launch_graph(NativeGraph graph, NativeStream stream) {
  GraphRecord& record = graph_of(graph);
  std::lock_guard lock(record.mutex);
  const CUresult code = context_->on_stream([&] { return driver_.cuGraphLaunch_(record.exec, stream_of(stream)); });
  return enqueued(stream, code, "cuGraphLaunch");
}

Result<> CudaBackend::do_destroy_graph(NativeGraph graph) {
  return part_in_context({.kind = Parting::Kind::graph, .value = graph.value},
                         [&](Parting graph_record) { return part_with(std::move(graph_record)); });
}

Result<std::vector<DevicePtr>> CudaBackend::do_graph_addresses(NativeGraph graph) { return graph_of(graph).addresses; }

Result<> CudaBackend::give_to_capture(NativeStream stream, void* object, CUhostFn destroy) {
  CUuserObject owned = nullptr;
  if (const CUresult code = driver_.cuUserObjectCreate_(&owned, object, destroy, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
      code != CUDA_SUCCESS) {
    destroy(object);
    return check(code, "cuUserObjectCreate");
  }
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CUgraph graph = nullptr;
  std::string_view what = "cuStreamGetCaptureInfo";
  CUresult code = driver_.cuStreamGetCaptureInfo_(stream_of(stream), &status, nullptr, &graph, nullptr, nullptr, nullptr);
  if (code == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_ACTIVE) code = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (code == CUDA_SUCCESS) {
    what = "cuGraphRetainUserObject";
    code = driver_.cuGraphRetainUserObject_(graph, owned, 1, CU_GRAPH_USER_OBJECT_MOVE);
  }
  if (code == CUDA_SUCCESS) return {};
  static_cast<void>(driver_.cuUserObjectRelease_(owned, 1));
  return check(code, what);
}

}  // namespace metrale::cuda
