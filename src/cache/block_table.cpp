// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/release_log.h"
#include "metrale/kv_cache.h"

namespace metrale {

BlockTable::BlockTable(BlockTable&& other) noexcept : cache_(other.cache_), blocks_(std::exchange(other.blocks_, {})) {}

BlockTable& BlockTable::operator=(BlockTable&& other) noexcept {
  if (this != &other) {
    release_and_log();
    cache_ = other.cache_;
    blocks_ = std::exchange(other.blocks_, {});
  }
  return *this;
}

BlockTable::~BlockTable() { release_and_log(); }

std::int64_t BlockTable::slot(std::uint64_t position) const noexcept {
  const std::uint64_t size = cache_->block_size();
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(blocks_[position / size]) * size + position % size);
}

Result<> BlockTable::reserve(std::uint64_t num_tokens, std::source_location site) {
  const std::uint64_t wanted = div_ceil(num_tokens, cache_->block_size());
  if (wanted <= blocks_.size()) return {};
  const std::uint64_t more = wanted - blocks_.size();
  if (more > cache_->num_free_blocks()) {
    return Error(Errc::out_of_memory,
                 fmt::format("kv cache: {} tokens need {} more blocks, {} of {} are free; end a sequence or make a larger cache",
                             num_tokens, more, cache_->num_free_blocks(), cache_->num_blocks()),
                 site);
  }
  blocks_.reserve(wanted);
  while (blocks_.size() < wanted) blocks_.push_back(static_cast<std::int32_t>(*cache_->try_alloc_block(site)));
  return {};
}

Result<> BlockTable::truncate(std::uint64_t num_tokens, std::source_location site) {
  const std::uint64_t kept = div_ceil(num_tokens, cache_->block_size());
  if (cache_->num_blocks() == 0) blocks_.clear();  // a released cache has forgotten every reference
  Result<> first;
  // Last first, so that the blocks come back in the order in which they were taken.
  while (blocks_.size() > kept) {
    const auto block = static_cast<std::uint32_t>(blocks_.back());
    blocks_.pop_back();
    if (Result<> dropped = cache_->drop_ref(block, site); !dropped && first) first = std::move(dropped);
  }
  return first;
}

Result<BlockTable> BlockTable::share_prefix(std::uint64_t num_tokens, std::source_location site) const {
  const std::uint64_t shared = std::min<std::uint64_t>(num_tokens / cache_->block_size(), blocks_.size());
  BlockTable table(*cache_);
  table.blocks_.reserve(shared);
  for (std::uint64_t i = 0; i < shared; ++i) {
    METRALE_TRY(cache_->add_ref(static_cast<std::uint32_t>(blocks_[i]), site));
    table.blocks_.push_back(blocks_[i]);
  }
  return table;
}

void BlockTable::release_and_log() noexcept {
  if (const Result<> result = truncate(0); !result) {
    detail::log_warning_noexcept("a block table gave back more than it held: {}", result.error().to_string());
  }
}

}  // namespace metrale
