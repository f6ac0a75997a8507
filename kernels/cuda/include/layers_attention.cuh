// SPDX-License-Identifier: Apache-2.0
//
// A block of an attention cluster of module "layers". The cluster has one cache head with its query heads; block r computes kPairs
// pairs of rows of queries, key and value, sends them to all, attends to its share of the cached keys, sends what it found to all,
// and computes kOutRows rows of the output matrix for the head's columns.
//
// Key warps hold 16 cached keys and values each, in registers before the queries come: tile i of 16 belongs to warp i / 8 % 7 of
// block i % 8. Their products run on tensor cores, queries and weights as the sum of two bf16 numbers. The step's own key is
// one more set of sums, of one block.
#pragma once

#include "layers_common.cuh"

namespace metrale::cuda::layers {

template <class S>
struct AttentionShared {
  // Floats between heads and between blocks, so that reads meet no conflicts.
  static constexpr u32 kHeadStride = S::kHeadDim + 4;
  static constexpr u32 kFoundStride = S::kQueryWidth + 16;

  float qkv[kMatrixWarps][S::kQkvRows];
  alignas(16) float squares[kMatrixWarps];
  float out[kMatrixWarps][S::kOutRows];
  /// Mailbox: queries, scaled, then key and value as the cache holds them.
  alignas(16) float queries[S::kGroup][kHeadStride];
  float key[S::kHeadDim];
  float value[S::kHeadDim];
  /// Of each key warp and, last, of the step's own token: largest score and total of each head, and sums.
  float2 softmax[kKeyWarps + 1][S::kGroup];
  alignas(16) float sums[kKeyWarps + 1][S::kGroup][kHeadStride];
  /// Mailbox: the same of each block, [kQueryWidth] sums, then largest score and total of each head.
  alignas(16) float found[kClusterBlocks][kFoundStride];
  u64 barriers[4 * S::kAttentionDepth + 2];
  ulonglong2 pools[kMostLayers];  ///< Of keys and values.
};

template <class S>
class Attention {
 public:
  using Shared = AttentionShared<S>;

  __device__ Attention(const Step& step, u32 head, u32 rank, char* shared)
      : step_(step), head_(head), rank_(rank), shared_(*reinterpret_cast<Shared*>(shared + S::kRing)) {
    static_assert(sizeof(Shared) <= S::kSmall);
    const u32 ring = shared_address(shared);
    const u32 barriers = shared_address(shared_.barriers);
    qkv_ = {ring, S::kQkvBytes, S::kAttentionDepth, barriers, barriers + 8 * S::kAttentionDepth};
    out_ = {ring + S::kAttentionDepth * S::kQkvBytes, S::kOutBytes, S::kAttentionDepth, barriers + 16 * S::kAttentionDepth,
            barriers + 24 * S::kAttentionDepth};
    queries_here_ = barriers + 32 * S::kAttentionDepth;
    found_here_ = queries_here_ + 8;
  }
  __device__ void init() const {
    qkv_.init();
    out_.init();
    init_barrier_of(queries_here_, 1);
    init_barrier_of(found_here_, 1);
    decoder::expect_bytes(queries_here_, kQueryBytes);
    decoder::expect_bytes(found_here_, kFoundBytes);
  }

  __device__ void fetch(u32 from, u32 to) const {
    for (u32 l = from; l < to; ++l) {
      const LayerAddresses& w = step_.layers[l];
      qkv_.open(l, S::kQkvRows * 2 * S::kHidden);
      for (u32 i = lane_id(); i < S::kQkvRows; i += 32) {
        const Pair pair = pair_of(i % S::kPairs);
        const u32 row = i < S::kPairs ? pair.first : pair.second;
        const u64 matrix = pair.of == Of::query ? w.q : pair.of == Of::key ? w.k : w.v;
        copy_bulk(
            qkv_.slot(l) + i * S::kHiddenRow,
            address<std::uint16_t>(matrix) + (head_ * (pair.of == Of::query ? S::kQueryWidth : S::kHeadDim) + row) * S::kHidden,
            2 * S::kHidden, qkv_.filled(l));
      }
      out_.open(l, S::kOutRows * 2 * S::kQueryWidth);
      for (u32 i = lane_id(); i < S::kOutRows; i += 32) {
        copy_bulk(out_.slot(l) + i * S::kOutRow,
                  address<std::uint16_t>(w.o) + (S::kOutRows * rank_ + i) * (S::kHeads * S::kHeadDim) + head_ * S::kQueryWidth,
                  2 * S::kQueryWidth, out_.filled(l));
      }
    }
  }

  /// A matrix warp.
  __device__ void multiply(u32 warp) const {
    const u32 lane = lane_id();
    const u32 group = lane / 8;
    const bool has_x = group < S::kHiddenSteps;
    const u32 quad = (warp * S::kHiddenSteps + (has_x ? group : 0)) * 4 + lane % 4;
    for (u32 l = 0; l < step_.params->num_layers; ++l) {
      {
        const float4 norm = load_early(address<float>(step_.layers[l].input_norm) + 4 * quad);
        Rows<S::kQkvRows / 8, S::kHiddenSteps> rows;
        rows.load(qkv_.wait(l) + warp * S::kHiddenSteps * 32, S::kHiddenRow);
        qkv_.leave(l);
        const float4 x = step_.wait_x<S>(l, quad);
        float v[S::kQkvRows / 8];
        rows.multiply(factor(times(x, norm)), v);
        const float squares = sum_of_squares<S::kHiddenSteps>(x);
        if (lane == 0) shared_.squares[warp] = squares;
        store_sums(v, shared_.qkv[warp]);
        barrier_arrive(kQkv, 32 * (kMatrixWarps + kKeyWarps));
      }
      Rows<S::kOutRows / 8, 1> rows;
      rows.load(out_.wait(l) + warp * 32, S::kOutRow);
      out_.leave(l);
      if (warp == 0) {
        own_token(l);
        barrier_arrive(kSums, 32 * (kKeyWarps + 1));
      }
      project(l, warp, rows);
      barrier_arrive(kOut, 32 * (kMatrixWarps + kOutWarps));
    }
  }

  /// A key warp.
  __device__ void attend(u32 warp) const {
    const u32 lane = lane_id();
    const u32 layers = step_.params->num_layers;
    for (u32 i = threadIdx.x; i < layers; i += 32 * kKeyWarps) shared_.pools[i] = {step_.layers[i].keys, step_.layers[i].values};
    const Pair pair = pair_of(min(lane, S::kPairs - 1));
    float cosine = 1;
    float sine = 0;
    if (pair.of != Of::value) sincosf(static_cast<float>(step_.position) * step_.frequencies[pair.frequency], &sine, &cosine);
    float* const mailbox = pair.of == Of::query ? shared_.queries[pair.first / S::kHeadDim]
                           : pair.of == Of::key ? shared_.key
                                                : shared_.value;
    const u32 to_first = shared_address(mailbox + pair.first % S::kHeadDim);
    const u32 to_second = shared_address(mailbox + pair.second % S::kHeadDim);
    const u32 first = 16 * (warp * kClusterBlocks + rank_);
    Tile tile;
    barrier_wait(kPools, 32 * kKeyWarps);
    load_tile(0, first, tile);
    for (u32 l = 0; l < layers; ++l) {
      barrier_wait(kQkv, 32 * (kMatrixWarps + kKeyWarps));
      float2 x{};
      if (warp < kPairWarps && lane < S::kPairs) {
        const float factor = norm_factor(shared_.squares, S::kHidden, step_.params->norm_eps);
        const float a = sum_of_warps(shared_.qkv, lane) * factor;
        const float b = sum_of_warps(shared_.qkv, S::kPairs + lane) * factor;
        x = {a * cosine - b * sine, b * cosine + a * sine};
        const float scale = step_.params->scale * kLog2E;
        float2 sent{x.x * scale, x.y * scale};
        if (pair.of != Of::query) sent = {decoder::from_bf16(decoder::to_bf16(x.x)), decoder::from_bf16(decoder::to_bf16(x.y))};
#pragma unroll
        for (u32 i = 0; i < kClusterBlocks; i += kPairWarps) {
          send(to_first, i + warp, sent.x, queries_here_);
          send(to_second, i + warp, sent.y, queries_here_);
        }
      }
      wait_here(queries_here_, l & 1);
      if (threadIdx.x == 0) decoder::expect_bytes(queries_here_, kQueryBytes);
      attend_keys(l, warp, first, tile);
      barrier_wait(kSums, 32 * (kKeyWarps + 1));
      send_found(warp);
      if (l + 1 < layers) load_tile(l + 1, first, tile);
      if (warp == 0) store_own(l, pair, x);
      if (warp >= kOutWarps) continue;
      barrier_wait(kOut, 32 * (kMatrixWarps + kOutWarps));
      const u32 row = threadIdx.x;
      if (row < S::kOutRows) {
        publish(step_.exchange + S::kExchangeY + head_ * S::kHidden + S::kOutRows * rank_ + row, sum_of_warps(shared_.out, row),
                step_.phase(l));
      }
    }
  }

 private:
  static constexpr u32 kQkv = 1, kSums = 2, kOut = 3, kPools = 4;
  static constexpr u32 kPairWarps = 4;
  static constexpr u32 kOutWarps = (S::kOutRows + 31) / 32;
  static constexpr u32 kQueryBytes = 4 * (S::kQueryWidth + 2 * S::kHeadDim);
  static constexpr u32 kFoundBytes = 4 * kClusterBlocks * (S::kQueryWidth + 2 * S::kGroup);
  static constexpr u32 kDimPairs = S::kHeadDim / 2;

  enum class Of : u32 { query, key, value };
  /// Two rows that are rotated together: elements of the head group's queries, or of key or value.
  struct Pair {
    Of of;
    u32 first;
    u32 second;
    u32 frequency;
  };
  __device__ Pair pair_of(u32 i) const {
    if (i >= S::kQueryPairs + S::kKeyPairs) {
      const u32 j = 2 * (S::kKeyPairs * rank_ + i - S::kQueryPairs - S::kKeyPairs);
      return {Of::value, j, j + 1, 0};
    }
    const bool query = i < S::kQueryPairs;
    const u32 all = query ? S::kQueryPairs * rank_ + i : S::kKeyPairs * rank_ + i - S::kQueryPairs;
    const u32 head = all / kDimPairs * S::kHeadDim;
    const u32 j = all % kDimPairs;
    const Of of = query ? Of::query : Of::key;
    if (step_.params->interleaved != 0) return {of, head + 2 * j, head + 2 * j + 1, j};
    return {of, head + j, head + j + kDimPairs, j};
  }

  static constexpr float kLog2E = 1.4426950408889634F;

  /// The step's own key or value into the cache, where it is read by later steps only.
  __device__ void store_own(u32 l, const Pair& pair, float2 x) const {
    if (lane_id() >= S::kPairs || pair.of == Of::query) return;
    const ulonglong2 pools = shared_.pools[l];
    const u64 row = decoder::CacheRows::create(step_.params->cache, step_.block_table, head_).offset(step_.position);
    auto* cache = reinterpret_cast<std::uint16_t*>(pair.of == Of::key ? pools.x : pools.y) + row;
    cache[pair.first] = decoder::to_bf16(x.x);
    cache[pair.second] = decoder::to_bf16(x.y);
  }

  // ---- cached keys ----
  /// Lane 4 n + t: of keys n and n + 8 elements 8 t to 8 t + 7 and those 32 on; of values 2 t, 2 t + 1, 2 t + 8, 2 t + 9 elements
  /// 8 n to 8 n + 7. Zeros where a key is absent.
  struct Tile {
    uint4 key[2][2];
    uint4 value[4];
  };
  /// Reads ahead of the queries; nothing waits here but for the block table.
  __device__ void load_tile(u32 l, u32 first, Tile& tile) const {
    const decoder::CacheRows rows = decoder::CacheRows::create(step_.params->cache, step_.block_table, head_);
    const ulonglong2 pools = shared_.pools[l];
    const u32 n = lane_id() / 4;
    const u32 t = lane_id() % 4;
    const auto piece = [&](u64 pool, u32 key, u32 chunk) {
      return reinterpret_cast<const uint4*>(pool + 2 * rows.offset(min(key, step_.position))) + chunk;
    };
#pragma unroll
    for (u32 j = 0; j < 2; ++j) {
      const u32 key = first + n + 8 * j;
      const uint4* from = piece(pools.x, key, t);
      tile.key[j][0] = load_piece(from, key < step_.position);
      tile.key[j][1] = load_piece(from + 4, key < step_.position);
    }
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
      const u32 key = first + 2 * t + j % 2 + 8 * (j / 2);
      tile.value[j] = load_piece(piece(pools.y, key, n), key < step_.position);
    }
  }

  /// Running softmax of lane 4 h + t: head h; sums [j][c]: element 16 t + 8 c + j.
  struct Softmax {
    float largest = decoder::kMasked;
    float total = 0;
    float sums[8][2] = {};
  };

  /// `tile` has the first of the warp's keys, and is free afterwards.
  __device__ void attend_keys(u32 l, u32 warp, u32 first, Tile& tile) const {
    const u32 h = lane_id() / 4;
    const u32 t = lane_id() % 4;
    Softmax s;
    u32 at = first;
    while (at < step_.position) {
      attend_tile(at, tile, s);
      at += 16 * kKeyWarps * kClusterBlocks;
      if (at < step_.position) load_tile(l, at, tile);
    }
    s.total += __shfl_xor_sync(kAllLanes, s.total, 1);
    s.total += __shfl_xor_sync(kAllLanes, s.total, 2);
    if (h >= S::kGroup) return;
    if (t == 0) shared_.softmax[warp][h] = {s.largest, s.total};
    auto* to = reinterpret_cast<float4*>(&shared_.sums[warp][h][16 * t]);
#pragma unroll
    for (u32 c = 0; c < 2; ++c) {
      to[2 * c] = {s.sums[0][c], s.sums[1][c], s.sums[2][c], s.sums[3][c]};
      to[2 * c + 1] = {s.sums[4][c], s.sums[5][c], s.sums[6][c], s.sums[7][c]};
    }
  }

  __device__ void attend_tile(u32 first, const Tile& tile, Softmax& s) const {
    const u32 h = lane_id() / 4;
    const u32 t = lane_id() % 4;
    float d[2][4] = {};
#pragma unroll
    for (u32 c = 0; c < 2; ++c) {
      float4 q[2] = {};
      if (h < S::kGroup) {
        const auto* from = reinterpret_cast<const float4*>(&shared_.queries[h][32 * c + 8 * t]);
        q[0] = from[0];
        q[1] = from[1];
      }
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const uint2 rounded = decoder::pack_quad(q[i]);
        const uint2 rest = decoder::pack_rest(q[i], rounded);
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
          const uint4& k = tile.key[j][c];
          decoder::multiply_add(d[j], rounded.x, rest.x, rounded.y, rest.y, i == 0 ? k.x : k.z, i == 0 ? k.y : k.w);
        }
      }
    }
    // Keys first + 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
    float score[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 key = first + 2 * t + i % 2 + 8 * (i / 2);
      score[i] = key < step_.position ? d[i / 2][i % 2] + d[i / 2][2 + i % 2] : decoder::kMasked;
    }
    float largest = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
    largest = fmaxf(largest, s.largest);
    const float shrink = decoder::exp2_near(s.largest - largest);
    s.largest = largest;
    s.total *= shrink;
    float4 p;
    p.x = score[0] > decoder::kMasked ? decoder::exp2_near(score[0] - largest) : 0.0F;
    p.y = score[1] > decoder::kMasked ? decoder::exp2_near(score[1] - largest) : 0.0F;
    p.z = score[2] > decoder::kMasked ? decoder::exp2_near(score[2] - largest) : 0.0F;
    p.w = score[3] > decoder::kMasked ? decoder::exp2_near(score[3] - largest) : 0.0F;
    s.total += p.x + p.y + p.z + p.w;
    const uint2 rounded = decoder::pack_quad(p);
    const uint2 rest = decoder::pack_rest(p, rounded);
#pragma unroll
    for (u32 j = 0; j < 8; ++j) {
      const u32 half = j % 2 == 0 ? 0x5410 : 0x7632;
      const u32 b0 = __byte_perm(word(tile.value[0], j / 2), word(tile.value[1], j / 2), half);
      const u32 b1 = __byte_perm(word(tile.value[2], j / 2), word(tile.value[3], j / 2), half);
      float o[4] = {};
      decoder::multiply_add(o, rounded.x, rest.x, rounded.y, rest.y, b0, b1);
      s.sums[j][0] = s.sums[j][0] * shrink + (o[0] + o[2]);
      s.sums[j][1] = s.sums[j][1] * shrink + (o[1] + o[3]);
    }
  }
  __device__ static u32 word(const uint4& x, u32 i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

  /// The step's own key and value, by one warp of the cluster's last block.
  __device__ void own_token(u32 l) const {
    wait_here(queries_here_, l & 1);
    const u32 lane = lane_id();
    const bool mine = rank_ + 1 == kClusterBlocks;
    const float2 key = reinterpret_cast<const float2*>(shared_.key)[lane];
    const float2 value = reinterpret_cast<const float2*>(shared_.value)[lane];
#pragma unroll
    for (u32 h = 0; h < S::kGroup; ++h) {
      const float2 q = *reinterpret_cast<const float2*>(&shared_.queries[h][2 * lane]);
      const float score = decoder::warp_sum(q.x * key.x + q.y * key.y);
      if (lane == 0) shared_.softmax[kKeyWarps][h] = mine ? float2{score, 1} : float2{decoder::kMasked, 0};
      *reinterpret_cast<float2*>(&shared_.sums[kKeyWarps][h][2 * lane]) = mine ? value : float2{0, 0};
    }
  }

  /// Joins the warps' sums and sends them to every block.
  __device__ void send_found(u32 warp) const {
    constexpr u32 kPairsOfAll = S::kQueryWidth / 2;
    constexpr u32 kSenders = 2 * kPairsOfAll;
    static_assert(kSenders + S::kGroup * kClusterBlocks <= 32 * kKeyWarps);
    const u32 thread = threadIdx.x;
    if (thread < kSenders) {
      const u32 element = thread % kPairsOfAll * 2;
      const u32 h = element / S::kHeadDim;
      const float largest = largest_of(h);
      float2 sum{0, 0};
#pragma unroll
      for (u32 w = 0; w <= kKeyWarps; ++w) {
        const float weight = decoder::exp2_near(shared_.softmax[w][h].x - largest);
        const float2 x = *reinterpret_cast<const float2*>(&shared_.sums[w][h][element % S::kHeadDim]);
        sum.x += weight * x.x;
        sum.y += weight * x.y;
      }
      const u32 to = shared_address(&shared_.found[rank_][element]);
#pragma unroll
      for (u32 i = 0; i < kClusterBlocks / 2; ++i)
        decoder::send_to(to, found_here_, thread / kPairsOfAll * (kClusterBlocks / 2) + i, sum);
    } else if (thread - kSenders < S::kGroup * kClusterBlocks) {
      const u32 h = (thread - kSenders) / kClusterBlocks;
      const float largest = largest_of(h);
      float total = 0;
#pragma unroll
      for (u32 w = 0; w <= kKeyWarps; ++w) total += decoder::exp2_near(shared_.softmax[w][h].x - largest) * shared_.softmax[w][h].y;
      decoder::send_to(shared_address(&shared_.found[rank_][S::kQueryWidth + 2 * h]), found_here_,
                       (thread - kSenders) % kClusterBlocks, {largest, total});
    }
  }
  __device__ float largest_of(u32 h) const {
    float largest = decoder::kMasked;
#pragma unroll
    for (u32 w = 0; w <= kKeyWarps; ++w) largest = fmaxf(largest, shared_.softmax[w][h].x);
    return largest;
  }

  /// Sixteen columns of the output matrix, all of one head: the other factor's columns are the blocks' sums, weighted and added
  /// afterwards.
  __device__ void project(u32 l, u32 warp, const Rows<S::kOutRows / 8, 1>& rows) const {
    using W = Rows<S::kOutRows / 8, 1>;
    const u32 t = lane_id() % 4;
    const u32 h = warp * 16 / S::kHeadDim;
    wait_here(found_here_, l & 1);
    if (warp == 0 && lane_id() == 0) decoder::expect_bytes(found_here_, kFoundBytes);
    const float4 x = *reinterpret_cast<const float4*>(&shared_.found[lane_id() / 4][16 * warp + 4 * t]);
    const uint2 rounded = decoder::pack_quad(x);
    const uint2 rest = decoder::pack_rest(x, rounded);
    float d[W::kTiles][4] = {};
#pragma unroll
    for (u32 i = 0; i < W::kTiles; ++i) {
      const uint2 low = rows.a[2 * i][0];
      const uint2 high = rows.a[2 * i + 1][0];
      decoder::multiply_add(d[i], low.x, high.x, low.y, high.y, rounded.x, rounded.y);
      decoder::multiply_add(d[i], low.x, high.x, low.y, high.y, rest.x, rest.y);
    }
    float2 softmax[kClusterBlocks];
    float largest = decoder::kMasked;
#pragma unroll
    for (u32 s = 0; s < kClusterBlocks; ++s) {
      softmax[s] = *reinterpret_cast<const float2*>(&shared_.found[s][S::kQueryWidth + 2 * h]);
      largest = fmaxf(largest, softmax[s].x);
    }
    float total = 0;
    float mine[2] = {};
#pragma unroll
    for (u32 s = 0; s < kClusterBlocks; ++s) {
      const float weight = decoder::exp2_near(softmax[s].x - largest);
      total += weight * softmax[s].y;
      if (s / 2 == t) mine[s % 2] = weight;
    }
    const float inverse = __fdividef(1.0F, total);
    mine[0] *= inverse;
    mine[1] *= inverse;
    float v[S::kOutRows / 8];
#pragma unroll
    for (u32 i = 0; i < S::kOutRows / 8; ++i) v[i] = d[i / 2][2 * (i % 2)] * mine[0] + d[i / 2][2 * (i % 2) + 1] * mine[1];
    store_sums(v, shared_.out[warp]);
  }

  const Step& step_;
  u32 head_;
  u32 rank_;
  Shared& shared_;
  Ring qkv_;
  Ring out_;
  u32 queries_here_;
  u32 found_here_;
};

}  // namespace metrale::cuda::layers
