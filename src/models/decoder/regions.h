// SPDX-License-Identifier: Apache-2.0
//
// Regions: named parts of one long-lived allocation. A table of (name, bytes, pointer) is filled first and allocated at once, so
// the addresses stay what they are for as long as graphs use them. BufferArena (metrale/arena.h) is the same for engines, over a
// fixed table. It holds its backend by reference. Made and released by one thread.
#pragma once

#include <cstdint>
#include <source_location>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/backend.h"
#include "metrale/model_resource.h"
#include "metrale/result.h"
#include "metrale/types.h"

namespace metrale::models {

class Regions final : public ModelResource {
 public:
  Regions(GpuBackend& backend, std::string_view label) : backend_(&backend), label_(label) {}
  Regions(const Regions&) = delete;
  Regions& operator=(const Regions&) = delete;
  ~Regions() override;

  /// Adds a region, whose address goes to `to` when `allocate` succeeds; 0 bytes: it stays null. `to` outlives this object.
  void add(std::string_view name, std::uint64_t bytes, DevicePtr& to);
  /// Forgets every region, for a new table. Nothing is allocated.
  void clear() noexcept { regions_.clear(); }
  /// Allocates every region, each aligned to kDeviceAlignment. Errors: as `GpuBackend::alloc_arena`.
  Result<> allocate(std::source_location site = std::source_location::current());
  /// Bytes of the whole allocation; 0 before it and after release.
  std::uint64_t size_bytes() const noexcept { return base_ ? bytes_ : 0; }

  std::string_view label() const noexcept override { return label_; }
  /// Frees the allocation and sets every address to null. Errors: invalid_argument (another backend: nothing is done), otherwise as
  /// `GpuBackend::free_arena`.
  Result<> release(GpuBackend& backend) override;

 private:
  struct Region {
    std::string_view name;
    std::uint64_t bytes;
    DevicePtr* to;
  };
  GpuBackend* backend_;
  std::string_view label_;
  std::vector<Region> regions_;
  std::uint64_t bytes_ = 0;
  DevicePtr base_;
};

}  // namespace metrale::models
