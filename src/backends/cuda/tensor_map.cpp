// SPDX-License-Identifier: Apache-2.0
#include "metrale/tensor_map.h"

#include <fmt/format.h>

#include <cstring>

#include "backends/cuda/cuda_backend.h"

namespace metrale::cuda {

namespace {

std::optional<CUtensorMapDataType> type_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::f32: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::f16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::bf16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::f64: return CU_TENSOR_MAP_DATA_TYPE_FLOAT64;
    case DType::f8_e4m3:
    case DType::f8_e5m2:
    case DType::i8:
    case DType::u8:
    case DType::boolean: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    case DType::i16:
    case DType::u16: return CU_TENSOR_MAP_DATA_TYPE_UINT16;
    case DType::i32: return CU_TENSOR_MAP_DATA_TYPE_INT32;
    case DType::u32: return CU_TENSOR_MAP_DATA_TYPE_UINT32;
    case DType::i64: return CU_TENSOR_MAP_DATA_TYPE_INT64;
    case DType::u64: return CU_TENSOR_MAP_DATA_TYPE_UINT64;
    default: return std::nullopt;
  }
}

}  // namespace

Result<TensorMap> CudaBackend::do_tensor_map(const TensorTile& tile) {
  const auto type = type_of(tile.dtype);
  if (!type) return Error(Errc::invalid_argument, fmt::format("tensor_map: the device has no type for {}", to_string(tile.dtype)));
  METRALE_TRY(context_->make_current());
  CUtensorMap encoded{};
  // Innermost first; the stride of the innermost is its size and not given.
  const cuuint64_t sizes[2] = {tile.cols, tile.rows};
  const cuuint64_t strides[1] = {tile.row_stride_bytes};
  const cuuint32_t box[2] = {tile.box_cols, tile.box_rows};
  const cuuint32_t steps[2] = {1, 1};
  METRALE_TRY(check(driver_.cuTensorMapEncodeTiled_(
                        &encoded, *type, 2, reinterpret_cast<void*>(static_cast<std::uintptr_t>(tile.address.address)), sizes,
                        strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                    "cuTensorMapEncodeTiled"));
  TensorMap map;
  static_assert(sizeof(map) == sizeof(encoded));
  std::memcpy(map.words.data(), &encoded, sizeof(map));
  return map;
}

}  // namespace metrale::cuda
