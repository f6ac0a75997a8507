// SPDX-License-Identifier: Apache-2.0
//
// Module bridge: what the bridges to other libraries launch beside those.
//   transpose_scales  B src, B dst, u32 rows, u32 blocks, u32 padded_rows   dst [blocks, padded_rows] = src [rows, blocks]ᵀ, zeros
//                     behind `rows`; blocks of 32 × 8 threads, one for each 32 × 32
//   fill_random       B dst, u64 words, u32 seed, u32 keep, u32 set         each 32 bits random, of which `keep` are kept and `set`
//                     are set; words of 16 bytes
#include "publish.cuh"

namespace {

using u32 = unsigned;
using u64 = unsigned long long;

constexpr u32 kTile = 32;
constexpr u32 kLanes = 8;

}  // namespace

extern "C" __global__ void __launch_bounds__(kTile* kLanes)
    transpose_scales(const float* __restrict__ src, float* __restrict__ dst, u32 rows, u32 blocks, u32 padded_rows) {
  __shared__ float tile[kTile][kTile + 1];
  const u64 row0 = static_cast<u64>(blockIdx.x) * kTile;
  const u32 block0 = blockIdx.y * kTile;
  for (u32 i = threadIdx.y; i < kTile; i += kLanes) {
    const u64 row = row0 + i;
    const u32 block = block0 + threadIdx.x;
    tile[i][threadIdx.x] = row < rows && block < blocks ? src[row * blocks + block] : 0.0f;
  }
  __syncthreads();
  for (u32 i = threadIdx.y; i < kTile; i += kLanes) {
    const u64 row = row0 + threadIdx.x;
    const u32 block = block0 + i;
    if (row < padded_rows && block < blocks) dst[static_cast<u64>(block) * padded_rows + row] = tile[threadIdx.x][i];
  }
}

extern "C" __global__ void __launch_bounds__(256) fill_random(uint4* dst, u64 words, u32 seed, u32 keep, u32 set) {
  const u64 step = static_cast<u64>(gridDim.x) * blockDim.x;
  for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += step) {
    u32 h = static_cast<u32>(i) * 2654435761u ^ static_cast<u32>(i >> 32) * 40503u ^ seed * 0x9e3779b9u;
    u32 lanes[4];
#pragma unroll
    for (u32& lane : lanes) {
      h ^= h >> 16;
      h *= 0x7feb352du;
      h ^= h >> 15;
      h *= 0x846ca68bu;
      h ^= h >> 16;
      lane = (h & keep) | set;
    }
    dst[i] = make_uint4(lanes[0], lanes[1], lanes[2], lanes[3]);
  }
}
