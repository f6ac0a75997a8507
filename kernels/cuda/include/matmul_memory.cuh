// SPDX-License-Identifier: Apache-2.0
//
// How the matrix kernels move bytes: asynchronous copies into shared memory, prefetches, loads that see what other kernels wrote,
// and the order in which rows of x lie in shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "matmul_plan.h"

namespace metrale::cuda::matmul {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

/// For lambdas that see a whole call: out of line, everything they capture would go to local memory.
#define METRALE_INLINE __attribute__((always_inline))

inline constexpr u32 kWarp = 32;
inline constexpr u32 kAllLanes = 0xFFFFFFFFU;

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

/// 16 bytes past the first-level cache. Both ends 16-byte aligned.
__device__ __forceinline__ void copy16_async(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
/// As above; zeros where `valid` is false, and then nothing is read.
__device__ __forceinline__ void copy16_or_zero_async(u32 to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy8_async(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
/// 4 bytes, of which the first `bytes` are read and the rest are zeros.
__device__ __forceinline__ void copy4_async(u32 to, const void* from, u32 bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Returns when at most `pending` of this thread's groups are on their way.
template <int pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
__device__ __forceinline__ void prefetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

__device__ __forceinline__ u32 load_shared(u32 at) {
  u32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_shared8(u32 at) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_shared16(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ void clear_shared16(u32 at) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
}

/// Four floats of a row of `k` from index 4·f on, zeros beyond its end. From the second-level cache: what a predecessor wrote is
/// there, whatever the first level holds.
__device__ __forceinline__ float4 load_quad(const float* row, u32 f, u32 k) {
  const u32 e = 4 * f;
  if (e + 4 <= k && (reinterpret_cast<u64>(row) & 15) == 0) return __ldcg(reinterpret_cast<const float4*>(row) + f);
  float4 v{0, 0, 0, 0};
  if (e < k) v.x = __ldcg(row + e);
  if (e + 1 < k) v.y = __ldcg(row + e + 1);
  if (e + 2 < k) v.z = __ldcg(row + e + 2);
  if (e + 3 < k) v.w = __ldcg(row + e + 3);
  return v;
}

__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000U); }
__device__ __forceinline__ float f16_bits(u32 low_half) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(low_half)));
}
/// Two floats as bf16, the first in the low half.
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const u32*>(&pair);
}

/// What the norm multiplies element `e` with; `norm` is f32 or bf16.
__device__ __forceinline__ float norm_weight(const void* norm, u32 dtype, float add, u32 e) {
  return add + (dtype == static_cast<u32>(DType::bf16) ? __bfloat162float(static_cast<const __nv_bfloat16*>(norm)[e])
                                                       : static_cast<const float*>(norm)[e]);
}

/// Where quad `f` of a row lies in shared memory, in quads. Lanes of one warp read quads 1, 2, 4 or 8 apart, or in the pairs of the
/// 256-element blocks; this order has each of those in different banks. It moves quads within runs of 64.
__device__ __forceinline__ u32 staged_quad(u32 f) { return f ^ (((f >> 3) ^ (f >> 4 & 3U)) & 7U); }

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (u32 lane = kWarp / 2; lane > 0; lane /= 2) v += __shfl_xor_sync(kAllLanes, v, lane);
  return v;
}

__device__ __forceinline__ float silu(float v) { return v / (1.0F + __expf(-v)); }

}  // namespace metrale::cuda::matmul
