// SPDX-License-Identifier: Apache-2.0
//
// Keys and values of a bf16 cache against up to eight query heads, on tensor cores, for head sizes of 64, 128 and 256. Queries and
// weights are taken as the sum of two bf16 numbers each, so that nothing is lost but the cache's own rounding. Rows are copied
// whole, by neighbouring lanes (pieces of rows by lanes far apart reach 3.1 of 4.4 TB/s), into a ring of each warp's own.
#pragma once

#include "decoder_one_share.cuh"

namespace metrale::cuda::decoder {

/// One warp's way through its tiles of 16 keys. Piece p of 16 bytes of row r lies at p ^ (r % 8), so that the rows of a matrix are
/// read from different banks.
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
        ring_(shared_address(shared + layout.ring + warp_id() * layout.ring_floats)) {}

  /// Sets copies going. Of rows before the step's own, which are there already.
  __device__ __forceinline__ void start() {
    u32 tile = share_.first_tile();
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage, tile += share_.tile_step()) {
      find(tile);
      copy(keys_, tile, key_stage(stage));
      copy(values_, tile, value_stage(stage));
    }
    find(tile);
  }

  /// After the gather and a barrier of the block. Leaves sums and softmax of this warp in shared memory; the caller synchronises.
  __device__ __forceinline__ void run() {
    if (share_.first_tile() >= share_.tiles) {
      wait_copies<0>();
      return;
    }
    float top = kMasked;
    float total = 0;
    float sums[head_dim / 16][4] = {};
    int stage = 0;
    for (u32 tile = share_.first_tile(); tile < share_.tiles; tile += share_.tile_step()) {
      const u32 next = tile + kStages * share_.tile_step();
      const bool is_last = tile == share_.tiles - 1;
      wait_copies<2 * kStages - 1>();
      if (is_last) insert(layout_.key, key_stage(stage));
      __syncwarp();
      float scores[4];
      score(key_stage(stage), scores);
      __syncwarp();
      copy(keys_, next, key_stage(stage));
      if (is_last) mask(tile, scores);

      float new_top = fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3]));
      new_top = fmaxf(new_top, __shfl_xor_sync(kAllLanes, new_top, 1));
      new_top = fmaxf(new_top, __shfl_xor_sync(kAllLanes, new_top, 2));
      new_top = fmaxf(new_top, top);
      if (tile == share_.first_tile()) {
        top = new_top;
      } else if (__any_sync(kAllLanes, new_top > top)) {
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
      if (is_last) insert(layout_.value, value_stage(stage));
      __syncwarp();
      add_values(value_stage(stage), scores, sums);
      __syncwarp();
      copy(values_, next, value_stage(stage));
      find(next + share_.tile_step());
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    total += __shfl_xor_sync(kAllLanes, total, 1);
    total += __shfl_xor_sync(kAllLanes, total, 2);
    leave(top, total, sums);
  }

 private:
  static constexpr u32 kRowBytes = head_dim * 2;
  static constexpr u32 kTileBytes = kKeyTile * kRowBytes;
  static constexpr int kStages = static_cast<int>(ring_bytes(head_dim) / (2 * kTileBytes));
  static constexpr u32 kRowPieces = kRowBytes / 16;
  static constexpr u32 kRowsAtOnce = kWarp / kRowPieces;

  __device__ u32 key_stage(int stage) const { return ring_ + static_cast<u32>(stage) * 2 * kTileBytes; }
  __device__ u32 value_stage(int stage) const { return key_stage(stage) + kTileBytes; }
  __device__ static u32 piece_at(u32 row, u32 piece) { return row * kRowBytes + (piece ^ row % 8) * 16; }

  /// Looks up where the tile lies that is copied next, a turn before it is.
  __device__ void find(u32 tile) {
    if (whole_tiles_ && tile < share_.tiles) next_ = rows_.offset(tile * kKeyTile);
  }
  /// Of that tile, the rows before the step's own, and zeros in place of others. An empty group where there is no such tile keeps
  /// the count of groups right.
  __device__ __forceinline__ void copy(const std::uint16_t* cache, u32 tile, u32 to) {
    if (tile < share_.tiles) {
      const u32 piece = lane_id() % kRowPieces;
      const u32 first = lane_id() / kRowPieces;
#pragma unroll
      for (u32 i = 0; i < kKeyTile / kRowsAtOnce; ++i) {
        const u32 row = first + i * kRowsAtOnce;
        const bool valid = tile * kKeyTile + row < share_.position;
        const u64 offset = whole_tiles_ ? next_ + static_cast<u64>(row) * rows_.token_stride
                                        : rows_.offset(smaller(tile * kKeyTile + row, share_.position));
        copy16_async(to + piece_at(row, piece), cache + offset + 8 * piece, valid);
      }
    }
    commit_copies();
  }

  /// The step's own row, into the tile that has its place.
  __device__ void insert(u32 from, u32 stage) {
    __syncwarp();  // zeros were copied there
    if (lane_id() >= kRowPieces) return;
    const uint4 piece = reinterpret_cast<const uint4*>(shared_ + from)[lane_id()];
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(stage + piece_at(share_.position % kKeyTile, lane_id())),
                 "r"(piece.x), "r"(piece.y), "r"(piece.z), "r"(piece.w)
                 : "memory");
  }

  /// Queries as the first factor of scores: rows 0 to 7 of it are the heads, 8 to 15 what rounding took from them.
  __device__ __forceinline__ void load_query(u32 chunk, u32 (&q)[4]) const {
    const u32 row = lane_id() % 16;
    const u32 at = row * (head_dim + 8) + 16 * chunk + lane_id() / 16 * 8;
    load_matrices(shared_address(shared_ + layout_.queries) + 2 * at, q);
  }

  /// Scores of head g with keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9. A batch of factors is on its way before the first product.
  __device__ __forceinline__ void score(u32 stage, float (&scores)[4]) const {
    constexpr u32 kBatch = 2;  // times 32 elements
    float s[2][2][4] = {};
    const u32 lane = lane_id();
#pragma unroll
    for (u32 first = 0; first < head_dim / 32; first += kBatch) {
      u32 q[kBatch][2][4];
      u32 k[kBatch][2][4];
#pragma unroll
      for (u32 c = 0; c < kBatch; ++c) {
        load_query(2 * (first + c), q[c][0]);
        load_query(2 * (first + c) + 1, q[c][1]);
#pragma unroll
        for (u32 j = 0; j < 2; ++j) load_matrices(stage + piece_at(8 * j + lane % 8, 4 * (first + c) + lane / 8), k[c][j]);
      }
#pragma unroll
      for (u32 c = 0; c < kBatch; ++c) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
#pragma unroll
          for (u32 j = 0; j < 2; ++j)
            multiply_add(s[j][h], q[c][h][0], q[c][h][1], q[c][h][2], q[c][h][3], k[c][j][2 * h], k[c][j][2 * h + 1]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      scores[2 * j] = (s[j][0][0] + s[j][1][0]) + (s[j][0][2] + s[j][1][2]);
      scores[2 * j + 1] = (s[j][0][1] + s[j][1][1]) + (s[j][0][3] + s[j][1][3]);
    }
  }
  __device__ void mask(u32 tile, float (&scores)[4]) const {
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
      if (tile * kKeyTile + 2 * (lane_id() % 4) + j % 2 + j / 2 * 8 > share_.position) scores[j] = kMasked;
    }
  }

  /// Products of the transposed values, 16 elements at a time, with the weights: sums[i] are elements 16 i + g and, in its second
  /// half, 16 i + g + 8, of heads 2 t and 2 t + 1.
  __device__ __forceinline__ void add_values(u32 stage, const float (&weights)[4], float (&sums)[head_dim / 16][4]) const {
    const u32 b0 = pack_bf16(weights[0], weights[1]);
    const u32 b1 = pack_bf16(weights[2], weights[3]);
    const u32 rest0 = pack_bf16(weights[0] - low_bf16(b0), weights[1] - high_bf16(b0));
    const u32 rest1 = pack_bf16(weights[2] - low_bf16(b1), weights[3] - high_bf16(b1));
    const u32 row = lane_id() / 16 * 8 + lane_id() % 8;
    constexpr u32 kBatch = 4;  // on their way before the first product
#pragma unroll
    for (u32 first = 0; first < head_dim / 16; first += kBatch) {
      u32 v[kBatch][4];
#pragma unroll
      for (u32 i = 0; i < kBatch; ++i) load_matrices_transposed(stage + piece_at(row, 2 * (first + i) + lane_id() / 8 % 2), v[i]);
#pragma unroll
      for (u32 i = 0; i < kBatch; ++i) multiply_add(sums[first + i], v[i][0], v[i][1], v[i][2], v[i][3], b0, b1);
#pragma unroll
      for (u32 i = 0; i < kBatch; ++i) multiply_add(sums[first + i], v[i][0], v[i][1], v[i][2], v[i][3], rest0, rest1);
    }
  }

  __device__ __forceinline__ void leave(float top, float total, const float (&sums)[head_dim / 16][4]) {
    wait_copies<0>();
    __syncwarp();
    const u32 g = lane_id() / 4;
    const u32 t = lane_id() % 4;
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      if (2 * t + h >= share_.heads) continue;
      float* to = warp_sums(shared_, layout_, warp_id(), 2 * t + h) + g;
#pragma unroll
      for (int i = 0; i < head_dim / 16; ++i) {
        to[16 * i] = sums[i][h];
        to[16 * i + 8] = sums[i][2 + h];
      }
    }
    if (t == 0) {
      warp_softmax(shared_, layout_, g)[warp_id()] = top;
      warp_softmax(shared_, layout_, g)[kOneWarps + warp_id()] = total;
    }
  }

  const OneShare& share_;
  CacheRows rows_;
  const std::uint16_t* keys_;
  const std::uint16_t* values_;
  float* shared_;
  const OneLayout& layout_;
  bool whole_tiles_;
  u32 ring_;
  u64 next_ = 0;  ///< Where the tile lies that is copied next.
};

}  // namespace metrale::cuda::decoder
