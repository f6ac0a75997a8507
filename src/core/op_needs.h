// SPDX-License-Identifier: Apache-2.0
//
// Which capabilities each operation needs. The face asks before it looks at handles, so that a call whose capability is absent
// answers `unsupported` and nothing else. Operations that release need none: they have nothing to release then.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>

#include "metrale/capabilities.h"
#include "metrale/op.h"

namespace metrale::detail {

/// Up to three capabilities, the most telling first.
struct Needs {
  std::array<Capability, 3> list{};
  std::size_t count = 0;

  template <class... C>
  static constexpr Needs of(C... c) {
    return {{c...}, sizeof...(c)};
  }
  constexpr const Capability* begin() const { return list.data(); }
  constexpr const Capability* end() const { return list.data() + count; }
};

constexpr Needs needs(Op op) {
  using enum Capability;
  switch (op) {
    case Op::alloc:
    case Op::alloc_managed:
    case Op::alloc_arena:
    case Op::adopt:
    case Op::memory_info: return Needs::of(memory);
    case Op::alloc_async: return Needs::of(pooled_memory, streams);
    case Op::alloc_host_pinned: return Needs::of(pinned_memory);
    case Op::register_host: return Needs::of(host_registration);
    case Op::host_ptr_to_device: return Needs::of(host_alias);
    case Op::memset:
    case Op::memset_async: return Needs::of(memory, streams);
    case Op::copy_h2d:
    case Op::copy_d2h:
    case Op::copy_d2d:
    case Op::copy_d2h_on_stream:
    case Op::copy_h2d_async:
    case Op::copy_h2d_async_retained:
    case Op::copy_d2h_async:
    case Op::copy_d2d_async:
    case Op::copy_d2d_2d_async:
    case Op::copy_batch_async: return Needs::of(copies, streams);
    case Op::copy_peer_async: return Needs::of(peer_copies, copies, streams);
    case Op::create_stream:
    case Op::synchronize:
    case Op::synchronize_for:
    case Op::synchronize_device:
    case Op::query: return Needs::of(streams);
    case Op::wrap_stream: return Needs::of(foreign_streams, streams);
    case Op::enqueue_host: return Needs::of(host_callbacks, streams);
    case Op::enqueue_native: return Needs::of(native_work, streams);
    case Op::create_event:
    case Op::event_synchronize:
    case Op::event_query: return Needs::of(events);
    case Op::record_event:
    case Op::stream_wait_event: return Needs::of(events, streams);
    case Op::event_elapsed_ns: return Needs::of(timed_events, events);
    case Op::begin_capture:
    case Op::end_capture:
    case Op::launch_graph: return Needs::of(graphs, streams);
    case Op::kernel:
    case Op::has_module: return Needs::of(kernels);
    case Op::launch: return Needs::of(kernels, streams);
    case Op::launch_raw: return Needs::of(raw_launch, kernels, streams);
    case Op::tensor_map: return Needs::of(tensor_maps);
    case Op::device_symbol: return Needs::of(device_symbols);
    case Op::sm_count: return Needs::of(processor_count);
    default: return {};
  }
}

/// Which operations a backend with `capabilities` refuses.
inline std::bitset<kNumOps> unsupported_ops(const Capabilities& capabilities) {
  std::bitset<kNumOps> refused;
  for (std::size_t i = 0; i < kNumOps; ++i) {
    for (const Capability c : needs(static_cast<Op>(i))) {
      if (!capabilities.has(c)) refused.set(i);
    }
  }
  return refused;
}

}  // namespace metrale::detail
