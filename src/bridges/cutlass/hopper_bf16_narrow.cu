// SPDX-License-Identifier: Apache-2.0
#include "bridges/cutlass/hopper_launch.cuh"

namespace metrale::cutlass {

const HopperKernel kHopperBf16Narrow = HopperInstance<::cutlass::bfloat16_t, 128, 6>::kKernel;

}  // namespace metrale::cutlass
