// SPDX-License-Identifier: Apache-2.0
//
// Rows of a paged cache, for one instruction set: where they lie, fetching and writing them. Included by attention.inl.
#pragma once

namespace metrale::host::decoder::METRALE_ISA {

METRALE_INLINE std::uint64_t cache_offset(const CacheLayout& c, const std::int32_t* table, std::uint32_t token,
                                          std::uint32_t head) {
  return static_cast<std::uint64_t>(table[token / c.block_tokens]) * c.block_stride +
         static_cast<std::uint64_t>(token % c.block_tokens) * c.token_stride + static_cast<std::uint64_t>(head) * c.head_stride;
}

METRALE_INLINE bool is_bf16(const CacheLayout& c) { return c.dtype == static_cast<std::uint32_t>(DType::bf16); }

/// Pointers to `count` rows of a cache head from token `first` on, the last one repeated up to a multiple of kLanes; rows of bf16
/// are widened into `scratch` [count, head_dim].
METRALE_INLINE void cache_rows(const CacheLayout& c, const void* cache, const std::int32_t* table, std::uint32_t first,
                               std::uint32_t count, std::uint32_t head, std::uint32_t head_dim, float* scratch,
                               const float** rows) {
  // One division for a tile, not one for each key.
  std::uint32_t block = first / c.block_tokens;
  std::uint32_t within = first % c.block_tokens;
  for (std::uint32_t j = 0; j < count;) {
    const std::uint64_t base =
        static_cast<std::uint64_t>(table[block]) * c.block_stride + static_cast<std::uint64_t>(head) * c.head_stride;
    for (; j < count && within < c.block_tokens; ++j, ++within) {
      const std::uint64_t offset = base + static_cast<std::uint64_t>(within) * c.token_stride;
      if (!is_bf16(c)) {
        rows[j] = static_cast<const float*>(cache) + offset;
        continue;
      }
      const std::uint16_t* from = static_cast<const std::uint16_t*>(cache) + offset;
      float* to = scratch + static_cast<std::size_t>(j) * head_dim;
      std::uint32_t d = 0;
      for (; d + kLanes <= head_dim; d += kLanes) store(to + d, load_bf16(from + d));
      for (; d < head_dim; ++d) {
        const std::uint32_t bits = static_cast<std::uint32_t>(from[d]) << 16;
        std::memcpy(to + d, &bits, 4);
      }
      rows[j] = to;
    }
    within = 0;
    ++block;
  }
  for (std::uint32_t j = count; j % kLanes != 0; ++j) rows[j] = rows[count - 1];
}

/// Fetches the rows of a cache head one after the other, ahead of their use. A head's rows lie apart, so the hardware's prefetchers
/// follow them badly.
class RowFetcher {
 public:
  METRALE_INLINE RowFetcher create(const CacheLayout& c, const void* cache, const std::int32_t* table, std::uint32_t num_rows,
                                   std::uint32_t head, std::uint32_t head_dim) {
    RowFetcher f;
    const std::uint32_t element = is_bf16(c) ? 2 : 4;
    f.cache_ = static_cast<const char*>(cache) + static_cast<std::uint64_t>(head) * c.head_stride * element;
    f.table_ = table;
    f.left_ = num_rows;
    f.block_tokens_ = c.block_tokens;
    f.block_bytes_ = c.block_stride * element;
    f.token_bytes_ = static_cast<std::uint64_t>(c.token_stride) * element;
    f.row_bytes_ = static_cast<std::uint64_t>(head_dim) * element;
    return f;
  }
  METRALE_INLINE void fetch(RowFetcher& f) {
    if (f.left_ == 0) return;
    --f.left_;
    const char* row = f.cache_ + static_cast<std::uint64_t>(*f.table_) * f.block_bytes_ + f.within_ * f.token_bytes_;
    for (std::uint64_t at = 0; at < f.row_bytes_; at += 64) __builtin_prefetch(row + at, 0, 2);
    if (++f.within_ < f.block_tokens_) return;
    f.within_ = 0;
    ++f.table_;
  }

 private:
  const char* cache_;
  const std::int32_t* table_;
  std::uint32_t left_;
  std::uint32_t block_tokens_;
  std::uint64_t within_ = 0;
  std::uint64_t block_bytes_;
  std::uint64_t token_bytes_;
  std::uint64_t row_bytes_;
};

METRALE_INLINE void write_cache_row(const CacheLayout& c, void* cache, std::uint64_t offset, const float* from,
                                    std::uint32_t head_dim) {
  if (!is_bf16(c)) {
    std::memcpy(static_cast<float*>(cache) + offset, from, head_dim * sizeof(float));
    return;
  }
  std::uint16_t* to = static_cast<std::uint16_t*>(cache) + offset;
  for (std::uint32_t d = 0; d < head_dim; ++d) {
    std::uint32_t bits;
    std::memcpy(&bits, from + d, 4);
    // A payload that lies in the low half only would round a NaN to infinity.
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to[d] = static_cast<std::uint16_t>(nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}

static void norm_head(float* x, const float* weight, std::uint32_t n, float eps) {
  double sum = 0;
  for (std::uint32_t d = 0; d < n; ++d) sum += static_cast<double>(x[d]) * x[d];
  const float scale = inverse_sqrt(sum / n + eps);
  for (std::uint32_t d = 0; d < n; ++d) x[d] = x[d] * scale * weight[d];
}

static void rotate_head(float* x, const float* cosines, const float* sines, std::uint32_t pairs, bool interleaved) {
  const std::uint32_t step = interleaved ? 2 : 1;
  const std::uint32_t partner = interleaved ? 1 : pairs;
  for (std::uint32_t j = 0; j < pairs; ++j) {
    float* first = x + static_cast<std::size_t>(j) * step;
    const float a = first[0];
    const float b = first[partner];
    first[0] = a * cosines[j] - b * sines[j];
    first[partner] = b * cosines[j] + a * sines[j];
  }
}

static void rotate_store(const RotateStoreCall& c) {
  const RotateStoreParams& p = c.p;
  const float* cosines = c.rotary + static_cast<std::size_t>(c.token) * 2 * p.pairs;
  const float* sines = cosines + p.pairs;
  float* q = c.q + static_cast<std::size_t>(c.token) * p.ld_q;
  for (std::uint32_t h = 0; h < p.num_heads; ++h) {
    float* head = q + static_cast<std::size_t>(h) * p.q_head_stride;
    if (c.q_norm) norm_head(head, c.q_norm, p.head_dim, p.norm_eps);
    rotate_head(head, cosines, sines, p.pairs, p.interleaved != 0);
  }
  const std::uint32_t position = static_cast<std::uint32_t>(c.step->position) + c.token;
  for (std::uint32_t h = 0; h < p.num_kv_heads; ++h) {
    float* k = c.k + static_cast<std::size_t>(c.token) * p.ld_kv + static_cast<std::size_t>(h) * p.head_dim;
    const float* v = c.v + static_cast<std::size_t>(c.token) * p.ld_kv + static_cast<std::size_t>(h) * p.head_dim;
    if (c.k_norm) norm_head(k, c.k_norm, p.head_dim, p.norm_eps);
    rotate_head(k, cosines, sines, p.pairs, p.interleaved != 0);
    const std::uint64_t offset = cache_offset(p.cache, c.block_table, position, h);
    write_cache_row(p.cache, c.key_cache, offset, k, p.head_dim);
    write_cache_row(p.cache, c.value_cache, offset, v, p.head_dim);
  }
}

}  // namespace metrale::host::decoder::METRALE_ISA
