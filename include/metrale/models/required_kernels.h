// SPDX-License-Identifier: Apache-2.0
//
// The kernels that the reference decoders need of every backend; `metgpu kernels --check` looks them up one by one. A decoder may
// need more of a backend whose kernels come in special forms too (decoder_kernels.h, "optional"; on CUDA kernels/cuda/include/
// matmul_plan.h). Constants; any thread.
#pragma once

#include <array>
#include <string_view>

#include "metrale/models/decoder_kernels.h"
#include "metrale/models/matmul_kernels.h"
#include "metrale/models/sampling_kernels.h"

namespace metrale {

struct KernelName {
  std::string_view module;
  std::string_view function;
};

inline constexpr std::array kRequiredKernels{
    KernelName{kMatmulModule, "repack"},   KernelName{kMatmulModule, "gather"},    KernelName{kMatmulModule, "prepare"},
    KernelName{kMatmulModule, "linear"},   KernelName{kMatmulModule, "linear4"},   KernelName{kMatmulModule, "swiglu"},
    KernelName{kDecoderModule, "widen"},   KernelName{kDecoderModule, "rotary"},   KernelName{kDecoderModule, "rotate_store"},
    KernelName{kDecoderModule, "attend"},  KernelName{kDecoderModule, "conv"},     KernelName{kDecoderModule, "attend_one"},
    KernelName{kDecoderModule, "delta"},   KernelName{kDecoderModule, "argmax"},   KernelName{kDecoderModule, "score"},
    KernelName{kSamplingModule, "sample"}, KernelName{kSamplingModule, "advance"},
};

}  // namespace metrale
