// SPDX-License-Identifier: Apache-2.0
#include "metrale/models/required_kernels.h"

#include "metrale/models/decoder_kernels.h"
#include "metrale/models/matmul_kernels.h"
#include "metrale/models/sampling_kernels.h"
#include "models/decoder/launch_plans.h"

namespace metrale {

Result<std::vector<KernelName>> required_kernels(GpuBackend& backend) {
  const auto plans = METRALE_TRY(models::launch_plans(backend));
  std::vector<KernelName> names{
      {kMatmulModule, "repack"},    {kMatmulModule, "gather"}, {kMatmulModule, "prepare"},  {kMatmulModule, "linear"},
      {kMatmulModule, "linear4"},   {kMatmulModule, "swiglu"}, {kDecoderModule, "widen"},   {kDecoderModule, "rotary"},
      {kDecoderModule, "attend"},   {kDecoderModule, "conv"},  {kDecoderModule, "delta"},   {kDecoderModule, "rotate_store"},
      {kDecoderModule, "argmax"},   {kDecoderModule, "score"}, {kSamplingModule, "sample"}, {kDecoderModule, "attend_one"},
      {kSamplingModule, "advance"},
  };
  if (plans->has_rotate_attend()) names.push_back({kDecoderModule, "rotate_attend"});
  for (const std::string_view entry : plans->matmul_entries()) names.push_back({kMatmulModule, entry});
  return names;
}

}  // namespace metrale
