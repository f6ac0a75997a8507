// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule and the gated norm behind it. Columns of a head's state do not touch each other, so kDeltaBlocks blocks of a
// cluster share a head and only the norm needs all of them. The state stays in registers over the tokens of a step.
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

/// Decay and rate of change of a token.
__device__ inline void delta_gates(const DeltaCall& c, const DeltaParams& p, u32 token, u32 head, float& decay, float& beta) {
  const u64 at = static_cast<u64>(token) * p.ld_ab + head;
  decay = expf(c.decay[head] * softplus(c.a[at] + c.dt_bias[head]));
  beta = sigmoid(c.b[at]);
}

// ---- heads of 128 x 128 ----
inline constexpr u32 kDeltaSize = 128;
inline constexpr u32 kDeltaTokens = 16;  // staged at once
inline constexpr u32 kDeltaSpan = 256;   // between two norms
inline constexpr u32 kDeltaThreads = 128;
inline constexpr u32 kDeltaColumns = kDeltaSize / kDeltaBlocks;
inline constexpr u32 kDeltaRanks = METRALE_CLUSTERS ? kDeltaBlocks : 1;

struct DeltaShared {
  float keys[kDeltaTokens][kDeltaSize];
  float queries[kDeltaTokens][kDeltaSize];
  float values[kDeltaTokens][kDeltaColumns];
  float out[kDeltaTokens][kDeltaColumns];
  float decays[kDeltaTokens];
  float betas[kDeltaTokens];
  float products[kDeltaTokens];              // of query and key
  float squares[kDeltaSpan];                 // sums over this block's columns
  float inbox[2][kDeltaBlocks][kDeltaSpan];  // the same from all blocks; spans alternate
};

/// Lane 8 r + j of warp w has, of column 8 w + j, rows 16 i + 4 r to 16 i + 4 r + 3, so that a row's lanes read whole sectors and
/// keys and queries come 16 bytes at a time without bank conflicts.
class DeltaColumns {
 public:
  __device__ DeltaColumns(const DeltaCall& call, const DeltaParams& params, DeltaShared& shared, u32 head)
      : c_(call), p_(params), shared_(shared), head_(DeltaHead::create(call, params, head)) {}

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
      norm(rank, first, count, span);
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
      const float4 o = reinterpret_cast<const float4*>(shared_.out[t])[piece];
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
      reinterpret_cast<float4*>(shared_.queries[t])[lane_id()] = q;
      reinterpret_cast<float4*>(shared_.keys[t])[lane_id()] = k;
      shared_.values[t][lane_id()] = v;
      if (lane_id() == 0) {
        shared_.decays[t] = decay;
        shared_.betas[t] = beta;
        shared_.products[t] = qk * q_scale * k_scale;
      }
    }
  }

  /// With the decay e, the state before S and the change d = beta (v - e k S): the new state is e S + k d, and q times it
  /// e (q S) + (q k) d, so both sums come from one look at S.
  __device__ void scan(u32 count) {
    const u32 quarter = lane_id() / 8;
    for (u32 t = 0; t < count; ++t) {
      const float4* keys = reinterpret_cast<const float4*>(shared_.keys[t]) + quarter;
      const float4* queries = reinterpret_cast<const float4*>(shared_.queries[t]) + quarter;
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
      const float decay = shared_.decays[t];
      const float change = (shared_.values[t][column()] - sum_key * decay) * shared_.betas[t];
      if (quarter == 0) shared_.out[t][column()] = sum_query * decay + change * shared_.products[t];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        state_[4 * i] = fmaf(k[i].x, change, state_[4 * i] * decay);
        state_[4 * i + 1] = fmaf(k[i].y, change, state_[4 * i + 1] * decay);
        state_[4 * i + 2] = fmaf(k[i].z, change, state_[4 * i + 2] * decay);
        state_[4 * i + 3] = fmaf(k[i].w, change, state_[4 * i + 3] * decay);
      }
    }
  }

  /// Norm and gate of this block's columns of tokens [first, first + count).
  __device__ void norm(u32 rank, u32 first, u32 count, u32 span) {
    const u32 columns = kDeltaSize / kDeltaRanks;
    const u32 column = rank * kDeltaColumns + threadIdx.x % columns;
    const float weight = c_.norm[column];
    float(&inbox)[kDeltaBlocks][kDeltaSpan] = shared_.inbox[span % 2];
    __syncthreads();
    if (span == 0) cluster_wait();  // of the arrival at the start: the others run
    for (u32 i = threadIdx.x; i < count * kDeltaRanks; i += kDeltaThreads)
      store_at(&inbox[rank][i / kDeltaRanks], i % kDeltaRanks, shared_.squares[i / kDeltaRanks]);
    cluster_arrive();
    cluster_wait();
    const u32 rows = kDeltaThreads / columns;
    for (u32 t = threadIdx.x / columns; t < count; t += rows) {
      const float gate = head_.gate[static_cast<u64>(first + t) * p_.ld_z + column];
      float sum = 0;
#pragma unroll
      for (u32 r = 0; r < kDeltaRanks; ++r) sum += inbox[r][t];
      float* to = head_.out + static_cast<u64>(first + t) * p_.num_value_heads * kDeltaSize + column;
      const float o = stays_staged() ? shared_.out[t][threadIdx.x % columns] : *to;
      *to = weight * (o * rsqrtf(sum / kDeltaSize + p_.norm_eps)) * silu(gate);
    }
  }

  const DeltaCall& c_;
  const DeltaParams& p_;
  DeltaShared& shared_;
  DeltaHead head_;
  float state_[32];
};

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

__device__ inline void delta_head(const DeltaCall& c, const DeltaParams& p, float* dynamic) {
  __shared__ __align__(16) DeltaShared shared;
  const u32 rank = METRALE_CLUSTERS ? cluster_rank() : blockIdx.x % kDeltaBlocks;
  const bool aligned = p.ld_qkv % 4 == 0 && (reinterpret_cast<u64>(c.qkv) | reinterpret_cast<u64>(c.out)) % 16 == 0;
  if (!has_fast_delta(p.key_dim, p.value_dim) || !aligned) {
    if (rank == 0) delta_any(c, p, dynamic);
    return;
  }
  if (!METRALE_CLUSTERS && rank != 0) return;
  cluster_arrive_relaxed();
  DeltaColumns(c, p, shared, blockIdx.x / kDeltaBlocks).run(rank);
}

}  // namespace metrale::cuda::decoder
