// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule over many tokens, in chunks of kChunkTokens. With S the state before a chunk, c_t the sum of the logarithms
// of its decays up to token t, and w_ts = exp(c_t - c_s), the changes d_t of the tokens solve
//   d_t + beta_t sum_{s<t} w_ts (k_t k_s) d_s = beta_t (v_t - exp(c_t) k_t S);
// what the tokens give, and the state after them, are
//   o_t = exp(c_t) q_t S + sum_{s<=t} w_ts (q_t k_s) d_s,    exp(c_end) S + sum_s w_(end,s) k_s d_s.
// Differences of the c are at most 0 where they are used, so nothing grows. Of the sequence only a triangle of kChunkTokens
// remains, which is solved in f32; the rest are products of small matrices, on tensor cores, each factor as the sum of two bf16
// numbers (the product of the two rests is left out: some 1e-5 of a term). The state itself stays in registers, in f32.
#pragma once

#include "decoder_delta_head.cuh"

namespace metrale::cuda::decoder {

inline constexpr u32 kChunkThreads = kDeltaChunkThreads;
inline constexpr u32 kChunkTokens = 32;
// Rows of matrices that tensor cores read are 16 bytes longer than they need be, so that they start in different banks.
inline constexpr u32 kChunkRow = kDeltaSize + 8;
inline constexpr u32 kChunkColumns = kDeltaColumns + 8;
inline constexpr u32 kSquareRow = kChunkTokens + 4;
static_assert(kDeltaSpan % kChunkTokens == 0 && kDeltaColumns == 32 && kChunkTokens == 32);

/// A matrix of bf16 numbers and what rounding left of each.
template <u32 rows, u32 stride>
struct SplitMatrix {
  std::uint16_t rounded[rows][stride];
  std::uint16_t rest[rows][stride];
  __device__ void set(u32 row, u32 column, float x) {
    const std::uint16_t bits = to_bf16(x);
    rounded[row][column] = bits;
    rest[row][column] = to_bf16(x - from_bf16(bits));
  }
  /// Elements from an even column on.
  __device__ void set(u32 row, u32 column, float x, float y) {
    const u32 bits = pack_bf16(x, y);
    *reinterpret_cast<u32*>(&rounded[row][column]) = bits;
    *reinterpret_cast<u32*>(&rest[row][column]) = pack_bf16(x - low_bf16(bits), y - high_bf16(bits));
  }
  /// Elements from a column on that four divides.
  __device__ void set(u32 row, u32 column, float4 x) {
    const uint2 bits = pack_quad(x);
    *reinterpret_cast<uint2*>(&rounded[row][column]) = bits;
    *reinterpret_cast<uint2*>(&rest[row][column]) = pack_rest(x, bits);
  }
};

struct DeltaChunk {
  SplitMatrix<2 * kChunkTokens, kChunkRow> rows;      // keys, then queries
  SplitMatrix<kDeltaSize, kChunkColumns> state;       // [key element, column]
  SplitMatrix<kChunkTokens, kChunkColumns> changes;   // [token, column]
  SplitMatrix<kChunkTokens, kChunkColumns> weighted;  // the same as the state takes them
  float sides[kChunkTokens][kSquareRow];              // [token, column]: values, then right sides
  float solve[kChunkTokens][kSquareRow];              // [s, t]: the triangle, transposed
  float mix[kChunkTokens][kSquareRow];                // [t, s]
  float logs[kChunkTokens];
  float betas[kChunkTokens];
};
static_assert(sizeof(DeltaChunk) <= kDeltaChunkBytes);

/// A first factor [16, 16] and a second one [16, 8], both split.
struct SplitA {
  u32 rounded[4];
  u32 rest[4];
};
struct SplitB {
  u32 rounded[2];
  u32 rest[2];
};
/// Four products with one first factor, in an order in which none waits for the one before.
__device__ __forceinline__ void multiply_add(float (&d)[4][4], const SplitA& a, const SplitB (&b)[4]) {
#pragma unroll
  for (u32 n = 0; n < 4; ++n)
    multiply_add(d[n], a.rounded[0], a.rounded[1], a.rounded[2], a.rounded[3], b[n].rounded[0], b[n].rounded[1]);
#pragma unroll
  for (u32 n = 0; n < 4; ++n) multiply_add(d[n], a.rest[0], a.rest[1], a.rest[2], a.rest[3], b[n].rounded[0], b[n].rounded[1]);
#pragma unroll
  for (u32 n = 0; n < 4; ++n)
    multiply_add(d[n], a.rounded[0], a.rounded[1], a.rounded[2], a.rounded[3], b[n].rest[0], b[n].rest[1]);
}

// Fragments by `ldmatrix`: lane l gives the address of row l % 8 of matrix l / 8.
/// Rows [row, 16) and columns [column, 16) of a matrix as a first factor.
template <u32 rows, u32 stride>
__device__ inline SplitA first_factor(const SplitMatrix<rows, stride>& m, u32 row, u32 column) {
  SplitA a;
  const u32 r = row + lane_id() % 16;
  const u32 c = column + lane_id() / 16 * 8;
  load_matrices(shared_address(&m.rounded[r][c]), a.rounded);
  load_matrices(shared_address(&m.rest[r][c]), a.rest);
  return a;
}
/// The transpose of rows [row, 16) and columns [column, 16) as a first factor.
template <u32 rows, u32 stride>
__device__ inline SplitA transposed_first_factor(const SplitMatrix<rows, stride>& m, u32 row, u32 column) {
  SplitA a;
  const u32 r = row + lane_id() / 16 * 8 + lane_id() % 8;
  const u32 c = column + lane_id() / 8 % 2 * 8;
  load_matrices_transposed(shared_address(&m.rounded[r][c]), a.rounded);
  load_matrices_transposed(shared_address(&m.rest[r][c]), a.rest);
  return a;
}
/// Factors 2 n and 2 n + 1 of four.
template <void (*load)(u32, u32 (&)[4]), u32 rows, u32 stride>
__device__ __forceinline__ void set_pair(const SplitMatrix<rows, stride>& m, u32 r, u32 c, u32 n, SplitB (&b)[4]) {
  u32 rounded[4];
  u32 rest[4];
  load(shared_address(&m.rounded[r][c]), rounded);
  load(shared_address(&m.rest[r][c]), rest);
#pragma unroll
  for (u32 i = 0; i < 2; ++i) b[2 * n + i] = {{rounded[2 * i], rounded[2 * i + 1]}, {rest[2 * i], rest[2 * i + 1]}};
}
/// Rows [row, 16) of a matrix of 32 columns as four second factors, side by side.
template <u32 rows, u32 stride>
__device__ inline void second_factors(const SplitMatrix<rows, stride>& m, u32 row, SplitB (&b)[4]) {
#pragma unroll
  for (u32 n = 0; n < 2; ++n) {
    const u32 r = row + lane_id() % 16;
    const u32 c = 16 * n + lane_id() / 16 * 8;
    set_pair<load_matrices_transposed>(m, r, c, n, b);
  }
}
/// The transpose of the first 32 rows of columns [column, 16) as four second factors: one for each 8 rows.
template <u32 rows, u32 stride>
__device__ inline void transposed_second_factors(const SplitMatrix<rows, stride>& m, u32 column, SplitB (&b)[4]) {
#pragma unroll
  for (u32 n = 0; n < 2; ++n) {
    const u32 r = 16 * n + lane_id() / 16 * 8 + lane_id() % 8;
    const u32 c = column + lane_id() / 8 % 2 * 8;
    set_pair<load_matrices>(m, r, c, n, b);
  }
}

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
      delta_norm(c_, p_, head_, shared_, rank, first, count, span, nullptr);
    }
  }

 private:
  // Results of tensor cores: lane 4 g + t has columns 2 t and 2 t + 1 of row g, then of row g + 8.
  __device__ static u32 group() { return lane_id() / 4; }
  __device__ static u32 pair() { return lane_id() % 4 * 2; }

  // ---- the state: warp w has rows [16 w, 16), four times 8 columns ----
  __device__ float2* state_at(u32 n, u32 half) const {
    const u32 row = 16 * warp_id() + group() + 8 * half;
    return reinterpret_cast<float2*>(head_.state + row * kDeltaSize + part_ * kDeltaColumns + 8 * n + pair());
  }
  __device__ void load_state() {
#pragma unroll
    for (u32 n = 0; n < 4; ++n) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const float2 x = *state_at(n, half);
        state_[n][2 * half] = x.x;
        state_[n][2 * half + 1] = x.y;
      }
    }
  }
  __device__ void store_state() const {
#pragma unroll
    for (u32 n = 0; n < 4; ++n) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) *state_at(n, half) = {state_[n][2 * half], state_[n][2 * half + 1]};
    }
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
    a_ = 0;
    b_ = 0;
    gated_ = warp_id() == 0 && first + lane_id() < p_.m;
    if (gated_) {
      const u64 at = static_cast<u64>(first + lane_id()) * p_.ld_ab + head_.head;
      a_ = c_.a[at];
      b_ = c_.b[at];
    }
  }
  /// Unit-length queries and keys, and the state, to shared memory. A token that there is not is all zeros and changes nothing.
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
      x_.rows.set(t, at, float4{k_[i].x * k_scale, k_[i].y * k_scale, k_[i].z * k_scale, k_[i].w * k_scale});
      x_.rows.set(kChunkTokens + t, at, float4{q_[i].x * q_scale, q_[i].y * q_scale, q_[i].z * q_scale, q_[i].w * q_scale});
    }
    *reinterpret_cast<float4*>(&x_.sides[t][4 * piece]) = v_;
#pragma unroll
    for (u32 n = 0; n < 4; ++n) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half)
        x_.state.set(16 * warp_id() + group() + 8 * half, 8 * n + pair(), state_[n][2 * half], state_[n][2 * half + 1]);
    }
    if (warp_id() == 0) {
      float sum = gated_ ? c_.decay[head_.head] * softplus(a_ + c_.dt_bias[head_.head]) : 0.0F;
#pragma unroll
      for (u32 w = 1; w < kWarp; w *= 2) {
        const float before = __shfl_up_sync(kAllLanes, sum, w);
        if (lane_id() >= w) sum += before;
      }
      x_.logs[lane_id()] = sum;
      x_.betas[lane_id()] = gated_ ? sigmoid(b_) : 0.0F;
    }
  }

  /// Tokens [first, first + count), which are `place` and on in the span.
  __device__ void chunk(u32 first, u32 place, u32 count, bool add_squares) {
    stage();
    __syncthreads();
    if (first + kChunkTokens < p_.m) load(first + kChunkTokens);
    float o[4][4] = {};
    multiply(o);
    __syncthreads();
    if (warp_id() < 4) solve();
    __syncthreads();
    if (warp_id() >= 6) finish(first, place, count, add_squares, o);
    update();
    __syncthreads();
  }

  /// Warp w: rows [16 (w % 4), 16) of keys and queries, with all keys (w < 4) or with the state. Leaves the triangle, the mix and
  /// the right sides; `o` of the last two warps is the state's part of their tokens' results.
  __device__ __forceinline__ void multiply(float (&d)[4][4]) {
    const u32 first_row = warp_id() % 4 * 16;
    const bool with_keys = warp_id() < 4;
#pragma unroll 2
    for (u32 k = 0; k < kDeltaSize; k += 16) {
      const SplitA a = first_factor(x_.rows, first_row, k);
      SplitB b[4];
      if (with_keys) {
        transposed_second_factors(x_.rows, k, b);
      } else {
        second_factors(x_.state, k, b);
      }
      multiply_add(d, a, b);
    }
    const bool is_key = first_row < kChunkTokens;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 t = first_row % kChunkTokens + group() + 8 * half;
      const float log = x_.logs[t];
      const float beta = x_.betas[t];
      const float decay = expf(log);
#pragma unroll
      for (u32 n = 0; n < 4; ++n) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
          const u32 s = 8 * n + pair() + i;
          float& x = d[n][2 * half + i];
          if (with_keys) {
            const float weight = s <= t ? expf(log - x_.logs[s]) : 0.0F;
            if (is_key) {
              x_.solve[s][t] = s < t ? beta * weight * x : 0.0F;
            } else {
              x_.mix[t][s] = weight * x;
            }
          } else if (is_key) {
            x_.sides[t][s] = beta * (x_.sides[t][s] - decay * x);
          } else {
            x *= decay;
          }
        }
      }
    }
  }

  /// By the first four warps: lane 4 g + j of warp w has tokens 4 i + j of column 8 w + g. Each token's change in turn goes to the
  /// other lanes of its column.
  __device__ __forceinline__ void solve() {
    const u32 column = 8 * warp_id() + group();
    const u32 j = lane_id() % 4;
    float d[kChunkTokens / 4];
#pragma unroll
    for (u32 i = 0; i < kChunkTokens / 4; ++i) d[i] = x_.sides[4 * i + j][column];
#pragma unroll
    for (u32 s = 0; s + 1 < kChunkTokens; ++s) {
      const float change = __shfl_sync(kAllLanes, d[s / 4], lane_id() / 4 * 4 + s % 4);
#pragma unroll
      for (u32 i = s / 4; i < kChunkTokens / 4; ++i) d[i] = fmaf(-x_.solve[s][4 * i + j], change, d[i]);  // by 0 up to token s
    }
    const float end = x_.logs[kChunkTokens - 1];
#pragma unroll
    for (u32 i = 0; i < kChunkTokens / 4; ++i) {
      x_.changes.set(4 * i + j, column, d[i]);
      x_.weighted.set(4 * i + j, column, d[i] * expf(end - x_.logs[4 * i + j]));
    }
  }

  /// By the last two warps, 16 tokens each: results before the norm, and their squares.
  __device__ __forceinline__ void finish(u32 first, u32 place, u32 count, bool add_squares, float (&o)[4][4]) {
    const u32 row = (warp_id() - 6) * 16;
#pragma unroll
    for (u32 k = 0; k < kChunkTokens; k += 16) {
      SplitA a;
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const float2 m = *reinterpret_cast<const float2*>(&x_.mix[row + group() + i % 2 * 8][k + pair() + i / 2 * 8]);
        a.rounded[i] = pack_bf16(m.x, m.y);
        a.rest[i] = pack_bf16(m.x - low_bf16(a.rounded[i]), m.y - high_bf16(a.rounded[i]));
      }
      SplitB b[4];
      second_factors(x_.changes, k, b);
      multiply_add(o, a, b);
    }
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 t = row + group() + 8 * half;
      float squares = 0;
#pragma unroll
      for (u32 n = 0; n < 4; ++n) squares += o[n][2 * half] * o[n][2 * half] + o[n][2 * half + 1] * o[n][2 * half + 1];
      squares += __shfl_xor_sync(kAllLanes, squares, 1);
      squares += __shfl_xor_sync(kAllLanes, squares, 2);
      if (t >= count) continue;
      if (pair() == 0) shared_.squares[place + t] = squares + (add_squares ? shared_.squares[place + t] : 0.0F);
      float* to = head_.out + static_cast<u64>(first + t) * p_.num_value_heads * kDeltaSize + part_ * kDeltaColumns + pair();
#pragma unroll
      for (u32 n = 0; n < 4; ++n) *reinterpret_cast<float2*>(to + 8 * n) = {o[n][2 * half], o[n][2 * half + 1]};
    }
  }

  __device__ __forceinline__ void update() {
    const float decay = expf(x_.logs[kChunkTokens - 1]);
#pragma unroll
    for (u32 n = 0; n < 4; ++n) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) state_[n][i] *= decay;
    }
#pragma unroll
    for (u32 t = 0; t < kChunkTokens; t += 16) {
      const SplitA a = transposed_first_factor(x_.rows, t, 16 * warp_id());
      SplitB b[4];
      second_factors(x_.weighted, t, b);
      multiply_add(state_, a, b);
    }
  }

  const DeltaCall& c_;
  const DeltaParams& p_;
  DeltaShared& shared_;
  DeltaChunk& x_;
  DeltaHead head_;
  u32 part_ = 0;
  float state_[4][4];
  float4 q_[4];
  float4 k_[4];
  float4 v_;
  float a_;
  float b_;
  bool gated_;
};

}  // namespace metrale::cuda::decoder
