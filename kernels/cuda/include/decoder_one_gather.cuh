// SPDX-License-Identifier: Apache-2.0
//
// Before a token's attention: its queries, scaled, and in the block that takes the last keys its own key and value, as the cache holds
// or will hold them, into shared memory; a warp for each. All loads of a row are on their way before the first is used.
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

/// Elements [4 l + 128 i, 4] of a row, normed where `norm` is given, then rotated.
template <int head_dim>
struct QuadRow {
  static constexpr int kPieces = head_dim > 128 ? head_dim / 128 : 1;
  float4 x[kPieces];

  __device__ static u32 element(int i) { return 4 * lane_id() + 128 * static_cast<u32>(i); }
  __device__ static bool real(int i) { return head_dim >= 128 || element(i) < head_dim; }

  __device__ void load(const float* from) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) x[i] = real(i) ? quad_at(from + element(i)) : float4{0, 0, 0, 0};
  }
  /// The other element of each pair comes from memory a second time, so that no lane waits for another.
  __device__ __forceinline__ void load_rotated(const float* from, const float* norm, const Rotation& r, float eps) {
    float4 other[kPieces];
    float4 cosine[kPieces];
    float4 sine[kPieces];
    float4 weight[kPieces];
    float4 other_weight[kPieces];
    load(from);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const u32 d = element(i);
      const bool turned = real(i) && d < 2 * r.pairs;
      const bool upper = d >= r.pairs;
      const u32 partner = !turned ? 0 : upper ? d - r.pairs : d + r.pairs;
      other[i] = cosine[i] = sine[i] = float4{0, 0, 0, 0};
      if (turned && !r.interleaved) {
        other[i] = quad_at(from + partner);
        const float* at = r.cosines + (upper ? partner : d);
        cosine[i] = quad_at(at);
        sine[i] = quad_at(at + r.pairs);
      } else if (turned) {
        const float2 c = *reinterpret_cast<const float2*>(r.cosines + d / 2);
        const float2 s = *reinterpret_cast<const float2*>(r.cosines + r.pairs + d / 2);
        cosine[i] = float4{c.x, c.x, c.y, c.y};
        sine[i] = float4{s.x, s.x, s.y, s.y};
      }
      weight[i] = other_weight[i] = float4{1, 1, 1, 1};
      if (norm && real(i)) {
        weight[i] = quad_at(norm + d);
        if (turned && !r.interleaved) other_weight[i] = quad_at(norm + partner);
      }
    }
    float scale = 1;
    if (norm) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) sum += x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
      scale = rsqrtf(warp_sum(sum) / static_cast<float>(head_dim) + eps);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const u32 d = element(i);
      float4 a = {x[i].x * scale * weight[i].x, x[i].y * scale * weight[i].y, x[i].z * scale * weight[i].z,
                  x[i].w * scale * weight[i].w};
      if (d < 2 * r.pairs) {
        float4 b = {-a.y, a.x, -a.w, a.z};
        if (!r.interleaved) {
          const float signed_scale = d >= r.pairs ? scale : -scale;
          b = {other[i].x * signed_scale * other_weight[i].x, other[i].y * signed_scale * other_weight[i].y,
               other[i].z * signed_scale * other_weight[i].z, other[i].w * signed_scale * other_weight[i].w};
        }
        a = {a.x * cosine[i].x + b.x * sine[i].x, a.y * cosine[i].y + b.y * sine[i].y, a.z * cosine[i].z + b.z * sine[i].z,
             a.w * cosine[i].w + b.w * sine[i].w};
      }
      x[i] = a;
    }
  }
};

__device__ inline uint2 pack_quad(float4 x) { return {pack_bf16(x.x, x.y), pack_bf16(x.z, x.w)}; }
/// What rounding took from `x`.
__device__ inline uint2 pack_rest(float4 x, uint2 rounded) {
  return {pack_bf16(x.x - low_bf16(rounded.x), x.y - high_bf16(rounded.x)),
          pack_bf16(x.z - low_bf16(rounded.y), x.w - high_bf16(rounded.y))};
}

/// Before the wait: what is known to be needed after it.
template <int head_dim>
__device__ __forceinline__ void prepare_gather(const OneCall& c, const OneShare& share, const OneLayout& l, float* shared) {
  // Rows of queries that there are none for must be numbers.
  auto* rows = reinterpret_cast<u32*>(shared + l.queries);
  for (u32 i = threadIdx.x; i < kHeadSet * (head_dim + 8); i += blockDim.x) rows[i] = 0;
  const float* norm = warp_id() < share.heads ? c.q_norm : c.k_norm;
  if (norm && lane_id() < head_dim / 32) prefetch(norm + 32 * lane_id());
}

/// Queries are taken as the sum of two bf16 numbers each: [kHeadSet] rows rounded, then as many of what that left.
template <int head_dim, bool fused>
__device__ __forceinline__ void gather_bf16(const OneCall& c, const RotateStoreParams& p, const OneShare& share, const OneLayout& l,
                                            float factor, bool quads, float* shared) {
  constexpr u32 kStride = head_dim + 8;
  const Rotation rotation{c.rotary, p.pairs, p.interleaved};
  auto* queries = reinterpret_cast<std::uint16_t*>(shared + l.queries);
  const u32 tasks = share.heads + (share.has_last_tile() ? 2 : 0);
  for (u32 task = warp_id(); task < tasks; task += blockDim.x / kWarp) {
    const bool is_query = task < share.heads;
    const bool is_key = task == share.heads;
    const float* from = is_query ? c.q + static_cast<u64>(share.first_head + task) * p.q_head_stride
                                 : (is_key ? c.k : c.v) + static_cast<u64>(share.kv_head) * head_dim;
    const float* norm = is_query ? c.q_norm : c.k_norm;
    QuadRow<head_dim> row;
    if (!fused && !is_query) {
      const OwnRow own(c, p, share, is_key);
      auto* to = reinterpret_cast<uint4*>(shared + (is_key ? l.key : l.value));
      const auto* cached = static_cast<const std::uint16_t*>(own.cache) + own.offset;
      if (lane_id() < head_dim / 8) to[lane_id()] = reinterpret_cast<const uint4*>(cached)[lane_id()];
      continue;
    }
    if (quads && fused && (is_query || is_key)) {
      if constexpr (fused) row.load_rotated(from, norm, rotation, p.norm_eps);
    } else if (quads) {
      row.load(from);
    } else {
      // The inbox serves as scratch; nothing is sent to it before every block has passed the barrier at the end.
      float* scratch = shared + l.inbox + warp_id() * head_dim;
      if (fused && (is_query || is_key)) {
        norm_and_rotate([&](u32 d) { return from[d]; }, norm, rotation, head_dim, p.norm_eps, scratch);
      } else {
        for (u32 d = lane_id(); d < head_dim; d += kWarp) scratch[d] = from[d];
        __syncwarp();
      }
      row.load(scratch);
      __syncwarp();
    }
    if (is_query) {
#pragma unroll
      for (int i = 0; i < QuadRow<head_dim>::kPieces; ++i) {
        const float4 x = {row.x[i].x * factor, row.x[i].y * factor, row.x[i].z * factor, row.x[i].w * factor};
        const uint2 rounded = pack_quad(x);
        if (!row.real(i)) continue;
        *reinterpret_cast<uint2*>(queries + task * kStride + row.element(i)) = rounded;
        *reinterpret_cast<uint2*>(queries + (kHeadSet + task) * kStride + row.element(i)) = pack_rest(x, rounded);
      }
      continue;
    }
    const OwnRow own(c, p, share, is_key);
    auto* to = reinterpret_cast<std::uint16_t*>(shared + (is_key ? l.key : l.value));
    auto* cached = static_cast<std::uint16_t*>(own.cache) + own.offset;
#pragma unroll
    for (int i = 0; i < QuadRow<head_dim>::kPieces; ++i) {
      if (!row.real(i)) continue;
      const uint2 rounded = pack_quad(row.x[i]);
      *reinterpret_cast<uint2*>(to + row.element(i)) = rounded;
      if (share.keeps) *reinterpret_cast<uint2*>(cached + row.element(i)) = rounded;
    }
  }
  __syncthreads();
  if (!quads) {
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace metrale::cuda::decoder
