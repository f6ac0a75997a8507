// SPDX-License-Identifier: Apache-2.0
#include "bridges/cutlass/hopper_launch.cuh"

namespace metrale::cutlass {

const HopperKernel kHopperFp8 = HopperInstance<::cutlass::float_e4m3_t, 128, 6>::kKernel;

}  // namespace metrale::cutlass
