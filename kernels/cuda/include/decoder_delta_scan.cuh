// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule token by token, for steps of a few tokens: the state stays in registers over the tokens of a step.
#pragma once

#include "decoder_delta_head.cuh"

namespace metrale::cuda::decoder {

/// Lane 8 r + j of warp w has, of column 8 w + j, rows 16 i + 4 r to 16 i + 4 r + 3, so that a row's lanes read whole sectors and
/// keys and queries come 16 bytes at a time without bank conflicts.
class DeltaColumns {
 public:
  __device__ DeltaColumns(const DeltaCall& call, const DeltaParams& params, DeltaShared& shared, DeltaStaged& staged, u32 head)
      : c_(call), p_(params), shared_(shared), staged_(staged), head_(DeltaHead::create(call, params, head)) {}

  __device__ void run(u32 rank) {
    load_state(rank);
    wait_for_predecessor();
    bool loaded = true;
    for (u32 first = 0, span = 0; first < p_.m; first += kDeltaSpan, ++span) {
      const u32 count = smaller(kDeltaSpan, p_.m - first);
      // Before sm_90 one block does the parts of all.
      for (u32 part = rank; part < kDeltaBlocks; part += kDeltaRanks) {
        if (!loaded) load_state(part);
        loaded = kDeltaRanks == kDeltaBlocks;
        for (u32 t = 0; t < count; t += kDeltaTokens) tile(part, first + t, t, smaller(kDeltaTokens, count - t), part != rank);
        if (!loaded || first + count == p_.m) store_state(part);
      }
      delta_norm(c_, p_, head_, shared_, rank, first, count, span, stays_staged() ? &staged_ : nullptr);
    }
  }

 private:
  __device__ u32 column() const { return warp_id() * 8 + lane_id() % 8; }
  __device__ u32 row(int i) const { return 16 * (static_cast<u32>(i) / 4) + 4 * (lane_id() / 8) + static_cast<u32>(i) % 4; }
  __device__ float* state_at(u32 part, int i) const { return head_.state + row(i) * kDeltaSize + part * kDeltaColumns + column(); }
  __device__ void load_state(u32 part) {
#pragma unroll
    for (int i = 0; i < 32; ++i) state_[i] = *state_at(part, i);
  }
  __device__ void store_state(u32 part) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) *state_at(part, i) = state_[i];
  }

  /// Tokens [first, first + count), which are `place` and on in the span.
  __device__ void tile(u32 part, u32 first, u32 place, u32 count, bool add_squares) {
    stage(part, first, count);
    __syncthreads();
    scan(count);
    __syncthreads();
    const u32 t = threadIdx.x / 8;
    const u32 piece = threadIdx.x % 8;
    float sum = 0;
    if (t < count) {
      const float4 o = reinterpret_cast<const float4*>(staged_.out[t])[piece];
      sum = o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w;
      float* to = head_.out + static_cast<u64>(first + t) * p_.num_value_heads * kDeltaSize + part * kDeltaColumns;
      if (!stays_staged()) reinterpret_cast<float4*>(to)[piece] = o;
    }
#pragma unroll
    for (u32 w = 4; w > 0; w /= 2) sum += __shfl_xor_sync(kAllLanes, sum, w);
    if (t < count && piece == 0) shared_.squares[place + t] = sum + (add_squares ? shared_.squares[place + t] : 0.0F);
  }
  /// A step of few tokens is normed from shared memory.
  __device__ bool stays_staged() const { return kDeltaRanks == kDeltaBlocks && p_.m <= kDeltaTokens; }

  /// Unit-length queries and keys, a warp for each token.
  __device__ void stage(u32 part, u32 first, u32 count) {
    for (u32 t = warp_id(); t < count; t += kDeltaThreads / kWarp) {
      const u64 row = static_cast<u64>(first + t) * p_.ld_qkv;
      float4 q = reinterpret_cast<const float4*>(head_.query + row)[lane_id()];
      float4 k = reinterpret_cast<const float4*>(head_.key + row)[lane_id()];
      const float v = head_.value[row + part * kDeltaColumns + lane_id()];
      float decay = 0;
      float beta = 0;
      delta_gates(c_, p_, first + t, head_.head, decay, beta);
      float qq = q.x * q.x + q.y * q.y + q.z * q.z + q.w * q.w;
      float kk = k.x * k.x + k.y * k.y + k.z * k.z + k.w * k.w;
      float qk = q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w;
#pragma unroll
      for (u32 w = kWarp / 2; w > 0; w /= 2) {
        qq += __shfl_xor_sync(kAllLanes, qq, w);
        kk += __shfl_xor_sync(kAllLanes, kk, w);
        qk += __shfl_xor_sync(kAllLanes, qk, w);
      }
      const float q_scale = rsqrtf(qq + 1e-6F) * 0.08838834764831845F;  // 1 / sqrt(128)
      const float k_scale = rsqrtf(kk + 1e-6F);
      q = {q.x * q_scale, q.y * q_scale, q.z * q_scale, q.w * q_scale};
      k = {k.x * k_scale, k.y * k_scale, k.z * k_scale, k.w * k_scale};
      reinterpret_cast<float4*>(staged_.queries[t])[lane_id()] = q;
      reinterpret_cast<float4*>(staged_.keys[t])[lane_id()] = k;
      staged_.values[t][lane_id()] = v;
      if (lane_id() == 0) {
        staged_.decays[t] = decay;
        staged_.betas[t] = beta;
        staged_.products[t] = qk * q_scale * k_scale;
      }
    }
  }

  /// With the decay e, the state before S and the change d = beta (v - e k S): the new state is e S + k d, and q times it
  /// e (q S) + (q k) d, so both sums come from one look at S.
  __device__ void scan(u32 count) {
    const u32 quarter = lane_id() / 8;
    for (u32 t = 0; t < count; ++t) {
      const float4* keys = reinterpret_cast<const float4*>(staged_.keys[t]) + quarter;
      const float4* queries = reinterpret_cast<const float4*>(staged_.queries[t]) + quarter;
      float4 k[8];
      float by_key[2] = {};
      float by_query[2] = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        k[i] = keys[4 * i];
        const float4 q = queries[4 * i];
        float& sk = by_key[i % 2];
        float& sq = by_query[i % 2];
        sk = fmaf(state_[4 * i], k[i].x, sk);
        sq = fmaf(state_[4 * i], q.x, sq);
        sk = fmaf(state_[4 * i + 1], k[i].y, sk);
        sq = fmaf(state_[4 * i + 1], q.y, sq);
        sk = fmaf(state_[4 * i + 2], k[i].z, sk);
        sq = fmaf(state_[4 * i + 2], q.z, sq);
        sk = fmaf(state_[4 * i + 3], k[i].w, sk);
        sq = fmaf(state_[4 * i + 3], q.w, sq);
      }
      float sum_key = by_key[0] + by_key[1];
      float sum_query = by_query[0] + by_query[1];
      sum_key += __shfl_xor_sync(kAllLanes, sum_key, 8);
      sum_query += __shfl_xor_sync(kAllLanes, sum_query, 8);
      sum_key += __shfl_xor_sync(kAllLanes, sum_key, 16);
      sum_query += __shfl_xor_sync(kAllLanes, sum_query, 16);
      const float decay = staged_.decays[t];
      const float change = (staged_.values[t][column()] - sum_key * decay) * staged_.betas[t];
      if (quarter == 0) staged_.out[t][column()] = sum_query * decay + change * staged_.products[t];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        state_[4 * i] = fmaf(k[i].x, change, state_[4 * i] * decay);
        state_[4 * i + 1] = fmaf(k[i].y, change, state_[4 * i + 1] * decay);
        state_[4 * i + 2] = fmaf(k[i].z, change, state_[4 * i + 2] * decay);
        state_[4 * i + 3] = fmaf(k[i].w, change, state_[4 * i + 3] * decay);
      }
    }
  }

  const DeltaCall& c_;
  const DeltaParams& p_;
  DeltaShared& shared_;
  DeltaStaged& staged_;
  DeltaHead head_;
  float state_[32];
};

}  // namespace metrale::cuda::decoder
