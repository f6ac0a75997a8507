// SPDX-License-Identifier: Apache-2.0
//
// Rows of x in shared memory, times the norm's weights, and the sums of their squares. The norm's factor 1 / sqrt(mean + eps) is
// the same for a whole row, so it is left to the end: products and squares are summed at the same time.
#pragma once

#include "matmul_call.cuh"

namespace metrale::cuda::matmul {

inline constexpr u32 kMaxWarps = 16;

/// The norm's weights, to where the first row of x will lie: they come from the file, so this may run before the predecessor ends.
__device__ __forceinline__ void stage_norm(const Call& call, float4* rows) {
  const LinearParams& p = call.p;
  const u32 quads = static_cast<u32>(staged_stride(p.k) / 4);
  for (u32 f = threadIdx.x; f < quads; f += blockDim.x) {
    float4 v{0, 0, 0, 0};
    if (4 * f < p.k) {
      const auto at = [&](u32 e) METRALE_INLINE { return e < p.k ? norm_weight(call.norm, p.norm_dtype, p.norm_add, e) : 0.0F; };
      if (p.norm_dtype == static_cast<u32>(DType::f32)) {
        v = load_quad(static_cast<const float*>(call.norm), f, p.k);
        v = {v.x + p.norm_add, v.y + p.norm_add, v.z + p.norm_add, v.w + p.norm_add};
      } else {
        v = {at(4 * f), at(4 * f + 1), at(4 * f + 2), at(4 * f + 3)};
      }
    }
    rows[staged_quad(f)] = v;
  }
}

/// Rows m0 to m0 + count - 1 of x into `rows` (unless null), which `stage_norm` has filled if there is a norm; each warp's share of
/// their squares into `squares` [row][kMaxWarps]. Each thread reads and writes the quads that it filled, so no barrier is between.
__device__ __forceinline__ void stage_rows(const Call& call, u32 m0, u32 count, float4* rows, float* squares) {
  const LinearParams& p = call.p;
  const u32 quads = static_cast<u32>(staged_stride(p.k) / 4), lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (u32 r = count; r-- > 0;) {
    const float* x = static_cast<const float*>(call.x) + u64{m0 + r} * p.ld_x;
    float sum = 0;
    constexpr u32 kBatch = 4;  // loads that are on their way together
    for (u32 f0 = threadIdx.x; f0 < quads; f0 += kBatch * blockDim.x) {
      float4 v[kBatch];
#pragma unroll
      for (u32 i = 0; i < kBatch; ++i) v[i] = load_quad(x, f0 + i * blockDim.x, p.k);
#pragma unroll
      for (u32 i = 0; i < kBatch; ++i) {
        const u32 f = f0 + i * blockDim.x;
        if (f >= quads) break;
        sum += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
        if (!rows) continue;
        const u32 at = staged_quad(f);
        if (call.norm) {
          const float4 g = rows[at];
          v[i] = {v[i].x * g.x, v[i].y * g.y, v[i].z * g.z, v[i].w * g.w};
        }
        rows[r * quads + at] = v[i];
      }
    }
    if (!call.norm) continue;
    sum = warp_sum(sum);
    if (lane == 0) squares[r * kMaxWarps + warp] = sum;
  }
}

/// The norm's factor of a staged row; 1 without a norm.
__device__ __forceinline__ float row_factor(const Call& call, const float* squares, u32 row) {
  if (!call.norm) return 1;
  float sum = 0;
  for (u32 w = 0; w < blockDim.x / kWarp; ++w) sum += squares[row * kMaxWarps + w];
  return rsqrtf(sum / static_cast<float>(call.p.k) + call.p.norm_eps);
}

}  // namespace metrale::cuda::matmul
