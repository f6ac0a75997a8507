// SPDX-License-Identifier: Apache-2.0
//
// Tensor maps: what a kernel needs to bring boxes of a matrix into shared memory by the device's own copy engine (TMA). Made by
// `GpuBackend::tensor_map`, given to a kernel by value as one argument. Plain values; a map is good for as long as the memory is.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "metrale/dtype.h"
#include "metrale/kernel_args.h"
#include "metrale/types.h"

namespace metrale {

/// Address and row stride of a tensor map are multiples of this, in bytes; so is the width of a box.
inline constexpr std::uint64_t kTensorMapAlignment = 16;
/// Most rows, and most columns, of a box.
inline constexpr std::uint32_t kMaxTensorBox = 256;
/// Bytes of a tensor map, which are those of a CUtensorMap.
inline constexpr std::size_t kTensorMapBytes = 128;

/// A matrix [rows, cols], row-major, with `row_stride_bytes` from row to row, read in boxes of [box_rows, box_cols]. What a box has
/// outside the matrix reads as zero. Nothing is swizzled or interleaved.
struct TensorTile {
  DevicePtr address;
  DType dtype = DType::bf16;
  std::uint64_t rows = 0;
  std::uint64_t cols = 0;
  std::uint64_t row_stride_bytes = 0;
  std::uint32_t box_rows = 0;
  std::uint32_t box_cols = 0;
};

/// The device's form of a TensorTile.
struct alignas(64) TensorMap {
  std::array<std::uint64_t, 16> words{};
  /// As an argument of a kernel that takes it by value; the map outlives the launch call.
  KernelArg arg() const noexcept { return KernelArg::bytes(std::as_bytes(std::span(words))); }
};
static_assert(sizeof(TensorMap) == kTensorMapBytes);

}  // namespace metrale
