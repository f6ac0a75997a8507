// SPDX-License-Identifier: Apache-2.0
//
// Rows of logits, the largest and the loss of a target, by a cluster of blocks each; and weights widened to f32.
#pragma once

#include "decoder_common.cuh"

namespace metrale::cuda::decoder {

// ---- widen ----
__device__ inline float load_weight(const void* from, u32 dtype, u64 i) {
  if (dtype == kF32) return static_cast<const float*>(from)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(from)[i];
  return dtype == kF16 ? __half2float(__ushort_as_half(bits)) : from_bf16(bits);
}

__device__ inline void widen_elements(const void* from, float* to, const WidenParams& p) {
  wait_for_predecessor();
  const u64 n = static_cast<u64>(p.rows) * p.cols;
  for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += static_cast<u64>(gridDim.x) * blockDim.x) {
    float x = load_weight(from, p.dtype, i);
    if (p.op == WidenOp::plus_one) x += 1.0F;
    if (p.op == WidenOp::negative_exp) x = -expf(x);
    to[p.transpose ? i % p.cols * p.rows + i / p.cols : i] = x;
  }
}

// ---- the largest logit ----
/// The best of what was seen. Its order makes the lowest index win among equals.
struct Best {
  float value = -INFINITY;
  u32 index = 0xffffffffU;
  u32 refused = 0;  ///< A NaN or +inf was seen.

  __device__ void see(float x, u32 i) {
    refused |= !(x < INFINITY);
    if (x > value) {  // indices rise within a thread
      value = x;
      index = i;
    }
  }
  __device__ void join(const Best& other) {
    refused |= other.refused;
    if (other.value > value || (other.value == value && other.index < index)) {
      value = other.value;
      index = other.index;
    }
  }
  __device__ Best from_lane(u32 mask) const {
    Best b;
    b.value = __shfl_xor_sync(kAllLanes, value, mask);
    b.index = __shfl_xor_sync(kAllLanes, index, mask);
    b.refused = __shfl_xor_sync(kAllLanes, refused, mask);
    return b;
  }
  __device__ std::int32_t id() const { return refused || !(value > -INFINITY) ? -1 : static_cast<std::int32_t>(index); }
};

inline constexpr u32 kRowWarps = 16;  // of the largest block

struct RowShared {
  float inbox[kClusterBlocks][3];  // Best of each block, bit for bit
  float sums[kClusterBlocks];
  float warps[kRowWarps][3];
};

/// This block's place among those of its row.
struct RowShare {
  u32 row;
  u32 rank;
  u32 blocks;
};
/// False for a block that has nothing to do.
__device__ inline bool row_share(RowShare& share) {
  share.row = blockIdx.x / kClusterBlocks;
#if METRALE_CLUSTERS
  share.rank = cluster_rank();
  share.blocks = kClusterBlocks;
  return true;
#else
  share.rank = 0;
  share.blocks = 1;
  return blockIdx.x % kClusterBlocks == 0;
#endif
}

/// Calls visit(x, index) for this block's part of a row, indices rising for each thread.
template <class Visit>
__device__ inline void each_logit(const float* row, u32 n, const RowShare& share, Visit visit) {
  const bool vectors = reinterpret_cast<u64>(row) % 16 == 0;
  const u32 whole = vectors ? n / 4 : 0;
  const u32 step = share.blocks * blockDim.x;
  const float4* quads = reinterpret_cast<const float4*>(row);
  constexpr u32 kAhead = 4;
  u32 i = share.rank * blockDim.x + threadIdx.x;
  for (; i + (kAhead - 1) * step < whole; i += kAhead * step) {
    float4 x[kAhead];
#pragma unroll
    for (u32 j = 0; j < kAhead; ++j) x[j] = quads[i + j * step];
#pragma unroll
    for (u32 j = 0; j < kAhead; ++j) {
      const u32 at = 4 * (i + j * step);
      visit(x[j].x, at);
      visit(x[j].y, at + 1);
      visit(x[j].z, at + 2);
      visit(x[j].w, at + 3);
    }
  }
  for (; i < whole; i += step) {
    const float4 x = quads[i];
    visit(x.x, 4 * i);
    visit(x.y, 4 * i + 1);
    visit(x.z, 4 * i + 2);
    visit(x.w, 4 * i + 3);
  }
  for (u32 j = 4 * whole + share.rank * blockDim.x + threadIdx.x; j < n; j += step) visit(row[j], j);
}

/// The best of the cluster's threads, in every thread of the blocks that `everywhere` names (all, or the first).
__device__ inline Best best_of_cluster(Best best, RowShared& shared, const RowShare& share, bool everywhere) {
  for (u32 w = kWarp / 2; w > 0; w /= 2) best.join(best.from_lane(w));
  if (lane_id() == 0) {
    shared.warps[warp_id()][0] = best.value;
    shared.warps[warp_id()][1] = __uint_as_float(best.index);
    shared.warps[warp_id()][2] = __uint_as_float(best.refused);
  }
  __syncthreads();
  if (warp_id() == 0) {
    best = {};
    if (lane_id() < blockDim.x / kWarp) {
      best.value = shared.warps[lane_id()][0];
      best.index = __float_as_uint(shared.warps[lane_id()][1]);
      best.refused = __float_as_uint(shared.warps[lane_id()][2]);
    }
    for (u32 w = kWarp / 2; w > 0; w /= 2) best.join(best.from_lane(w));
  }
  cluster_wait();  // of the arrival at the start: the others run
  if (threadIdx.x < (everywhere ? share.blocks : 1)) {
    store_at(&shared.inbox[share.rank][0], threadIdx.x, best.value);
    store_at(&shared.inbox[share.rank][1], threadIdx.x, __uint_as_float(best.index));
    store_at(&shared.inbox[share.rank][2], threadIdx.x, __uint_as_float(best.refused));
  }
  cluster_arrive();
  cluster_wait();
  best = {};
  if (everywhere || share.rank == 0) {
    for (u32 r = 0; r < share.blocks; ++r) {
      Best other;
      other.value = shared.inbox[r][0];
      other.index = __float_as_uint(shared.inbox[r][1]);
      other.refused = __float_as_uint(shared.inbox[r][2]);
      best.join(other);
    }
  }
  return best;
}

__device__ inline void argmax_row(const float* logits, std::int32_t* ids, const RowsParams& p) {
  __shared__ RowShared shared;
  RowShare share;
  if (!row_share(share)) return;
  cluster_arrive_relaxed();
  wait_for_predecessor();
  Best best;
  each_logit(logits + static_cast<u64>(share.row) * p.ld, p.n, share, [&](float x, u32 i) { best.see(x, i); });
  best = best_of_cluster(best, shared, share, false);
  if (share.rank == 0 && threadIdx.x == 0) ids[share.row] = best.id();
}

/// A target outside the row gives a loss of NaN.
__device__ inline void score_row(const float* logits, const std::int32_t* targets, RowScore* scores, const RowsParams& p) {
  __shared__ RowShared shared;
  RowShare share;
  if (!row_share(share)) return;
  cluster_arrive_relaxed();
  wait_for_predecessor();
  const float* row = logits + static_cast<u64>(share.row) * p.ld;
  Best best;
  each_logit(row, p.n, share, [&](float x, u32 i) { best.see(x, i); });
  best = best_of_cluster(best, shared, share, true);
  float sum = 0;
  if (best.id() >= 0) each_logit(row, p.n, share, [&](float x, u32) { sum += expf(x - best.value); });
  sum = warp_sum(sum);
  if (lane_id() == 0) shared.warps[warp_id()][0] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    double total = 0;
    for (u32 w = 0; w < blockDim.x / kWarp; ++w) total += static_cast<double>(shared.warps[w][0]);
    store_at(&shared.sums[share.rank], 0, static_cast<float>(total));
  }
  cluster_arrive();
  cluster_wait();
  if (share.rank != 0 || threadIdx.x != 0) return;
  double total = 0;
  for (u32 r = 0; r < share.blocks; ++r) total += static_cast<double>(shared.sums[r]);
  const std::int32_t target = targets[share.row];
  RowScore score;
  score.best = best.id();
  score.loss = NAN;
  if (score.best >= 0 && target >= 0 && static_cast<u32>(target) < p.n)
    score.loss = static_cast<float>(log(total) + static_cast<double>(best.value) - static_cast<double>(row[target]));
  scores[share.row] = score;
}

}  // namespace metrale::cuda::decoder
