// SPDX-License-Identifier: Apache-2.0
//
// Makes a HopperKernel of one instance of the kernel template.
#pragma once

#include <cstring>

#include "bridges/cutlass/cuda_status.cuh"
#include "bridges/cutlass/hopper_kernel.cuh"

namespace metrale::cutlass {

template <class Element, int kColumns, int kStages>
struct HopperInstance {
  // The kernel aligns its part of shared memory itself.
  static constexpr int kSharedBytes = sizeof(HopperShared<Element, kColumns, kStages>) + 1024;
  static_assert(kSharedBytes <= 232448, "more shared memory than a block can have");

  static Foreign ready() noexcept {
    return cuda_status(
        cudaFuncSetAttribute(hopper_kernel<Element, kColumns, kStages>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
        "cudaFuncSetAttribute");
  }
  static Foreign launch(const WeightMap& map, const HopperArguments& arguments, unsigned blocks, std::uint64_t stream) noexcept {
    CUtensorMap tensor_map;
    static_assert(sizeof(tensor_map) == sizeof(map));
    std::memcpy(&tensor_map, &map, sizeof(map));
    if (arguments.next_tile != nullptr) {
      const Foreign cleared =
          cuda_status(cudaMemsetAsync(arguments.next_tile, 0, sizeof(*arguments.next_tile), reinterpret_cast<cudaStream_t>(stream)),
                      "cudaMemsetAsync");
      if (!cleared.ok()) return cleared;
    }
    hopper_kernel<Element, kColumns, kStages>
        <<<blocks, kThreads, kSharedBytes, reinterpret_cast<cudaStream_t>(stream)>>>(tensor_map, arguments);
    return cuda_status(cudaGetLastError(), "launch");
  }
  static constexpr HopperKernel kKernel{.columns = kColumns, .ready = &ready, .launch = &launch};
};

}  // namespace metrale::cutlass
