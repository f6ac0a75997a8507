// SPDX-License-Identifier: Apache-2.0
//
// repack, gather and prepare: what is done to weights at load, to embeddings, and to many rows of x before `linear` sees them.
#pragma once

#include "matmul_rows.cuh"
#include "matmul_stage.cuh"

namespace metrale::cuda::matmul {

using u16 = std::uint16_t;

/// Blocks of `head` 2-byte words and then `quants` of them: all quants first, then all heads.
__device__ __forceinline__ void split_blocks(const u16* from, u16* to, u32 blocks, u32 head, u32 quants) {
  const u32 block = head + quants;
  for (u32 i = threadIdx.x; i < blocks * quants; i += blockDim.x) to[i] = from[i / quants * block + head + i % quants];
  for (u32 i = threadIdx.x; i < blocks * head; i += blockDim.x) to[blocks * quants + i] = from[i / head * block + i % head];
}

__device__ __forceinline__ void split_q6_k(const u16* from, u16* to, u32 blocks) {
  constexpr u32 kBlock = 105;  // words: 64 of low halves, 32 of top bits, 8 of scales, 1 scale
  for (u32 i = threadIdx.x; i < blocks * 64; i += blockDim.x) to[i] = from[i / 64 * kBlock + i % 64];
  u16* top = to + u64{blocks} * 64;
  for (u32 i = threadIdx.x; i < blocks * 32; i += blockDim.x) {
    const u32 chunk = i % 32 / 4, x = i % 4 / 2, half = chunk / 4, c = chunk % 4;  // word i % 2 of word x of the chunk
    const auto* bits = reinterpret_cast<const unsigned char*>(from + i / 32 * kBlock + 64) + 32 * half;
    u32 word = 0;
    for (u32 b = 0; b < 2; ++b) {
      for (u32 field = 0; field < 4; ++field) {
        const u32 j = 4 * (2 * x + field / 2) + 2 * (i % 2) + b, run = c / 2 + field % 2 * 2;
        word |= (bits[16 * (c % 2) + j] >> (2 * run) & 3U) << (8 * b + 2 * field);
      }
    }
    top[i] = static_cast<u16>(word);
  }
  u16* scales = top + u64{blocks} * 32;
  for (u32 i = threadIdx.x; i < blocks * 8; i += blockDim.x) {
    const auto* s = reinterpret_cast<const unsigned char*>(from + i / 8 * kBlock + 96) + 8 * (i % 8 / 4) + i % 4;
    scales[i] = static_cast<u16>(s[0] | s[4] << 8);
  }
  u16* d = scales + u64{blocks} * 8;
  for (u32 i = threadIdx.x; i < blocks; i += blockDim.x) d[i] = from[i * kBlock + 104];
}

/// One group of rows a block: into shared memory, and back in the order of matmul_types.cuh.
__device__ __forceinline__ void repack_group(std::byte* w, const RepackParams& p, std::byte* shared) {
  const auto type = static_cast<DType>(p.dtype);
  if (!can_repack(type, p.k)) return;
  const u64 bytes = row_bytes(type, p.k);
  const u32 groups = (p.n + kGroupRows - 1) / kGroupRows;
  for (u32 group = blockIdx.x; group < groups; group += gridDim.x) {
    const u32 left = p.n - group * kGroupRows, rows = left < kGroupRows ? left : kGroupRows;
    auto* from = reinterpret_cast<u16*>(shared);
    auto* to = reinterpret_cast<u16*>(w + u64{group} * kGroupRows * bytes);
    for (u32 i = threadIdx.x; i < rows * bytes / 2; i += blockDim.x) from[i] = to[i];
    __syncthreads();
    const u32 blocks = rows * (p.k / block_elements(type));
    switch (type) {
      case DType::q4_0: split_blocks(from, to, blocks, 1, 8); break;
      case DType::q4_1: split_blocks(from, to, blocks, 2, 8); break;
      case DType::q8_0: split_blocks(from, to, blocks, 1, 16); break;
      case DType::q4_k: split_blocks(from, to, blocks, 8, 64); break;
      case DType::q6_k: split_q6_k(from, to, blocks); break;
      default: break;
    }
    __syncthreads();
  }
}

/// y[i, :] = W[ids[i], :]. An id outside the matrix, which the caller has promised not to give, makes a row of NaN.
__device__ __forceinline__ void gather_rows(const std::int32_t* ids, const std::byte* w, float* y, const GatherParams& p) {
  for (u32 i = blockIdx.x; i < p.m; i += gridDim.x) {
    const std::int32_t id = __ldcg(ids + i);
    float* to = y + u64{i} * p.ld_y;
    if (id < 0 || static_cast<u32>(id) >= p.n) {
      for (u32 e = threadIdx.x; e < p.k; e += blockDim.x) to[e] = __int_as_float(0x7FC00000);
      continue;
    }
    const MatrixView view{w, p.n, p.k, p.packed != 0};
    for (u32 s = threadIdx.x; 16 * s < p.k; s += blockDim.x) {
      float4 v[4];
      read_segment(p.dtype, view, static_cast<u32>(id), s, v);
#pragma unroll
      for (u32 q = 0; q < 4; ++q) {
        const u32 e = 16 * s + 4 * q;
        if (e < p.k) to[e] = v[q].x;
        if (e + 1 < p.k) to[e + 1] = v[q].y;
        if (e + 2 < p.k) to[e + 2] = v[q].z;
        if (e + 3 < p.k) to[e + 3] = v[q].w;
      }
    }
  }
}

/// Rows of norm(x), as bf16 or f32, with zeros up to `prepared_stride`.
__device__ __forceinline__ void prepare_rows(const float* x, const void* norm, void* out, const LinearParams& p) {
  const u32 stride = static_cast<u32>(prepared_stride(p.k));
  const bool f32 = activation_class(static_cast<DType>(p.w[0].dtype), static_cast<Precision>(p.precision)) == ActivationClass::f32;
  __shared__ float squares[kMaxWarps];
  for (u32 row = blockIdx.x; row < p.m; row += gridDim.x) {
    const float* from = x + u64{row} * p.ld_x;
    float factor = 1;
    if (norm) {
      float sum = 0;
      for (u32 f = threadIdx.x; 4 * f < p.k; f += blockDim.x) {
        const float4 v = load_quad(from, f, p.k);
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
      }
      sum = warp_sum(sum);
      __syncthreads();
      if (threadIdx.x % kWarp == 0) squares[threadIdx.x / kWarp] = sum;
      __syncthreads();
      sum = 0;
      for (u32 w = 0; w < blockDim.x / kWarp; ++w) sum += squares[w];
      factor = rsqrtf(sum / static_cast<float>(p.k) + p.norm_eps);
    }
    for (u32 f = threadIdx.x; 4 * f < stride; f += blockDim.x) {
      float4 v = load_quad(from, f, p.k);
      if (norm) {
        const auto g = [&](u32 e)
                           METRALE_INLINE { return e < p.k ? factor * norm_weight(norm, p.norm_dtype, p.norm_add, e) : 0.0F; };
        v = {v.x * g(4 * f), v.y * g(4 * f + 1), v.z * g(4 * f + 2), v.w * g(4 * f + 3)};
      }
      if (f32) {
        reinterpret_cast<float4*>(static_cast<float*>(out) + u64{row} * stride)[f] = v;
      } else {
        reinterpret_cast<uint2*>(static_cast<std::byte*>(out) + u64{row} * stride * 2)[f] = {bf16_pair(v.x, v.y),
                                                                                             bf16_pair(v.z, v.w)};
      }
    }
  }
}

}  // namespace metrale::cuda::matmul
