// SPDX-License-Identifier: Apache-2.0
//
// The one place where FlashInfer's exceptions and CUDA's codes become an Outcome.
#pragma once

#include <cuda_runtime.h>

#include <exception>

#include "bridges/flashinfer/kernels.h"

namespace metrale::fi {

/// Calls `work`, which answers a cudaError_t. Takes CUDA's pending code with it, so that no later call inherits it.
template <class Work>
Outcome guarded(const Work& work) noexcept {
  try {
    Outcome outcome;
    try {
      const cudaError_t code = work();
      if (code != cudaSuccess) outcome = {.cuda = code, .text = cudaGetErrorString(code)};
    } catch (const std::exception& thrown) {
      outcome.text = thrown.what();
    } catch (...) {
      outcome.text = "something that is no std::exception was thrown";
    }
    const cudaError_t pending = cudaGetLastError();
    if (outcome.ok() && pending != cudaSuccess) outcome = {.cuda = pending, .text = cudaGetErrorString(pending)};
    return outcome;
  } catch (...) {
    return {.cuda = cudaErrorMemoryAllocation, .text = {}};  // no memory for a message
  }
}

inline cudaStream_t stream_of(std::uint64_t native) noexcept { return reinterpret_cast<cudaStream_t>(native); }

}  // namespace metrale::fi
