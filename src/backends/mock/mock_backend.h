// SPDX-License-Identifier: Apache-2.0
//
// MockBackend: the host backend's streams, events, graphs and copies on fake addresses, with a control that records, counts and
// fails calls at the entry of each hook.
#pragma once

#include <memory>
#include <string>

#include "backends/host/host_backend.h"
#include "backends/mock/address_space.h"
#include "backends/mock/state.h"
#include "metrale/backends/mock.h"

namespace metrale::mock {

class MockBackend : public host::HostBackend {
 public:
  explicit MockBackend(const Options& options);
  ~MockBackend() override;
  MockControl& control() noexcept { return control_; }

 protected:
  std::string_view do_name() const noexcept override { return "mock"; }
  std::string do_device_key() const override { return "mock on " + HostBackend::do_device_key(); }
  Capabilities do_capabilities() const override;
  Result<std::uint32_t> do_sm_count() override;

  Result<std::byte*> do_resolve(DevicePtr ptr, std::uint64_t bytes) const override;
  Result<DeviceMemoryInfo> memory_now() override;
  Result<DevicePtr> do_alloc(std::uint64_t bytes, MemoryKind kind) override;
  Result<> do_free(DevicePtr base, std::uint64_t bytes, MemoryKind kind) override;
  Result<void*> do_alloc_pinned(std::uint64_t bytes) override;
  Result<> do_free_pinned(void* ptr, std::uint64_t bytes) override;
  Result<> do_register_host(void* ptr, std::uint64_t bytes) override;
  Result<> do_unregister_host(void* ptr, std::uint64_t bytes) override;
  Result<DevicePtr> do_host_alias(void* base) override;
  Result<DeviceMemoryInfo> do_memory_info() override;

  Result<> do_copy_h2d_async(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream stream, bool retained) override;
  Result<> do_copy_d2h_async(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) override;
  Result<> do_copy_d2d_async(DevicePtr dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) override;
  Result<> do_copy_d2d_2d_async(const Copy2D& rectangle, NativeStream stream) override;
  Result<> do_copy_batch_async(std::span<const CopyDesc> copies, NativeStream stream, bool capturing) override;
  Result<> do_copy_peer_async(DevicePtr dst, GpuBackend& from, DevicePtr src, std::uint64_t bytes, NativeStream stream) override;
  Result<> do_memset_async(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream stream) override;
  Result<> do_copy_h2d(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream default_stream) override;
  Result<> do_copy_d2h(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream default_stream) override;
  Result<> do_copy_d2d(DevicePtr dst, DevicePtr src, std::uint64_t bytes, NativeStream default_stream) override;
  Result<> do_copy_d2h_on_stream(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) override;
  Result<> do_memset(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream default_stream) override;

  Result<NativeStream> do_create_stream(int priority) override;
  Result<> do_destroy_stream(NativeStream stream) override;
  Result<NativeStream> do_wrap_stream(std::uint64_t value) override;
  Result<> do_synchronize(NativeStream stream) override;
  Result<> do_synchronize_for(NativeStream stream, std::chrono::nanoseconds timeout) override;
  Result<> do_synchronize_device() override;
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

  Result<> do_begin_capture(NativeStream stream) override;
  Result<NativeGraph> do_end_capture(NativeStream stream) override;
  Result<> do_abort_capture(NativeStream stream) override;
  Result<bool> do_stream_is_capturing(NativeStream stream) override;
  Result<> do_launch_graph(NativeGraph graph, NativeStream stream) override;
  Result<> do_destroy_graph(NativeGraph graph) override;

  Result<NativeKernel> do_find_kernel(std::string_view module, std::string_view function) override;
  Result<bool> do_has_module(std::string_view module) override;
  Result<KernelFacts> do_kernel_facts(NativeKernel kernel) override;
  Result<> do_launch(const LaunchDesc& launch) override;
  KernelRegistry* do_kernel_registry() noexcept override { return nullptr; }
  Result<> do_unload_modules() override;

 private:
  MockControl::State& state() const noexcept { return *control_.state_; }
  Result<> enter(Op op) const { return state().enter(op); }
  /// Enters a hook and records the call.
  Result<> enter(const CallRecord& call) const {
    METRALE_TRY(enter(call.op));
    record(call);
    return {};
  }
  /// Notes a call where recording is on; a record that finds no memory is left out.
  void record(const CallRecord& call) const noexcept {
    if (state().is_recording.load(std::memory_order_relaxed)) state().add(call);
  }
  void record_sync(NativeStream stream) const noexcept {
    if (state().is_recording.load(std::memory_order_relaxed)) state().add(SyncRecord{stream, state().sum(Op::copy_d2h_async)});
  }
  void count_h2d(std::uint64_t bytes) const noexcept {
    state().shards[MockControl::State::shard()].h2d_bytes.fetch_add(bytes, std::memory_order_relaxed);
  }
  LaunchRecord record_of(const LaunchDesc& launch) const;
  static const MockKernel& mock_kernel(NativeKernel kernel) noexcept { return *reinterpret_cast<const MockKernel*>(kernel.value); }

  MockControl control_;
};

}  // namespace metrale::mock
