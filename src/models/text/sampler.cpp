// SPDX-License-Identifier: Apache-2.0
//
// Compiled without contraction of multiplication and addition: the results must not depend on what the processor can fuse.
#include "metrale/models/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace metrale {
namespace {

// e^x for x <= 0, to about an ulp. The C library's own differs between platforms in the last bit.
double exp_of_nonpositive(double x) {
  constexpr double kLog2E = 1.4426950408889634;
  constexpr double kLn2High = 0x1.62e42fee00000p-1;  // short enough that k * kLn2High is exact
  constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
  if (x < -700.0) return 0.0;
  const double k = std::floor(x * kLog2E + 0.5);
  const double r = (x - k * kLn2High) - k * kLn2Low;
  // Taylor: |r| <= ln(2) / 2, so the first term left out is below 2^-57.
  double sum = 1.0;
  for (int i = 13; i >= 1; --i) sum = 1.0 + sum * r / i;
  return std::ldexp(sum, static_cast<int>(k));
}

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

  // Everything below is in an order that the logits alone decide: sums in floating point depend on it.
  auto& left = candidates_;
  left.clear();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] != -std::numeric_limits<float>::infinity()) left.push_back({static_cast<TokenId>(i), 0.0});
  }
  const auto before = [logits](const Candidate& a, const Candidate& b) {
    const float x = logits[static_cast<std::size_t>(a.id)];
    const float y = logits[static_cast<std::size_t>(b.id)];
    return x != y ? x > y : a.id < b.id;
  };
  if (options_.top_k != 0 && options_.top_k < left.size()) {
    std::nth_element(left.begin(), left.begin() + options_.top_k, left.end(), before);
    left.resize(options_.top_k);
    std::sort(left.begin(), left.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  }
  const double largest = logits[best];
  const double temperature = options_.temperature;
  double total = 0.0;
  for (Candidate& candidate : left) {
    candidate.weight = exp_of_nonpositive((logits[static_cast<std::size_t>(candidate.id)] - largest) / temperature);
    total += candidate.weight;
  }
  if (options_.top_p < 1.0F) {
    // The most probable are sorted block by block, since few are needed as a rule.
    const double wanted = total * options_.top_p;
    double kept = 0.0;
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
  const double target = uniform() * total;
  double passed = 0.0;
  TokenId chosen = static_cast<TokenId>(best);  // also where rounding lets the sum end below the target
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
