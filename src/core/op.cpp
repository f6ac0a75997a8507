// SPDX-License-Identifier: Apache-2.0
#include "metrale/op.h"

#include <array>

namespace metrale {
namespace {
// Indexed by Op, in the order of the enumeration; the test walks both.
// clang-format off
constexpr std::array<std::string_view, kNumOps> kNames{
    "alloc", "alloc_managed", "alloc_async", "alloc_arena", "free", "free_async", "free_arena", "trim", "alloc_host_pinned",
    "free_host_pinned", "register_host", "unregister_host", "host_ptr_to_device", "adopt", "disown", "memset", "memset_async",
    "scan_redzones", "poison_redzones", "sweep_unreleased", "memory_info", "copy_h2d", "copy_d2h", "copy_d2d",
    "copy_d2h_on_stream", "copy_h2d_async", "copy_h2d_async_retained", "copy_d2h_async", "copy_d2d_async", "copy_d2d_2d_async",
    "copy_batch_async", "copy_peer_async", "create_stream", "destroy_stream", "wrap_stream", "synchronize", "synchronize_for",
    "synchronize_device", "query", "enqueue_host", "enqueue_native", "create_event", "destroy_event", "record_event",
    "stream_wait_event", "event_synchronize", "event_query", "event_elapsed_ns", "begin_capture", "end_capture",
    "abort_capture", "stream_is_capturing", "launch_graph", "destroy_graph", "capture_uses", "kernel", "launch", "launch_raw",
    "tensor_map", "device_symbol", "unload_modules", "has_module", "bind_to_thread", "sm_count",
};
// clang-format on
static_assert(!kNames.back().empty(), "every Op has a name");
}  // namespace

std::string_view to_string(Op op) noexcept {
  const auto i = static_cast<std::size_t>(op);
  return i < kNames.size() ? kNames[i] : "unknown";
}

}  // namespace metrale
