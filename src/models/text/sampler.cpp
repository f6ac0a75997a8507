// SPDX-License-Identifier: Apache-2.0
//
// Compiled without contraction of multiplication and addition: the results must not depend on what the processor can fuse.
#include "metrale/models/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "metrale/models/sampling_math.h"

namespace metrale {
namespace {

// SplitMix64, to spread a seed over the state of the generator.
std::uint64_t split_mix(std::uint64_t& state) {
  state += 0x9e3779b97f4a7c15U;
  std::uint64_t z = state;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9U;
  z = (z ^ z >> 27) * 0x94d049bb133111ebU;
  return z ^ z >> 31;
}

Error bad_logit(std::size_t position, std::size_t count, float value) {
  return Error(Errc::internal,
               fmt::format("logit {} of {} is {}: the model's numbers are no longer finite", position, count, value));
}

// Position of the winner.
Result<std::size_t> best_of(std::span<const float> logits) {
  if (logits.empty() || logits.size() > static_cast<std::size_t>(std::numeric_limits<TokenId>::max()))
    return Error(Errc::invalid_argument, fmt::format("choose among {} logits: 1 to 2^31 - 1 are needed", logits.size()));
  std::size_t best = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (!(logits[i] <= std::numeric_limits<float>::max())) [[unlikely]]
      return bad_logit(i, logits.size(), logits[i]);
    if (logits[i] > logits[best]) best = i;
  }
  if (logits[best] == -std::numeric_limits<float>::infinity())
    return Error(Errc::internal, fmt::format("all of {} logits are -inf: no token is left to choose", logits.size()));
  return best;
}

}  // namespace

Result<TokenId> argmax(std::span<const float> logits) { return static_cast<TokenId>(METRALE_TRY(best_of(logits))); }

Result<Sampler> Sampler::create(const SamplerOptions& options) {
  if (!(options.temperature >= 0.0F) || !std::isfinite(options.temperature))
    return Error(Errc::invalid_argument,
                 fmt::format("temperature {}: a finite number of 0 or more is needed", options.temperature));
  if (!(options.top_p > 0.0F) || options.top_p > 1.0F)
    return Error(Errc::invalid_argument, fmt::format("top_p {}: a number above 0, at most 1, is needed", options.top_p));
  return Sampler(options);
}

Sampler::Sampler(const SamplerOptions& options) : options_(options) {
  std::uint64_t seed = options.seed;
  for (std::uint64_t& word : state_) word = split_mix(seed);
}

// xoshiro256**; the upper 53 bits as a number in [0, 1).
double Sampler::uniform() {
  const std::uint64_t result = std::rotl(state_[1] * 5, 7) * 9;
  const std::uint64_t t = state_[1] << 17;
  state_[2] ^= state_[0];
  state_[3] ^= state_[1];
  state_[1] ^= state_[2];
  state_[0] ^= state_[3];
  state_[2] ^= t;
  state_[3] = std::rotl(state_[3], 45);
  return static_cast<double>(result >> 11) * 0x1p-53;
}

Result<TokenId> Sampler::next(std::span<const float> logits) {
  const std::size_t best = METRALE_TRY(best_of(logits));
  if (options_.temperature == 0.0F) return static_cast<TokenId>(best);

  // Weights are whole numbers, whose sums do not depend on their order.
  auto& left = candidates_;
  left.clear();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] != -std::numeric_limits<float>::infinity()) left.push_back({static_cast<TokenId>(i), 0});
  }
  const auto before = [logits](const Candidate& a, const Candidate& b) {
    const float x = logits[static_cast<std::size_t>(a.id)];
    const float y = logits[static_cast<std::size_t>(b.id)];
    return x != y ? x > y : a.id < b.id;
  };
  if (options_.top_k != 0 && options_.top_k < left.size()) {
    std::nth_element(left.begin(), left.begin() + options_.top_k, left.end(), before);
    left.resize(options_.top_k);
  }
  const int bits = sampling::weight_bits(static_cast<std::uint32_t>(logits.size()));
  const double inverse_temperature = this->inverse_temperature();
  std::uint64_t total = 0;
  for (Candidate& candidate : left) {
    candidate.weight = sampling::weight_of(logits[static_cast<std::size_t>(candidate.id)], logits[best], inverse_temperature, bits);
    total += candidate.weight;
  }
  if (options_.top_p < 1.0F) {
    // The most probable are sorted block by block, since few are needed as a rule.
    const std::uint64_t wanted = sampling::wanted_weight(total, options_.top_p);
    std::uint64_t kept = 0;
    std::size_t count = 0;
    std::size_t sorted = 0;
    std::size_t block = 64;
    while (count < left.size() && kept < wanted) {
      if (count == sorted) {
        sorted = std::min(left.size(), sorted + block);
        block *= 4;
        const auto first = left.begin() + static_cast<std::ptrdiff_t>(count);
        const auto last = left.begin() + static_cast<std::ptrdiff_t>(sorted);
        std::nth_element(first, last, left.end(), before);
        std::sort(first, last, before);
      }
      kept += left[count++].weight;
    }
    left.resize(count);
    total = kept;
  }
  // The filters leave them in any order.
  if (options_.top_k != 0 || options_.top_p < 1.0F) std::ranges::sort(left, {}, &Candidate::id);
  const std::uint64_t target = sampling::draw_target(total, uniform());
  std::uint64_t passed = 0;
  TokenId chosen = static_cast<TokenId>(best);  // also where rounding puts the target at the sum
  for (const Candidate& candidate : left) {
    passed += candidate.weight;
    if (passed > target) {
      chosen = candidate.id;
      break;
    }
  }
  return chosen;
}

}  // namespace metrale
