// SPDX-License-Identifier: Apache-2.0
#include "metrale/backends/cuda_kernels.h"

namespace metrale::cuda {

std::string_view kernel_targets() { return METRALE_CUDA_TARGETS; }

}  // namespace metrale::cuda
