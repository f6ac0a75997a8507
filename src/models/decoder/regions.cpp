// SPDX-License-Identifier: Apache-2.0
#include "models/decoder/regions.h"

#include <fmt/format.h>

#include "core/release_log.h"
#include "models/decoder/release.h"

namespace metrale::models {

Regions::~Regions() {
  if (const Result<> result = release(*backend_); !result)
    detail::log_warning_noexcept("{} not given back: {}", label_, result.error().to_string());
}

void Regions::add(std::string_view name, std::uint64_t bytes, DevicePtr& to) {
  to = {};
  if (bytes != 0) regions_.push_back({name, bytes, &to});
}

Result<> Regions::allocate(std::source_location site) {
  std::uint64_t bytes = 0;
  std::string_view largest;
  std::uint64_t largest_bytes = 0;
  for (const Region& region : regions_) {
    if (region.bytes > (std::uint64_t{1} << 62) - bytes) {
      return Error(Errc::out_of_memory, fmt::format("{}: {} wants {} bytes", label_, region.name, region.bytes), site);
    }
    bytes += round_up(region.bytes, kDeviceAlignment);
    if (region.bytes > largest_bytes) {
      largest = region.name;
      largest_bytes = region.bytes;
    }
  }
  Result<DevicePtr> base = backend_->alloc_arena(bytes, site);
  if (!base) {
    return std::move(base).error().with_note(
        fmt::format("for {} of {} bytes, of which {} takes {}", label_, bytes, largest, largest_bytes));
  }
  base_ = *base;
  bytes_ = bytes;
  std::uint64_t at = 0;
  for (const Region& region : regions_) {
    *region.to = base_.offset(at);
    at += round_up(region.bytes, kDeviceAlignment);
  }
  return {};
}

Result<> Regions::release(GpuBackend& backend) {
  METRALE_TRY(check_own_backend(*backend_, backend, label_));
  if (!base_) return {};
  METRALE_TRY(backend.free_arena(base_));
  base_ = {};
  for (const Region& region : regions_) *region.to = {};
  return {};
}

}  // namespace metrale::models
