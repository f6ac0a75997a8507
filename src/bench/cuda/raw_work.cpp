// SPDX-License-Identifier: Apache-2.0
//
// The raw side's copies, graphs and marks.
#include "backends/cuda/status.h"
#include "bench/cuda/raw_device.h"

namespace metrale::bench {

template <class Body>
Result<double> CudaRawDevice::timed(const Body& body) {
  METRALE_TRY(enter());
  METRALE_TRY(check(driver_.cuEventRecord_(start_, stream_), "cuEventRecord"));
  METRALE_TRY(body());
  METRALE_TRY(check(driver_.cuEventRecord_(end_, stream_), "cuEventRecord"));
  METRALE_TRY(check(driver_.cuEventSynchronize_(end_), "cuEventSynchronize"));
  float milliseconds = 0;
  METRALE_TRY(check(driver_.cuEventElapsedTime_(&milliseconds, start_, end_), "cuEventElapsedTime"));
  return static_cast<double>(milliseconds) / 1e3;
}

// ---- copies ----

Result<std::span<std::byte>> CudaRawDevice::pinned(std::uint64_t bytes) {
  METRALE_TRY(enter());
  pinned_.reserve(pinned_.size() + 1);
  void* memory = nullptr;
  METRALE_TRY(check(driver_.cuMemHostAlloc_(&memory, bytes, 0), "cuMemHostAlloc"));
  pinned_.push_back(memory);
  return std::span(static_cast<std::byte*>(memory), bytes);
}

Result<> CudaRawDevice::to_host(std::span<const RawCopy> copies) {
  METRALE_TRY(enter());
  for (const RawCopy& copy : copies) {
    const CUresult code = driver_.cuMemcpyDtoHAsync_(copy.host, copy.device, copy.bytes, stream_);
    if (code != CUDA_SUCCESS) return check(code, "cuMemcpyDtoHAsync");
  }
  return check(driver_.cuStreamSynchronize_(stream_), "cuStreamSynchronize");
}

Result<> CudaRawDevice::to_device(std::span<const RawCopy> copies) {
  METRALE_TRY(enter());
  for (const RawCopy& copy : copies) {
    const CUresult code = driver_.cuMemcpyHtoDAsync_(copy.device, copy.host, copy.bytes, stream_);
    if (code != CUDA_SUCCESS) return check(code, "cuMemcpyHtoDAsync");
  }
  return check(driver_.cuStreamSynchronize_(stream_), "cuStreamSynchronize");
}

Result<> CudaRawDevice::to_host_blocking(std::span<const RawCopy> copies) {
  for (const RawCopy& copy : copies) METRALE_TRY(to_host({&copy, 1}));
  return {};
}

Result<double> CudaRawDevice::device_copy_seconds(std::uint64_t dst, std::uint64_t src, std::uint64_t bytes) {
  return timed([&] { return check(driver_.cuMemcpyDtoDAsync_(dst, src, bytes, stream_), "cuMemcpyDtoDAsync"); });
}

// ---- graphs ----

template <class Body>
Result<std::uint32_t> CudaRawDevice::capture(const Body& body) {
  METRALE_TRY(enter());
  graphs_.reserve(graphs_.size() + 1);
  METRALE_TRY(check(driver_.cuStreamBeginCapture_(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture"));
  const Result<> recorded = body();
  CUgraph graph = nullptr;
  const CUresult ended = driver_.cuStreamEndCapture_(stream_, &graph);
  if (!recorded) {
    if (graph != nullptr) driver_.cuGraphDestroy_(graph);
    return Error(recorded.error());
  }
  METRALE_TRY(check(ended, "cuStreamEndCapture"));
  CUgraphExec instance = nullptr;
  if (Result<> made = check(driver_.cuGraphInstantiateWithFlags_(&instance, graph, 0), "cuGraphInstantiateWithFlags"); !made) {
    driver_.cuGraphDestroy_(graph);
    return std::move(made).error();
  }
  graphs_.emplace_back(graph, instance);
  METRALE_TRY(check(driver_.cuGraphUpload_(instance, stream_), "cuGraphUpload"));
  METRALE_TRY(synchronize());
  return static_cast<std::uint32_t>(graphs_.size() - 1);
}

Result<std::uint32_t> CudaRawDevice::make_chain(std::uint32_t nodes, std::uint32_t blocks, bool dependent) {
  constexpr unsigned kChainThreads = 128;
  return capture([&]() -> Result<> {
    std::array<void*, 1> params{&counters_};
    for (std::uint32_t i = 0; i < nodes; ++i) {
      CUlaunchAttribute attribute;
      CUlaunchConfig config = dependent_config(attribute, blocks, dependent && i != 0);
      config.blockDimX = kChainThreads;
      METRALE_TRY(check(driver_.cuLaunchKernelEx_(&config, nop_waits_, params.data(), nullptr), "cuLaunchKernelEx"));
    }
    return {};
  });
}

Result<std::optional<std::uint32_t>> CudaRawDevice::make_peer(const PeerProduct& product, std::string& why_not) {
  METRALE_TRY(enter());
  if (!blas_) {
    auto blas = CublasLt::load();
    if (!blas) {
      why_not = blas.error().message();
      return std::nullopt;
    }
    blas_ = std::move(*blas);
  }
  const CUdeviceptr x = METRALE_TRY(new_memory(std::uint64_t{product.k} * 2));
  const CUdeviceptr y = METRALE_TRY(new_memory(std::uint64_t{product.n} * 2));
  const CUdeviceptr workspace = METRALE_TRY(new_memory(CublasLt::kWorkspaceBytes));
  // The input may be any finite bf16: the first row of a matrix is as good as random.
  METRALE_TRY(
      check(driver_.cuMemcpyDtoDAsync_(x, product.weights[0].address, std::uint64_t{product.k} * 2, stream_), "cuMemcpyDtoDAsync"));
  METRALE_TRY(synchronize());
  auto plan = blas_->plan(product.n, product.k);
  if (!plan) {
    why_not = plan.error().message();
    return std::nullopt;
  }
  const auto multiply = [&](std::uint32_t i) {
    const DevicePtr weights = product.weights[i % product.weights.size()];
    return blas_->run(*plan, weights.address, x, y, workspace, stream_);
  };
  // Outside the capture first: the library may load code on its first call.
  METRALE_TRY(multiply(0));
  METRALE_TRY(synchronize());
  const std::uint32_t graph = METRALE_TRY(capture([&]() -> Result<> {
    for (std::uint32_t i = 0; i < product.count; ++i) {
      if (Result<> enqueued = multiply(i); !enqueued) return enqueued;
    }
    return {};
  }));
  return graph;
}

Result<> CudaRawDevice::launch_graph(std::uint32_t graph, std::uint32_t count) {
  METRALE_TRY(enter());
  CUgraphExec instance = graphs_[graph].second;
  for (std::uint32_t i = 0; i < count; ++i) {
    const CUresult code = driver_.cuGraphLaunch_(instance, stream_);
    if (code != CUDA_SUCCESS) return check(code, "cuGraphLaunch");
  }
  return {};
}

Result<double> CudaRawDevice::graph_seconds(std::uint32_t graph) {
  return timed([&] { return check(driver_.cuGraphLaunch_(graphs_[graph].second, stream_), "cuGraphLaunch"); });
}

// ---- marks ----

Result<> CudaRawDevice::reset_marks(std::uint32_t capacity) {
  METRALE_TRY(enter());
  marks_.reserve(capacity);
  while (marks_.size() < capacity) marks_.push_back(METRALE_TRY(new_event()));
  num_marks_ = 0;
  return {};
}

Result<> CudaRawDevice::hold(std::uint64_t native, std::uint64_t nanoseconds) {
  METRALE_TRY(enter());
  std::array<void*, 1> params{&nanoseconds};
  return check(driver_.cuLaunchKernel_(hold_, 1, 1, 1, 1, 1, 1, 0, reinterpret_cast<CUstream>(native), params.data(), nullptr),
               "cuLaunchKernel");
}

Result<> CudaRawDevice::mark(std::uint64_t native) {
  if (num_marks_ == marks_.size()) return Error(Errc::out_of_range, "more launches than there are events for a profile");
  METRALE_TRY(check(driver_.cuEventRecord_(marks_[num_marks_], reinterpret_cast<CUstream>(native)), "cuEventRecord"));
  ++num_marks_;
  return {};
}

Result<std::vector<double>> CudaRawDevice::mark_seconds() {
  METRALE_TRY(enter());
  std::vector<double> seconds;
  if (num_marks_ == 0) return seconds;
  METRALE_TRY(check(driver_.cuEventSynchronize_(marks_[num_marks_ - 1]), "cuEventSynchronize"));
  for (std::size_t i = 1; i < num_marks_; ++i) {
    float milliseconds = 0;
    METRALE_TRY(check(driver_.cuEventElapsedTime_(&milliseconds, marks_[i - 1], marks_[i]), "cuEventElapsedTime"));
    seconds.push_back(static_cast<double>(milliseconds) / 1e3);
  }
  return seconds;
}

}  // namespace metrale::bench
