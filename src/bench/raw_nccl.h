// SPDX-License-Identifier: Apache-2.0
//
// NCCL called directly, the other side of suite collective. Communicators of this process, one for each device. One thread for each
// rank.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "metrale/result.h"
#include "metrale/types.h"

namespace metrale::bench {

class RawNccl {
 public:
  /// One communicator for each device, as the runtime counts devices. Loads the library that the bridge has loaded before.
  /// Errors: unsupported (no library), internal (its codes).
  static Result<std::unique_ptr<RawNccl>> create(std::span<const int> devices);
  RawNccl(const RawNccl&) = delete;
  RawNccl& operator=(const RawNccl&) = delete;
  /// Ranks end in turn, by a thread each.
  ~RawNccl();

  /// `count` floats, added up over the ranks.
  Result<> all_reduce(std::uint32_t rank, DevicePtr from, DevicePtr to, std::uint64_t count, std::uint64_t native_stream) const;

 private:
  struct Api;
  RawNccl();

  std::unique_ptr<Api> api_;
  std::vector<void*> comms_;
};

}  // namespace metrale::bench
