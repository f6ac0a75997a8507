// SPDX-License-Identifier: Apache-2.0
//
// CudaBackend: the hooks of the CUDA backend over a table of driver functions, the loaded one or a test's. A native stream is a
// CUstream, a native event a CUevent; kernels and graphs are records of this backend.
#pragma once

#include <cuda.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "backends/cuda/context.h"
#include "backends/cuda/driver.h"
#include "backends/cuda/host_call.h"
#include "backends/cuda/joins.h"
#include "backends/cuda/module.h"
#include "backends/cuda/pinned_pool.h"
#include "metrale/backend.h"
#include "metrale/backends/cuda.h"

namespace metrale::cuda {

/// As `create`, over another driver than the process's own. The table outlives the backend.
Result<std::unique_ptr<GpuBackend>> create_with_driver(const Driver& driver, const Options& options);

/// What a launch needs of a kernel.
struct KernelRecord {
  CUfunction function = nullptr;
  const Kernel* kernel = nullptr;
  const std::string* name = nullptr;              ///< Lives as long as the process.
  std::atomic<bool> allows_wide_clusters{false};  ///< Opted in to clusters of more than eight blocks.
};

/// An instantiated graph.
struct GraphRecord {
  CUgraphExec exec = nullptr;
  std::mutex mutex;  ///< One launch at a time: the driver's graphs are not for several threads.
  std::vector<DevicePtr> addresses;
};

class CudaBackend final : public GpuBackend {
 public:
  CudaBackend(std::shared_ptr<Context> context, const FaceOptions& face);
  ~CudaBackend() override;

  /// Second half of construction.
  Result<> start(const Options& options);

 protected:
  // ---- identity (backend.cpp) ----
  std::string_view do_name() const noexcept override { return "cuda"; }
  std::string do_device_key() const override { return device_key_; }
  Capabilities do_capabilities() const override;
  Result<std::uint32_t> do_sm_count() override;
  Result<> do_bind_to_thread() override { return context_->make_current(); }
  void do_shutdown() noexcept override;

  // ---- memory (memory.cpp) ----
  Result<DevicePtr> do_alloc(std::uint64_t bytes, MemoryKind kind) override;
  Result<> do_free(DevicePtr base, std::uint64_t bytes, MemoryKind kind) override;
  Result<void*> do_alloc_pinned(std::uint64_t bytes) override;
  Result<> do_free_pinned(void* ptr, std::uint64_t bytes) override;
  Result<> do_register_host(void* ptr, std::uint64_t bytes) override;
  Result<> do_unregister_host(void* ptr, std::uint64_t bytes) override;
  Result<DevicePtr> do_host_alias(void* base) override;
  Result<DeviceMemoryInfo> do_memory_info() override;
  bool do_packs_small_allocations() const noexcept override { return true; }

  // ---- copies and fills (copy.cpp) ----
  Result<> do_copy_h2d_async(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream stream, bool retained) override;
  Result<> do_copy_d2h_async(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) override;
  Result<> do_copy_d2d_async(DevicePtr dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) override;
  Result<> do_copy_d2d_2d_async(const Copy2D& rectangle, NativeStream stream) override;
  Result<> do_copy_batch_async(std::span<const CopyDesc> copies, NativeStream stream, bool capturing) override;
  Result<> do_copy_peer_async(DevicePtr dst, GpuBackend& from, DevicePtr src, std::uint64_t bytes, NativeStream stream) override;
  Result<> do_memset_async(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream stream) override;

  // ---- streams and events (stream.cpp, event.cpp) ----
  Result<NativeStream> do_create_stream(int priority) override;
  Result<> do_destroy_stream(NativeStream stream) override;
  Result<NativeStream> do_wrap_stream(std::uint64_t native) override;
  void do_unwrap_stream(NativeStream stream) noexcept override;
  void do_share_stream(NativeStream stream) noexcept override { work().share(stream_of(stream), this); }
  Result<> do_synchronize(NativeStream stream) override;
  Result<> do_synchronize_for(NativeStream stream, std::chrono::nanoseconds timeout) override;
  Result<> do_synchronize_device() override { return do_wait_for_earlier_work(); }
  Result<> do_wait_for_earlier_work() override;
  Result<bool> do_query(NativeStream stream) override;
  Result<> do_enqueue_host(NativeStream stream, std::function<void()> fn) override;
  Result<> do_enqueue_native(NativeStream stream, NativeWork work) override;
  Result<NativeEvent> do_create_event(bool timed) override;
  Result<> do_destroy_event(NativeEvent event) override;
  Result<> do_record_event(NativeEvent event, NativeStream stream) override;
  Result<> do_stream_wait_event(NativeStream stream, NativeEvent event) override;
  Result<> do_event_synchronize(NativeEvent event) override;
  Result<bool> do_event_query(NativeEvent event) override;
  Result<std::int64_t> do_event_elapsed_ns(NativeEvent start, NativeEvent end) override;

  // ---- capture and graphs (graph.cpp) ----
  Result<> do_begin_capture(NativeStream stream) override;
  Result<NativeGraph> do_end_capture(NativeStream stream) override;
  Result<> do_abort_capture(NativeStream stream) override;
  Result<bool> do_stream_is_capturing(NativeStream stream) override;
  Result<> do_launch_graph(NativeGraph graph, NativeStream stream) override;
  Result<> do_destroy_graph(NativeGraph graph) override;
  Result<std::vector<DevicePtr>> do_graph_addresses(NativeGraph graph) override;

  // ---- kernels (launch.cpp) ----
  Result<NativeKernel> do_find_kernel(std::string_view module, std::string_view function) override;
  Result<bool> do_has_module(std::string_view module) override;
  Result<KernelFacts> do_kernel_facts(NativeKernel kernel) override;
  Result<> do_launch(const LaunchDesc& launch) override;
  Result<TensorMap> do_tensor_map(const TensorTile& tile) override;  // tensor_map.cpp
  KernelRegistry* do_kernel_registry() noexcept override { return &modules_; }
  Result<> do_unload_modules() override;

 private:
  /// What goes back to the driver, or to a pool, once the work in flight has passed.
  struct Parting {
    enum class Kind : std::uint8_t { memory, managed, pinned, graph, stream, event };
    Kind kind;
    std::uint64_t value = 0;  ///< An address or a handle.
    std::uint64_t bytes = 0;
    std::vector<MarkPtr> marks{};
    bool until_shutdown = false;  ///< Nobody can tell when its work is done.
    bool is_unmarked = false;     ///< Nor can anybody now, while a library captures a stream; later.

    bool is_due() const noexcept;
  };
  /// Whether it may go as soon as its own work is done, or only while the driver has nothing to wait for.
  static bool waits_for_device(Parting::Kind kind) noexcept {
    return kind == Parting::Kind::memory || kind == Parting::Kind::managed;
  }

  static CUstream stream_of(NativeStream stream) noexcept { return reinterpret_cast<CUstream>(stream.value); }
  static CUevent event_of(NativeEvent event) noexcept { return reinterpret_cast<CUevent>(event.value); }
  static GraphRecord& graph_of(NativeGraph graph) noexcept { return *reinterpret_cast<GraphRecord*>(graph.value); }
  static KernelRecord& kernel_of(NativeKernel kernel) noexcept { return *reinterpret_cast<KernelRecord*>(kernel.value); }

  Work& work() noexcept { return context_->work(); }
  Result<> check(CUresult code, std::string_view what) { return context_->check(code, what); }
  /// The result of an enqueue on `stream`, which counts it.
  Result<> enqueued(NativeStream stream, CUresult code, std::string_view what) {
    work().note(stream_of(stream), this);
    return context_->check(code, what);
  }
  template <class T>
  Result<T> noted(Result<T> result) {
    if (!result) return context_->noted(std::move(result).error());
    return result;
  }

  // ---- what goes back (release.cpp) ----
  /// Gives back at once where nothing is in flight, otherwise once this backend's work so far has passed.
  Result<> part_with(Parting parting);
  /// Runs `part` with the context current; where that fails the thing is kept. After the driver there is nobody to give it to.
  template <class Part>
  Result<> part_in_context(Parting parting, Part&& part) {
    if (Result<> current = context_->make_current(); !current) {
      if (is_gone(static_cast<CUresult>(current.error().native_code()))) return {};
      parting.until_shutdown = !waits_for_device(parting.kind);
      keep_for_later(std::move(parting));
      return current;
    }
    const OutsideCapture outside(driver_);
    return part(std::move(parting));
  }
  /// Puts off what is spare, for the driver to have it.
  void part_with_spares() noexcept;
  /// Calls `leave`, of `work()`, which keeps the end of what runs on a stream. Where that cannot be marked it is waited for: nobody
  /// could tell afterwards when the work is done. Not inside a library's capture, which a wait would break.
  template <class Leave>
  void leave_stream(NativeStream stream, Leave&& leave) {
    Errc reason = Errc::out_of_memory;
    try {
      const Result<> left = leave(false);
      if (left) return;
      reason = left.error().code();
    } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for the mark
    }
    if (reason != Errc::device_lost && reason != Errc::capture_unsafe) {
      static_cast<void>(driver_.cuStreamSynchronize_(stream_of(stream)));
    }
    static_cast<void>(leave(true).has_value());
  }
  /// Marks what could not be marked before.
  void mark_unmarked();
  /// Gives back what may go now, without waiting.
  void reap() noexcept;
  /// Waits until what was put off may go, at most a while, where `bytes` would fit then; whether anything went.
  bool reap_waiting(std::uint64_t bytes);
  /// Gives back everything. All work of this backend is done.
  void reap_all() noexcept;
  Result<> give_back(const Parting& parting) noexcept;
  /// Keeps what cannot go now, for the next try. False where the heap has no place for it, and `parting` is as before.
  bool keep_for_later(Parting&& parting) noexcept;
  Result<std::vector<MarkPtr>> marks_of_own_work() noexcept;
  /// A block of the same kind and size that was put off and may be used now.
  std::optional<DevicePtr> take_put_off(std::uint64_t bytes, MemoryKind kind) noexcept;

  /// Refuses managed memory beyond what the device has.
  Result<> check_managed(std::uint64_t bytes);

  // ---- graphs (graph.cpp) ----
  GraphRecord* keep_graph();
  void forget_graph(const GraphRecord* graph) noexcept;

  // ---- staging (copy.cpp) ----
  Result<> copy_staged(DevicePtr dst, const std::byte* src, std::uint64_t bytes, NativeStream stream, StreamRecord& record);
  Result<> copy_staged_small(DevicePtr dst, const std::byte* src, std::uint64_t bytes, NativeStream stream, StreamRecord& record);
  /// Waits while too much is staged.
  Result<> wait_for_staging();
  void part_with_staged(void* block, std::uint64_t bytes, StreamRecord& record) noexcept;
  Result<> copy_frozen(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream stream);
  /// Puts off the open staging block of a stream, whose staging is locked.
  void close_staging(StreamRecord& record) noexcept;
  // ---- launches (launch.cpp) ----
  CUresult launch_with_attributes(const LaunchDesc& launch, void** params);
  Error launch_error(const LaunchDesc& launch, CUresult code);

  /// Lets this device reach the memory of another, where it can.
  Result<> reach(Context& peer);
  void leave_capture() noexcept;
  /// Gives the graph that `stream` is captured into something to own; `destroy` is called on a driver's thread with `object`.
  Result<> give_to_capture(NativeStream stream, void* object, CUhostFn destroy);

  std::shared_ptr<Context> context_;  // shared: by all backends of the device
  const Driver& driver_;
  std::string device_key_;
  Modules modules_;
  std::shared_ptr<PinnedPool> pinned_;  // shared: graphs give frozen bytes back, on the driver's threads
  std::shared_ptr<HostCalls> host_calls_;
  bool is_integrated_ = false;
  bool is_closed_ = false;
  int least_priority_ = 0;
  int greatest_priority_ = 0;

  std::atomic<std::uint32_t> num_captures_{0};  ///< Open, begun here.
  Joins joins_;

  std::mutex partings_mutex_;
  std::vector<Parting> partings_;
  std::atomic<std::size_t> num_partings_{0};
  std::atomic<std::uint64_t> device_bytes_{0};
  std::atomic<std::uint64_t> managed_bytes_{0};

  std::mutex graphs_mutex_;
  std::unordered_map<const GraphRecord*, std::unique_ptr<GraphRecord>> graphs_;  ///< Also those that a lost device keeps.
  std::mutex kernels_mutex_;
  std::unordered_map<const Kernel*, std::unique_ptr<KernelRecord>> kernels_;
  std::mutex peers_mutex_;
  std::vector<CUcontext> peers_;  ///< Contexts whose memory is reachable from here, or was found not to be.
};

}  // namespace metrale::cuda
