// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule and the gated norm behind it: one token, a few in turn, or many by chunks for heads of 128 x 128; any other
// size by one block a head.
#pragma once

#include "decoder_delta_chunks.cuh"
#include "decoder_delta_scan.cuh"
#include "decoder_delta_step.cuh"

namespace metrale::cuda::decoder {

// ---- any size: one block a head, the state where it lies ----
__device__ inline float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  __syncthreads();
  if (lane_id() == 0) scratch[warp_id()] = x;
  __syncthreads();
  float sum = 0;
  for (u32 w = 0; w < blockDim.x / kWarp; ++w) sum += scratch[w];
  return sum;
}

__device__ inline void delta_any(const DeltaCall& c, const DeltaParams& p, float* shared) {
  const DeltaHead h = DeltaHead::create(c, p, blockIdx.x / kDeltaBlocks);
  float* queries = shared;
  float* keys = queries + p.key_dim;
  float* out = keys + p.key_dim;
  float* scratch = out + p.value_dim;  // [32]
  wait_for_predecessor();
  for (u32 t = 0; t < p.m; ++t) {
    const u64 row = static_cast<u64>(t) * p.ld_qkv;
    float qq = 0;
    float kk = 0;
    for (u32 i = threadIdx.x; i < p.key_dim; i += blockDim.x) {
      qq += h.query[row + i] * h.query[row + i];
      kk += h.key[row + i] * h.key[row + i];
    }
    const float q_scale = rsqrtf(block_sum(qq, scratch) + 1e-6F) * rsqrtf(static_cast<float>(p.key_dim));
    const float k_scale = rsqrtf(block_sum(kk, scratch) + 1e-6F);
    for (u32 i = threadIdx.x; i < p.key_dim; i += blockDim.x) {
      queries[i] = h.query[row + i] * q_scale;
      keys[i] = h.key[row + i] * k_scale;
    }
    __syncthreads();
    float decay = 0;
    float beta = 0;
    delta_gates(c, p, t, h.head, decay, beta);
    float squares = 0;
    for (u32 j = threadIdx.x; j < p.value_dim; j += blockDim.x) {
      float* column = h.state + j;
      float by_key = 0;
      for (u32 i = 0; i < p.key_dim; ++i) by_key += column[static_cast<u64>(i) * p.value_dim] * keys[i];
      const float change = (h.value[row + j] - by_key * decay) * beta;
      float o = 0;
      for (u32 i = 0; i < p.key_dim; ++i) {
        float& s = column[static_cast<u64>(i) * p.value_dim];
        s = s * decay + keys[i] * change;
        o += s * queries[i];
      }
      out[j] = o;
      squares += o * o;
    }
    const float scale = rsqrtf(block_sum(squares, scratch) / static_cast<float>(p.value_dim) + p.norm_eps);
    const float* gate = h.gate + static_cast<u64>(t) * p.ld_z;
    float* to = h.out + static_cast<u64>(t) * p.num_value_heads * p.value_dim;
    for (u32 j = threadIdx.x; j < p.value_dim; j += blockDim.x) to[j] = c.norm[j] * (out[j] * scale) * silu(gate[j]);
  }
}

/// A function of its own, so that a step of one token has registers enough.
__device__ __noinline__ void delta_by_chunks(const DeltaCall& c, const DeltaParams& p, DeltaShared& shared, u32 rank) {
  extern __shared__ __align__(16) float dynamic[];
  DeltaChunks(c, p, shared, *reinterpret_cast<DeltaChunk*>(dynamic), blockIdx.x / kDeltaBlocks).run(rank);
}

__device__ inline void delta_head(const DeltaCall& c, const DeltaParams& p, float* dynamic) {
  __shared__ __align__(16) DeltaShared shared;
  const u32 rank = METRALE_CLUSTERS ? cluster_rank() : blockIdx.x % kDeltaBlocks;
  const bool aligned = p.ld_qkv % 4 == 0 && (reinterpret_cast<u64>(c.qkv) | reinterpret_cast<u64>(c.out)) % 16 == 0;
  if (!has_fast_delta(p.key_dim, p.value_dim) || !aligned) {
    if (rank == 0) delta_any(c, p, dynamic);
    return;
  }
  if (!METRALE_CLUSTERS && rank != 0) return;
#if METRALE_CLUSTERS
  if (p.m == 1) {
    DeltaStep(c, p, shared, blockIdx.x / kDeltaBlocks).run(rank);
    return;
  }
#endif
  cluster_arrive_relaxed();
  if (blockDim.x == kChunkThreads) {
    const DeltaCall call = c;  // the address of `c` itself is given to nobody, so that it stays in registers
    delta_by_chunks(call, p, shared, rank);
    return;
  }
  DeltaColumns(c, p, shared, *reinterpret_cast<DeltaStaged*>(dynamic), blockIdx.x / kDeltaBlocks).run(rank);
}

}  // namespace metrale::cuda::decoder
