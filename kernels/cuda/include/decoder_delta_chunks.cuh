// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule over many tokens, in chunks of kChunkTokens, f32 throughout. With S the state before a chunk, c_t the sum of the
// logarithms of its decays up to token t, and w_ts = exp(c_t - c_s), the changes d_t of the tokens solve
//   d_t + beta_t sum_{s<t} w_ts (k_t k_s) d_s = beta_t (v_t - exp(c_t) k_t S),
// what they give is o_t = exp(c_t) q_t S + sum_{s<=t} w_ts (q_t k_s) d_s, and the state becomes exp(c_end) S + sum_s w_(end,s) k_s d_s.
// Differences of the c are at most 0 where they are used, so nothing grows. Against the scan that takes a token after another, the
// sequential part is a triangle of kChunkTokens that one warp solves; the rest are products of small matrices.
#pragma once

#include "decoder_delta_head.cuh"

namespace metrale::cuda::decoder {

inline constexpr u32 kChunkThreads = kDeltaChunkThreads;
inline constexpr u32 kChunkTokens = 32;
inline constexpr u32 kChunkRow = kDeltaSize + 4;     // 16 bytes more than a row: rows start in different banks
inline constexpr u32 kSquareRow = kChunkTokens + 4;  // likewise
static_assert(kDeltaSpan % kChunkTokens == 0 && kDeltaColumns == 32);

struct DeltaChunk {
  float keys[kChunkTokens][kChunkRow];
  float queries[kChunkTokens][kChunkRow];
  float state[kDeltaSize][kDeltaColumns];
  float changes[kChunkTokens][kSquareRow];  // [token, column]: values, then right sides, then changes
  float solve[kChunkTokens][kSquareRow];  // [s, t]: the triangle, transposed; then changes as the state takes them, [token, column]
  float mix[kChunkTokens][kSquareRow];    // [t, s]
  float logs[kChunkTokens];
  float betas[kChunkTokens];
};
static_assert(sizeof(DeltaChunk) <= kDeltaChunkBytes);

class DeltaChunks {
 public:
  __device__ DeltaChunks(const DeltaCall& call, const DeltaParams& params, DeltaShared& shared, DeltaChunk& chunk, u32 head)
      : c_(call), p_(params), shared_(shared), x_(chunk), head_(DeltaHead::create(call, params, head)) {}

  __device__ void run(u32 rank) {
    part_ = rank;
    load_state();
    wait_for_predecessor();
    bool loaded = true;
    for (u32 first = 0, span = 0; first < p_.m; first += kDeltaSpan, ++span) {
      const u32 count = smaller(kDeltaSpan, p_.m - first);
      // Before sm_90 one block does the parts of all.
      for (part_ = rank; part_ < kDeltaBlocks; part_ += kDeltaRanks) {
        if (!loaded) load_state();
        loaded = kDeltaRanks == kDeltaBlocks;
        if (!loaded || first == 0) load(first);
        for (u32 t = 0; t < count; t += kChunkTokens) chunk(first + t, t, smaller(kChunkTokens, count - t), part_ != rank);
        if (!loaded || first + count == p_.m) store_state();
      }
      delta_norm(c_, p_, head_, shared_, rank, first, count, span, false);
    }
  }

 private:
  // ---- the state: thread 8 r + c has rows 4 r to 4 r + 3 of columns 4 c to 4 c + 3 ----
  __device__ float4* state_at(u32 i) const {
    return reinterpret_cast<float4*>(head_.state + (threadIdx.x / 8 * 4 + i) * kDeltaSize + part_ * kDeltaColumns) +
           threadIdx.x % 8;
  }
  __device__ void load_state() {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) state_[i] = *state_at(i);
  }
  __device__ void store_state() const {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) *state_at(i) = state_[i];
  }

  // ---- a chunk's inputs: eight threads for each token ----
  /// On their way to registers, while the chunk before is worked on.
  __device__ void load(u32 first) {
    const u32 t = threadIdx.x / 8;
    const u32 piece = threadIdx.x % 8;
    const bool real = first + t < p_.m;
    const u64 row = static_cast<u64>(first + t) * p_.ld_qkv;
    const float4 zero{0, 0, 0, 0};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      q_[i] = real ? reinterpret_cast<const float4*>(head_.query + row)[piece + 8 * i] : zero;
      k_[i] = real ? reinterpret_cast<const float4*>(head_.key + row)[piece + 8 * i] : zero;
    }
    v_ = real ? reinterpret_cast<const float4*>(head_.value + row + part_ * kDeltaColumns)[piece] : zero;
    log_ = 0;
    beta_ = 0;
    if (warp_id() == 0 && first + lane_id() < p_.m) delta_log_gates(c_, p_, first + lane_id(), head_.head, log_, beta_);
  }
  /// Unit-length queries and keys to shared memory. A token that there is not is all zeros and changes nothing.
  __device__ void stage() {
    const u32 t = threadIdx.x / 8;
    const u32 piece = threadIdx.x % 8;
    float qq = 0;
    float kk = 0;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      qq += q_[i].x * q_[i].x + q_[i].y * q_[i].y + q_[i].z * q_[i].z + q_[i].w * q_[i].w;
      kk += k_[i].x * k_[i].x + k_[i].y * k_[i].y + k_[i].z * k_[i].z + k_[i].w * k_[i].w;
    }
#pragma unroll
    for (u32 w = 1; w < 8; w *= 2) {
      qq += __shfl_xor_sync(kAllLanes, qq, w);
      kk += __shfl_xor_sync(kAllLanes, kk, w);
    }
    const float q_scale = rsqrtf(qq + 1e-6F) * 0.08838834764831845F;  // 1 / sqrt(128)
    const float k_scale = rsqrtf(kk + 1e-6F);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 at = 4 * (piece + 8 * i);
      quad(&x_.queries[t][at]) = {q_[i].x * q_scale, q_[i].y * q_scale, q_[i].z * q_scale, q_[i].w * q_scale};
      quad(&x_.keys[t][at]) = {k_[i].x * k_scale, k_[i].y * k_scale, k_[i].z * k_scale, k_[i].w * k_scale};
    }
    quad(&x_.changes[t][4 * piece]) = v_;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) quad(&x_.state[threadIdx.x / 8 * 4 + i][4 * piece]) = state_[i];
    if (warp_id() == 0) {
      float sum = log_;
#pragma unroll
      for (u32 w = 1; w < kWarp; w *= 2) {
        const float before = __shfl_up_sync(kAllLanes, sum, w);
        if (lane_id() >= w) sum += before;
      }
      x_.logs[lane_id()] = sum;
      x_.betas[lane_id()] = beta_;
    }
  }

  /// Tokens [first, first + count), which are `place` and on in the span.
  __device__ void chunk(u32 first, u32 place, u32 count, bool add_squares) {
    stage();
    __syncthreads();
    if (first + kChunkTokens < p_.m) load(first + kChunkTokens);
    float o[2][2];
    multiply(o);
    __syncthreads();
    if (warp_id() == 0) solve();
    __syncthreads();
    finish(first, place, count, add_squares, o);
    update();
    __syncthreads();
  }

  static __device__ float4& quad(float* p) { return *reinterpret_cast<float4*>(p); }
  static __device__ void add(float& sum, const float4& a, const float4& b) {
    sum = fmaf(a.x, b.x, sum);
    sum = fmaf(a.y, b.y, sum);
    sum = fmaf(a.z, b.z, sum);
    sum = fmaf(a.w, b.w, sum);
  }

  /// Thread 16 y + x: products of keys and queries 2 y and 2 y + 1 with keys x and x + 16, and with columns 2 x and 2 x + 1 of the state.
  /// Leaves the triangle, the mix and the right sides; `o` is the state's part of the results.
  __device__ __forceinline__ void multiply(float (&o)[2][2]) {
    const u32 t0 = threadIdx.x / 16 * 2;
    const u32 x = threadIdx.x % 16;
    float kk[2][2] = {};
    float qk[2][2] = {};
    float ks[2][2] = {};
    float qs[2][2] = {};
#pragma unroll 2
    for (u32 i = 0; i < kDeltaSize; i += 4) {
      float4 k[2];
      float4 q[2];
      float4 other[2];
      float4 column[2];
#pragma unroll
      for (u32 j = 0; j < 2; ++j) {
        k[j] = quad(&x_.keys[t0 + j][i]);
        q[j] = quad(&x_.queries[t0 + j][i]);
        other[j] = quad(&x_.keys[x + 16 * j][i]);
      }
      const float2 s0 = *reinterpret_cast<const float2*>(&x_.state[i][2 * x]);
      const float2 s1 = *reinterpret_cast<const float2*>(&x_.state[i + 1][2 * x]);
      const float2 s2 = *reinterpret_cast<const float2*>(&x_.state[i + 2][2 * x]);
      const float2 s3 = *reinterpret_cast<const float2*>(&x_.state[i + 3][2 * x]);
      column[0] = {s0.x, s1.x, s2.x, s3.x};
      column[1] = {s0.y, s1.y, s2.y, s3.y};
#pragma unroll
      for (u32 a = 0; a < 2; ++a) {
#pragma unroll
        for (u32 b = 0; b < 2; ++b) {
          add(kk[a][b], k[a], other[b]);
          add(qk[a][b], q[a], other[b]);
          add(ks[a][b], k[a], column[b]);
          add(qs[a][b], q[a], column[b]);
        }
      }
    }
#pragma unroll
    for (u32 a = 0; a < 2; ++a) {
      const u32 t = t0 + a;
      const float log = x_.logs[t];
      const float beta = x_.betas[t];
#pragma unroll
      for (u32 b = 0; b < 2; ++b) {
        const u32 s = x + 16 * b;
        const float weight = s <= t ? expf(log - x_.logs[s]) : 0.0F;
        x_.mix[t][s] = weight * qk[a][b];
        x_.solve[s][t] = s < t ? beta * weight * kk[a][b] : 0.0F;
        float& change = x_.changes[t][2 * x + b];
        change = beta * (change - expf(log) * ks[a][b]);
        o[a][b] = expf(log) * qs[a][b];
      }
    }
  }

  /// By one warp, a column in each lane.
  __device__ __forceinline__ void solve() {
    float d[kChunkTokens];
#pragma unroll
    for (u32 t = 0; t < kChunkTokens; ++t) d[t] = x_.changes[t][lane_id()];
#pragma unroll
    for (u32 s = 0; s + 1 < kChunkTokens; ++s) {
#pragma unroll
      for (u32 t = s / 4 * 4; t < kChunkTokens; t += 4) {
        const float4 a = quad(&x_.solve[s][t]);  // 0 where t <= s
        d[t] = fmaf(-a.x, d[s], d[t]);
        d[t + 1] = fmaf(-a.y, d[s], d[t + 1]);
        d[t + 2] = fmaf(-a.z, d[s], d[t + 2]);
        d[t + 3] = fmaf(-a.w, d[s], d[t + 3]);
      }
    }
    __syncwarp();
    const float end = x_.logs[kChunkTokens - 1];
#pragma unroll
    for (u32 t = 0; t < kChunkTokens; ++t) {
      x_.changes[t][lane_id()] = d[t];
      x_.solve[t][lane_id()] = d[t] * expf(end - x_.logs[t]);
    }
  }

  /// Results before the norm, and their squares.
  __device__ __forceinline__ void finish(u32 first, u32 place, u32 count, bool add_squares, float (&o)[2][2]) {
    const u32 t0 = threadIdx.x / 16 * 2;
    const u32 x = threadIdx.x % 16;
#pragma unroll 2
    for (u32 s = 0; s < kChunkTokens; s += 4) {
      const float4 m0 = quad(&x_.mix[t0][s]);
      const float4 m1 = quad(&x_.mix[t0 + 1][s]);
      float4 column[2];
      const float2 d0 = *reinterpret_cast<const float2*>(&x_.changes[s][2 * x]);
      const float2 d1 = *reinterpret_cast<const float2*>(&x_.changes[s + 1][2 * x]);
      const float2 d2 = *reinterpret_cast<const float2*>(&x_.changes[s + 2][2 * x]);
      const float2 d3 = *reinterpret_cast<const float2*>(&x_.changes[s + 3][2 * x]);
      column[0] = {d0.x, d1.x, d2.x, d3.x};
      column[1] = {d0.y, d1.y, d2.y, d3.y};
#pragma unroll
      for (u32 b = 0; b < 2; ++b) {
        add(o[0][b], m0, column[b]);
        add(o[1][b], m1, column[b]);
      }
    }
#pragma unroll
    for (u32 a = 0; a < 2; ++a) {
      const u32 t = t0 + a;
      float squares = o[a][0] * o[a][0] + o[a][1] * o[a][1];
#pragma unroll
      for (u32 w = 1; w < 16; w *= 2) squares += __shfl_xor_sync(kAllLanes, squares, w);
      if (t >= count) continue;
      if (x == 0) shared_.squares[place + t] = squares + (add_squares ? shared_.squares[place + t] : 0.0F);
      float* to = head_.out + static_cast<u64>(first + t) * p_.num_value_heads * kDeltaSize + part_ * kDeltaColumns + 2 * x;
      *reinterpret_cast<float2*>(to) = {o[a][0], o[a][1]};
    }
  }

  __device__ __forceinline__ void update() {
    const u32 row = threadIdx.x / 8 * 4;
    const u32 column = threadIdx.x % 8 * 4;
    const float decay = expf(x_.logs[kChunkTokens - 1]);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) state_[i] = {state_[i].x * decay, state_[i].y * decay, state_[i].z * decay, state_[i].w * decay};
#pragma unroll 4
    for (u32 s = 0; s < kChunkTokens; ++s) {
      const float4 k = quad(&x_.keys[s][row]);
      const float4 d = quad(&x_.solve[s][column]);
      const float ks[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        state_[i].x = fmaf(ks[i], d.x, state_[i].x);
        state_[i].y = fmaf(ks[i], d.y, state_[i].y);
        state_[i].z = fmaf(ks[i], d.z, state_[i].z);
        state_[i].w = fmaf(ks[i], d.w, state_[i].w);
      }
    }
  }

  const DeltaCall& c_;
  const DeltaParams& p_;
  DeltaShared& shared_;
  DeltaChunk& x_;
  DeltaHead head_;
  u32 part_ = 0;
  float4 state_[4];
  float4 q_[4];
  float4 k_[4];
  float4 v_;
  float log_;
  float beta_;
};

}  // namespace metrale::cuda::decoder
