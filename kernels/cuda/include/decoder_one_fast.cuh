// SPDX-License-Identifier: Apache-2.0
//
// Keys and values of a bf16 cache against up to eight query heads, on tensor cores, for head sizes of 64, 128 and 256. Queries and
// weights are taken as the sum of two bf16 numbers each, so that nothing is lost but the cache's own rounding. No matrix is laid
// out for its product: which element of a head stands where in a product is free as long as both factors agree, so each lane copies
// just those 16-byte pieces that it multiplies, into a ring that no other lane touches, several tiles ahead.
#pragma once

#include "decoder_one_share.cuh"

namespace metrale::cuda::decoder {

/// One warp's way through its tiles. Lane 4 g + t holds, of a key tile, elements [32 c + 8 t, 8] of keys g and g + 8; of a value tile,
/// elements [64 c + 8 g, 8] of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9; of the weights, those keys for head g.
template <int head_dim>
class FastKeys {
 public:
  __device__ FastKeys(const OneShare& share, const CacheLayout& cache, const std::int32_t* table, const void* keys,
                      const void* values, float* shared, const OneLayout& layout)
      : share_(share),
        rows_(CacheRows::create(cache, table, share.kv_head)),
        keys_(static_cast<const std::uint16_t*>(keys)),
        values_(static_cast<const std::uint16_t*>(values)),
        shared_(shared),
        layout_(layout),
        whole_tiles_(cache.block_tokens % kKeyTile == 0),
        ring_(reinterpret_cast<uint4*>(shared + layout.ring + warp_id() * (ring_bytes(head_dim) / 4)) + lane_id()) {}

  /// Sets copies going. Of rows before the step's own, which are there already.
  __device__ void start() {
    u32 tile = share_.first_tile();
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage, tile += share_.tile_step()) {
      copy_keys(tile, stage);
      copy_values(tile, stage);
    }
  }

  /// After gather_heads. Leaves sums and softmax of this warp in shared memory; the caller synchronises.
  __device__ void run() {
    split_queries();
    float top = kMasked;
    float total = 0;
    float sums[head_dim / 16][4] = {};
    int stage = 0;
    for (u32 tile = share_.first_tile(); tile < share_.tiles; tile += share_.tile_step()) {
      const u32 next = tile + kStages * share_.tile_step();
      wait_copies<2 * kStages - 1>();
      if (tile == share_.tiles - 1) insert_key(stage);
      float scores[4];
      score(stage, scores);
      copy_keys(next, stage);
      if (tile == share_.tiles - 1) mask(tile, scores);

      float new_top = fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3]));
      new_top = fmaxf(new_top, __shfl_xor_sync(kAllLanes, new_top, 1));
      new_top = fmaxf(new_top, __shfl_xor_sync(kAllLanes, new_top, 2));
      new_top = fmaxf(new_top, top);
      if (__any_sync(kAllLanes, new_top > top)) {
        const float correction = exp2_near(top - new_top);
        total *= correction;
        top = new_top;
        // Sums lie with heads 2 t and 2 t + 1, the softmax with head g.
        const float even = __shfl_sync(kAllLanes, correction, 8 * (lane_id() % 4));
        const float odd = __shfl_sync(kAllLanes, correction, 8 * (lane_id() % 4) + 4);
#pragma unroll
        for (int i = 0; i < head_dim / 16; ++i) {
          sums[i][0] *= even;
          sums[i][1] *= odd;
          sums[i][2] *= even;
          sums[i][3] *= odd;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[i] = exp2_near(scores[i] - top);
        total += scores[i];
      }
      wait_copies<2 * kStages - 1>();
      if (tile == share_.tiles - 1) insert_value(stage);
      add_values(stage, scores, sums);
      copy_values(next, stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    total += __shfl_xor_sync(kAllLanes, total, 1);
    total += __shfl_xor_sync(kAllLanes, total, 2);
    leave(top, total, sums);
  }

 private:
  static constexpr int kPieces = head_dim / 16;  // of keys in a tile, for each lane, and as many of values
  static constexpr int kStages = static_cast<int>(ring_bytes(head_dim)) / (2 * kPieces * 512);

  __device__ uint4* key_piece(int stage, int i) const { return ring_ + (stage * 2 * kPieces + i) * 32; }
  __device__ uint4* value_piece(int stage, int i) const { return ring_ + ((stage * 2 + 1) * kPieces + i) * 32; }

  /// Where row `row` of a tile lies; rows past the step's own are put where that one is.
  __device__ u64 row_offset(u32 tile, u64 first, u32 row) const {
    if (whole_tiles_) return first + static_cast<u64>(row) * rows_.token_stride;
    return rows_.offset(smaller(tile * kKeyTile + row, share_.position));
  }

  /// An empty group past the last tile keeps the count of groups right.
  __device__ void copy_keys(u32 tile, int stage) {
    if (tile < share_.tiles) {
      const u32 g = lane_id() / 4;
      const u32 t = lane_id() % 4;
      const u64 first = whole_tiles_ ? rows_.offset(tile * kKeyTile) : 0;
#pragma unroll
      for (u32 j = 0; j < 2; ++j) {
        const u32 row = g + 8 * j;
        const bool valid = tile * kKeyTile + row < share_.position;
        const std::uint16_t* from = keys_ + row_offset(tile, first, valid ? row : 0) + 8 * t;
#pragma unroll
        for (int c = 0; c < head_dim / 32; ++c)
          copy16_async(shared_address(key_piece(stage, static_cast<int>(j) * (head_dim / 32) + c)), from + 32 * c, valid);
      }
    }
    commit_copies();
  }
  __device__ void copy_values(u32 tile, int stage) {
    if (tile < share_.tiles) {
      const u32 g = lane_id() / 4;
      const u64 first = whole_tiles_ ? rows_.offset(tile * kKeyTile) : 0;
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        const u32 row = value_row(j);
        const bool valid = tile * kKeyTile + row < share_.position;
        const std::uint16_t* from = values_ + row_offset(tile, first, valid ? row : 0) + 8 * g;
#pragma unroll
        for (int c = 0; c < head_dim / 64; ++c)
          copy16_async(shared_address(value_piece(stage, 4 * c + static_cast<int>(j))), from + 64 * c, valid);
      }
    }
    commit_copies();
  }
  __device__ static u32 value_row(u32 j) { return 2 * (lane_id() % 4) + j % 2 + j / 2 * 8; }

  __device__ static uint4 pack8(const float* from) {
    return {pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]), pack_bf16(from[4], from[5]), pack_bf16(from[6], from[7])};
  }
  /// The step's own key is not taken from the cache, where it may still be on its way.
  __device__ void insert_key(int stage) {
    const u32 row = share_.position % kKeyTile;
    if (row % 8 != lane_id() / 4) return;
#pragma unroll
    for (int c = 0; c < head_dim / 32; ++c)
      *key_piece(stage, static_cast<int>(row / 8) * (head_dim / 32) + c) =
          pack8(shared_ + layout_.key + 32 * c + 8 * (lane_id() % 4));
  }
  __device__ void insert_value(int stage) {
    const u32 row = share_.position % kKeyTile;
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
      if (row != value_row(j)) continue;
#pragma unroll
      for (int c = 0; c < head_dim / 64; ++c)
        *value_piece(stage, 4 * c + static_cast<int>(j)) = pack8(shared_ + layout_.value + 64 * c + 8 * (lane_id() / 4));
    }
  }

  /// Queries as the first factor of scores: rows 0 to 7 of it are the heads, 8 to 15 what rounding took from them.
  __device__ void split_queries() {
    uint4* fragments = reinterpret_cast<uint4*>(shared_ + layout_.fragments);
    for (u32 i = threadIdx.x; i < head_dim / 16 * 32; i += blockDim.x) {
      const u32 g = i % 32 / 4;
      const u32 t = i % 4;
      const float* q = shared_ + layout_.queries + g * head_dim + i / 64 * 32 + 8 * t + i / 32 % 2 * 4;
      uint4 f;
      f.x = pack_bf16(q[0], q[1]);
      f.y = pack_bf16(q[0] - low_bf16(f.x), q[1] - high_bf16(f.x));
      f.z = pack_bf16(q[2], q[3]);
      f.w = pack_bf16(q[2] - low_bf16(f.z), q[3] - high_bf16(f.z));
      fragments[i] = f;
    }
    __syncthreads();
  }

  /// Scores of head g with keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
  __device__ void score(int stage, float (&scores)[4]) const {
    const uint4* fragments = reinterpret_cast<const uint4*>(shared_ + layout_.fragments) + lane_id();
    float s[2][4] = {};
#pragma unroll
    for (int c = 0; c < head_dim / 32; ++c) {
      const uint4 q0 = fragments[2 * c * 32];
      const uint4 q1 = fragments[(2 * c + 1) * 32];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint4 k = *key_piece(stage, j * (head_dim / 32) + c);
        multiply_add(s[j], q0.x, q0.y, q0.z, q0.w, k.x, k.y);
        multiply_add(s[j], q1.x, q1.y, q1.z, q1.w, k.z, k.w);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      scores[2 * j] = s[j][0] + s[j][2];
      scores[2 * j + 1] = s[j][1] + s[j][3];
    }
  }
  __device__ void mask(u32 tile, float (&scores)[4]) const {
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
      if (tile * kKeyTile + value_row(j) > share_.position) scores[j] = kMasked;
    }
  }

  /// Products of the transposed values, 16 elements at a time, with the weights: sums[4 c + i] are elements 64 c + 8 g + 2 i and the one
  /// after it, of heads 2 t and 2 t + 1.
  __device__ void add_values(int stage, const float (&weights)[4], float (&sums)[head_dim / 16][4]) const {
    const u32 b0 = pack_bf16(weights[0], weights[1]);
    const u32 b1 = pack_bf16(weights[2], weights[3]);
    const u32 rest0 = pack_bf16(weights[0] - low_bf16(b0), weights[1] - high_bf16(b0));
    const u32 rest1 = pack_bf16(weights[2] - low_bf16(b1), weights[3] - high_bf16(b1));
#pragma unroll
    for (int c = 0; c < head_dim / 64; ++c) {
      u32 v[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4 piece = *value_piece(stage, 4 * c + j);
        v[j][0] = piece.x;
        v[j][1] = piece.y;
        v[j][2] = piece.z;
        v[j][3] = piece.w;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 a0 = __byte_perm(v[0][i], v[1][i], 0x5410);
        const u32 a1 = __byte_perm(v[0][i], v[1][i], 0x7632);
        const u32 a2 = __byte_perm(v[2][i], v[3][i], 0x5410);
        const u32 a3 = __byte_perm(v[2][i], v[3][i], 0x7632);
        multiply_add(sums[4 * c + i], a0, a1, a2, a3, b0, b1);
        multiply_add(sums[4 * c + i], a0, a1, a2, a3, rest0, rest1);
      }
    }
  }

  __device__ void leave(float top, float total, const float (&sums)[head_dim / 16][4]) {
    wait_copies<0>();
    __syncwarp();
    const u32 g = lane_id() / 4;
    const u32 t = lane_id() % 4;
    float* mine = shared_ + layout_.ring + warp_id() * (ring_bytes(head_dim) / 4);
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      if (2 * t + h >= share_.heads) continue;
      float* to = mine + (2 * t + h) * head_dim + 8 * g;
#pragma unroll
      for (int c = 0; c < head_dim / 64; ++c) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          *reinterpret_cast<float4*>(to + 64 * c + 2 * i) = {sums[4 * c + i][h], sums[4 * c + i][2 + h], sums[4 * c + i + 1][h],
                                                             sums[4 * c + i + 1][2 + h]};
        }
      }
    }
    if (t == 0) {
      float* to = shared_ + layout_.warps + (warp_id() * kHeadSet + g) * 2;
      to[0] = top * 0.6931471805599453F;  // in units of e, as the general path leaves it
      to[1] = total;
    }
  }

  const OneShare& share_;
  CacheRows rows_;
  const std::uint16_t* keys_;
  const std::uint16_t* values_;
  float* shared_;
  const OneLayout& layout_;
  bool whole_tiles_;
  uint4* ring_;
};

}  // namespace metrale::cuda::decoder
