// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/spare_blocks.h"

namespace metrale::cuda {

// So that `put` needs no memory.
SpareBlocks::SpareBlocks() {
  for (Bin& bin : bins_) bin.blocks.reserve(kMostBlocks);
}

SpareBlocks::Bin* SpareBlocks::find(std::uint64_t bytes) noexcept {
  if (bins_[last_].bytes == bytes) [[likely]]
    return &bins_[last_];
  for (std::size_t i = 0; i < kBins; ++i) {
    if (bins_[i].bytes != bytes) continue;
    last_ = i;
    return &bins_[i];
  }
  return nullptr;
}

bool SpareBlocks::put(DevicePtr block, std::uint64_t bytes) noexcept {
  if (bytes > kLargest) return false;
  std::lock_guard lock(mutex_);
  if (held_bytes_ + bytes > kMostBytes || num_held_ == kMostBlocks) return false;
  Bin* bin = find(bytes);
  for (std::size_t i = 0; bin == nullptr && i < kBins; ++i) {
    if (!bins_[i].blocks.empty()) continue;
    bin = &bins_[last_ = i];
    bin->bytes = bytes;
  }
  if (bin == nullptr) return false;
  bin->blocks.push_back(block);
  held_bytes_ += bytes;
  ++num_held_;
  return true;
}

std::optional<DevicePtr> SpareBlocks::take(std::uint64_t bytes) noexcept {
  if (bytes > kLargest) return std::nullopt;
  std::lock_guard lock(mutex_);
  Bin* bin = num_held_ == 0 ? nullptr : find(bytes);
  if (bin == nullptr || bin->blocks.empty()) return std::nullopt;
  const DevicePtr block = bin->blocks.back();
  bin->blocks.pop_back();
  held_bytes_ -= bytes;
  --num_held_;
  return block;
}

std::optional<SpareBlocks::Block> SpareBlocks::take_any() noexcept {
  std::lock_guard lock(mutex_);
  for (Bin& bin : bins_) {
    if (bin.blocks.empty()) continue;
    const Block block{bin.blocks.back(), bin.bytes};
    bin.blocks.pop_back();
    held_bytes_ -= bin.bytes;
    --num_held_;
    return block;
  }
  return std::nullopt;
}

}  // namespace metrale::cuda
