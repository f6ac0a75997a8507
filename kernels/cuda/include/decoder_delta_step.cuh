// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule of one token. The state is in registers before the wait; after it no warp waits for another, but for the sum
// of squares that the norm needs, which the blocks of the cluster send each other.
#pragma once

#include "decoder_delta_head.cuh"

namespace metrale::cuda::decoder {

/// Lane 8 r + j of warp w has, of column 8 w + j, rows 16 i + 4 r to 16 i + 4 r + 3, so that a row's lanes read whole sectors.
class DeltaStep {
 public:
  __device__ DeltaStep(const DeltaCall& call, const DeltaParams& params, DeltaShared& shared, u32 head)
      : c_(call), p_(params), shared_(shared), head_(DeltaHead::create(call, params, head)) {}

  __device__ __forceinline__ void run(u32 rank) {
    const u32 quarter = lane_id() / 8;
    const u32 column = rank * kDeltaColumns + warp_id() * 8 + lane_id() % 8;
    float* state = head_.state + 4 * quarter * kDeltaSize + column;
    float s[8][4];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
#pragma unroll
      for (u32 j = 0; j < 4; ++j) s[i][j] = state[(16 * i + j) * kDeltaSize];
    }
    const float weight = c_.norm[column];
    const float rate = c_.decay[head_.head];
    const float bias = c_.dt_bias[head_.head];
    const float* a_at = c_.a + head_.head;
    const float* b_at = c_.b + head_.head;
    const float* value_at = head_.value + column;
    const float* gate_at = head_.gate + column;
    float* out_at = head_.out + column;
    const float4* key_at = reinterpret_cast<const float4*>(head_.key) + quarter;
    const float4* query_at = reinterpret_cast<const float4*>(head_.query) + quarter;
    const float eps = p_.norm_eps;
    const u32 barrier = shared_address(&shared_.barrier);
    if (threadIdx.x == 0) init_barrier(barrier);
    // The initialisation is an instruction of the whole warp, which racecheck takes for another lane's.
    __syncwarp();
    if (threadIdx.x == 0) expect_bytes(barrier, kDeltaBlocks * kWarps * 8);
    cluster_arrive();
    cluster_wait();
    // Not to be worked out after the wait.
    asm volatile("" : "+l"(a_at), "+l"(b_at), "+l"(value_at), "+l"(gate_at), "+l"(out_at), "+l"(key_at), "+l"(query_at));
    wait_for_predecessor();

    float4 k[8];
    float4 q[8];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) k[i] = key_at[4 * i];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) q[i] = query_at[4 * i];
    const float a = *a_at;
    const float b = *b_at;
    const float value = *value_at;
    const float gate = *gate_at;

    // Both sums over the state from one look at it, and the lengths with them.
    float qq = 0;
    float kk = 0;
    float qk = 0;
    float by_key = 0;
    float by_query = 0;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
      kk += k[i].x * k[i].x + k[i].y * k[i].y + k[i].z * k[i].z + k[i].w * k[i].w;
      qq += q[i].x * q[i].x + q[i].y * q[i].y + q[i].z * q[i].z + q[i].w * q[i].w;
      qk += q[i].x * k[i].x + q[i].y * k[i].y + q[i].z * k[i].z + q[i].w * k[i].w;
      by_key += s[i][0] * k[i].x + s[i][1] * k[i].y + s[i][2] * k[i].z + s[i][3] * k[i].w;
      by_query += s[i][0] * q[i].x + s[i][1] * q[i].y + s[i][2] * q[i].z + s[i][3] * q[i].w;
    }
#pragma unroll
    for (u32 w = 8; w < kWarp; w *= 2) {
      kk += __shfl_xor_sync(kAllLanes, kk, w);
      qq += __shfl_xor_sync(kAllLanes, qq, w);
      qk += __shfl_xor_sync(kAllLanes, qk, w);
      by_key += __shfl_xor_sync(kAllLanes, by_key, w);
      by_query += __shfl_xor_sync(kAllLanes, by_query, w);
    }
    const float decay = expf(rate * softplus(a + bias));
    const float q_scale = rsqrtf(qq + 1e-6F) * 0.08838834764831845F;  // 1 / sqrt(128)
    const float k_scale = rsqrtf(kk + 1e-6F);
    // The new state is e S + k d with d = beta (v - e k S), and q times it e (q S) + (q k) d.
    const float change = (value - by_key * k_scale * decay) * sigmoid(b);
    const float o = by_query * q_scale * decay + change * (qk * q_scale * k_scale);

    float squares = o * o;
#pragma unroll
    for (u32 w = 1; w < 8; w *= 2) squares += __shfl_xor_sync(kAllLanes, squares, w);
    if (lane_id() < kDeltaBlocks)
      send_to(shared_address(&shared_.warp_squares[rank * kWarps + warp_id()]), barrier, lane_id(), float2{squares, 0});

    const float step = k_scale * change;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
      state[16 * i * kDeltaSize] = fmaf(k[i].x, step, s[i][0] * decay);
      state[(16 * i + 1) * kDeltaSize] = fmaf(k[i].y, step, s[i][1] * decay);
      state[(16 * i + 2) * kDeltaSize] = fmaf(k[i].z, step, s[i][2] * decay);
      state[(16 * i + 3) * kDeltaSize] = fmaf(k[i].w, step, s[i][3] * decay);
    }
    wait_barrier(barrier, 0);
    if (quarter != 0) return;
    float sum = 0;
#pragma unroll
    for (u32 i = 0; i < kDeltaBlocks * kWarps; ++i) sum += shared_.warp_squares[i].x;
    *out_at = weight * (o * rsqrtf(sum / kDeltaSize + eps)) * silu(gate);
  }

 private:
  static constexpr u32 kWarps = kDeltaThreads / kWarp;

  const DeltaCall& c_;
  const DeltaParams& p_;
  DeltaShared& shared_;
  DeltaHead head_;
};

}  // namespace metrale::cuda::decoder
