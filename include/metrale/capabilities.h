// SPDX-License-Identifier: Apache-2.0
//
// What a backend can do, told beforehand. A call whose capability is absent answers `unsupported` with the reason given here, and
// does nothing. A value; fixed for the life of a backend, any thread.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace metrale {

enum class Capability : std::uint8_t {
  memory,              ///< alloc, free, arenas, memset, reports
  managed_memory,      ///< alloc_managed gives memory that both sides may touch
  pinned_memory,       ///< alloc_host_pinned
  host_registration,   ///< register_host
  host_alias,          ///< host_ptr_to_device
  pooled_memory,       ///< alloc_async, free_async
  copies,              ///< copies between host and device and within the device
  peer_copies,         ///< copy_peer_async
  streams,             ///< streams of one's own, default_stream
  stream_priorities,   ///< create_stream honours its priority
  foreign_streams,     ///< wrap_stream
  native_work,         ///< enqueue_native
  events,              ///< events without time
  timed_events,        ///< create_timed_event, event_elapsed_ns, timing spans
  host_callbacks,      ///< enqueue_host
  graphs,              ///< capture and replay
  kernels,             ///< kernel look-up and launch_typed
  raw_launch,          ///< launch with void** parameters
  cooperative_launch,  ///< LaunchAttributes::cooperative
  cluster_launch,      ///< LaunchAttributes::cluster
  dependent_launch,    ///< LaunchAttributes::dependent_launch
  device_symbols,      ///< kernel_registry()->device_symbol
  tensor_maps,         ///< tensor_map
  processor_count,     ///< sm_count
  computes,            ///< Kernels really run. The mock records launches and computes nothing.
};
inline constexpr std::size_t kNumCapabilities = static_cast<std::size_t>(Capability::computes) + 1;

std::string_view to_string(Capability capability) noexcept;

class Capabilities {
 public:
  bool has(Capability c) const noexcept { return present_[static_cast<std::size_t>(c)]; }
  /// Why `c` is absent, one line; empty when it is present.
  std::string_view why_not(Capability c) const noexcept { return reasons_[static_cast<std::size_t>(c)]; }

  /// Marks `c` as present.
  Capabilities& add(Capability c);
  /// Marks `c` as absent; `reason` is one line for whoever calls it all the same.
  Capabilities& lacks(Capability c, std::string reason);
  /// Nothing present, every reason `reason`.
  static Capabilities none(const std::string& reason);

 private:
  std::bitset<kNumCapabilities> present_;
  std::array<std::string, kNumCapabilities> reasons_;
};

}  // namespace metrale
