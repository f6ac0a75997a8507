// SPDX-License-Identifier: Apache-2.0
#include "metrale/kv_cache.h"

#include <fmt/format.h>

#include <array>
#include <limits>
#include <utility>

#include "core/release_log.h"
#include "core/saturating.h"
#include "metrale/owner_scope.h"
#include "metrale/switches.h"

namespace metrale {
namespace {

constexpr std::size_t kTraceDepth = 64;
/// NaN in bf16, f32 and E4M3 alike.
constexpr std::uint8_t kNaNByte = 0xFF;

const KvSide& side_of(const KvLayout& layout, std::size_t pool) noexcept {
  const KvLayer& layer = layout.layers[pool / 2];
  return pool % 2 == 0 ? layer.k : layer.v;
}
std::string_view side_name(std::size_t pool) noexcept { return pool % 2 == 0 ? "keys" : "values"; }

}  // namespace

PagedKvCache::PagedKvCache(GpuBackend& backend, KvLayout layout, const KvOptions& options)
    : backend_(&backend),
      layout_(std::move(layout)),
      poison_(options.poison.value_or(switches().kv_poison)),
      trace_(options.trace.value_or(switches().kv_trace)),
      poison_stream_(options.poison_stream ? options.poison_stream : backend.default_stream()) {}

PagedKvCache::~PagedKvCache() = default;

Result<std::unique_ptr<PagedKvCache>> PagedKvCache::create(GpuBackend& backend, KvLayout layout, std::uint32_t num_blocks,
                                                           KvOptions options, std::source_location site) {
  METRALE_TRY(layout.validate(site));
  constexpr std::uint32_t kMaxBlocks = std::numeric_limits<std::int32_t>::max();
  if (num_blocks == 0 || num_blocks > kMaxBlocks) {
    return Error(Errc::invalid_argument, fmt::format("kv cache: {} blocks asked; 1 to {} are possible", num_blocks, kMaxBlocks),
                 site);
  }
  std::unique_ptr<PagedKvCache> cache(new PagedKvCache(backend, std::move(layout), options));
  const OwnerScope owner(cache->label());
  const std::size_t num_pools = 2 * cache->layout_.layers.size();
  cache->pools_.reserve(num_pools);
  for (std::size_t i = 0; i < num_pools; ++i) {
    const detail::Count bytes = detail::Count(cache->layout_.block_bytes(side_of(cache->layout_, i))) * num_blocks;
    const auto what = [&] {
      return fmt::format("kv cache: {} blocks of layer {} {}, {} bytes", num_blocks, i / 2, side_name(i), bytes.value());
    };
    if (bytes.saturated()) return Error(Errc::invalid_argument, what() + " or more: no device has them", site);
    Result<DeviceBuffer> pool = DeviceBuffer::create(backend, bytes.value(), site);
    if (!pool) return std::move(pool).error().with_note("for " + what());
    cache->pools_.push_back(std::move(*pool));
  }
  cache->refs_.assign(num_blocks, 0);
  cache->free_.reserve(num_blocks);
  for (std::uint32_t block = num_blocks; block-- > 0;) cache->free_.push_back(block);  // block 0 is taken first
  if (cache->trace_) cache->traces_.resize(num_blocks);
  return cache;
}

std::uint64_t PagedKvCache::size_bytes() const noexcept {
  std::uint64_t sum = 0;
  for (const DeviceBuffer& pool : pools_) sum += pool.size_bytes();
  return sum;
}

Result<std::uint32_t> PagedKvCache::alloc_block(std::source_location site) {
  if (const std::optional<std::uint32_t> block = try_alloc_block(site)) return *block;
  return Error(Errc::out_of_memory,
               num_blocks() == 0
                   ? std::string("kv cache: it was released and has no blocks")
                   : fmt::format("kv cache: none of {} blocks of {} tokens is free; end a sequence or make a larger cache",
                                 num_blocks(), block_size()),
               site);
}

std::optional<std::uint32_t> PagedKvCache::try_alloc_block(std::source_location site) {
  if (free_.empty()) return std::nullopt;
  const std::uint32_t block = free_.back();
  free_.pop_back();
  refs_[block] = 1;
  note(block, Change::alloc, site);
  return block;
}

Result<> PagedKvCache::add_ref(std::uint32_t block, std::source_location site) {
  METRALE_TRY(check_block(block, "add a reference to", site));
  std::uint32_t& refs = refs_[block];
  if (refs == 0 || refs == std::numeric_limits<std::uint32_t>::max()) {
    return refused(block, "add a reference to",
                   refs == 0 ? "it is free; take it with alloc_block" : "it has as many as can be counted", site);
  }
  ++refs;
  note(block, Change::add, site);
  return {};
}

Result<> PagedKvCache::drop_ref(std::uint32_t block, std::source_location site) {
  METRALE_TRY(check_block(block, "drop a reference to", site));
  std::uint32_t& refs = refs_[block];
  if (refs == 0) return refused(block, "drop a reference to", "it is free already; someone dropped one too many", site);
  --refs;
  note(block, Change::drop, site);
  if (refs == 0) {
    free_.push_back(block);  // never grows beyond what create reserved
    if (poison_) poison_freed(block, site);
  }
  return {};
}

std::string PagedKvCache::history(std::uint32_t block) const {
  std::string text;
  if (block >= traces_.size()) return text;
  for (const TraceEntry& entry : traces_[block]) {
    constexpr std::array<std::string_view, 3> kNames{"alloc", "add", "drop"};
    text += fmt::format("{} -> {} references ({}:{})\n", kNames[static_cast<std::size_t>(entry.change)], entry.refs_after,
                        entry.site.file_name(), entry.site.line());
  }
  return text;
}

Result<> PagedKvCache::check_block(std::uint32_t block, std::string_view what, std::source_location site) const {
  if (block < refs_.size()) return {};
  return Error(Errc::out_of_range, fmt::format("{} kv block {}: there are {}", what, block, refs_.size()), site);
}

Error PagedKvCache::refused(std::uint32_t block, std::string_view what, std::string_view why, std::source_location site) const {
  std::string text = fmt::format("{} kv block {}: {}", what, block, why);
  if (trace_) text += "; its history, oldest first:\n" + history(block);
  return {Errc::invalid_argument, std::move(text), site};
}

void PagedKvCache::note(std::uint32_t block, Change change, std::source_location site) {
  if (!trace_) return;
  std::vector<TraceEntry>& trace = traces_[block];
  if (trace.size() == kTraceDepth) trace.erase(trace.begin());
  trace.push_back({change, refs_[block], site});
}

Result<> PagedKvCache::zero_block(std::uint32_t block, StreamHandle stream, std::source_location site) {
  return fill_block(block, 0, stream, site);
}

Result<> PagedKvCache::poison_block(std::uint32_t block, StreamHandle stream, std::source_location site) {
  return fill_block(block, kNaNByte, stream, site);
}

Result<> PagedKvCache::fill_block(std::uint32_t block, std::uint8_t value, StreamHandle stream, std::source_location site) {
  METRALE_TRY(check_block(block, "fill", site));
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    const std::uint64_t bytes = layout_.block_bytes(side_of(layout_, i));
    METRALE_TRY(backend_->memset_async(pools_[i].ptr().offset(block * bytes), value, bytes, stream, site));
  }
  return {};
}

// The reference has gone whether or not the fill works, so a failure is logged: poison is a help, not a promise.
void PagedKvCache::poison_freed(std::uint32_t block, std::source_location site) noexcept {
  if (backend_->stream_is_capturing(poison_stream_, site)) return;
  if (const Result<> filled = poison_block(block, poison_stream_, site); !filled) {
    detail::log_warning_noexcept("kv block {} was freed and not poisoned: {}", block, filled.error().to_string());
  }
}

Result<> PagedKvCache::release(GpuBackend& backend) {
  if (&backend != backend_) {
    return Error(Errc::invalid_argument, "release of the kv cache on another backend than the one it was made on");
  }
  refs_.clear();
  free_.clear();
  traces_.clear();
  Result<> first;
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    Result<> result = pools_[i].release();
    if (!result && first) {
      first = std::move(result).error().with_note(fmt::format("for the {} of layer {}", side_name(i), i / 2));
    }
  }
  return first;
}

}  // namespace metrale
