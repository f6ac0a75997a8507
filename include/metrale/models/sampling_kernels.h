// SPDX-License-Identifier: Apache-2.0
//
// The kernels between two steps of a decoder that the host does not wait between: names, argument lists and by-value structs, as in
// decoder_kernels.h. Plain values; any thread.
//
// Module kSamplingModule (B = Buffer, P = by-value struct):
//   advance   B token, B step, B ids, B tokens, P AdvanceParams    makes the chosen token the input of the next step
// Grid and block {1}.
#pragma once

#include <cstdint>
#include <string_view>

namespace metrale {

inline constexpr std::string_view kSamplingModule = "sampling";

/// tokens[index] = token[0]; ids[0] = token[0], or 0 where that is negative, so that the steps that follow a failed one stay inside
/// the vocabulary; step.position += 1. All int32.
struct AdvanceParams {
  std::uint32_t index = 0;
};

}  // namespace metrale
