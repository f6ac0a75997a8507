// SPDX-License-Identifier: Apache-2.0
//
// HostBackend: the hooks of the host backend over a `Device`.
// Not final: the mock and test doubles derive from it and call its hooks.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "backends/host/device.h"
#include "backends/host/module.h"
#include "backends/host/status.h"
#include "backends/host/stream.h"
#include "metrale/backend.h"
#include "metrale/backends/host.h"

namespace metrale::host {

class HostBackend : public GpuBackend {
 public:
  explicit HostBackend(Options options = {}) : HostBackend(std::move(options), kRunNowBytes) {}
  ~HostBackend() override;

  /// Makes and initializes a `T`, which derives from HostBackend.
  template <class T, class... Args>
  static Result<std::unique_ptr<GpuBackend>> make(Args&&... args) {
    return guarded("create a host backend", [&]() -> Result<std::unique_ptr<GpuBackend>> {
      auto backend = std::make_unique<T>(std::forward<Args>(args)...);
      METRALE_TRY(static_cast<HostBackend&>(*backend).start());
      return std::unique_ptr<GpuBackend>(std::move(backend));
    });
  }

 protected:
  /// Copies and fills of at most `run_now_bytes` run in the caller when their stream is idle.
  HostBackend(Options options, std::uint64_t run_now_bytes);

  Device& device() noexcept { return *device_; }
  const Device& device() const noexcept { return *device_; }
  /// The host memory behind [ptr, ptr + bytes). Here an address is its own.
  virtual Result<std::byte*> do_resolve(DevicePtr ptr, std::uint64_t bytes) const;
  /// What do_memory_info reports; large allocations ask it too.
  virtual Result<DeviceMemoryInfo> memory_now();
  static Stream& stream_of(NativeStream stream) noexcept { return *reinterpret_cast<Stream*>(stream.value); }
  static Event& event_of(NativeEvent event) noexcept { return *reinterpret_cast<Event*>(event.value); }
  static Graph& graph_of(NativeGraph graph) noexcept { return *reinterpret_cast<Graph*>(graph.value); }
  static const HostKernel& kernel_of(NativeKernel kernel) noexcept { return *reinterpret_cast<const HostKernel*>(kernel.value); }
  static NativeStream native(Stream& stream) noexcept { return {reinterpret_cast<std::uintptr_t>(&stream)}; }
  static NativeEvent native(Event& event) noexcept { return {reinterpret_cast<std::uintptr_t>(&event)}; }
  static NativeGraph native(Graph& graph) noexcept { return {reinterpret_cast<std::uintptr_t>(&graph)}; }

  // ---- hooks: identity (backend.cpp) ----
  std::string_view do_name() const noexcept override { return "host"; }
  std::string do_device_key() const override { return device_key_; }
  Capabilities do_capabilities() const override;
  Result<std::uint32_t> do_sm_count() override;
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

  // ---- copies and fills (copy.cpp) ----
  Result<> do_copy_h2d_async(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream stream, bool retained) override;
  Result<> do_copy_d2h_async(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) override;
  Result<> do_copy_d2d_async(DevicePtr dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) override;
  Result<> do_copy_d2d_2d_async(const Copy2D& rectangle, NativeStream stream) override;
  Result<> do_copy_peer_async(DevicePtr dst, GpuBackend& from, DevicePtr src, std::uint64_t bytes, NativeStream stream) override;
  Result<> do_memset_async(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream stream) override;
  Result<> do_copy_h2d(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream default_stream) override;
  Result<> do_copy_d2h(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream default_stream) override;
  Result<> do_copy_d2d(DevicePtr dst, DevicePtr src, std::uint64_t bytes, NativeStream default_stream) override;
  Result<> do_copy_d2h_on_stream(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) override;
  Result<> do_memset(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream default_stream) override;

  // ---- streams and events (stream.cpp, event.cpp) ----
  Result<NativeStream> do_create_stream(int priority) override;
  Result<> do_destroy_stream(NativeStream stream) override;
  Result<NativeStream> do_wrap_stream(std::uint64_t value) override;
  Result<> do_synchronize(NativeStream stream) override;
  Result<> do_synchronize_for(NativeStream stream, std::chrono::nanoseconds timeout) override;
  Result<> do_synchronize_device() override;
  Result<bool> do_query(NativeStream stream) override;
  Result<> do_enqueue_host(NativeStream stream, std::function<void()> fn) override;
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

  // ---- kernels (module.cpp, launch.cpp) ----
  Result<NativeKernel> do_find_kernel(std::string_view module, std::string_view function) override;
  Result<bool> do_has_module(std::string_view module) override;
  Result<KernelFacts> do_kernel_facts(NativeKernel kernel) override;
  Result<> do_launch(const LaunchDesc& launch) override;
  KernelRegistry* do_kernel_registry() noexcept override;
  Result<> do_unload_modules() override;

 private:
  /// One block of memory that the backend handed out.
  struct Block {
    std::uint64_t bytes = 0;         ///< As asked for.
    std::uint64_t mapped_bytes = 0;  ///< 0: from the heap.
  };
  // Above this a copy is worth a worker of its own.
  static constexpr std::uint64_t kRunNowBytes = 64 << 10;

  Result<> start();
  Result<std::byte*> take_memory(std::string_view what, std::uint64_t bytes, std::uint64_t fill_head, std::uint64_t fill_tail);
  /// As above, unfilled, and only of what is free at this moment.
  Result<std::byte*> take_free_memory(std::string_view what, std::uint64_t bytes);
  /// After `refusal`: waits for what was freed behind work in flight where that is enough, and tries again.
  Result<std::byte*> take_once_freed(std::string_view what, std::uint64_t bytes, Error refusal);
  /// Whether `bytes` fit once all is back that was freed behind work in flight.
  bool could_fit(std::uint64_t bytes);
  /// Hands a block back once work in flight has passed.
  Result<> give_memory(std::string_view what, void* base, std::uint64_t bytes);
  void unmap(void* base, const Block& block) noexcept;

  const std::string device_key_;
  const std::uint64_t memory_limit_;  ///< 0: none.
  Modules modules_;
  std::mutex memory_mutex_;
  std::unordered_map<void*, Block> blocks_;
  std::uint64_t used_bytes_ = 0;
  std::unique_ptr<Device> device_;
};

}  // namespace metrale::host
