// SPDX-License-Identifier: Apache-2.0
//
// Before a token's attention: its queries, scaled, and in the block that takes the last keys its own key and value, as the cache
// holds or will hold them, into shared memory; a warp for each. All loads of a row are on their way before the first is used.
#pragma once

#include "decoder_one_share.cuh"
#include "decoder_rotary.cuh"

namespace metrale::cuda::decoder {

/// A key or value is not taken from the cache, where it may still be on its way.
struct OwnRow {
  bool is_key;
  const float* from;
  void* cache;
  u64 offset;
  __device__ OwnRow(const OneCall& c, const RotateStoreParams& p, const OneShare& share, bool key)
      : is_key(key),
        from((key ? c.k : c.v) + static_cast<u64>(share.kv_head) * p.head_dim),
        cache(key ? c.key_cache : c.value_cache),
        offset(CacheRows::create(p.cache, c.block_table, share.kv_head).offset(share.position)) {}
};

// ---- as f32, any sizes ----
template <class T, bool fused>
__device__ __forceinline__ void gather_floats(const OneCall& c, const RotateStoreParams& p, const OneShare& share,
                                              const OneLayout& l, float factor, float* shared) {
  const Rotation rotation{c.rotary, p.pairs, p.interleaved};
  const u32 tasks = share.heads + (share.has_last_tile() ? 2 : 0);
  for (u32 i = share.heads * l.width + threadIdx.x; i < kHeadSet * l.width; i += blockDim.x) shared[l.queries + i] = 0;
  for (u32 task = warp_id(); task < tasks; task += blockDim.x / kWarp) {
    if (task < share.heads) {
      float* to = shared + l.queries + task * l.width;
      const float* q = c.q + static_cast<u64>(share.first_head + task) * p.q_head_stride;
      if constexpr (fused) norm_and_rotate([&](u32 d) { return q[d]; }, c.q_norm, rotation, p.head_dim, p.norm_eps, to);
      for (u32 d = lane_id(); d < l.width; d += kWarp) {
        float x = 0;
        if (d < p.head_dim) x = fused ? to[d] : q[d];
        to[d] = x * factor;
      }
      continue;
    }
    const OwnRow row(c, p, share, task == share.heads);
    float* to = shared + (row.is_key ? l.key : l.value);
    if constexpr (fused) {
      if (row.is_key) norm_and_rotate([&](u32 d) { return row.from[d]; }, c.k_norm, rotation, p.head_dim, p.norm_eps, to);
    }
    for (u32 d = lane_id(); d < p.head_dim; d += kWarp) {
      if constexpr (fused) {
        to[d] = CacheElement<T>::rounded(row.is_key ? to[d] : row.from[d]);
        if (share.keeps) CacheElement<T>::store(row.cache, row.offset + d, to[d]);
      } else {
        to[d] = CacheElement<T>::load(row.cache, row.offset + d);
      }
    }
  }
  __syncthreads();
}

// ---- as bf16, for tensor cores ----
/// Whether rows may be read in pieces of four elements.
__device__ inline bool has_quads(const OneCall& c, const RotateStoreParams& p) {
  const u64 addresses = reinterpret_cast<u64>(c.q) | reinterpret_cast<u64>(c.k) | reinterpret_cast<u64>(c.v) |
                        reinterpret_cast<u64>(c.q_norm) | reinterpret_cast<u64>(c.k_norm) | reinterpret_cast<u64>(c.rotary);
  return addresses % 16 == 0 && (p.q_head_stride | p.pairs) % 4 == 0;
}

__device__ inline float4 quad_at(const float* p) { return *reinterpret_cast<const float4*>(p); }

__device__ inline float4 scaled(float4 x, float by) { return {x.x * by, x.y * by, x.z * by, x.w * by}; }
__device__ inline float4 scaled(float4 x, float by, float4 weight) {
  return {x.x * by * weight.x, x.y * by * weight.y, x.z * by * weight.z, x.w * by * weight.w};
}

/// One row on its way to shared memory, elements [4 l + 128 i, 4] of it in lane l. Queries are taken as the sum of two bf16 numbers
/// each: [kHeadSet] rows rounded, then as many of what that left. All that does not depend on the predecessor is done in `prepare`,
/// before the wait.
template <int head_dim, bool fused>
class GatherRow {
 public:
  __device__ __forceinline__ void prepare(const OneCall& c, const RotateStoreParams& p, const OneShare& share, const OneLayout& l,
                                          u32 task, float* shared) {
    is_query_ = task < share.heads;
    const bool is_key = task == share.heads;
    turns_ = fused && (is_query_ || is_key);
    from_ = is_query_ ? c.q + static_cast<u64>(share.first_head + task) * p.q_head_stride
                      : (is_key ? c.k : c.v) + static_cast<u64>(share.kv_head) * head_dim;
    norm_ = !turns_ ? nullptr : is_query_ ? c.q_norm : c.k_norm;
    if (is_query_) {
      to_ = reinterpret_cast<std::uint16_t*>(shared + l.queries) + task * kStride;
    } else {
      to_ = reinterpret_cast<std::uint16_t*>(shared + (is_key ? l.key : l.value));
      cached_ = static_cast<std::uint16_t*>(is_key ? c.key_cache : c.value_cache) +
                CacheRows::create(p.cache, c.block_table, share.kv_head).offset(share.position);
    }
    pairs_ = p.pairs;
    interleaved_ = p.interleaved;
    rotary_ = c.rotary;
    if constexpr (fused) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        weight_[i] = other_weight_[i] = float4{1, 1, 1, 1};
        if (!norm_ || !real(i)) continue;
        const float4* at = reinterpret_cast<const float4*>(norm_);
        if (reinterpret_cast<u64>(norm_) % 16 == 0) weight_[i] = at[element(i) / 4];
        if (reinterpret_cast<u64>(norm_) % 16 == 0 && pairs_ % 4 == 0) other_weight_[i] = at[partner(i) / 4];
      }
    }
    asm volatile("" : "+l"(from_), "+l"(to_), "+l"(cached_), "+l"(rotary_));  // not to be worked out after the wait
  }

  /// `scratch` is used where rows cannot be read in quads.
  __device__ __forceinline__ void run(const RotateStoreParams& p, const OneShare& share, float factor, bool quads, float* scratch) {
    if (!fused && !is_query_) {
      if (lane_id() < head_dim / 8) reinterpret_cast<uint4*>(to_)[lane_id()] = reinterpret_cast<const uint4*>(cached_)[lane_id()];
      return;
    }
    float4 x[kPieces];
    if (quads) {
      load(from_, x);
      if constexpr (fused) {
        if (turns_) turn(p.norm_eps, x);
      }
    } else {
      if (turns_) {
        norm_and_rotate([&](u32 d) { return from_[d]; }, norm_, Rotation{rotary_, pairs_, interleaved_}, head_dim, p.norm_eps,
                        scratch);
      } else {
        for (u32 d = lane_id(); d < head_dim; d += kWarp) scratch[d] = from_[d];
        __syncwarp();
      }
      load(scratch, x);
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (!real(i)) continue;
      if (is_query_) x[i] = scaled(x[i], factor);
      const uint2 rounded = pack_quad(x[i]);
      *reinterpret_cast<uint2*>(to_ + element(i)) = rounded;
      if (is_query_) {
        *reinterpret_cast<uint2*>(to_ + kHeadSet * kStride + element(i)) = pack_rest(x[i], rounded);
      } else if (share.keeps) {
        *reinterpret_cast<uint2*>(cached_ + element(i)) = rounded;
      }
    }
  }

 private:
  static constexpr int kPieces = head_dim > 128 ? head_dim / 128 : 1;
  static constexpr u32 kStride = head_dim + 8;

  __device__ static u32 element(int i) { return 4 * lane_id() + 128 * static_cast<u32>(i); }
  __device__ static bool real(int i) { return head_dim >= 128 || element(i) < head_dim; }
  __device__ bool turned(int i) const { return real(i) && element(i) < 2 * pairs_; }
  __device__ bool upper(int i) const { return element(i) >= pairs_; }
  /// The element that this piece's first is paired with.
  __device__ u32 partner(int i) const {
    return !turned(i) || interleaved_ ? 0 : upper(i) ? element(i) - pairs_ : element(i) + pairs_;
  }

  __device__ static void load(const float* from, float4 (&x)[kPieces]) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) x[i] = real(i) ? quad_at(from + element(i)) : float4{0, 0, 0, 0};
  }

  /// Norm and rotation. The other element of each pair comes from memory a second time, so that no lane waits for another.
  __device__ __forceinline__ void turn(float eps, float4 (&x)[kPieces]) const {
    float4 other[kPieces];
    float4 cosine[kPieces];
    float4 sine[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      other[i] = sine[i] = float4{0, 0, 0, 0};
      cosine[i] = float4{1, 1, 1, 1};
      if (!turned(i)) continue;
      if (!interleaved_) {
        other[i] = quad_at(from_ + partner(i));
        const float* at = rotary_ + (upper(i) ? partner(i) : element(i));
        cosine[i] = quad_at(at);
        sine[i] = quad_at(at + pairs_);
      } else {
        const float2 c = *reinterpret_cast<const float2*>(rotary_ + element(i) / 2);
        const float2 s = *reinterpret_cast<const float2*>(rotary_ + pairs_ + element(i) / 2);
        cosine[i] = float4{c.x, c.x, c.y, c.y};
        sine[i] = float4{s.x, s.x, s.y, s.y};
      }
    }
    float scale = 1;
    if (norm_) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) sum += x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
      scale = rsqrtf(warp_sum(sum) / static_cast<float>(head_dim) + eps);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float4 a = scaled(x[i], scale, weight_[i]);
      const float4 b = interleaved_ ? float4{-a.y, a.x, -a.w, a.z} : scaled(other[i], upper(i) ? scale : -scale, other_weight_[i]);
      x[i] = {a.x * cosine[i].x + b.x * sine[i].x, a.y * cosine[i].y + b.y * sine[i].y, a.z * cosine[i].z + b.z * sine[i].z,
              a.w * cosine[i].w + b.w * sine[i].w};
    }
  }

  bool is_query_;
  bool turns_;
  u32 pairs_;
  u32 interleaved_;
  const float* from_;
  const float* norm_;
  const float* rotary_;
  std::uint16_t* to_;
  std::uint16_t* cached_ = nullptr;
  float4 weight_[kPieces];
  float4 other_weight_[kPieces];
};

/// The rows that the block's warps take in turn.
template <int head_dim, bool fused>
class Gather {
 public:
  /// Before the wait; a barrier of the block must follow.
  __device__ Gather(const OneCall& call, const RotateStoreParams& params, const OneShare& share, const OneLayout& layout,
                    float factor, float* shared)
      : c_(call),
        p_(params),
        share_(share),
        l_(layout),
        shared_(shared),
        factor_(factor),
        quads_(has_quads(call, params)),
        tasks_(share.heads + (share.has_last_tile() ? 2 : 0)) {
    // Rows of queries that there are none for must be numbers.
    auto* rows = reinterpret_cast<u32*>(shared + layout.queries);
    for (u32 i = threadIdx.x; i < kHeadSet * (head_dim + 8); i += blockDim.x) rows[i] = 0;
    if (warp_id() < tasks_) row_.prepare(c_, p_, share_, l_, warp_id(), shared_);
  }
  __device__ __forceinline__ void run() {
    // The inbox serves as scratch; nothing is sent to it before every block has passed the barrier at the end.
    float* scratch = shared_ + l_.inbox + warp_id() * head_dim;
    if (warp_id() < tasks_) row_.run(p_, share_, factor_, quads_, scratch);
    if (warp_id() + kOneWarps < tasks_) {
      row_.prepare(c_, p_, share_, l_, warp_id() + kOneWarps, shared_);
      row_.run(p_, share_, factor_, quads_, scratch);
    }
    __syncthreads();
    if (!quads_) {
      cluster_arrive();
      cluster_wait();
    }
  }

 private:
  const OneCall& c_;
  const RotateStoreParams& p_;
  const OneShare& share_;
  const OneLayout& l_;
  float* shared_;
  float factor_;
  bool quads_;
  u32 tasks_;  ///< At most kHeadSet + 2.
  GatherRow<head_dim, fused> row_;
};

}  // namespace metrale::cuda::decoder
