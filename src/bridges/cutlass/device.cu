// SPDX-License-Identifier: Apache-2.0
//
// What the bridge asks of the device besides kernels.
#include <cuda.h>

#include <cstring>

#include "bridges/cutlass/cuda_status.cuh"

namespace metrale::cutlass {

Foreign query_chip(Chip& chip) noexcept {
  int device = 0;
  if (const Foreign f = cuda_status(cudaGetDevice(&device), "cudaGetDevice"); !f.ok()) return f;
  const struct {
    int* value;
    cudaDeviceAttr attribute;
  } wanted[] = {{&chip.major, cudaDevAttrComputeCapabilityMajor},
                {&chip.minor, cudaDevAttrComputeCapabilityMinor},
                {&chip.sm_count, cudaDevAttrMultiProcessorCount}};
  for (const auto& w : wanted) {
    if (const Foreign f = cuda_status(cudaDeviceGetAttribute(w.value, w.attribute, device), "cudaDeviceGetAttribute"); !f.ok())
      return f;
  }
  return {};
}

Foreign make_weight_map(WeightMap& map, std::uint64_t address, std::uint64_t rows, std::uint64_t k, int element_bytes,
                        int box_rows) noexcept {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult state{};
    const cudaError_t code = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &state);
    return code == cudaSuccess && state == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found) : nullptr;
  }();
  if (encode == nullptr) {
    return {.origin = Foreign::Origin::cuda,
            .code = static_cast<int>(cudaErrorNotSupported),
            .text = "the driver has no cuTensorMapEncodeTiled",
            .call = "cudaGetDriverEntryPointByVersion"};
  }
  const cuuint64_t sizes[2] = {k, rows};
  const cuuint64_t strides[1] = {k * static_cast<std::uint64_t>(element_bytes)};
  const cuuint32_t box[2] = {128U / static_cast<unsigned>(element_bytes), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  CUtensorMap made;
  const CUresult code = encode(&made, element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
                               reinterpret_cast<void*>(address), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS) {
    return {.origin = Foreign::Origin::cuda,
            .code = static_cast<int>(code),
            .text = "the driver refuses the map",
            .call = "cuTensorMapEncodeTiled"};
  }
  static_assert(sizeof(made) == sizeof(map));
  std::memcpy(&map, &made, sizeof(map));
  return {};
}

}  // namespace metrale::cutlass
