// SPDX-License-Identifier: Apache-2.0
//
// The fake's own functions, one for each of the table. Their rules are in the files that define them.
#pragma once

#include <cuda.h>

#include "backends/cuda/driver.h"

namespace metrale::fake_cuda::api {

// The names of cuda.h may be macros (cuMemAlloc is cuMemAlloc_v2); each declaration has the type that cuda.h gives that name.
template <class F>
struct Signature;
template <class... A>
struct Signature<CUresult (*)(A...)> {
  using type = CUresult(A...);
};
#define METRALE_FAKE_CUDA_DECLARE(name, version) Signature<decltype(&::name)>::type name;
METRALE_CUDA_REQUIRED(METRALE_FAKE_CUDA_DECLARE)
METRALE_CUDA_OPTIONAL(METRALE_FAKE_CUDA_DECLARE)
#undef METRALE_FAKE_CUDA_DECLARE

}  // namespace metrale::fake_cuda::api
