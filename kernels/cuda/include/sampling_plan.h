// SPDX-License-Identifier: Apache-2.0
//
// How the CUDA kernels of module "sampling" (metrale/models/sampling_kernels.h) are launched. Plain C++ without CUDA. Constants.
#pragma once

#include <cstdint>

namespace metrale::cuda::sampling {

/// `sample` runs as one cluster of so many blocks, built into its code; before sm_90 the first block does all the work.
inline constexpr std::uint32_t kSampleBlocks = 8;
inline constexpr std::uint32_t kSampleThreads = 512;

}  // namespace metrale::cuda::sampling
