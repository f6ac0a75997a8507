// SPDX-License-Identifier: Apache-2.0
#define METRALE_ISA isa_amx
// clang-format off
#include "simd.h"
#include "amx_impl.h"
// clang-format on

namespace metrale::host::matmul {

const Ops kOpsAmx = {METRALE_ISA::prepare, METRALE_ISA::linear};

}  // namespace metrale::host::matmul
