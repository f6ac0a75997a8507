// SPDX-License-Identifier: Apache-2.0
//
// Module "sampling": what stands between two steps of a decoder. Contracts: metrale/models/sampling_kernels.h.
#include <cstdint>

#include "metrale/models/decoder_kernels.h"
#include "metrale/models/sampling_kernels.h"
#include "publish.cuh"

METRALE_PUBLISH_WAITS(advance);

// What follows reads the step's header before its own wait, so it is launched behind the end of this kernel.
extern "C" __global__ void __launch_bounds__(1) advance(const std::int32_t* token, metrale::StepHeader* step, std::int32_t* ids,
                                                        std::int32_t* tokens, const __grid_constant__ metrale::AdvanceParams p) {
  metrale::wait_for_predecessor();
  const std::int32_t chosen = *token;
  tokens[p.index] = chosen;
  *ids = chosen < 0 ? 0 : chosen;
  step->position += 1;
}
