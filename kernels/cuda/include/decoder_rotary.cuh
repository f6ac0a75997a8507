// SPDX-License-Identifier: Apache-2.0
//
// Rotary embedding: the table of a step, and heads normed, rotated and stored, a warp for each.
#pragma once

#include "decoder_common.cuh"

namespace metrale::cuda::decoder {

__device__ inline void rotary_row(const StepHeader* step, const float* frequencies, float* table, const RotaryParams& p) {
  float* row = table + static_cast<u64>(blockIdx.x) * 2 * p.pairs;
  wait_for_predecessor();
  const auto position = static_cast<float>(step->position + static_cast<std::int32_t>(blockIdx.x));
  for (u32 j = threadIdx.x; j < p.pairs; j += blockDim.x) {
    float sine = 0;
    float cosine = 0;
    sincosf(position * frequencies[j], &sine, &cosine);
    row[j] = cosine;
    row[p.pairs + j] = sine;
  }
}

/// How one head is rotated; `cosines` [pairs] and then the sines.
struct Rotation {
  const float* cosines;
  u32 pairs;
  u32 interleaved;
};

inline constexpr u32 kHeadElements = kMaxHeadDim / kWarp;  // of a lane, at most

/// A head, normed where `norm` is given, then rotated, into `to` [head_dim] of shared memory by one warp. The value that lane l
/// holds of element l + 32 i is that of `element(i)`, so that all loads are on their way before the first is used.
template <class Element>
__device__ inline void norm_and_rotate(Element element, const float* norm, const Rotation& rotation, u32 head_dim, float eps,
                                       float* to) {
  float x[kHeadElements];
  float weight[kHeadElements];
  float sum = 0;
#pragma unroll
  for (u32 i = 0; i < kHeadElements; ++i) {
    const u32 d = lane_id() + kWarp * i;
    x[i] = d < head_dim ? element(d) : 0.0F;
    weight[i] = norm && d < head_dim ? norm[d] : 1.0F;
  }
  float cosine[kHeadElements / 2];
  float sine[kHeadElements / 2];
#pragma unroll
  for (u32 i = 0; i < kHeadElements / 2; ++i) {
    const u32 j = lane_id() + kWarp * i;
    cosine[i] = j < rotation.pairs ? rotation.cosines[j] : 0.0F;
    sine[i] = j < rotation.pairs ? rotation.cosines[rotation.pairs + j] : 0.0F;
  }
#pragma unroll
  for (u32 i = 0; i < kHeadElements; ++i) sum += x[i] * x[i];
  float scale = 1.0F;
  if (norm) scale = rsqrtf(warp_sum(sum) / static_cast<float>(head_dim) + eps);
#pragma unroll
  for (u32 i = 0; i < kHeadElements; ++i) {
    const u32 d = lane_id() + kWarp * i;
    if (d < head_dim) to[d] = norm ? x[i] * scale * weight[i] : x[i];
  }
  __syncwarp();
  const u32 stride = rotation.interleaved ? 2 : 1;
  const u32 partner = rotation.interleaved ? 1 : rotation.pairs;
#pragma unroll
  for (u32 i = 0; i < kHeadElements / 2; ++i) {
    const u32 j = lane_id() + kWarp * i;
    if (j < rotation.pairs) {
      const float a = to[j * stride];
      const float b = to[j * stride + partner];
      to[j * stride] = a * cosine[i] - b * sine[i];
      to[j * stride + partner] = b * cosine[i] + a * sine[i];
    }
  }
  __syncwarp();
}

struct RotateStoreCall {
  float* q;
  float* k;
  const float* v;
  const float* q_norm;
  const float* k_norm;
  const float* rotary;
  const StepHeader* step;
  const std::int32_t* block_table;
  void* key_cache;
  void* value_cache;
};

/// A token for each block along x; its heads are dealt to the warps of the blocks along y, the keys' after the queries'.
template <class T>
__device__ inline void rotate_store_token(const RotateStoreCall& c, const RotateStoreParams& p, float* shared) {
  const u32 token = blockIdx.x;
  const u32 warps = blockDim.x / kWarp;
  float* head = shared + warp_id() * p.head_dim;
  const Rotation rotation{c.rotary + static_cast<u64>(token) * 2 * p.pairs, p.pairs, p.interleaved};
  const u32 position = static_cast<u32>(c.step->position) + token;
  for (u32 h = blockIdx.y * warps + warp_id(); h < p.num_heads + p.num_kv_heads; h += gridDim.y * warps) {
    if (h < p.num_heads) {
      float* q = c.q + static_cast<u64>(token) * p.ld_q + static_cast<u64>(h) * p.q_head_stride;
      norm_and_rotate([&](u32 d) { return q[d]; }, c.q_norm, rotation, p.head_dim, p.norm_eps, head);
      for (u32 d = lane_id(); d < p.head_dim; d += kWarp) q[d] = head[d];
    } else {
      const u32 kv_head = h - p.num_heads;
      const u64 from = static_cast<u64>(token) * p.ld_kv + static_cast<u64>(kv_head) * p.head_dim;
      norm_and_rotate([&](u32 d) { return c.k[from + d]; }, c.k_norm, rotation, p.head_dim, p.norm_eps, head);
      const u64 offset = CacheRows::create(p.cache, c.block_table, kv_head).offset(position);
      for (u32 d = lane_id(); d < p.head_dim; d += kWarp) {
        CacheElement<T>::store(c.key_cache, offset + d, head[d]);
        CacheElement<T>::store(c.value_cache, offset + d, c.v[from + d]);
      }
    }
    __syncwarp();
  }
}

__device__ inline void rotate_store_rows(const RotateStoreCall& c, const RotateStoreParams& p, float* shared) {
  wait_for_predecessor();
  if (p.head_dim > kMaxHeadDim) return;
  if (p.cache.dtype == kBf16) {
    rotate_store_token<std::uint16_t>(c, p, shared);
  } else {
    rotate_store_token<float>(c, p, shared);
  }
}

}  // namespace metrale::cuda::decoder
