// SPDX-License-Identifier: Apache-2.0
//
// The kernels between two steps of a decoder that the host does not wait between: names, argument lists and by-value structs, as in
// decoder_kernels.h. Plain values; any thread.
//
// Module kSamplingModule (B = Buffer, P = by-value struct):
//   sample    B logits, B inputs, B token, B scratch, P SampleParams    draws a token as Sampler does
//   advance   B token, B step, B ids, B tokens, P AdvanceParams         makes the chosen token the input of the next step
// Grids and blocks: advance {1} and {1}; of sample they are the backend's own matter.
#pragma once

#include <cstdint>
#include <string_view>

namespace metrale {

inline constexpr std::string_view kSamplingModule = "sampling";

/// The first bytes of the `inputs` of `sample`, before `draws`, uniform numbers in [0, 1): double [..].
struct SamplingInputs {
  double inverse_temperature = 0;  ///< Positive.
  float top_p = 1;                 ///< As in SamplerOptions, and so is `top_k`.
  std::uint32_t top_k = 0;
};
static_assert(sizeof(SamplingInputs) == 16);

/// logits f32 [n], none of them NaN or +inf. token int32 [1]: on entry the largest logit's id as `argmax` finds it, or a negative
/// number, which stays; on return the token that the uniform number draws[draw] picks. scratch: uint64 [n].
struct SampleParams {
  std::uint32_t n = 0;
  std::uint32_t draw = 0;
};

/// tokens[index] = token[0]; ids[0] = token[0], or 0 where that is negative, so that the steps that follow a failed one stay inside
/// the vocabulary; step.position += 1. All int32.
struct AdvanceParams {
  std::uint32_t index = 0;
};

}  // namespace metrale
