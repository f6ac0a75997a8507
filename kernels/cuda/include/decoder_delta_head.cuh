// SPDX-License-Identifier: Apache-2.0
//
// What the ways through the gated delta rule share: a value head, a token's gates, and the gated norm behind it. Columns of a
// head's state do not touch each other, so kDeltaBlocks blocks of a cluster share a head and only the norm needs all of them.
#pragma once

#include "decoder_common.cuh"

namespace metrale::cuda::decoder {

struct DeltaCall {
  const float* qkv;
  const float* z;
  const float* a;
  const float* b;
  const float* decay;
  const float* dt_bias;
  const float* norm;
  float* state;
  const StepHeader* step;
  float* out;
};

/// A value head and where its rows start.
struct DeltaHead {
  u32 head;
  const float* query;  ///< Of the first token; so are the others.
  const float* key;
  const float* value;
  const float* gate;
  float* out;
  float* state;  ///< [key_dim, value_dim]

  __device__ static DeltaHead create(const DeltaCall& c, const DeltaParams& p, u32 head) {
    const u32 group = p.num_value_heads / p.num_key_heads;
    const u32 key_head = p.tiled ? head % p.num_key_heads : head / group;
    const u64 key_width = static_cast<u64>(p.num_key_heads) * p.key_dim;
    const u64 at = static_cast<u64>(head) * p.value_dim;
    DeltaHead h;
    h.head = head;
    h.query = c.qkv + static_cast<u64>(key_head) * p.key_dim;
    h.key = h.query + key_width;
    h.value = c.qkv + 2 * key_width + at;
    h.gate = c.z + at;
    h.out = c.out + at;
    h.state = c.state + (static_cast<u64>(static_cast<u32>(c.step->slot)) * p.num_value_heads + head) * p.key_dim * p.value_dim;
    return h;
  }
};

/// The logarithm of a token's decay, and its rate of change.
__device__ inline void delta_log_gates(const DeltaCall& c, const DeltaParams& p, u32 token, u32 head, float& log_decay,
                                       float& beta) {
  const u64 at = static_cast<u64>(token) * p.ld_ab + head;
  log_decay = c.decay[head] * softplus(c.a[at] + c.dt_bias[head]);
  beta = sigmoid(c.b[at]);
}
__device__ inline void delta_gates(const DeltaCall& c, const DeltaParams& p, u32 token, u32 head, float& decay, float& beta) {
  delta_log_gates(c, p, token, head, decay, beta);
  decay = expf(decay);
}

// ---- heads of 128 x 128 ----
inline constexpr u32 kDeltaSize = 128;
inline constexpr u32 kDeltaTokens = 16;    // staged at once
inline constexpr u32 kDeltaSpan = 256;     // between two norms
inline constexpr u32 kDeltaThreads = 128;  // of a scan
inline constexpr u32 kDeltaColumns = kDeltaSize / kDeltaBlocks;
inline constexpr u32 kDeltaRanks = METRALE_CLUSTERS ? kDeltaBlocks : 1;

/// Tokens of a scan.
struct DeltaStaged {
  float keys[kDeltaTokens][kDeltaSize];
  float queries[kDeltaTokens][kDeltaSize];
  float values[kDeltaTokens][kDeltaColumns];
  float out[kDeltaTokens][kDeltaColumns];
  float decays[kDeltaTokens];
  float betas[kDeltaTokens];
  float products[kDeltaTokens];  // of query and key
};
static_assert(sizeof(DeltaStaged) <= kDeltaScanBytes);

struct DeltaShared {
  float squares[kDeltaSpan];                 // sums over this block's columns
  float inbox[2][kDeltaBlocks][kDeltaSpan];  // the same from all blocks; spans alternate
  // A step of one token: sums of squares of all the cluster's warps, and the barrier that counts them.
  float2 warp_squares[kDeltaBlocks * kDeltaThreads / kWarp];
  u64 barrier;
};

/// Norm and gate of this block's columns of tokens [first, first + count), of which `squares` has been filled; spans are counted
/// from 0. `staged`: the tokens, where they still are in shared memory, or null.
__device__ __forceinline__ void delta_norm(const DeltaCall& c, const DeltaParams& p, const DeltaHead& head, DeltaShared& shared,
                                           u32 rank, u32 first, u32 count, u32 span, const DeltaStaged* staged) {
  const u32 columns = kDeltaSize / kDeltaRanks;
  const u32 column = rank * kDeltaColumns + threadIdx.x % columns;
  const float weight = c.norm[column];
  float(&inbox)[kDeltaBlocks][kDeltaSpan] = shared.inbox[span % 2];
  __syncthreads();
  if (span == 0) cluster_wait();  // of the arrival at the start: the others run
  for (u32 i = threadIdx.x; i < count * kDeltaRanks; i += blockDim.x)
    store_at(&inbox[rank][i / kDeltaRanks], i % kDeltaRanks, shared.squares[i / kDeltaRanks]);
  cluster_arrive();
  cluster_wait();
  constexpr u32 kAtOnce = 8;
  const u32 rows = blockDim.x / columns;
  float* out = head.out + static_cast<u64>(first) * p.num_value_heads * kDeltaSize + column;
  const float* gates = head.gate + static_cast<u64>(first) * p.ld_z + column;
  for (u32 t = threadIdx.x / columns; t < count; t += kAtOnce * rows) {
    float gate[kAtOnce];
    float o[kAtOnce];
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const u32 at = t + i * rows;
      if (at >= count) break;
      gate[i] = gates[static_cast<u64>(at) * p.ld_z];
      o[i] = staged ? staged->out[at][threadIdx.x % columns] : out[static_cast<u64>(at) * p.num_value_heads * kDeltaSize];
    }
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const u32 at = t + i * rows;
      if (at >= count) break;
      float sum = 0;
#pragma unroll
      for (u32 r = 0; r < kDeltaRanks; ++r) sum += inbox[r][at];
      out[static_cast<u64>(at) * p.num_value_heads * kDeltaSize] =
          weight * (o[i] * rsqrtf(sum / kDeltaSize + p.norm_eps)) * silu(gate[i]);
    }
  }
}

}  // namespace metrale::cuda::decoder
