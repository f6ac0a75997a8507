// SPDX-License-Identifier: Apache-2.0
//
// Attention over a paged cache, for one instruction set: included by ops_<isa>.cpp after simd.h. Queries lie along vector lanes
// for many tokens, head elements for one.
#pragma once

namespace metrale::host::decoder::METRALE_ISA {

METRALE_INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

METRALE_INLINE std::uint64_t cache_offset(const CacheLayout& c, const std::int32_t* table, std::uint32_t token,
                                          std::uint32_t head) {
  return static_cast<std::uint64_t>(table[token / c.block_tokens]) * c.block_stride +
         static_cast<std::uint64_t>(token % c.block_tokens) * c.token_stride + static_cast<std::uint64_t>(head) * c.head_stride;
}

METRALE_INLINE bool is_bf16(const CacheLayout& c) { return c.dtype == static_cast<std::uint32_t>(DType::bf16); }

/// Pointers to `count` rows of a cache head from token `first` on; rows of bf16 are widened into `scratch` [count, head_dim].
METRALE_INLINE void cache_rows(const CacheLayout& c, const void* cache, const std::int32_t* table, std::uint32_t first,
                               std::uint32_t count, std::uint32_t head, std::uint32_t head_dim, float* scratch,
                               const float** rows) {
  // One division for a tile, not one for each key.
  std::uint32_t block = first / c.block_tokens;
  std::uint32_t within = first % c.block_tokens;
  for (std::uint32_t j = 0; j < count; ++j) {
    const std::uint64_t offset = static_cast<std::uint64_t>(table[block]) * c.block_stride +
                                 static_cast<std::uint64_t>(within) * c.token_stride +
                                 static_cast<std::uint64_t>(head) * c.head_stride;
    if (++within == c.block_tokens) {
      within = 0;
      ++block;
    }
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
}

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

// Below every score that is real, and finite so that differences of two of them are.
inline constexpr float kMasked = -1e30f;

#if defined(__AVX512F__)
inline constexpr int kVectors = 2;  // of kLanes queries each
inline constexpr int kUnroll = 8;   // keys, or head elements, at a time
#elif defined(__AVX2__)
inline constexpr int kVectors = 1;
inline constexpr int kUnroll = 4;
#else
inline constexpr int kVectors = 1;
inline constexpr int kUnroll = 2;
#endif

/// scores [count, kAttendTile] of up to kUnroll keys against queries [head_dim, kAttendTile], from lane `lane` on.
template <int unroll>
METRALE_INLINE void score_keys(const float* queries, const float* const* keys, std::uint32_t head_dim, int lane, float* scores) {
  Vec sum[unroll][kVectors] = {};
  for (std::uint32_t d = 0; d < head_dim; ++d) {
    Vec q[kVectors];
    for (int v = 0; v < kVectors; ++v) q[v] = load(queries + static_cast<std::size_t>(d) * kAttendTile + lane + kLanes * v);
    for (int j = 0; j < unroll; ++j) {
      const Vec k = splat(keys[j][d]);
      for (int v = 0; v < kVectors; ++v) sum[j][v] += q[v] * k;
    }
  }
  for (int j = 0; j < unroll; ++j) {
    for (int v = 0; v < kVectors; ++v) store(scores + static_cast<std::size_t>(j) * kAttendTile + lane + kLanes * v, sum[j][v]);
  }
}

/// sums [head_dim, kAttendTile] += weights [count, kAttendTile] by values, for head elements [d, d + unroll).
template <int unroll>
METRALE_INLINE void add_values(const float* weights, const float* const* values, std::uint32_t count, std::uint32_t d, int lane,
                               float* sums) {
  Vec sum[unroll][kVectors];
  float* first = sums + static_cast<std::size_t>(d) * kAttendTile + lane;
  for (int i = 0; i < unroll; ++i) {
    for (int v = 0; v < kVectors; ++v) sum[i][v] = load(first + static_cast<std::size_t>(i) * kAttendTile + kLanes * v);
  }
  for (std::uint32_t j = 0; j < count; ++j) {
    Vec w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = load(weights + static_cast<std::size_t>(j) * kAttendTile + lane + kLanes * v);
    const float* value = values[j] + d;
    for (int i = 0; i < unroll; ++i) {
      const Vec x = splat(value[i]);
      for (int v = 0; v < kVectors; ++v) sum[i][v] += w[v] * x;
    }
  }
  for (int i = 0; i < unroll; ++i) {
    for (int v = 0; v < kVectors; ++v) store(first + static_cast<std::size_t>(i) * kAttendTile + kLanes * v, sum[i][v]);
  }
}

static void attend(const AttendCall& c) {
  const AttendParams& p = c.p;
  const std::uint32_t head_dim = p.head_dim;
  const std::uint32_t kv_head = c.head / (p.num_heads / p.num_kv_heads);
  const std::uint32_t first_row = c.tile * kAttendTile;
  const std::uint32_t num_rows = p.m - first_row < kAttendTile ? p.m - first_row : kAttendTile;
  const std::uint32_t first_position = static_cast<std::uint32_t>(c.step->position) + first_row;
  const std::uint32_t num_keys = first_position + num_rows;

  float* queries = c.shared;
  float* sums = queries + static_cast<std::size_t>(kAttendTile) * head_dim;
  float* weights = sums + static_cast<std::size_t>(kAttendTile) * head_dim;
  float* key_scratch = weights + static_cast<std::size_t>(kKeyTile) * kAttendTile;
  float* value_scratch = key_scratch + static_cast<std::size_t>(kKeyTile) * head_dim;

  for (std::uint32_t d = 0; d < head_dim; ++d) {
    for (std::uint32_t i = 0; i < kAttendTile; ++i) {
      // Lanes without a row repeat the last one: their results are finite and unused.
      const std::uint32_t row = first_row + (i < num_rows ? i : num_rows - 1);
      queries[static_cast<std::size_t>(d) * kAttendTile + i] =
          c.q[static_cast<std::size_t>(row) * p.ld_q + static_cast<std::size_t>(c.head) * p.q_head_stride + d] * p.scale;
      sums[static_cast<std::size_t>(d) * kAttendTile + i] = 0;
    }
  }

  constexpr int kTileVectors = static_cast<int>(kAttendTile) / kLanes;
  Vec largest[kTileVectors], total[kTileVectors];
  for (int v = 0; v < kTileVectors; ++v) {
    largest[v] = splat(kMasked);
    total[v] = Vec{};
  }

  const float* keys[kKeyTile];
  const float* values[kKeyTile];
  for (std::uint32_t first = 0; first < num_keys; first += kKeyTile) {
    const std::uint32_t count = num_keys - first < kKeyTile ? num_keys - first : kKeyTile;
    cache_rows(p.cache, c.key_cache, c.block_table, first, count, kv_head, head_dim, key_scratch, keys);
    cache_rows(p.cache, c.value_cache, c.block_table, first, count, kv_head, head_dim, value_scratch, values);

    for (int lane = 0; lane < static_cast<int>(kAttendTile); lane += kLanes * kVectors) {
      std::uint32_t j = 0;
      for (; j + kUnroll <= count; j += kUnroll)
        score_keys<kUnroll>(queries, keys + j, head_dim, lane, weights + static_cast<std::size_t>(j) * kAttendTile);
      for (; j < count; ++j) score_keys<1>(queries, keys + j, head_dim, lane, weights + static_cast<std::size_t>(j) * kAttendTile);
    }

    Vec correction[kTileVectors];
    bool corrected = false;
    for (int v = 0; v < kTileVectors; ++v) {
      float* column = weights + kLanes * v;
      const IntVec position = iota() + static_cast<std::int32_t>(first_position + kLanes * static_cast<std::uint32_t>(v));
      const bool diagonal = first + count > first_position + kLanes * static_cast<std::uint32_t>(v);
      Vec top = largest[v];
      for (std::uint32_t j = 0; j < count; ++j) {
        float* at = column + static_cast<std::size_t>(j) * kAttendTile;
        Vec s = load(at);
        if (diagonal) {
          s = select(position < static_cast<std::int32_t>(first + j), splat(kMasked), s);
          store(at, s);
        }
        top = max(top, s);
      }
      correction[v] = exp(largest[v] - top);
      const IntVec raised = largest[v] < top;
      corrected = corrected || any(raised);
      largest[v] = top;
      Vec sum = total[v] * correction[v];
      for (std::uint32_t j = 0; j < count; ++j) {
        float* at = column + static_cast<std::size_t>(j) * kAttendTile;
        const Vec w = exp(load(at) - top);
        store(at, w);
        sum += w;
      }
      total[v] = sum;
    }
    if (corrected && first != 0) {
      for (std::uint32_t d = 0; d < head_dim; ++d) {
        for (int v = 0; v < kTileVectors; ++v) {
          float* at = sums + static_cast<std::size_t>(d) * kAttendTile + kLanes * v;
          store(at, load(at) * correction[v]);
        }
      }
    }
    for (int lane = 0; lane < static_cast<int>(kAttendTile); lane += kLanes * kVectors) {
      std::uint32_t d = 0;
      for (; d + kUnroll <= head_dim; d += kUnroll) add_values<kUnroll>(weights, values, count, d, lane, sums);
      for (; d < head_dim; ++d) add_values<1>(weights, values, count, d, lane, sums);
    }
  }

  for (std::uint32_t i = 0; i < num_rows; ++i) {
    const std::uint32_t row = first_row + i;
    const float inverse = 1.0f / total[i / kLanes][static_cast<int>(i % kLanes)];
    float* out = c.out + (static_cast<std::size_t>(row) * p.num_heads + c.head) * head_dim;
    const float* gate =
        c.q + static_cast<std::size_t>(row) * p.ld_q + static_cast<std::size_t>(c.head) * p.q_head_stride + head_dim;
    for (std::uint32_t d = 0; d < head_dim; ++d) {
      const float o = sums[static_cast<std::size_t>(d) * kAttendTile + i] * inverse;
      out[d] = p.gated ? o * sigmoid(gate[d]) : o;
    }
  }
}

/// Dot product over a head.
METRALE_INLINE float dot(const float* a, const float* b, std::uint32_t n) {
  Vec s0{}, s1{};
  std::uint32_t d = 0;
  for (; d + 2 * kLanes <= n; d += 2 * kLanes) {
    s0 += load(a + d) * load(b + d);
    s1 += load(a + d + kLanes) * load(b + d + kLanes);
  }
  if (d + kLanes <= n) {
    s0 += load(a + d) * load(b + d);
    d += kLanes;
  }
  float sum = sum_lanes(s0 + s1);
  for (; d < n; ++d) sum += a[d] * b[d];
  return sum;
}

/// sums [d, d + kLanes * vectors) += weights by values.
template <int vectors>
METRALE_INLINE void add_weighted(const float* weights, const float* const* values, std::uint32_t count, std::uint32_t d,
                                 float* sums) {
  Vec sum[vectors];
  for (int v = 0; v < vectors; ++v) sum[v] = load(sums + d + kLanes * v);
  for (std::uint32_t j = 0; j < count; ++j) {
    const Vec w = splat(weights[j]);
    for (int v = 0; v < vectors; ++v) sum[v] += w * load(values[j] + d + kLanes * v);
  }
  for (int v = 0; v < vectors; ++v) store(sums + d + kLanes * v, sum[v]);
}

static void attend_one(const AttendCall& c) {
  const AttendParams& p = c.p;
  const std::uint32_t head_dim = p.head_dim;
  const std::uint32_t kv_head = c.head / (p.num_heads / p.num_kv_heads);
  const std::uint32_t num_keys = static_cast<std::uint32_t>(c.step->position) + 1;
  const float* q = c.q + static_cast<std::size_t>(c.head) * p.q_head_stride;

  float* query = c.shared;
  float* sums = query + head_dim;
  float* weights = sums + head_dim;
  float* key_scratch = weights + kKeyTile;
  float* value_scratch = key_scratch + static_cast<std::size_t>(kKeyTile) * head_dim;
  for (std::uint32_t d = 0; d < head_dim; ++d) {
    query[d] = q[d] * p.scale;
    sums[d] = 0;
  }

  float largest = kMasked;
  float total = 0;
  const float* keys[kKeyTile];
  const float* values[kKeyTile];
  for (std::uint32_t first = 0; first < num_keys; first += kKeyTile) {
    const std::uint32_t count = num_keys - first < kKeyTile ? num_keys - first : kKeyTile;
    cache_rows(p.cache, c.key_cache, c.block_table, first, count, kv_head, head_dim, key_scratch, keys);
    cache_rows(p.cache, c.value_cache, c.block_table, first, count, kv_head, head_dim, value_scratch, values);
    float top = largest;
    for (std::uint32_t j = 0; j < count; ++j) {
      weights[j] = dot(query, keys[j], head_dim);
      top = weights[j] > top ? weights[j] : top;
    }
    for (std::uint32_t j = count; j < kKeyTile; ++j) weights[j] = kMasked;
    Vec sum{};
    for (std::uint32_t j = 0; j < count; j += kLanes) {
      const IntVec lane = iota() + static_cast<std::int32_t>(j);
      const Vec w = select(lane < static_cast<std::int32_t>(count), exp(load(weights + j) - top), Vec{});
      store(weights + j, w);
      sum += w;
    }
    if (top > largest) {
      const float correction = first == 0 ? 0.0f : exponential(largest - top);
      total *= correction;
      for (std::uint32_t d = 0; d < head_dim; ++d) sums[d] *= correction;
      largest = top;
    }
    total += sum_lanes(sum);
    std::uint32_t d = 0;
    for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) add_weighted<4>(weights, values, count, d, sums);
    for (; d + kLanes <= head_dim; d += kLanes) add_weighted<1>(weights, values, count, d, sums);
    for (; d < head_dim; ++d) {
      for (std::uint32_t j = 0; j < count; ++j) sums[d] += weights[j] * values[j][d];
    }
  }

  const float inverse = 1.0f / total;
  const float* gate = q + head_dim;
  float* out = c.out + static_cast<std::size_t>(c.head) * head_dim;
  for (std::uint32_t d = 0; d < head_dim; ++d) out[d] = sums[d] * inverse * (p.gated ? sigmoid(gate[d]) : 1.0f);
}

}  // namespace metrale::host::decoder::METRALE_ISA
