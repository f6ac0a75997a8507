// SPDX-License-Identifier: Apache-2.0
//
// Packs and unpacks NVFP4 on the device, for every chip: a thread for each group of 16.
#include <cuda_bf16.h>

#include "bridges/cutlass/cuda_status.cuh"
#include "bridges/cutlass/nvfp4_codes.h"

namespace metrale::cutlass {
namespace {

constexpr unsigned kThreads = 256;

struct Group {
  std::uint64_t row;
  std::uint64_t group;
  bool exists;
};

/// Threads go over the groups of all tiles where scales are tiled, padding included, and over those of the matrix otherwise.
__device__ Group group_of_thread(const Nvfp4Arguments& p) {
  const std::uint64_t groups = p.cols / 16;
  const std::uint64_t across = p.tiled ? (groups + codes::kTileGroups - 1) / codes::kTileGroups * codes::kTileGroups : groups;
  const std::uint64_t index = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const Group g{.row = index / across, .group = index % across, .exists = false};
  return {.row = g.row, .group = g.group, .exists = g.row < p.rows && g.group < groups};
}

__device__ std::uint64_t place_of(const Nvfp4Arguments& p, const Group& g) {
  const std::uint64_t groups = p.cols / 16;
  return p.tiled ? codes::tiled_place(g.row, g.group, (groups + codes::kTileGroups - 1) / codes::kTileGroups)
                 : g.row * groups + g.group;
}

__global__ void __launch_bounds__(kThreads) pack_kernel(const Nvfp4Arguments p) {
  const Group g = group_of_thread(p);
  if (!g.exists) {
    const std::uint64_t padded_rows = (std::uint64_t{p.rows} + codes::kTileRows - 1) / codes::kTileRows * codes::kTileRows;
    if (p.tiled && g.row < padded_rows) p.scales[place_of(p, g)] = 0;
    return;
  }
  const std::uint64_t at = g.row * p.cols + g.group * 16;
  const auto* source = reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.plain) + at);
  const uint4 words[2] = {source[0], source[1]};
  float values[16];
  float largest = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    values[i] = __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(words)[i]);
    largest = fmaxf(largest, fabsf(values[i]));
  }
  const std::uint8_t scale = codes::group_scale(largest, p.alpha);
  const float step = codes::group_step(scale, p.alpha);
  std::uint64_t packed = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) packed |= std::uint64_t{codes::group_code(values[i], step)} << (4 * i);
  p.scales[place_of(p, g)] = scale;
  *reinterpret_cast<std::uint64_t*>(p.values + at / 2) = packed;
}

__global__ void __launch_bounds__(kThreads) unpack_kernel(const Nvfp4Arguments p) {
  const Group g = group_of_thread(p);
  if (!g.exists) return;
  const std::uint64_t at = g.row * p.cols + g.group * 16;
  const float step = codes::group_step(p.scales[place_of(p, g)], p.alpha);
  const std::uint64_t packed = *reinterpret_cast<const std::uint64_t*>(p.values + at / 2);
  uint4 words[2];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    reinterpret_cast<__nv_bfloat16*>(words)[i] = __float2bfloat16_rn(codes::from_e2m1(packed >> (4 * i) & 15U) * step);
  }
  auto* out = reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.plain) + at);
  out[0] = words[0];
  out[1] = words[1];
}

}  // namespace

Foreign launch_nvfp4(const Nvfp4Arguments& arguments, bool pack, std::uint64_t stream) noexcept {
  const std::uint64_t groups = arguments.cols / 16;
  const std::uint64_t threads = arguments.tiled
                                    ? (std::uint64_t{arguments.rows} + codes::kTileRows - 1) / codes::kTileRows * codes::kTileRows *
                                          ((groups + codes::kTileGroups - 1) / codes::kTileGroups * codes::kTileGroups)
                                    : arguments.rows * groups;
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  (pack ? pack_kernel : unpack_kernel)<<<blocks, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(arguments);
  return cuda_status(cudaGetLastError(), "launch");
}

}  // namespace metrale::cutlass
