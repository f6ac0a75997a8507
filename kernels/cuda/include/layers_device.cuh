// SPDX-License-Identifier: Apache-2.0
//
// The instructions that the kernels of module "layers" are made of, beside those of decoder_common.cuh. All else in their headers
// is C++, so that tests run it on a host with another file of this name.
#pragma once

#include "decoder_common.cuh"

namespace metrale::cuda::layers {

using decoder::kAllLanes;
using decoder::lane_id;
using decoder::shared_address;
using decoder::u32;
using decoder::u64;
using decoder::warp_id;

__device__ inline char* dynamic_shared() {
  extern __shared__ __align__(128) char shared_bytes[];
  return shared_bytes;
}

// ---- words of device memory that other blocks write or read meanwhile ----
__device__ inline uint4 load_words(const float* p) {
  uint4 w;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "l"(p)
               : "memory");
  return w;
}
__device__ inline void store_word(float* p, u32 word) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(p), "r"(word) : "memory");
}

// ---- loads that stay where they are written: ahead of a wait ----
__device__ inline float4 load_early(const float* p) {
  float4 x;
  asm volatile("ld.global.nc.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(p));
  return x;
}
/// Zeros where it is not `present`.
__device__ inline uint4 load_piece(const uint4* from, bool present) {
  uint4 x;
  asm volatile(
      "{.reg .pred p; setp.ne.u32 p, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"
      "@p ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];}"
      : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
      : "l"(from), "r"(static_cast<u32>(present)));
  return x;
}

// ---- named barriers of a block ----
__device__ inline void barrier_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void barrier_wait(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- shared memory, by address, and barriers in it that count bytes ----
__device__ inline void init_barrier_of(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Makes fresh barriers known to the cluster and to bulk copies.
__device__ inline void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void arrive_at(u32 barrier) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory"); }
/// Waits for a phase of a barrier in shared memory. It says only that bytes have come to this block, so nothing that was read from
/// device memory before becomes doubtful, as a wait for the cluster's scope would have it.
__device__ inline void wait_here(u32 barrier, u32 phase) {
  u32 done = 0;
  while (done == 0) {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(phase)
                 : "memory");
  }
}
__device__ inline void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}
/// To the same place in block `rank` of the cluster, counted by the barrier at the same place there.
__device__ inline void send(u32 to, u32 rank, float x, u32 barrier) {
  asm volatile(
      "{.reg .u32 to, counter; mapa.shared::cluster.u32 to, %0, %2; mapa.shared::cluster.u32 counter, %1, %2;"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %3, [counter];}" ::"r"(to),
      "r"(barrier), "r"(rank), "r"(__float_as_uint(x))
      : "memory");
}
__device__ inline uint2 load_half_row(u32 address) {
  uint2 w;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(w.x), "=r"(w.y) : "r"(address) : "memory");
  return w;
}

}  // namespace metrale::cuda::layers
