// SPDX-License-Identifier: Apache-2.0
//
// Guard bands: which blocks carry one, and what was last written there. Filling and reading is the face's work. Any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <source_location>
#include <unordered_map>
#include <vector>

#include "metrale/types.h"

namespace metrale::detail {

/// One band: [base + block_bytes, + band_bytes).
struct RedZone {
  DevicePtr base;
  std::uint64_t block_bytes = 0;
  std::uint64_t band_bytes = 0;
  std::uint64_t index = 0;   ///< Creation index: counts allocations that reach the driver, refused ones too.
  std::uint8_t written = 0;  ///< The value every byte of the band holds unless a kernel overran.
  std::source_location site;
};

class RedZones {
 public:
  explicit RedZones(std::uint64_t band_bytes) : band_bytes_(round_up(band_bytes, 16)) {}

  /// METRALE_NO_REDZONES: the build that benchmarks/redzone_cost.sh compares with.
  bool on() const noexcept {
#ifdef METRALE_NO_REDZONES
    return false;
#else
    return band_bytes_ != 0;
#endif
  }
  std::uint64_t band_bytes() const noexcept { return band_bytes_; }
  std::uint64_t next_index() noexcept { return next_index_.fetch_add(1, std::memory_order_relaxed); }

  /// While it lives, no band is forgotten, so no block that has one is freed; one scan or poison at a time holds it.
  [[nodiscard]] std::unique_lock<std::mutex> hold() { return std::unique_lock(hold_mutex_); }

  void add(const RedZone& zone) {
    std::lock_guard lock(mutex_);
    zones_[zone.base.address] = zone;
  }
  /// Forgets the band of a block, before the block is freed, and returns its size; 0 when it has none. Waits while they are held.
  std::uint64_t remove(DevicePtr base) {
    std::lock_guard hold(hold_mutex_);
    std::lock_guard lock(mutex_);
    const auto it = zones_.find(base.address);
    if (it == zones_.end()) return 0;
    const std::uint64_t bytes = it->second.band_bytes;
    zones_.erase(it);
    return bytes;
  }
  void set_written(DevicePtr base, std::uint8_t value) {
    std::lock_guard lock(mutex_);
    const auto it = zones_.find(base.address);
    if (it != zones_.end()) it->second.written = value;
  }
  std::vector<RedZone> snapshot() const {
    std::lock_guard lock(mutex_);
    std::vector<RedZone> zones;
    for (const auto& [base, zone] : zones_) zones.push_back(zone);
    return zones;
  }

 private:
  const std::uint64_t band_bytes_;
  std::atomic<std::uint64_t> next_index_{0};
  std::mutex hold_mutex_;  // taken before the other
  mutable std::mutex mutex_;
  std::unordered_map<std::uint64_t, RedZone> zones_;
};

}  // namespace metrale::detail
