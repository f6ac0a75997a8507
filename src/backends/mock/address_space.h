// SPDX-License-Identifier: Apache-2.0
//
// The mock's device addresses and the host memory behind them. Addresses ascend and are never used twice, so a stale one is found
// out. It owns no memory. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <shared_mutex>
#include <vector>

#include "metrale/result.h"
#include "metrale/types.h"

namespace metrale::mock {

class AddressSpace {
 public:
  AddressSpace();

  /// Gives `memory` an address.
  DevicePtr add(std::byte* memory, std::uint64_t bytes) { return add(memory, bytes, true); }
  /// Gives host memory an address; it does not count as device memory.
  DevicePtr add_alias(std::byte* memory, std::uint64_t bytes) { return add(memory, bytes, false); }
  /// Takes the block that starts at `base` out and returns its memory; null when there is none.
  std::byte* remove(DevicePtr base);
  /// Takes out every block whose memory is `memory`.
  void remove_all_of(const void* memory);
  /// The memory behind a range of one block. An address that no mock block ever had is taken for a host address, as that of adopted
  /// memory is. Errors: out_of_range (freed, or longer than its block).
  Result<std::byte*> resolve(DevicePtr ptr, std::uint64_t bytes) const;
  std::uint64_t live_bytes() const;

 private:
  struct Block {
    std::byte* memory = nullptr;
    std::uint64_t bytes = 0;
    bool counts = true;
  };
  DevicePtr add(std::byte* memory, std::uint64_t bytes, bool counts);
  void forget(const Block& block) noexcept { live_bytes_ -= block.counts ? block.bytes : 0; }

  mutable std::shared_mutex mutex_;
  std::map<std::uint64_t, Block> blocks_;
  std::uint64_t next_;
  std::uint64_t live_bytes_ = 0;
};

}  // namespace metrale::mock
