// SPDX-License-Identifier: Apache-2.0
#include "bridges/cutlass/hopper_launch.cuh"

namespace metrale::cutlass {

const HopperKernel kHopperBf16Wide = HopperInstance<::cutlass::bfloat16_t, 256, 4>::kKernel;

}  // namespace metrale::cutlass
