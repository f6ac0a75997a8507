// SPDX-License-Identifier: Apache-2.0
#include "bridges/cutlass/nvfp4_gemm.cuh"

namespace metrale::cutlass {

using ::cute::_1;
using ::cute::_128;

const Nvfp4Kernel kNvfp4Sm120 =
    Nvfp4Gemm<::cutlass::arch::Sm120, ::cute::Shape<_128, _128, _128>, ::cute::Shape<_1, _1, _1>>::kKernel;

}  // namespace metrale::cutlass
