// SPDX-License-Identifier: Apache-2.0
#include "metrale/tensor_map.h"

#include <fmt/format.h>

#include "core/face_state.h"

namespace metrale {

using detail::FaceState;

namespace {

Error wrong(std::string why, GpuBackend::Site site) {
  return Error(Errc::invalid_argument, fmt::format("tensor_map: {}", std::move(why)), site);
}

Result<> check_tile(const TensorTile& tile, GpuBackend::Site site) {
  if (is_quantised(tile.dtype))
    return wrong(fmt::format("{} elements come in blocks; take a dense type", to_string(tile.dtype)), site);
  if (tile.rows == 0 || tile.cols == 0)
    return wrong(fmt::format("a matrix of {} x {} has no elements", tile.rows, tile.cols), site);
  const auto row_bytes = size_bytes(tile.dtype, tile.cols);
  if (!row_bytes || tile.row_stride_bytes < *row_bytes) {
    return wrong(fmt::format("a row stride of {} bytes does not hold {} columns of {}", tile.row_stride_bytes, tile.cols,
                             to_string(tile.dtype)),
                 site);
  }
  if (tile.address.address % kTensorMapAlignment != 0 || tile.row_stride_bytes % kTensorMapAlignment != 0) {
    return wrong(fmt::format("the address {:#x} and the row stride of {} bytes must be multiples of {}", tile.address.address,
                             tile.row_stride_bytes, kTensorMapAlignment),
                 site);
  }
  if (tile.box_rows == 0 || tile.box_cols == 0 || tile.box_rows > kMaxTensorBox || tile.box_cols > kMaxTensorBox) {
    return wrong(fmt::format("a box of {} x {}: each side is 1 to {}", tile.box_rows, tile.box_cols, kMaxTensorBox), site);
  }
  if (const auto box_bytes = size_bytes(tile.dtype, tile.box_cols); !box_bytes || *box_bytes % kTensorMapAlignment != 0) {
    return wrong(fmt::format("a box of {} columns of {} is no multiple of {} bytes wide", tile.box_cols, to_string(tile.dtype),
                             kTensorMapAlignment),
                 site);
  }
  return {};
}

}  // namespace

Result<TensorMap> GpuBackend::tensor_map(const TensorTile& tile, Site site) {
  FaceState& f = *face_;
  return f.run({.op = Op::tensor_map, .src = tile.address.address, .site = site}, [&]() -> Result<TensorMap> {
    METRALE_TRY(check_tile(tile, site));
    std::uint64_t bytes = 0;
    if (__builtin_mul_overflow(tile.rows - 1, tile.row_stride_bytes, &bytes) ||
        __builtin_add_overflow(bytes, size_bytes(tile.dtype, tile.cols).value_or(0), &bytes)) {
      return Error(Errc::out_of_range, "tensor_map: the matrix's size overflows", site);
    }
    METRALE_TRY(f.check_device("tensor_map", tile.address, bytes, site));
    return do_tensor_map(tile);
  });
}

}  // namespace metrale
