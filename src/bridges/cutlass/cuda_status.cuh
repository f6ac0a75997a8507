// SPDX-License-Identifier: Apache-2.0
//
// Codes of CUDA's runtime and of CUTLASS as the bridge's host code takes them.
#pragma once

#include <cuda_runtime_api.h>

#include "bridges/cutlass/launch.h"

namespace metrale::cutlass {

inline Foreign cuda_status(cudaError_t code, const char* call) noexcept {
  if (code == cudaSuccess) return {};
  return {.origin = Foreign::Origin::cuda, .code = static_cast<int>(code), .text = cudaGetErrorString(code), .call = call};
}

}  // namespace metrale::cutlass
