// SPDX-License-Identifier: Apache-2.0
//
// Keys and values of any cache against up to eight query heads, in f32 throughout, for every head size up to kMaxHeadDim.
#pragma once

#include "decoder_one_share.cuh"

namespace metrale::cuda::decoder {

/// Sums of each of `count` (a power of two up to 32) values over the lanes; lane l returns that of values[l % count]. `values` is
/// used up.
template <int count, int width = count>
__device__ __forceinline__ float sums_over_lanes(float (&values)[count]) {
  if constexpr (width == 1) {
    float sum = values[0];
#pragma unroll
    for (int w = count; w < 32; w *= 2) sum += __shfl_xor_sync(kAllLanes, sum, w);
    return sum;
  } else {
    constexpr int kHalf = width / 2;
    const bool upper = (lane_id() & static_cast<u32>(kHalf)) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float send = upper ? values[i] : values[i + kHalf];
      const float keep = upper ? values[i + kHalf] : values[i];
      values[i] = keep + __shfl_xor_sync(kAllLanes, send, kHalf);
    }
    return sums_over_lanes<count, kHalf>(values);
  }
}

inline constexpr u32 kGeneralTile = 4;  // keys

/// One warp's way through its tiles; lane l holds elements l + 32 i of a head.
template <class T>
struct GeneralKeys {
  const OneShare& share;
  CacheRows rows;
  const void* key_cache;
  const void* value_cache;
  float* shared;
  const OneLayout& layout;
  u32 head_dim;

  static constexpr u32 kHeads = 4;  // at a time

  /// Brings the first rows nearer that are there already.
  __device__ void start() const {
    for (u32 tile = share.first_tile(), i = 0; tile < share.tiles && i < 4; tile += share.tile_step(), ++i) {
      const u32 key = tile * kGeneralTile + lane_id() / 8;
      if (key >= share.position) continue;
      const u64 offset = rows.offset(key);
      for (u32 d = lane_id() % 8 * 32; d < head_dim; d += 256) {
        prefetch(static_cast<const T*>(key_cache) + offset + d);
        prefetch(static_cast<const T*>(value_cache) + offset + d);
      }
    }
  }

  /// After the gather. Leaves sums and softmax of this warp in shared memory; the caller synchronises.
  __device__ void run() const {
    if (share.first_tile() >= share.tiles) return;
    for (u32 head = 0; head < share.heads; head += kHeads) {
      if (head_dim <= 128) {
        pass<4, 4>(head);
      } else {
        pass<8, 2>(head);
      }
    }
  }

 private:
  /// Row `token` of a cache, elements of this lane. The step's own, which may still be on its way, from `own`.
  template <int pieces>
  __device__ void load(const void* cache, const float* own, u32 token, float (&x)[pieces]) const {
    const u64 offset = token < share.position ? rows.offset(token) : 0;
#pragma unroll
    for (int i = 0; i < pieces; ++i) {
      const u32 d = lane_id() + 32 * static_cast<u32>(i);
      x[i] = 0;
      if (d >= head_dim || token > share.position) continue;
      x[i] = token < share.position ? CacheElement<T>::load(cache, offset + d) : own[d];
    }
  }

  /// Heads [first, first + kHeads), `keys` keys at a time; lane l has the softmax of head l % kHeads.
  template <int pieces, int keys>
  __device__ void pass(u32 first) const {
    float q[kHeads][pieces];
    float sums[kHeads][pieces] = {};
#pragma unroll
    for (u32 h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < pieces; ++i) {
        const u32 d = lane_id() + 32 * static_cast<u32>(i);
        q[h][i] = d < head_dim ? shared[layout.queries + (first + h) * layout.width + d] : 0.0F;
      }
    }
    float top = kMasked;
    float total = 0;
    for (u32 tile = share.first_tile(); tile < share.tiles; tile += share.tile_step()) {
      for (u32 key = tile * kGeneralTile; key < (tile + 1) * kGeneralTile && key <= share.position; key += keys) {
        float products[keys * kHeads];
        float x[keys][pieces];
        float y[keys][pieces];
#pragma unroll
        for (int k = 0; k < keys; ++k) load(key_cache, shared + layout.key, key + static_cast<u32>(k), x[k]);
#pragma unroll
        for (int k = 0; k < keys; ++k) load(value_cache, shared + layout.value, key + static_cast<u32>(k), y[k]);
#pragma unroll
        for (int k = 0; k < keys; ++k) {
#pragma unroll
          for (u32 h = 0; h < kHeads; ++h) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < pieces; ++i) sum += q[h][i] * x[k][i];
            products[k * static_cast<int>(kHeads) + static_cast<int>(h)] = sum;
          }
        }
        const float score = sums_over_lanes(products);
        const bool valid = key + lane_id() / kHeads % keys <= share.position;
        float new_top = valid ? score : kMasked;
#pragma unroll
        for (u32 w = kHeads; w < keys * kHeads; w *= 2) new_top = fmaxf(new_top, __shfl_xor_sync(kAllLanes, new_top, w));
        new_top = fmaxf(new_top, top);
        const float correction = exp2f(top - new_top);
        const float weight = valid ? exp2f(score - new_top) : 0.0F;
        top = new_top;
        total = total * correction + weight;
#pragma unroll
        for (u32 h = 0; h < kHeads; ++h) {
          const float scale = __shfl_sync(kAllLanes, correction, h);
#pragma unroll
          for (int i = 0; i < pieces; ++i) sums[h][i] *= scale;
#pragma unroll
          for (int k = 0; k < keys; ++k) {
            const float w = __shfl_sync(kAllLanes, weight, static_cast<u32>(k) * kHeads + h);
#pragma unroll
            for (int i = 0; i < pieces; ++i) sums[h][i] += w * y[k][i];
          }
        }
      }
    }
#pragma unroll
    for (u32 w = kHeads; w < keys * kHeads; w *= 2) total += __shfl_xor_sync(kAllLanes, total, w);
#pragma unroll
    for (u32 h = 0; h < kHeads; ++h) {
      float* to = warp_sums(shared, layout, warp_id(), first + h);
#pragma unroll
      for (int i = 0; i < pieces; ++i) {
        const u32 d = lane_id() + 32 * static_cast<u32>(i);
        if (d < layout.width) to[d] = sums[h][i];
      }
    }
    if (lane_id() < kHeads) {
      warp_softmax(shared, layout, first + lane_id())[warp_id()] = top;
      warp_softmax(shared, layout, first + lane_id())[kOneWarps + warp_id()] = total;
    }
  }
};

}  // namespace metrale::cuda::decoder
