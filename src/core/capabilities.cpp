// SPDX-License-Identifier: Apache-2.0
#include "metrale/capabilities.h"

#include <utility>

namespace metrale {
namespace {
// Indexed by Capability.
// clang-format off
constexpr std::array<std::string_view, kNumCapabilities> kNames{
    "memory", "managed_memory", "pinned_memory", "host_registration", "host_alias", "pooled_memory", "copies", "peer_copies",
    "streams", "stream_priorities", "foreign_streams", "native_work", "events", "timed_events", "host_callbacks", "graphs",
    "kernels",
    "raw_launch", "cooperative_launch", "cluster_launch", "dependent_launch", "device_symbols", "tensor_maps",
    "processor_count", "computes",
};
// clang-format on
static_assert(!kNames.back().empty(), "every Capability has a name");
}  // namespace

std::string_view to_string(Capability capability) noexcept {
  const auto i = static_cast<std::size_t>(capability);
  return i < kNames.size() ? kNames[i] : "unknown";
}

Capabilities& Capabilities::add(Capability c) {
  present_.set(static_cast<std::size_t>(c));
  reasons_[static_cast<std::size_t>(c)].clear();
  return *this;
}

Capabilities& Capabilities::lacks(Capability c, std::string reason) {
  present_.reset(static_cast<std::size_t>(c));
  reasons_[static_cast<std::size_t>(c)] = std::move(reason);
  return *this;
}

Capabilities Capabilities::none(const std::string& reason) {
  Capabilities none;
  none.reasons_.fill(reason);
  return none;
}

}  // namespace metrale
