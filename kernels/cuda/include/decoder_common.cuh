// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of module "decoder" share: element types, sums over warps, clusters, asynchronous copies, the paged cache.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "decoder_plan.h"
#include "metrale/dtype.h"
#include "metrale/models/decoder_kernels.h"
#include "publish.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define METRALE_CLUSTERS 1
#define METRALE_CLUSTER_OF(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define METRALE_CLUSTERS 0
#define METRALE_CLUSTER_OF(blocks)
#endif

namespace metrale::cuda::decoder {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

inline constexpr u32 kF32 = static_cast<u32>(DType::f32);
inline constexpr u32 kF16 = static_cast<u32>(DType::f16);
inline constexpr u32 kBf16 = static_cast<u32>(DType::bf16);

inline constexpr u32 kWarp = 32;
inline constexpr u32 kAllLanes = 0xffffffffU;
/// Below every score that is real, and finite so that differences of two of them are.
inline constexpr float kMasked = -1e30F;

// ---- numbers ----
__device__ inline float from_bf16(std::uint16_t bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }
/// The two elements of a word.
__device__ inline float low_bf16(u32 word) { return __uint_as_float(word << 16); }
__device__ inline float high_bf16(u32 word) { return __uint_as_float(word & 0xffff0000U); }
/// Nearest, ties to even; a NaN stays one.
__device__ inline std::uint16_t to_bf16(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
/// Two floats as a word of bf16, `low` in its low half.
__device__ inline u32 pack_bf16(float low, float high) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
/// Four floats as bf16.
__device__ inline uint2 pack_quad(float4 x) { return {pack_bf16(x.x, x.y), pack_bf16(x.z, x.w)}; }
/// What rounding took from `x`.
__device__ inline uint2 pack_rest(float4 x, uint2 rounded) {
  return {pack_bf16(x.x - low_bf16(rounded.x), x.y - high_bf16(rounded.x)),
          pack_bf16(x.z - low_bf16(rounded.y), x.w - high_bf16(rounded.y))};
}
/// 2^x to a few units in the last place.
__device__ inline float exp2_near(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }
__device__ inline float silu(float x) { return x * sigmoid(x); }
__device__ inline float softplus(float x) { return x > 20.0F ? x : log1pf(expf(x)); }

// ---- warps ----
__device__ inline u32 lane_id() { return threadIdx.x % kWarp; }
__device__ inline u32 warp_id() { return threadIdx.x / kWarp; }
__device__ inline float warp_sum(float x) {
  for (u32 w = kWarp / 2; w > 0; w /= 2) x += __shfl_xor_sync(kAllLanes, x, w);
  return x;
}

// ---- clusters; a block before sm_90 is a cluster of its own ----
__device__ inline u32 cluster_rank() {
#if METRALE_CLUSTERS
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}
/// The first half of a barrier among the cluster's threads; what was written before is seen by those that waited.
__device__ inline void cluster_arrive() {
#if METRALE_CLUSTERS
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
/// As `cluster_arrive`, for a barrier that only says that every block runs.
__device__ inline void cluster_arrive_relaxed() {
#if METRALE_CLUSTERS
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if METRALE_CLUSTERS
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}
/// Stores to the same shared variable of block `rank` of the cluster, which must have started.
__device__ inline void store_at(float* shared, u32 rank, float value) {
#if METRALE_CLUSTERS
  u32 at;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(at)
               : "r"(static_cast<u32>(__cvta_generic_to_shared(shared))), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory");
#else
  *shared = value;
#endif
}

// ---- data that says itself that it has come; where there are no clusters, plain stores ----
__device__ inline u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
/// A barrier in shared memory, 8 aligned bytes, whose first phase ends when as many bytes have come as one `expect_bytes` said.
/// Others may send only after a barrier of the cluster.
__device__ inline void init_barrier(u32 barrier) {
#if METRALE_CLUSTERS
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ inline void expect_bytes(u32 barrier, u32 bytes) {
#if METRALE_CLUSTERS
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
/// To the same place in block `rank` of the cluster, counted by the barrier at the same place there.
__device__ inline void send_to(u32 shared, u32 barrier, u32 rank, float2 x) {
#if METRALE_CLUSTERS
  asm volatile(
      "{.reg .u32 to, counter; mapa.shared::cluster.u32 to, %0, %2; mapa.shared::cluster.u32 counter, %1, %2;"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [to], {%3, %4}, [counter];}" ::"r"(shared),
      "r"(barrier), "r"(rank), "f"(x.x), "f"(x.y)
      : "memory");
#else
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(x.x), "f"(x.y) : "memory");
#endif
}
__device__ inline void wait_barrier(u32 barrier, u32 phase) {
#if METRALE_CLUSTERS
  u32 done = 0;
  while (done == 0) {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(phase)
                 : "memory");
  }
#endif
}
/// Asks for a line to be brought into L2.
__device__ inline void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// ---- asynchronous copies to shared memory ----
/// 16 bytes; zeros where `valid` is false. Both aligned to 16 bytes.
__device__ inline void copy16_async(u32 shared, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Returns when all but the last `pending` groups of this thread are there.
template <int pending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// ---- tensor cores ----
/// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. Lane 4 g + t gets elements 2 t
/// and 2 t + 1 of row g of each, or, transposed, of column g.
__device__ inline void load_matrices(u32 address, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_matrices_transposed(u32 address, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
/// d [16, 8] += a [16, 16] · b [16, 8], bf16 with f32 sums.
__device__ inline void multiply_add(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- the paged cache ----
/// Where rows of one cache head lie. A power of two as block size, the usual case, takes no division.
struct CacheRows {
  const std::int32_t* table;
  u64 block_stride;
  u64 head_offset;
  u32 token_stride;
  u32 block_tokens;
  u32 shift;  ///< log2(block_tokens), or 32.

  __device__ static CacheRows create(const CacheLayout& c, const std::int32_t* table, u32 head) {
    const bool power = (c.block_tokens & (c.block_tokens - 1)) == 0;
    return {table,          c.block_stride, static_cast<u64>(head) * c.head_stride,
            c.token_stride, c.block_tokens, power ? static_cast<u32>(__ffs(static_cast<int>(c.block_tokens)) - 1) : 32};
  }
  /// In elements.
  __device__ u64 offset(u32 token) const {
    const u32 block = shift < 32 ? token >> shift : token / block_tokens;
    const u32 within = shift < 32 ? token & (block_tokens - 1) : token - block * block_tokens;
    return static_cast<u64>(static_cast<u32>(table[block])) * block_stride + static_cast<u64>(within) * token_stride + head_offset;
  }
};

/// Elements of a cache as floats.
template <class T>
struct CacheElement;
template <>
struct CacheElement<float> {
  __device__ static float load(const void* cache, u64 i) { return static_cast<const float*>(cache)[i]; }
  __device__ static void store(void* cache, u64 i, float x) { static_cast<float*>(cache)[i] = x; }
  __device__ static float rounded(float x) { return x; }
};
template <>
struct CacheElement<std::uint16_t> {
  __device__ static float load(const void* cache, u64 i) { return from_bf16(static_cast<const std::uint16_t*>(cache)[i]); }
  __device__ static void store(void* cache, u64 i, float x) { static_cast<std::uint16_t*>(cache)[i] = to_bf16(x); }
  __device__ static float rounded(float x) { return from_bf16(to_bf16(x)); }
};

}  // namespace metrale::cuda::decoder
