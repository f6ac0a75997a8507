// SPDX-License-Identifier: Apache-2.0
//
// The operations of a backend as data: one enumerator for each public call that reaches the device. Calls that differ in a flag
// share one: `create_timed_event` is create_event, every memory figure is memory_info. Observers see operations, the mock counts
// them and fails the n-th of a kind, errors name them. Plain values, any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace metrale {

// clang-format off
enum class Op : std::uint8_t {
  alloc, alloc_managed, alloc_async, alloc_arena, free, free_async, free_arena, trim,
  alloc_host_pinned, free_host_pinned, register_host, unregister_host, host_ptr_to_device, adopt, disown,
  memset, memset_async, scan_redzones, poison_redzones, sweep_unreleased, memory_info,
  copy_h2d, copy_d2h, copy_d2d, copy_d2h_on_stream, copy_h2d_async, copy_h2d_async_retained, copy_d2h_async,
  copy_d2d_async, copy_d2d_2d_async, copy_batch_async, copy_peer_async,
  create_stream, destroy_stream, wrap_stream, synchronize, synchronize_for, synchronize_device, query, enqueue_host, enqueue_native,
  create_event, destroy_event, record_event, stream_wait_event, event_synchronize, event_query, event_elapsed_ns,
  begin_capture, end_capture, abort_capture, stream_is_capturing, launch_graph, destroy_graph, capture_uses,
  kernel, launch, launch_raw, tensor_map, device_symbol, unload_modules, has_module, bind_to_thread, sm_count,
};
// clang-format on
inline constexpr std::size_t kNumOps = static_cast<std::size_t>(Op::sm_count) + 1;

/// The enumerator's name, e.g. "copy_d2h_on_stream": that of the public method where one method has it to itself.
std::string_view to_string(Op op) noexcept;

}  // namespace metrale
