// SPDX-License-Identifier: Apache-2.0
#include "metrale/backend_hooks.h"

#include <fmt/format.h>

namespace metrale {
namespace {

Error absent(std::string_view backend, std::string_view what) {
  return Error(Errc::unsupported, fmt::format("the {} backend has no {}", backend, what));
}

}  // namespace

Result<std::uint32_t> BackendHooks::do_sm_count() { return absent(do_name(), "processor count"); }
Result<> BackendHooks::do_bind_to_thread() { return {}; }

Result<DevicePtr> BackendHooks::do_alloc(std::uint64_t, MemoryKind) { return absent(do_name(), "device memory"); }
Result<> BackendHooks::do_free(DevicePtr, std::uint64_t, MemoryKind) { return absent(do_name(), "device memory"); }
Result<void*> BackendHooks::do_alloc_pinned(std::uint64_t) { return absent(do_name(), "pinned host memory"); }
Result<> BackendHooks::do_free_pinned(void*, std::uint64_t) { return absent(do_name(), "pinned host memory"); }
Result<> BackendHooks::do_register_host(void*, std::uint64_t) { return absent(do_name(), "registration of host memory"); }
Result<> BackendHooks::do_unregister_host(void*, std::uint64_t) { return absent(do_name(), "registration of host memory"); }
Result<DevicePtr> BackendHooks::do_host_alias(void*) { return absent(do_name(), "device aliases of host memory"); }
Result<DeviceMemoryInfo> BackendHooks::do_memory_info() { return absent(do_name(), "memory figures"); }

Result<> BackendHooks::do_copy_h2d_async(DevicePtr, const void*, std::uint64_t, NativeStream, bool) {
  return absent(do_name(), "copies to the device");
}
Result<> BackendHooks::do_copy_d2h_async(void*, DevicePtr, std::uint64_t, NativeStream) {
  return absent(do_name(), "copies to the host");
}
Result<> BackendHooks::do_copy_d2d_async(DevicePtr, DevicePtr, std::uint64_t, NativeStream) {
  return absent(do_name(), "copies within the device");
}
Result<> BackendHooks::do_copy_d2d_2d_async(const Copy2D&, NativeStream) { return absent(do_name(), "2-D copies"); }
Result<> BackendHooks::do_copy_peer_async(DevicePtr, GpuBackend&, DevicePtr, std::uint64_t, NativeStream) {
  return absent(do_name(), "copies between devices");
}
Result<> BackendHooks::do_memset_async(DevicePtr, std::uint8_t, std::uint64_t, NativeStream) { return absent(do_name(), "fills"); }

Result<> BackendHooks::do_copy_batch_async(std::span<const CopyDesc> copies, NativeStream stream, bool) {
  for (const CopyDesc& copy : copies) {
    if (copy.host_src != nullptr) {
      METRALE_TRY(do_copy_h2d_async(copy.dst, copy.host_src, copy.bytes, stream, true));
    } else if (copy.host_dst != nullptr) {
      METRALE_TRY(do_copy_d2h_async(copy.host_dst, copy.src, copy.bytes, stream));
    } else {
      METRALE_TRY(do_copy_d2d_async(copy.dst, copy.src, copy.bytes, stream));
    }
  }
  return {};
}

Result<> BackendHooks::do_copy_h2d(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream default_stream) {
  METRALE_TRY(do_copy_h2d_async(dst, src, bytes, default_stream, true));
  return do_synchronize(default_stream);
}
Result<> BackendHooks::do_copy_d2h(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream default_stream) {
  return do_copy_d2h_on_stream(dst, src, bytes, default_stream);
}
Result<> BackendHooks::do_copy_d2d(DevicePtr dst, DevicePtr src, std::uint64_t bytes, NativeStream default_stream) {
  METRALE_TRY(do_copy_d2d_async(dst, src, bytes, default_stream));
  return do_synchronize(default_stream);
}
Result<> BackendHooks::do_copy_d2h_on_stream(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) {
  METRALE_TRY(do_copy_d2h_async(dst, src, bytes, stream));
  return do_synchronize(stream);
}
Result<> BackendHooks::do_memset(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream default_stream) {
  METRALE_TRY(do_memset_async(dst, value, bytes, default_stream));
  return do_synchronize(default_stream);
}

Result<NativeStream> BackendHooks::do_create_stream(int) { return absent(do_name(), "streams"); }
Result<> BackendHooks::do_destroy_stream(NativeStream) { return absent(do_name(), "streams"); }
Result<NativeStream> BackendHooks::do_wrap_stream(std::uint64_t) { return absent(do_name(), "foreign streams"); }
Result<> BackendHooks::do_synchronize(NativeStream) { return absent(do_name(), "streams"); }
Result<> BackendHooks::do_synchronize_for(NativeStream, std::chrono::nanoseconds) { return absent(do_name(), "streams"); }
Result<> BackendHooks::do_synchronize_device() { return absent(do_name(), "streams"); }
Result<> BackendHooks::do_wait_for_earlier_work() { return do_synchronize_device(); }
Result<bool> BackendHooks::do_query(NativeStream) { return absent(do_name(), "streams"); }
// NOLINTNEXTLINE(performance-unnecessary-value-param): those who override it keep the function
Result<> BackendHooks::do_enqueue_host(NativeStream, std::function<void()>) {
  return absent(do_name(), "host functions in streams");
}
Result<> BackendHooks::do_enqueue_native(NativeStream, NativeWork) { return absent(do_name(), "work of other libraries"); }
Result<NativeEvent> BackendHooks::do_create_event(bool timed) { return absent(do_name(), timed ? "timed events" : "events"); }
Result<> BackendHooks::do_destroy_event(NativeEvent) { return absent(do_name(), "events"); }
Result<> BackendHooks::do_record_event(NativeEvent, NativeStream) { return absent(do_name(), "events"); }
Result<> BackendHooks::do_stream_wait_event(NativeStream, NativeEvent) { return absent(do_name(), "events"); }
Result<> BackendHooks::do_event_synchronize(NativeEvent) { return absent(do_name(), "events"); }
Result<bool> BackendHooks::do_event_query(NativeEvent) { return absent(do_name(), "events"); }
Result<std::int64_t> BackendHooks::do_event_elapsed_ns(NativeEvent, NativeEvent) { return absent(do_name(), "timed events"); }

Result<> BackendHooks::do_begin_capture(NativeStream) { return absent(do_name(), "graphs"); }
Result<NativeGraph> BackendHooks::do_end_capture(NativeStream) { return absent(do_name(), "graphs"); }
Result<> BackendHooks::do_abort_capture(NativeStream) { return absent(do_name(), "graphs"); }
Result<bool> BackendHooks::do_stream_is_capturing(NativeStream) { return absent(do_name(), "graphs"); }
Result<> BackendHooks::do_launch_graph(NativeGraph, NativeStream) { return absent(do_name(), "graphs"); }
Result<> BackendHooks::do_destroy_graph(NativeGraph) { return absent(do_name(), "graphs"); }
Result<std::vector<DevicePtr>> BackendHooks::do_graph_addresses(NativeGraph) { return std::vector<DevicePtr>{}; }

Result<NativeKernel> BackendHooks::do_find_kernel(std::string_view, std::string_view) { return absent(do_name(), "kernels"); }
Result<bool> BackendHooks::do_has_module(std::string_view) { return absent(do_name(), "kernels"); }
Result<KernelFacts> BackendHooks::do_kernel_facts(NativeKernel) { return absent(do_name(), "kernels"); }
Result<> BackendHooks::do_launch(const LaunchDesc&) { return absent(do_name(), "kernels"); }
Result<TensorMap> BackendHooks::do_tensor_map(const TensorTile&) { return absent(do_name(), "tensor maps"); }
Result<> BackendHooks::do_unload_modules() { return {}; }

}  // namespace metrale
