// SPDX-License-Identifier: Apache-2.0
//
// Causal attention of many tokens over a paged cache: a block for each tile of kAttendTile queries of one head. On tensor cores for
// bf16 caches and head sizes of 64, 128 and 256, with scores and sums in f32; in f32 throughout otherwise.
#pragma once

#include "decoder_common.cuh"

namespace metrale::cuda::decoder {

struct AttendCall {
  const float* q;
  const void* key_cache;
  const void* value_cache;
  const StepHeader* step;
  const std::int32_t* block_table;
  float* out;
};

/// What a block works on. Tiles with the most keys come first, so that the last blocks to start are short.
struct AttendShare {
  u32 head;
  u32 kv_head;
  u32 first_row;
  u32 num_rows;
  u32 first_position;  ///< Of its first row.
  __device__ static AttendShare create(const AttendParams& p, const StepHeader* step) {
    AttendShare s;
    s.head = blockIdx.x;
    s.kv_head = s.head / (p.num_heads / p.num_kv_heads);
    s.first_row = (gridDim.y - 1 - blockIdx.y) * kAttendTile;
    s.num_rows = smaller(kAttendTile, p.m - s.first_row);
    s.first_position = static_cast<u32>(step->position) + s.first_row;
    return s;
  }
};

__device__ inline void write_attention(const AttendCall& c, const AttendParams& p, u32 row, u32 head, u32 d, float x) {
  if (p.gated) x *= sigmoid(c.q[static_cast<u64>(row) * p.ld_q + static_cast<u64>(head) * p.q_head_stride + p.head_dim + d]);
  c.out[(static_cast<u64>(row) * p.num_heads + head) * p.head_dim + d] = x;
}

/// Four warps of 16 queries each. Keys and values come in tiles, two stages deep.
template <int head_dim>
class AttendTiles {
 public:
  __device__ AttendTiles(const AttendCall& call, const AttendParams& params, void* shared)
      : c_(call),
        p_(params),
        share_(AttendShare::create(params, call.step)),
        num_keys_(share_.first_position + share_.num_rows),
        shared_(shared_address(shared)) {}

  __device__ void run() {
    const u32 tiles = divide_up(num_keys_, kKeys);
    copy_tile(0);
    load_queries();
    for (u32 tile = 0; tile < tiles; ++tile) {
      if (tile + 1 < tiles) copy_tile(tile + 1);
      commit_copies();
      wait_copies<1>();
      __syncthreads();
      step(tile);
      __syncthreads();
    }
    write();
  }

 private:
  static constexpr int kKeys = head_dim == 256 ? 32 : 64;
  static constexpr u32 kRowBytes = (head_dim + 8) * 2;  // 16 bytes more than a row: the rows of a matrix start in different banks
  static constexpr u32 kMatrixBytes = kKeys * kRowBytes;

  __device__ u32 stage_keys(u32 tile) const { return shared_ + tile % 2 * 2 * kMatrixBytes; }
  __device__ u32 stage_values(u32 tile) const { return stage_keys(tile) + kMatrixBytes; }

  /// Rows past the last key are zeros, since a weight of zero times what lay there might not be.
  __device__ void copy_tile(u32 tile) {
    constexpr u32 kPieces = head_dim / 8;
    constexpr u32 kRowsAtOnce = 128 / kPieces;
    const u32 piece = threadIdx.x % kPieces;
    const CacheRows rows = CacheRows::create(p_.cache, c_.block_table, share_.kv_head);
    const auto* keys = static_cast<const std::uint16_t*>(c_.key_cache);
    const auto* values = static_cast<const std::uint16_t*>(c_.value_cache);
#pragma unroll 4
    for (u32 row = threadIdx.x / kPieces; row < kKeys; row += kRowsAtOnce) {
      const u32 key = tile * kKeys + row;
      const bool valid = key < num_keys_;
      const u64 from = rows.offset(valid ? key : 0) + 8 * piece;
      const u32 to = row * kRowBytes + 16 * piece;
      copy16_async(stage_keys(tile) + to, keys + from, valid);
      copy16_async(stage_values(tile) + to, values + from, valid);
    }
    if (tile == 0) commit_copies();
  }

  __device__ u32 row_of(u32 half) const { return warp_id() * 16 + lane_id() / 4 + 8 * half; }

  /// Queries times scale and log2(e), as first factors.
  __device__ void load_queries() {
    const float factor = p_.scale * 1.4426950408889634F;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 row = row_of(half);
      const bool real = row < share_.num_rows;
      const float* q = c_.q + static_cast<u64>(share_.first_row + (real ? row : 0)) * p_.ld_q +
                       static_cast<u64>(share_.head) * p_.q_head_stride + 2 * (lane_id() % 4);
#pragma unroll
      for (int s = 0; s < head_dim / 16; ++s) {
        q_[s][half] = real ? pack_bf16(q[16 * s] * factor, q[16 * s + 1] * factor) : 0;
        q_[s][half + 2] = real ? pack_bf16(q[16 * s + 8] * factor, q[16 * s + 9] * factor) : 0;
      }
    }
  }

  __device__ void step(u32 tile) {
    float s[kKeys / 8][4] = {};
    const u32 lane = lane_id();
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      const u32 row = stage_keys(tile) + (8 * static_cast<u32>(n) + lane % 8) * kRowBytes + lane / 8 * 16;
#pragma unroll
      for (int k = 0; k < head_dim / 32; ++k) {
        u32 b[4];
        load_matrices(row + 64 * static_cast<u32>(k), b);
        multiply_add(s[n], q_[2 * k][0], q_[2 * k][1], q_[2 * k][2], q_[2 * k][3], b[0], b[1]);
        multiply_add(s[n], q_[2 * k + 1][0], q_[2 * k + 1][1], q_[2 * k + 1][2], q_[2 * k + 1][3], b[2], b[3]);
      }
    }
    if ((tile + 1) * kKeys > share_.first_position + warp_id() * 16) {  // a key may lie behind a query
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
          const u32 key = tile * kKeys + 8 * static_cast<u32>(n) + 2 * (lane % 4) + i % 2;
          if (key > share_.first_position + row_of(i / 2)) s[n][i] = kMasked;
        }
      }
    }
    soften(s);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const u32 a0 = pack_bf16(s[2 * k][0], s[2 * k][1]);
      const u32 a1 = pack_bf16(s[2 * k][2], s[2 * k][3]);
      const u32 a2 = pack_bf16(s[2 * k + 1][0], s[2 * k + 1][1]);
      const u32 a3 = pack_bf16(s[2 * k + 1][2], s[2 * k + 1][3]);
      const u32 row = stage_values(tile) + (16 * static_cast<u32>(k) + lane % 16) * kRowBytes + lane / 16 * 16;
#pragma unroll
      for (int n = 0; n < head_dim / 16; ++n) {
        u32 b[4];
        load_matrices_transposed(row + 32 * static_cast<u32>(n), b);
        multiply_add(o_[2 * n], a0, a1, a2, a3, b[0], b[1]);
        multiply_add(o_[2 * n + 1], a0, a1, a2, a3, b[2], b[3]);
      }
    }
  }

  /// Scores to weights relative to the largest so far; what was summed before is scaled down to match.
  __device__ void soften(float (&s)[kKeys / 8][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = top_[half];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
      const float correction = exp2_near(top_[half] - top);
      top_[half] = top;
      total_[half] *= correction;
#pragma unroll
      for (int n = 0; n < head_dim / 8; ++n) {
        o_[n][2 * half] *= correction;
        o_[n][2 * half + 1] *= correction;
      }
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float weight = exp2_near(s[n][2 * half + i] - top);  // every query sees a key of the first tile
          s[n][2 * half + i] = weight;
          total_[half] += weight;
        }
      }
    }
  }

  __device__ void write() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = total_[half];
      total += __shfl_xor_sync(kAllLanes, total, 1);
      total += __shfl_xor_sync(kAllLanes, total, 2);
      const u32 row = row_of(static_cast<u32>(half));
      if (row >= share_.num_rows) continue;
      const float inverse = 1.0F / total;
#pragma unroll
      for (int n = 0; n < head_dim / 8; ++n) {
        const u32 d = 8 * static_cast<u32>(n) + 2 * (lane_id() % 4);
        write_attention(c_, p_, share_.first_row + row, share_.head, d, o_[n][2 * half] * inverse);
        write_attention(c_, p_, share_.first_row + row, share_.head, d + 1, o_[n][2 * half + 1] * inverse);
      }
    }
  }

  const AttendCall& c_;
  const AttendParams& p_;
  AttendShare share_;
  u32 num_keys_;
  u32 shared_;
  u32 q_[head_dim / 16][4];
  float o_[head_dim / 8][4] = {};
  float top_[2] = {kMasked, kMasked};
  float total_[2] = {0, 0};
};

/// 32 queries against 32 keys at a time in f32. Thread 16 r + t has rows 4 r to 4 r + 3, and of them scores of keys t and t + 16
/// and elements t + 16 i of the sums.
template <class T, int pieces>
__device__ inline void attend_rows(const AttendCall& c, const AttendParams& p, const AttendShare& share, u32 sub, float* shared) {
  constexpr u32 kTile = 32;
  const u32 stride = p.head_dim + 1;
  float* queries = shared;
  float* rows = queries + kTile * stride;  // keys, then values
  float* weights = rows + kTile * stride;  // [32 queries, 33]
  const CacheRows cache = CacheRows::create(p.cache, c.block_table, share.kv_head);
  const u32 r = threadIdx.x / 16 * 4;
  const u32 t = threadIdx.x % 16;
  const u32 count = smaller(kTile, share.num_rows - sub);
  const u32 num_keys = share.first_position + sub + count;

  for (u32 i = threadIdx.x; i < kTile * p.head_dim; i += blockDim.x) {
    const u32 row = i / p.head_dim;
    const u32 d = i - row * p.head_dim;
    const float* q = c.q + static_cast<u64>(share.first_row + sub + (row < count ? row : 0)) * p.ld_q +
                     static_cast<u64>(share.head) * p.q_head_stride;
    queries[row * stride + d] = q[d] * p.scale;
  }
  const auto load = [&](const void* from, u32 first) {
    __syncthreads();
    for (u32 i = threadIdx.x; i < kTile * p.head_dim; i += blockDim.x) {
      const u32 row = i / p.head_dim;
      const u32 d = i - row * p.head_dim;
      rows[row * stride + d] = first + row < num_keys ? CacheElement<T>::load(from, cache.offset(first + row) + d) : 0.0F;
    }
    __syncthreads();
  };

  float sums[4][pieces] = {};
  float top[4] = {kMasked, kMasked, kMasked, kMasked};
  float total[4] = {};
  for (u32 first = 0; first < num_keys; first += kTile) {
    load(c.key_cache, first);
    float s[4][2] = {};
    for (u32 d = 0; d < p.head_dim; ++d) {
      const float k0 = rows[t * stride + d];
      const float k1 = rows[(t + 16) * stride + d];
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const float q = queries[(r + i) * stride + d];
        s[i][0] += q * k0;
        s[i][1] += q * k1;
      }
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 position = share.first_position + sub + r + i;
      const bool seen0 = first + t <= position;
      const bool seen1 = first + t + 16 <= position;
      float new_top = fmaxf(seen0 ? s[i][0] : kMasked, seen1 ? s[i][1] : kMasked);
#pragma unroll
      for (u32 w = 8; w > 0; w /= 2) new_top = fmaxf(new_top, __shfl_xor_sync(kAllLanes, new_top, w));
      new_top = fmaxf(new_top, top[i]);
      const float correction = expf(top[i] - new_top);
      const float w0 = seen0 ? expf(s[i][0] - new_top) : 0.0F;
      const float w1 = seen1 ? expf(s[i][1] - new_top) : 0.0F;
      top[i] = new_top;
      total[i] = total[i] * correction + w0 + w1;
#pragma unroll
      for (int e = 0; e < pieces; ++e) sums[i][e] *= correction;
      weights[(r + i) * 33 + t] = w0;
      weights[(r + i) * 33 + t + 16] = w1;
    }
    load(c.value_cache, first);  // its barriers also make the weights seen
    for (u32 k = 0; k < kTile; ++k) {
      float w[4];
#pragma unroll
      for (u32 i = 0; i < 4; ++i) w[i] = weights[(r + i) * 33 + k];
#pragma unroll
      for (int e = 0; e < pieces; ++e) {
        const u32 d = t + 16 * static_cast<u32>(e);
        const float v = d < p.head_dim ? rows[k * stride + d] : 0.0F;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) sums[i][e] += w[i] * v;
      }
    }
  }
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
#pragma unroll
    for (u32 w = 8; w > 0; w /= 2) total[i] += __shfl_xor_sync(kAllLanes, total[i], w);
    if (r + i >= count) continue;
#pragma unroll
    for (int e = 0; e < pieces; ++e) {
      const u32 d = t + 16 * static_cast<u32>(e);
      if (d < p.head_dim) write_attention(c, p, share.first_row + sub + r + i, share.head, d, sums[i][e] / total[i]);
    }
  }
  __syncthreads();
}

template <class T>
__device__ inline void attend_general_tile(const AttendCall& c, const AttendParams& p, float* shared) {
  const AttendShare share = AttendShare::create(p, c.step);
  for (u32 sub = 0; sub < share.num_rows; sub += 32) {
    if (p.head_dim <= 64) {
      attend_rows<T, 4>(c, p, share, sub, shared);
    } else if (p.head_dim <= 128) {
      attend_rows<T, 8>(c, p, share, sub, shared);
    } else {
      attend_rows<T, 16>(c, p, share, sub, shared);
    }
  }
}

__device__ inline void attend_tile(const AttendCall& c, const AttendParams& p, float* shared) {
  wait_for_predecessor();
  if (p.head_dim > kMaxHeadDim) return;
  const bool aligned = (p.cache.block_stride | p.cache.token_stride | p.cache.head_stride) % 8 == 0 &&
                       (reinterpret_cast<u64>(c.key_cache) | reinterpret_cast<u64>(c.value_cache)) % 16 == 0;
  if (p.cache.dtype != kBf16) return attend_general_tile<float>(c, p, shared);
  if (!aligned || !has_fast_attention(p.head_dim)) return attend_general_tile<std::uint16_t>(c, p, shared);
  if (p.head_dim == 64) return AttendTiles<64>(c, p, shared).run();
  if (p.head_dim == 128) return AttendTiles<128>(c, p, shared).run();
  AttendTiles<256>(c, p, shared).run();
}

}  // namespace metrale::cuda::decoder
