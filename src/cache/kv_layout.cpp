// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "core/saturating.h"
#include "metrale/kv_cache.h"

namespace metrale {
namespace {

using detail::Count;

bool is_offered(DType type) noexcept { return type == DType::bf16 || type == DType::f32 || type == DType::f8_e4m3; }

Count side_bytes(std::uint32_t block_size, const KvSide& side) noexcept {
  return Count(block_size) * side.num_heads * side.head_dim * dtype_facts(side.dtype).block_bytes;
}

}  // namespace

KvLayout KvLayout::uniform(std::uint32_t num_layers, std::uint32_t num_kv_heads, std::uint32_t head_dim, DType dtype,
                           std::uint32_t block_size) {
  const KvSide side{num_kv_heads, head_dim, dtype};
  return {block_size, std::vector<KvLayer>(num_layers, KvLayer{side, side})};
}

Result<> KvLayout::validate(std::source_location site) const {
  if (block_size == 0 || layers.empty()) {
    return Error(Errc::invalid_argument,
                 fmt::format("kv layout: {} tokens in a block, {} layers; both must be more than 0", block_size, layers.size()),
                 site);
  }
  Count total;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    for (const bool keys : {true, false}) {
      const KvSide& side = keys ? layers[i].k : layers[i].v;
      const auto wrong = [&](std::string_view what) {
        return Error(Errc::invalid_argument,
                     fmt::format("kv layout: layer {} {}: {} heads x {} of {}: {}", i, keys ? "keys" : "values", side.num_heads,
                                 side.head_dim, to_string(side.dtype), what),
                     site);
      };
      if (!is_offered(side.dtype)) return wrong("only bf16, f32 and f8_e4m3 are offered");
      if (side.num_heads == 0 || side.head_dim == 0) return wrong("heads and head dim must be more than 0");
      total = total + side_bytes(block_size, side);
      if (total.saturated()) return wrong("a block of all layers would take 2^62 bytes or more");
    }
  }
  return {};
}

std::uint64_t KvLayout::block_bytes(const KvSide& side) const noexcept { return side_bytes(block_size, side).value(); }

std::uint64_t KvLayout::bytes_per_block() const noexcept {
  Count total;
  for (const KvLayer& layer : layers) total = total + side_bytes(block_size, layer.k) + side_bytes(block_size, layer.v);
  return total.value();
}

Result<std::uint32_t> compute_num_blocks(std::uint64_t bytes, const KvLayout& layout, std::source_location site) {
  METRALE_TRY(layout.validate(site));
  const std::uint64_t each = layout.bytes_per_block();
  if (bytes < each) {
    return Error(Errc::out_of_memory,
                 fmt::format("kv cache: {} bytes hold no block; one of {} tokens in {} layers takes {}", bytes, layout.block_size,
                             layout.layers.size(), each),
                 site);
  }
  constexpr std::uint64_t kMax = std::numeric_limits<std::int32_t>::max();
  return static_cast<std::uint32_t>(std::min(bytes / each, kMax));
}

}  // namespace metrale
