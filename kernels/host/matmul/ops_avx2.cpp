// SPDX-License-Identifier: Apache-2.0
#define METRALE_ISA isa_avx2
// clang-format off
#include "simd.h"
#include "linear_impl.h"
// clang-format on

namespace metrale::host::matmul {

const Ops kOpsAvx2 = {METRALE_ISA::prepare_as_rows, METRALE_ISA::linear_on_rows};

}  // namespace metrale::host::matmul
