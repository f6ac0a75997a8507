// SPDX-License-Identifier: Apache-2.0
//
// Attention over a paged cache, for one instruction set: included by ops_<isa>.cpp after simd.h. Queries lie along vector lanes
// for many tokens, head elements for one.
#pragma once

#include <utility>

#include "decoder/cache.inl"

namespace metrale::host::decoder::METRALE_ISA {

METRALE_INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

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

inline constexpr int kTileVectors = static_cast<int>(kAttendTile) / kLanes;

/// A tile of queries, one in each lane, and its scratch in the block's shared memory. Lanes past `num_rows` have no row.
struct QueryTile {
  std::uint32_t head_dim;
  std::uint32_t first_row;
  std::uint32_t num_rows;
  std::uint32_t first_position;
  float* queries;  ///< [head_dim, kAttendTile]
  float* sums;     ///< [head_dim, kAttendTile], of weighted values
  float* weights;  ///< [kKeyTile, kAttendTile], scores of a key tile until they are softened
};

/// The softmax so far: the largest score of each query and the sum of its weights.
struct RunningSoftmax {
  Vec largest[kTileVectors];
  Vec total[kTileVectors];
};

/// Scales the queries and lays them along the lanes; zeroes the sums.
METRALE_INLINE void load_queries(const AttendCall& c, const QueryTile& t) {
  for (std::uint32_t d = 0; d < t.head_dim; ++d) {
    for (std::uint32_t i = 0; i < kAttendTile; ++i) {
      // Lanes without a row repeat the last one: their results are finite and unused.
      const std::uint32_t row = t.first_row + (i < t.num_rows ? i : t.num_rows - 1);
      t.queries[static_cast<std::size_t>(d) * kAttendTile + i] =
          c.q[static_cast<std::size_t>(row) * c.p.ld_q + static_cast<std::size_t>(c.head) * c.p.q_head_stride + d] * c.p.scale;
      t.sums[static_cast<std::size_t>(d) * kAttendTile + i] = 0;
    }
  }
}

METRALE_INLINE void score_tile(const QueryTile& t, const float* const* keys, std::uint32_t count) {
  for (int lane = 0; lane < static_cast<int>(kAttendTile); lane += kLanes * kVectors) {
    std::uint32_t j = 0;
    for (; j + kUnroll <= count; j += kUnroll)
      score_keys<kUnroll>(t.queries, keys + j, t.head_dim, lane, t.weights + static_cast<std::size_t>(j) * kAttendTile);
    for (; j < count; ++j)
      score_keys<1>(t.queries, keys + j, t.head_dim, lane, t.weights + static_cast<std::size_t>(j) * kAttendTile);
  }
}

/// Turns the scores of keys [first, first + count) into weights relative to the largest so far, and scales the sums down where that
/// was raised. Keys behind a query's position get no weight.
METRALE_INLINE void soften_tile(const QueryTile& t, std::uint32_t first, std::uint32_t count, RunningSoftmax& softmax) {
  Vec correction[kTileVectors];
  bool corrected = false;
  for (int v = 0; v < kTileVectors; ++v) {
    float* column = t.weights + kLanes * v;
    const IntVec position = iota() + static_cast<std::int32_t>(t.first_position + kLanes * static_cast<std::uint32_t>(v));
    const bool diagonal = first + count > t.first_position + kLanes * static_cast<std::uint32_t>(v);
    Vec top = softmax.largest[v];
    for (std::uint32_t j = 0; j < count; ++j) {
      float* at = column + static_cast<std::size_t>(j) * kAttendTile;
      Vec s = load(at);
      if (diagonal) {
        s = select(position < static_cast<std::int32_t>(first + j), splat(kMasked), s);
        store(at, s);
      }
      top = max(top, s);
    }
    correction[v] = exp(softmax.largest[v] - top);
    const IntVec raised = softmax.largest[v] < top;
    corrected = corrected || any(raised);
    softmax.largest[v] = top;
    Vec sum = softmax.total[v] * correction[v];
    for (std::uint32_t j = 0; j < count; ++j) {
      float* at = column + static_cast<std::size_t>(j) * kAttendTile;
      const Vec w = exp(load(at) - top);
      store(at, w);
      sum += w;
    }
    softmax.total[v] = sum;
  }
  if (!corrected || first == 0) return;
  for (std::uint32_t d = 0; d < t.head_dim; ++d) {
    for (int v = 0; v < kTileVectors; ++v) {
      float* at = t.sums + static_cast<std::size_t>(d) * kAttendTile + kLanes * v;
      store(at, load(at) * correction[v]);
    }
  }
}

METRALE_INLINE void add_value_tile(const QueryTile& t, const float* const* values, std::uint32_t count) {
  for (int lane = 0; lane < static_cast<int>(kAttendTile); lane += kLanes * kVectors) {
    std::uint32_t d = 0;
    for (; d + kUnroll <= t.head_dim; d += kUnroll) add_values<kUnroll>(t.weights, values, count, d, lane, t.sums);
    for (; d < t.head_dim; ++d) add_values<1>(t.weights, values, count, d, lane, t.sums);
  }
}

METRALE_INLINE void write_rows(const AttendCall& c, const QueryTile& t, const RunningSoftmax& softmax) {
  const AttendParams& p = c.p;
  for (std::uint32_t i = 0; i < t.num_rows; ++i) {
    const std::uint32_t row = t.first_row + i;
    const float inverse = 1.0f / softmax.total[i / kLanes][static_cast<int>(i % kLanes)];
    float* out = c.out + (static_cast<std::size_t>(row) * p.num_heads + c.head) * t.head_dim;
    const float* gate =
        c.q + static_cast<std::size_t>(row) * p.ld_q + static_cast<std::size_t>(c.head) * p.q_head_stride + t.head_dim;
    for (std::uint32_t d = 0; d < t.head_dim; ++d) {
      const float o = t.sums[static_cast<std::size_t>(d) * kAttendTile + i] * inverse;
      out[d] = p.gated ? o * sigmoid(gate[d]) : o;
    }
  }
}

static void attend(const AttendCall& c) {
  const AttendParams& p = c.p;
  QueryTile t;
  t.head_dim = p.head_dim;
  t.first_row = c.tile * kAttendTile;
  t.num_rows = p.m - t.first_row < kAttendTile ? p.m - t.first_row : kAttendTile;
  t.first_position = static_cast<std::uint32_t>(c.step->position) + t.first_row;
  t.queries = c.shared;
  t.sums = t.queries + static_cast<std::size_t>(kAttendTile) * t.head_dim;
  t.weights = t.sums + static_cast<std::size_t>(kAttendTile) * t.head_dim;
  float* key_scratch = t.weights + static_cast<std::size_t>(kKeyTile) * kAttendTile;
  float* value_scratch = key_scratch + static_cast<std::size_t>(kKeyTile) * t.head_dim;
  load_queries(c, t);

  RunningSoftmax softmax;
  for (int v = 0; v < kTileVectors; ++v) {
    softmax.largest[v] = splat(kMasked);
    softmax.total[v] = Vec{};
  }
  const std::uint32_t kv_head = c.head / (p.num_heads / p.num_kv_heads);
  const std::uint32_t num_keys = t.first_position + t.num_rows;
  const float* keys[kKeyTile];
  const float* values[kKeyTile];
  for (std::uint32_t first = 0; first < num_keys; first += kKeyTile) {
    const std::uint32_t count = num_keys - first < kKeyTile ? num_keys - first : kKeyTile;
    cache_rows(p.cache, c.key_cache, c.block_table, first, count, kv_head, t.head_dim, key_scratch, keys);
    cache_rows(p.cache, c.value_cache, c.block_table, first, count, kv_head, t.head_dim, value_scratch, values);
    score_tile(t, keys, count);
    soften_tile(t, first, count, softmax);
    add_value_tile(t, values, count);
  }
  write_rows(c, t, softmax);
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

template <int w, int... lane>
METRALE_INLINE Vec add_halves(Vec a, Vec b, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(a, b, ((lane & w) != 0 ? kLanes + lane : lane)...) +
         __builtin_shufflevector(a, b, ((lane & w) != 0 ? kLanes + (lane ^ w) : (lane ^ w))...);
}
/// Lane i of the result: the sum of the lanes of v[i]. `v` is used up.
template <int w = 1>
METRALE_INLINE Vec sums_of(Vec* v) {
  if constexpr (w == kLanes) {
    return v[0];
  } else {
    for (int i = 0; i < kLanes / w; i += 2) v[i / 2] = add_halves<w>(v[i], v[i + 1], std::make_integer_sequence<int, kLanes>());
    return sums_of<2 * w>(v);
  }
}

// Attention of one token takes up to four query heads of the same cache head at a time, so that keys and values are read
// once for them.
inline constexpr int kMaxHeads = 4;

/// weights [heads, kKeyTile]: products of `kLanes / padded` keys, from key j on, with each query [heads, head_dim].
template <int heads>
METRALE_INLINE void score_one(const float* queries, const float* const* keys, std::uint32_t head_dim, float* weights) {
  constexpr int kPadded = heads == 3 ? 4 : heads;
  constexpr int kKeys = kLanes / kPadded;
  Vec sum[kLanes] = {};
  std::uint32_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) {
    Vec q[heads];
    for (int h = 0; h < heads; ++h) q[h] = load(queries + static_cast<std::size_t>(h) * head_dim + d);
    for (int j = 0; j < kKeys; ++j) {
      const Vec key = load(keys[j] + d);
      for (int h = 0; h < heads; ++h) sum[h * kKeys + j] += q[h] * key;
    }
  }
  const Vec all = sums_of(sum);
  float scores[kLanes];
  store(scores, all);
  for (int h = 0; h < heads; ++h) {
    for (int j = 0; j < kKeys; ++j) {
      float score = scores[h * kKeys + j];
      for (std::uint32_t e = d; e < head_dim; ++e) score += queries[static_cast<std::size_t>(h) * head_dim + e] * keys[j][e];
      weights[h * static_cast<int>(kKeyTile) + j] = score;
    }
  }
}

/// sums [heads, head_dim], elements [d, d + kLanes * vectors), += weights [heads, kKeyTile] by values.
template <int heads, int vectors>
METRALE_INLINE void add_weighted(const float* weights, const float* const* values, std::uint32_t count, std::uint32_t d,
                                 std::uint32_t head_dim, float* sums) {
  Vec sum[heads][vectors];
  for (int h = 0; h < heads; ++h) {
    for (int v = 0; v < vectors; ++v) sum[h][v] = load(sums + static_cast<std::size_t>(h) * head_dim + d + kLanes * v);
  }
  for (std::uint32_t j = 0; j < count; ++j) {
    Vec value[vectors];
    for (int v = 0; v < vectors; ++v) value[v] = load(values[j] + d + kLanes * v);
    for (int h = 0; h < heads; ++h) {
      const Vec w = splat(weights[static_cast<std::size_t>(h) * kKeyTile + j]);
      for (int v = 0; v < vectors; ++v) sum[h][v] += w * value[v];
    }
  }
  for (int h = 0; h < heads; ++h) {
    for (int v = 0; v < vectors; ++v) store(sums + static_cast<std::size_t>(h) * head_dim + d + kLanes * v, sum[h][v]);
  }
}

/// Query heads [head, head + heads), all of one cache head.
template <int heads>
static void attend_heads(const AttendCall& c, std::uint32_t head) {
  const AttendParams& p = c.p;
  const std::uint32_t head_dim = p.head_dim;
  const std::uint32_t kv_head = head / (p.num_heads / p.num_kv_heads);
  const std::uint32_t num_keys = static_cast<std::uint32_t>(c.step->position) + 1;
  const float* q = c.q + static_cast<std::size_t>(head) * p.q_head_stride;

  float* queries = c.shared;
  float* sums = queries + static_cast<std::size_t>(kMaxHeads) * head_dim;
  float* weights = sums + static_cast<std::size_t>(kMaxHeads) * head_dim;
  float* key_scratch = weights + static_cast<std::size_t>(kMaxHeads) * kKeyTile;
  float* value_scratch = key_scratch + static_cast<std::size_t>(kKeyTile) * head_dim;
  for (std::uint32_t h = 0; h < heads; ++h) {
    for (std::uint32_t d = 0; d < head_dim; ++d) {
      queries[h * head_dim + d] = q[static_cast<std::size_t>(h) * p.q_head_stride + d] * p.scale;
      sums[h * head_dim + d] = 0;
    }
  }

  // Keys run one tile ahead of their scores, values as far ahead of their sum as scores take.
  RowFetcher key_fetcher = RowFetcher::create(p.cache, c.key_cache, c.block_table, num_keys, kv_head, head_dim);
  RowFetcher value_fetcher = RowFetcher::create(p.cache, c.value_cache, c.block_table, num_keys, kv_head, head_dim);
  for (std::uint32_t j = 0; j < kKeyTile; ++j) RowFetcher::fetch(key_fetcher);

  float largest[heads];
  float total[heads];
  for (int h = 0; h < heads; ++h) {
    largest[h] = kMasked;
    total[h] = 0;
  }
  const float* keys[kKeyTile];
  const float* values[kKeyTile];
  constexpr std::uint32_t kStep = kLanes / (heads == 3 ? 4 : heads);
  for (std::uint32_t first = 0; first < num_keys; first += kKeyTile) {
    const std::uint32_t count = num_keys - first < kKeyTile ? num_keys - first : kKeyTile;
    cache_rows(p.cache, c.key_cache, c.block_table, first, count, kv_head, head_dim, key_scratch, keys);
    for (std::uint32_t j = 0; j < count; j += kStep) {
      for (std::uint32_t i = 0; i < kStep; ++i) {
        RowFetcher::fetch(value_fetcher);
        RowFetcher::fetch(key_fetcher);
      }
      score_one<heads>(queries, keys + j, head_dim, weights + j);
    }
    for (int h = 0; h < heads; ++h) {
      float* row = weights + static_cast<std::size_t>(h) * kKeyTile;
      Vec tops = splat(largest[h]);
      for (std::uint32_t j = 0; j < count; j += kLanes) {
        const IntVec lane = iota() + static_cast<std::int32_t>(j);
        const Vec scores = select(lane < static_cast<std::int32_t>(count), load(row + j), splat(kMasked));
        store(row + j, scores);
        tops = max(tops, scores);
      }
      const float top = max_lanes(tops);
      Vec sum{};
      for (std::uint32_t j = 0; j < count; j += kLanes) {
        const Vec scores = load(row + j);
        const Vec w = select(scores > kMasked, exp(scores - top), Vec{});
        store(row + j, w);
        sum += w;
      }
      if (top > largest[h]) {
        const float correction = first == 0 ? 0.0f : exponential(largest[h] - top);
        total[h] *= correction;
        for (std::uint32_t d = 0; d < head_dim; ++d) sums[static_cast<std::uint32_t>(h) * head_dim + d] *= correction;
        largest[h] = top;
      }
      total[h] += sum_lanes(sum);
    }
    cache_rows(p.cache, c.value_cache, c.block_table, first, count, kv_head, head_dim, value_scratch, values);
    std::uint32_t d = 0;
    for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) add_weighted<heads, 4>(weights, values, count, d, head_dim, sums);
    for (; d + kLanes <= head_dim; d += kLanes) add_weighted<heads, 1>(weights, values, count, d, head_dim, sums);
    for (; d < head_dim; ++d) {
      for (std::uint32_t h = 0; h < heads; ++h) {
        for (std::uint32_t j = 0; j < count; ++j) sums[h * head_dim + d] += weights[h * kKeyTile + j] * values[j][d];
      }
    }
  }

  for (std::uint32_t h = 0; h < heads; ++h) {
    const float inverse = 1.0f / total[h];
    const float* gate = q + static_cast<std::size_t>(h) * p.q_head_stride + head_dim;
    float* out = c.out + static_cast<std::size_t>(head + h) * head_dim;
    for (std::uint32_t d = 0; d < head_dim; ++d) out[d] = sums[h * head_dim + d] * inverse * (p.gated ? sigmoid(gate[d]) : 1.0f);
  }
}

static void attend_one(const AttendCall& c) {
  const std::uint32_t num_heads = c.p.num_heads;
  const std::uint32_t group = num_heads / c.p.num_kv_heads;
  const auto end = static_cast<std::uint32_t>(std::uint64_t{num_heads} * (c.head + 1) / c.heads_blocks);
  for (auto head = static_cast<std::uint32_t>(std::uint64_t{num_heads} * c.head / c.heads_blocks); head < end;) {
    const std::uint32_t group_end = (head / group + 1) * group;
    const std::uint32_t left = (group_end < end ? group_end : end) - head;
    switch (left) {
      case 1: attend_heads<1>(c, head); break;
      case 2: attend_heads<2>(c, head); break;
      case 3: attend_heads<3>(c, head); break;
      default: attend_heads<4>(c, head); break;
    }
    head += left < 4 ? left : 4;
  }
}

}  // namespace metrale::host::decoder::METRALE_ISA
