// SPDX-License-Identifier: Apache-2.0
//
// Compiled without contraction, for the sake of sampling_math.h.
#include "sampling/sampling.h"

#include <algorithm>
#include <array>

#include "metrale/models/decoder_kernels.h"
#include "metrale/models/sampling_math.h"

namespace metrale::host::sampling {
namespace {

using namespace metrale::sampling;

void advance(const BlockContext& c) {
  const auto p = c.arg<AdvanceParams>(4);
  const std::int32_t token = *c.ptr<const std::int32_t>(0);
  c.ptr<std::int32_t>(3)[p.index] = token;
  *c.ptr<std::int32_t>(2) = token < 0 ? 0 : token;
  ++c.ptr<StepHeader>(1)->position;
}

/// What is kept of a row: every logit above `key`, and the first `ties` of those that equal it.
struct Kept {
  std::uint32_t key = 0;
  std::uint64_t ties = 0;
};

class Row {
 public:
  Row(const float* logits, const std::uint64_t* weights, std::uint32_t n) : logits_(logits), weights_(weights), n_(n) {}

  /// The largest key for which the logits of this key and above reach `goal` together, in number or in weight. Nothing is sorted:
  /// keys are halved 32 times.
  Kept reach(std::uint64_t goal, bool by_weight, std::uint32_t from) const {
    std::uint64_t above = 0;  // what those from `end` on reach, less than the goal
    std::uint64_t end = std::uint64_t{1} << 32;
    std::uint64_t key = from;
    while (end - key > 1) {
      const std::uint64_t middle = key + (end - key) / 2;
      std::uint64_t sum = 0;
      for (std::uint32_t i = 0; i < n_; ++i) sum += order_key(logits_[i]) >= middle ? by_weight ? weights_[i] : 1 : 0;
      if (sum >= goal) {
        key = middle;
      } else {
        end = middle;
        above = sum;
      }
    }
    std::uint64_t each = 1;
    for (std::uint32_t i = 0; i < n_ && by_weight; ++i) {
      if (order_key(logits_[i]) == key) each = weights_[i];
    }
    return {static_cast<std::uint32_t>(key), each == 0 ? 0 : (goal - above + each - 1) / each};
  }

  /// Calls visit(id, weight) for what is kept, ids rising, until it returns true.
  template <class Visit>
  void each(Kept kept, Visit visit) const {
    for (std::uint32_t i = 0; i < n_; ++i) {
      const std::uint32_t key = order_key(logits_[i]);
      if (key < kept.key || (key == kept.key && kept.ties == 0)) continue;
      if (key == kept.key) --kept.ties;
      if (visit(i, weights_[i])) return;
    }
  }
  std::uint64_t total(const Kept& kept) const {
    std::uint64_t sum = 0;
    each(kept, [&](std::uint32_t, std::uint64_t weight) {
      sum += weight;
      return false;
    });
    return sum;
  }

 private:
  const float* logits_;
  const std::uint64_t* weights_;
  std::uint32_t n_;
};

void sample(const BlockContext& c) {
  const auto p = c.arg<SampleParams>(4);
  const float* logits = c.ptr<const float>(0);
  const auto* inputs = c.ptr<const SamplingInputs>(1);
  const auto* draws = reinterpret_cast<const double*>(inputs + 1);
  auto* token = c.ptr<std::int32_t>(2);
  auto* weights = c.ptr<std::uint64_t>(3);
  const std::int32_t best = *token;
  if (best < 0) return;
  const int bits = weight_bits(p.n);
  for (std::uint32_t i = 0; i < p.n; ++i) weights[i] = weight_of(logits[i], logits[best], inputs->inverse_temperature, bits);

  const Row row(logits, weights, p.n);
  Kept kept;
  if (inputs->top_k != 0 && inputs->top_k < p.n) kept = row.reach(inputs->top_k, false, 0);
  if (inputs->top_p < 1.0F) kept = row.reach(wanted_weight(row.total(kept), inputs->top_p), true, kept.key);
  const std::uint64_t target = draw_target(row.total(kept), draws[p.draw]);
  std::uint64_t passed = 0;
  row.each(kept, [&](std::uint32_t id, std::uint64_t weight) {
    passed += weight;
    if (passed <= target) return false;
    *token = static_cast<std::int32_t>(id);
    return true;
  });
}

constexpr std::array<std::uint32_t, 5> kSample{8, 8, 8, 8, sizeof(SampleParams)};
constexpr std::array<std::uint32_t, 5> kAdvance{8, 8, 8, 8, sizeof(AdvanceParams)};
constexpr std::array<HostKernel, 2> kKernels{
    {{kSamplingModule, "sample", sample, kSample, {}, false}, {kSamplingModule, "advance", advance, kAdvance, {}, false}}};

}  // namespace

std::span<const HostKernel> kernels() noexcept { return kKernels; }

}  // namespace metrale::host::sampling
