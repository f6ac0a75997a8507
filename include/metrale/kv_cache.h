// SPDX-License-Identifier: Apache-2.0
//
// PagedKvCache: keys and values of attention layers in blocks of tokens. One block index spans all layers: block 7 is block 7 of
// every pool. Each layer has two pools, K and V, row-major [num_blocks, block_size, num_kv_heads, head_dim], with its own element
// type and heads for each. The pools are separate allocations, so that red zones and copy checks see the end of each one. Blocks
// are counted by reference and handed out last freed first. It holds its backend by reference. One thread at a time, by the
// caller's own lock; pool addresses never change and may be read by any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/backend.h"
#include "metrale/device_buffer.h"
#include "metrale/dtype.h"
#include "metrale/model_resource.h"
#include "metrale/result.h"
#include "metrale/types.h"

namespace metrale {

/// One side, keys or values, of one layer.
struct KvSide {
  std::uint32_t num_heads = 0;
  std::uint32_t head_dim = 0;
  DType dtype = DType::bf16;  ///< bf16, f32 or f8_e4m3.
  friend bool operator==(const KvSide&, const KvSide&) = default;
};
struct KvLayer {
  KvSide k;
  KvSide v;
  friend bool operator==(const KvLayer&, const KvLayer&) = default;
};

/// Blocks of every layer, before there are any.
struct KvLayout {
  std::uint32_t block_size = 16;  ///< Tokens in a block.
  std::vector<KvLayer> layers;    ///< Attention layers only, in the order of the model.

  /// The same heads and type on both sides of `num_layers` layers.
  static KvLayout uniform(std::uint32_t num_layers, std::uint32_t num_kv_heads, std::uint32_t head_dim, DType dtype,
                          std::uint32_t block_size = 16);
  /// Errors: invalid_argument (no layers, a size of 0, an element type that is not offered, more than 2^62 bytes: names layer and
  ///   side).
  Result<> validate(std::source_location site = std::source_location::current()) const;
  /// Bytes of one block of one side. The layout is valid.
  std::uint64_t block_bytes(const KvSide& side) const noexcept;
  /// Bytes that one block takes in all layers, keys and values with their true types. The layout is valid.
  std::uint64_t bytes_per_block() const noexcept;
};

/// Blocks that fit into `bytes`, at most 2^31 - 1.
/// Errors: invalid_argument (the layout), out_of_memory (less than one block: says what one needs).
Result<std::uint32_t> compute_num_blocks(std::uint64_t bytes, const KvLayout& layout,
                                         std::source_location site = std::source_location::current());

struct KvOptions {
  /// Fill a block with 0xFF, NaN in all three types, when its last reference goes. Default METRALE_KV_POISON.
  std::optional<bool> poison = std::nullopt;
  /// Keep each block's last 64 reference changes, for `history` and error texts. Default METRALE_KV_TRACE.
  std::optional<bool> trace = std::nullopt;
  /// Where poison is enqueued: the stream that reads the cache. Null: the default stream. Skipped while the stream is captured.
  StreamHandle poison_stream = {};
};

class PagedKvCache final : public ModelResource {
 public:
  /// Allocates the pools; contents are unspecified.
  /// Errors: invalid_argument (the layout; no blocks, or 2^31 and more), otherwise as `GpuBackend::alloc`, naming layer and side;
  ///   what was allocated before is given back.
  static Result<std::unique_ptr<PagedKvCache>> create(GpuBackend& backend, KvLayout layout, std::uint32_t num_blocks,
                                                      KvOptions options = {},
                                                      std::source_location site = std::source_location::current());
  ~PagedKvCache() override;
  PagedKvCache(const PagedKvCache&) = delete;
  PagedKvCache& operator=(const PagedKvCache&) = delete;

  const KvLayout& layout() const noexcept { return layout_; }
  std::uint32_t block_size() const noexcept { return layout_.block_size; }
  std::uint32_t num_layers() const noexcept { return static_cast<std::uint32_t>(layout_.layers.size()); }
  /// 0 after release.
  std::uint32_t num_blocks() const noexcept { return static_cast<std::uint32_t>(refs_.size()); }
  std::uint32_t num_free_blocks() const noexcept { return static_cast<std::uint32_t>(free_.size()); }
  /// Bytes of all pools; 0 after release.
  std::uint64_t size_bytes() const noexcept;

  // ---- references ----

  /// Takes a free block, with one reference. Its contents are what the last owner left.
  /// Errors: out_of_memory (none is free, or the cache was released).
  Result<std::uint32_t> alloc_block(std::source_location site = std::source_location::current());
  /// As `alloc_block`; nullopt when none is free.
  std::optional<std::uint32_t> try_alloc_block(std::source_location site = std::source_location::current());
  /// Adds a reference. Errors: out_of_range (no such block), invalid_argument (the block is free, or has 2^32 - 1 references).
  Result<> add_ref(std::uint32_t block, std::source_location site = std::source_location::current());
  /// Drops a reference; the block is free when that was the last, and the next to be taken.
  /// Errors: out_of_range, invalid_argument (the block is free already: names it and, with trace, its history). Nothing changes
  ///   then.
  Result<> drop_ref(std::uint32_t block, std::source_location site = std::source_location::current());
  /// References of a block; 0: free, or no such block.
  std::uint32_t ref_count(std::uint32_t block) const noexcept { return block < refs_.size() ? refs_[block] : 0; }
  /// The last reference changes of a block, a line each; empty without trace.
  std::string history(std::uint32_t block) const;

  // ---- memory ----

  /// First byte of a layer's pool; null after release or when there is no such layer.
  DevicePtr k_pool(std::uint32_t layer) const noexcept { return pool(2 * std::size_t{layer}); }
  DevicePtr v_pool(std::uint32_t layer) const noexcept { return pool(2 * std::size_t{layer} + 1); }

  /// Fills a block with zeros in every pool, in stream order.
  /// Errors: out_of_range (no such block), otherwise as `GpuBackend::memset_async`; earlier pools may be filled.
  Result<> zero_block(std::uint32_t block, StreamHandle stream, std::source_location site = std::source_location::current());
  /// As `zero_block`, with NaN.
  Result<> poison_block(std::uint32_t block, StreamHandle stream, std::source_location site = std::source_location::current());

  std::string_view label() const noexcept override { return "kv cache"; }
  /// Frees every pool, going on after failures, and forgets all blocks: later references fail. A pool that a graph names is kept
  /// for the next call. Errors: the first; invalid_argument (another backend: nothing is done).
  Result<> release(GpuBackend& backend) override;

 private:
  enum class Change : std::uint8_t { alloc, add, drop };
  struct TraceEntry {
    Change change;
    std::uint32_t refs_after;
    std::source_location site;
  };

  PagedKvCache(GpuBackend& backend, KvLayout layout, const KvOptions& options);
  DevicePtr pool(std::size_t index) const noexcept { return index < pools_.size() ? pools_[index].ptr() : DevicePtr{}; }
  Result<> check_block(std::uint32_t block, std::string_view what, std::source_location site) const;
  Error refused(std::uint32_t block, std::string_view what, std::string_view why, std::source_location site) const;
  Result<> fill_block(std::uint32_t block, std::uint8_t value, StreamHandle stream, std::source_location site);
  void note(std::uint32_t block, Change change, std::source_location site);
  void poison_freed(std::uint32_t block, std::source_location site) noexcept;

  GpuBackend* backend_;
  KvLayout layout_;
  bool poison_;
  bool trace_;
  StreamHandle poison_stream_;
  std::vector<DeviceBuffer> pools_;              // K and V of layer 0, of layer 1, …
  std::vector<std::uint32_t> refs_;              // by block
  std::vector<std::uint32_t> free_;              // a stack
  std::vector<std::vector<TraceEntry>> traces_;  // by block, oldest first; empty without trace
};

/// The blocks of one sequence, each held by one reference of its own. It holds the cache by reference, so the cache outlives it,
/// and drops its references when it dies; after the cache was released there are none. Move-only; under the cache's lock.
class BlockTable {
 public:
  explicit BlockTable(PagedKvCache& cache) noexcept : cache_(&cache) {}
  BlockTable(BlockTable&& other) noexcept;
  BlockTable& operator=(BlockTable&& other) noexcept;
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;
  ~BlockTable();

  /// Block indices in the order of the sequence, as kernels read them.
  std::span<const std::int32_t> blocks() const noexcept { return blocks_; }
  /// Tokens that the blocks have room for.
  std::uint64_t capacity_tokens() const noexcept { return std::uint64_t{cache_->block_size()} * blocks_.size(); }
  /// Where a token's row is in every pool, in tokens from the pool's start. `position` < capacity_tokens().
  std::int64_t slot(std::uint64_t position) const noexcept;

  /// Takes blocks until `num_tokens` fit. Errors: out_of_memory (blocks wanted and free; the table is as before).
  Result<> reserve(std::uint64_t num_tokens, std::source_location site = std::source_location::current());
  /// Drops the blocks that the first `num_tokens` tokens do not need, last first.
  /// Errors: the first of `PagedKvCache::drop_ref`; the blocks leave the table all the same.
  Result<> truncate(std::uint64_t num_tokens, std::source_location site = std::source_location::current());
  /// A table that shares the whole blocks among the first `num_tokens` tokens; a block that is only partly covered is not shared.
  /// Errors: as `PagedKvCache::add_ref`; nothing is shared then.
  Result<BlockTable> share_prefix(std::uint64_t num_tokens, std::source_location site = std::source_location::current()) const;
  /// Drops every block. Errors: as `truncate`.
  Result<> release(std::source_location site = std::source_location::current()) { return truncate(0, site); }

 private:
  void release_and_log() noexcept;

  PagedKvCache* cache_;
  std::vector<std::int32_t> blocks_;
};

}  // namespace metrale
