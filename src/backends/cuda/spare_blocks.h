// SPDX-License-Identifier: Apache-2.0
//
// SpareBlocks: small blocks that were freed while nothing used them, kept for the next allocation of exactly that size. The driver
// packs such blocks into chunks of 2 MiB, so giving one back at once frees nothing, and costs more than all else in `free`.
// Holds at most `kMostBytes`, as much as one chunk. Any thread.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "metrale/types.h"

namespace metrale::cuda {

class SpareBlocks {
 public:
  static constexpr std::uint64_t kLargest = std::uint64_t{64} << 10;  ///< Larger blocks are none of ours.
  static constexpr std::uint64_t kMostBytes = std::uint64_t{2} << 20;
  static constexpr std::size_t kMostBlocks = 512;

  SpareBlocks();

  /// Keeps a block. False where there is no room for it.
  bool put(DevicePtr block, std::uint64_t bytes) noexcept;
  /// A block of that size, which is the caller's then.
  std::optional<DevicePtr> take(std::uint64_t bytes) noexcept;
  struct Block {
    DevicePtr base;
    std::uint64_t bytes = 0;
  };
  /// Takes one of any size; nullopt when none is left.
  std::optional<Block> take_any() noexcept;

 private:
  /// Blocks of one size; without blocks it serves the next size that needs one.
  struct Bin {
    std::uint64_t bytes = 0;
    std::vector<DevicePtr> blocks;
  };
  static constexpr std::size_t kBins = 16;

  Bin* find(std::uint64_t bytes) noexcept;

  std::mutex mutex_;
  std::array<Bin, kBins> bins_;
  std::size_t last_ = 0;  ///< The bin that was found last.
  std::uint64_t held_bytes_ = 0;
  std::size_t num_held_ = 0;
};

}  // namespace metrale::cuda
