// SPDX-License-Identifier: Apache-2.0
//
// Attention of one token, as a cluster of blocks for each cache head (and set of its query heads): every warp takes keys here and
// there over the whole context, and what the warps found is joined in shared memory, over the cluster, and, where several clusters
// share a head, through scratch by the block that comes last. decoder_one_fast.cuh and decoder_one_general.cuh go through the keys.
#pragma once

#include "decoder_one_fast.cuh"
#include "decoder_one_general.cuh"
#include "decoder_rotary.cuh"

namespace metrale::cuda::decoder {

struct OneCall {
  const float* q;
  const float* k;  ///< From here to `rotary`: null where q is rotated and the cache complete.
  const float* v;
  const float* q_norm;
  const float* k_norm;
  const float* rotary;
  const StepHeader* step;
  const std::int32_t* block_table;
  void* key_cache;
  void* value_cache;
  float* out;
  float* scratch;  ///< Or null.
};

inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr u32 kRanks = METRALE_CLUSTERS ? kClusterBlocks : 1;

/// The scaled queries of the block's heads, and in the block that takes the last keys the step's own key and value, as the cache
/// holds or will hold them. A warp for each. `factor` scales the queries.
template <class T, bool fused>
__device__ __forceinline__ void gather_heads(const OneCall& c, const RotateStoreParams& p, const OneShare& share,
                                             const OneLayout& l, float factor, float* shared) {
  const u32 width = l.value - l.key;
  const Rotation rotation{c.rotary, p.pairs, p.interleaved};
  const u32 tasks = share.heads + (share.has_last_tile() ? 2 : 0);
  for (u32 i = threadIdx.x; i < (kHeadSet - share.heads) * width; i += blockDim.x) shared[l.queries + share.heads * width + i] = 0;
  for (u32 task = warp_id(); task < tasks; task += blockDim.x / kWarp) {
    if (task < share.heads) {
      float* to = shared + l.queries + task * width;
      const float* q = c.q + static_cast<u64>(share.first_head + task) * p.q_head_stride;
      if constexpr (fused) norm_and_rotate([&](u32 d) { return q[d]; }, c.q_norm, rotation, p.head_dim, p.norm_eps, to);
      for (u32 d = lane_id(); d < width; d += kWarp) {
        float x = 0;
        if (d < p.head_dim) x = fused ? to[d] : q[d];
        to[d] = x * factor;
      }
      continue;
    }
    const bool is_key = task == share.heads;
    float* to = shared + (is_key ? l.key : l.value);
    void* cache = is_key ? c.key_cache : c.value_cache;
    const u64 offset = CacheRows::create(p.cache, c.block_table, share.kv_head).offset(share.position);
    if constexpr (fused) {
      const float* from = (is_key ? c.k : c.v) + static_cast<u64>(share.kv_head) * p.head_dim;
      if (is_key) norm_and_rotate([&](u32 d) { return from[d]; }, c.k_norm, rotation, p.head_dim, p.norm_eps, to);
      for (u32 d = lane_id(); d < width; d += kWarp) {
        float x = 0;
        if (d < p.head_dim) {
          x = CacheElement<T>::rounded(is_key ? to[d] : from[d]);
          // Every set of query heads finds the same; the first one keeps it.
          if (share.first_head == share.kv_head * (p.num_heads / p.num_kv_heads)) CacheElement<T>::store(cache, offset + d, x);
        }
        to[d] = x;
      }
    } else {
      for (u32 d = lane_id(); d < width; d += kWarp) to[d] = d < p.head_dim ? CacheElement<T>::load(cache, offset + d) : 0.0F;
    }
  }
  __syncthreads();
}

/// Joins what the warps, then the blocks of the cluster left, in slices: block r of the cluster ends with slice r of
/// [heads, head_dim].
__device__ __forceinline__ void join_and_write(const OneCall& c, const RotateStoreParams& p, u32 gated, const OneShare& share,
                                               const OneLayout& l, float* shared) {
  const u32 width = l.value - l.key;
  const u32 warps = blockDim.x / kWarp;
  const u32 elements = share.heads * p.head_dim;
  const u32 slice = divide_up(elements, kRanks);
  __syncthreads();

  // The largest score of this block's warps and the sum of their weights.
  const auto block_softmax = [&](u32 head, float& top, float& total) {
    top = kMasked;
    total = 0;
    for (u32 w = 0; w < warps; ++w) top = fmaxf(top, shared[l.warps + (w * kHeadSet + head) * 2]);
    for (u32 w = 0; w < warps; ++w) {
      const float* at = shared + l.warps + (w * kHeadSet + head) * 2;
      total += at[1] * expf(at[0] - top);
    }
  };
  cluster_wait();  // of the arrival at the start: the others run
  for (u32 e = threadIdx.x; e < elements; e += blockDim.x) {
    const u32 head = e / p.head_dim;
    const u32 d = e - head * p.head_dim;
    float top = kMasked;
    for (u32 w = 0; w < warps; ++w) top = fmaxf(top, shared[l.warps + (w * kHeadSet + head) * 2]);
    float sum = 0;
    for (u32 w = 0; w < warps; ++w) {
      sum += shared[l.ring + w * (ring_bytes(p.head_dim) / 4) + head * width + d] *
             expf(shared[l.warps + (w * kHeadSet + head) * 2] - top);
    }
    const u32 rank = e / slice;
    store_at(shared + l.inbox + share.rank * width + (e - rank * slice), rank, sum);
  }
  for (u32 i = threadIdx.x; i < share.heads * kRanks; i += blockDim.x) {
    const u32 head = i / kRanks;
    float top = 0;
    float total = 0;
    block_softmax(head, top, total);
    float* at = shared + l.softmax + (share.rank * kHeadSet + head) * 2;
    store_at(at, i % kRanks, top);
    store_at(at + 1, i % kRanks, total);
  }
  cluster_arrive();
  cluster_wait();

  const u32 first = share.rank * slice;
  const u32 count = first < elements ? smaller(slice, elements - first) : 0;
  const auto finish = [&](u32 e, float sum, float total) {
    const u32 head = e / p.head_dim;
    const u32 d = e - head * p.head_dim;
    float x = sum / total;
    if (gated) x *= sigmoid(c.q[static_cast<u64>(share.first_head + head) * p.q_head_stride + p.head_dim + d]);
    c.out[static_cast<u64>(share.first_head + head) * p.head_dim + d] = x;
  };
  // Of what `records` hold, `stride` apart: sums at `e`, tops and totals of the heads at `softmax`.
  const auto join = [&](u32 num, u32 head, auto sum_of, auto top_of, auto total_of, float& top, float& sum, float& total) {
    top = kMasked;
    sum = 0;
    total = 0;
    for (u32 r = 0; r < num; ++r) top = fmaxf(top, top_of(r, head));
    for (u32 r = 0; r < num; ++r) {
      const float weight = expf(top_of(r, head) - top);
      sum += sum_of(r) * weight;
      total += total_of(r, head) * weight;
    }
  };
  const auto block_top = [&](u32 r, u32 head) { return shared[l.softmax + (r * kHeadSet + head) * 2]; };
  const auto block_total = [&](u32 r, u32 head) { return shared[l.softmax + (r * kHeadSet + head) * 2 + 1]; };
  const auto join_blocks = [&](u32 e, float& top, float& sum, float& total) {
    join(
        kRanks, (first + e) / p.head_dim, [&](u32 r) { return shared[l.inbox + r * width + e]; }, block_top, block_total, top, sum,
        total);
  };
  if (share.active == 1) {
    for (u32 e = threadIdx.x; e < count; e += blockDim.x) {
      float top = 0;
      float sum = 0;
      float total = 0;
      join_blocks(e, top, sum, total);
      finish(first + e, sum, total);
    }
    return;
  }

  // Several clusters: the last block of those with this slice joins them.
  __shared__ u32 is_last;
  const u32 record = width + 2 * kHeadSet;
  const u32 place = share.unit * kClusterBlocks + share.rank;
  u32* counter = reinterpret_cast<u32*>(c.scratch) + place;
  float* records = c.scratch + static_cast<u64>(share.units) * kClusterBlocks + static_cast<u64>(place) * share.clusters * record;
  float* own = records + static_cast<u64>(share.cluster) * record;
  for (u32 e = threadIdx.x; e < count; e += blockDim.x) {
    float top = 0;
    float sum = 0;
    float total = 0;
    join_blocks(e, top, sum, total);
    own[e] = sum;
  }
  for (u32 head = threadIdx.x; head < share.heads; head += blockDim.x) {
    float top = 0;
    float sum = 0;
    float total = 0;
    join(kRanks, head, [](u32) { return 0.0F; }, block_top, block_total, top, sum, total);
    own[width + 2 * head] = top;
    own[width + 2 * head + 1] = total;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicInc(counter, share.active - 1) == share.active - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (u32 e = threadIdx.x; e < count; e += blockDim.x) {
    float top = 0;
    float sum = 0;
    float total = 0;
    const auto cluster_top = [&](u32 r, u32 head) { return __ldcg(records + static_cast<u64>(r) * record + width + 2 * head); };
    const auto cluster_total = [&](u32 r, u32 head) {
      return __ldcg(records + static_cast<u64>(r) * record + width + 2 * head + 1);
    };
    join(
        share.active, (first + e) / p.head_dim, [&](u32 r) { return __ldcg(records + static_cast<u64>(r) * record + e); },
        cluster_top, cluster_total, top, sum, total);
    finish(first + e, sum, total);
  }
}

template <int head_dim, bool fused>
__device__ __forceinline__ void attend_fast(const OneCall& c, const RotateAttendParams& p, const OneShare& share,
                                            const OneLayout& l, float* shared) {
  FastKeys<head_dim> keys(share, p.rotate.cache, c.block_table, c.key_cache, c.value_cache, shared, l);
  keys.start();
  wait_for_predecessor();
  gather_heads<std::uint16_t, fused>(c, p.rotate, share, l, p.scale * kLog2E, shared);
  keys.run();
}

template <class T, bool fused>
__device__ __forceinline__ void attend_general(const OneCall& c, const RotateAttendParams& p, const OneShare& share,
                                               const OneLayout& l, float* shared) {
  wait_for_predecessor();
  gather_heads<T, fused>(c, p.rotate, share, l, p.scale, shared);
  const CacheRows rows = CacheRows::create(p.rotate.cache, c.block_table, share.kv_head);
  GeneralKeys<T>{share, rows, c.key_cache, c.value_cache, shared, l, p.rotate.head_dim}.run();
}

/// One step's attention. `fused`: normed, rotated and stored here; otherwise q and the cache are complete.
template <bool fused>
__device__ __forceinline__ void attend_token(const OneCall& c, const RotateAttendParams& p, float* shared) {
  OneShare share;
  if (p.rotate.head_dim > kMaxHeadDim || !share.find(p.rotate, c.step, c.scratch != nullptr)) return;
  cluster_arrive_relaxed();
  const CacheLayout& cache = p.rotate.cache;
  const bool aligned = (cache.block_stride | cache.token_stride | cache.head_stride) % 8 == 0 &&
                       (reinterpret_cast<u64>(c.key_cache) | reinterpret_cast<u64>(c.value_cache)) % 16 == 0;
  const OneLayout l = one_layout(p.rotate.head_dim, blockDim.x / kWarp);
  if (cache.dtype != kBf16) {
    attend_general<float, fused>(c, p, share, l, shared);
  } else if (!aligned || !has_fast_attention(p.rotate.head_dim)) {
    attend_general<std::uint16_t, fused>(c, p, share, l, shared);
  } else if (p.rotate.head_dim == 64) {
    attend_fast<64, fused>(c, p, share, l, shared);
  } else if (p.rotate.head_dim == 128) {
    attend_fast<128, fused>(c, p, share, l, shared);
  } else {
    attend_fast<256, fused>(c, p, share, l, shared);
  }
  join_and_write(c, p.rotate, p.gated, share, l, shared);
}

}  // namespace metrale::cuda::decoder
