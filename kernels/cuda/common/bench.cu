// SPDX-License-Identifier: Apache-2.0
//
// Module bench: what metgpu bench launches beside the kernels of the decoders. None computes anything of use.
//   nop8       B, B, B, B, u32, u32, u32, u32   nothing: the cost of a launch
//   nop_waits  B float counters                 counters[block] += 1, behind its predecessor
//   touch      B src, u64 words, B u32 out      reads `words` times 16 bytes
//   fill       B dst, u64 words, u32 seed       random bf16 pairs, two of them in 32 bits, of magnitude 0.0078 to 2
//   hold       u64 nanoseconds                  one thread waits so long
#include "publish.cuh"

namespace {

using u32 = unsigned;
using u64 = unsigned long long;

__device__ u64 first_word() { return static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ u64 step_words() { return static_cast<u64>(gridDim.x) * blockDim.x; }

/// Both halves keep their sign and the low mantissa of `bits`, with an exponent from 0x78 to 0x7f.
__device__ u32 as_bf16_pair(u32 bits) { return (bits & 0x83ff83ffu) | 0x3c003c00u; }

}  // namespace

extern "C" __global__ void nop8(const void*, const void*, const void*, const void*, u32, u32, u32, u32) {}

METRALE_PUBLISH_WAITS(nop_waits);
extern "C" __global__ void nop_waits(float* counters) {
  metrale::wait_for_predecessor();
  if (threadIdx.x == 0) counters[blockIdx.x] += 1.0f;
  metrale::let_dependents_start();
}

extern "C" __global__ void __launch_bounds__(256) touch(const uint4* __restrict__ src, u64 words, u32* out) {
  constexpr int kUnroll = 8;
  const u64 step = step_words();
  u64 i = first_word();
  u32 all = 0;
  for (; i + (kUnroll - 1) * step < words; i += kUnroll * step) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = __ldcs(src + i + u * step);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) all ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  for (; i < words; i += step) {
    const uint4 v = __ldcs(src + i);
    all ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  // Never true of random data, but the compiler cannot know, so the reads stay.
  if (all == 0x9e3779b9u) *out = all;
}

extern "C" __global__ void __launch_bounds__(256) fill(uint4* dst, u64 words, u32 seed) {
  const u64 step = step_words();
  for (u64 i = first_word(); i < words; i += step) {
    u32 h = static_cast<u32>(i) * 2654435761u ^ static_cast<u32>(i >> 32) * 40503u ^ seed * 0x9e3779b9u;
    u32 lanes[4];
#pragma unroll
    for (u32& lane : lanes) {
      h ^= h >> 16;
      h *= 0x85ebca6bu;
      h ^= h >> 13;
      h *= 0xc2b2ae35u;
      h ^= h >> 16;
      lane = as_bf16_pair(h);
      h += 0x6d2b79f5u;
    }
    dst[i] = make_uint4(lanes[0], lanes[1], lanes[2], lanes[3]);
  }
}

extern "C" __global__ void hold(u64 nanoseconds) {
  u64 start;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  u64 now = start;
  while (now - start < nanoseconds) {
    __nanosleep(500);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  }
}
