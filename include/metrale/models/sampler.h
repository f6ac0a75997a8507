// SPDX-License-Identifier: Apache-2.0
//
// Sampler: picks the next token from a row of logits. The same options, seed and logits give the same tokens on every platform, and
// on a device that samples itself: the generator and the exponential are its own, and probabilities are summed as whole numbers
// (sampling_math.h). It holds the state of the generator, so one sampler serves one sequence and one thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "metrale/models/tokenizer.h"
#include "metrale/result.h"

namespace metrale {

/// Filters apply in the order of the fields.
struct SamplerOptions {
  /// Logits are divided by this first. 0 means greedy: the largest logit wins, and the other fields have no effect.
  float temperature = 0.0F;
  /// Then the `top_k` largest logits stay. 0 keeps all.
  std::uint32_t top_k = 0;
  /// Then, of what is left, the most probable tokens stay until their probabilities sum to `top_p` or more; at least one. 1
  /// keeps all.
  float top_p = 1.0F;
  std::uint64_t seed = 0;
};

/// The index of the largest logit; of several, the lowest.
/// Errors: invalid_argument (no logits), internal (a logit is NaN or +inf, or all are -inf: the message names the position).
/// Threads: any.
Result<TokenId> argmax(std::span<const float> logits);

class Sampler {
 public:
  /// Errors: invalid_argument (temperature negative or not finite, top_p outside (0, 1]).
  static Result<Sampler> create(const SamplerOptions& options);

  /// Draws a token from `logits`, [vocab]. Equal logits count the lower id as the larger, in every filter. -inf is never drawn.
  /// Errors: as `argmax`; the generator is as before.
  Result<TokenId> next(std::span<const float> logits);

  const SamplerOptions& options() const noexcept { return options_; }
  /// 0 for greedy.
  double inverse_temperature() const noexcept {
    return options_.temperature == 0.0F ? 0.0 : 1.0 / static_cast<double>(options_.temperature);
  }
  /// The next uniform number in [0, 1), for a device that draws with it. `next` takes one for each token too.
  double uniform();

 private:
  struct Candidate {
    TokenId id;
    std::uint64_t weight;
  };

  explicit Sampler(const SamplerOptions& options);
  SamplerOptions options_;
  std::uint64_t state_[4];
  std::vector<Candidate> candidates_;  // kept between calls for its memory
};

}  // namespace metrale
