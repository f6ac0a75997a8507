// SPDX-License-Identifier: Apache-2.0
//
// The largest logit and the sum of exponentials, for one instruction set: included by ops_<isa>.cpp after attention.inl.
#pragma once

namespace metrale::host::decoder::METRALE_ISA {

/// The largest of `n` logits, the lowest index among equals; -1 where one is NaN or +inf, or all are -inf.
static std::int32_t argmax(const RowCall& c) {
  constexpr float kInfinity = __builtin_inff();
  std::uint32_t i = 0;
  Vec top = splat(-kInfinity);
  IntVec bad{};  // lanes that met a NaN or +inf
  for (; i + kLanes <= c.n; i += kLanes) {
    const Vec x = load(c.logits + i);
    bad |= ~(x < kInfinity);
    top = max(top, x);
  }
  float largest = max_lanes(top);
  bool refused = any(bad);
  for (; i < c.n; ++i) {
    refused = refused || !(c.logits[i] < kInfinity);
    largest = c.logits[i] > largest ? c.logits[i] : largest;
  }
  if (refused || !(largest > -kInfinity)) return -1;
  i = 0;
  for (; i + kLanes <= c.n; i += kLanes) {
    const IntVec hit = load(c.logits + i) == largest;
    if (!any(hit)) continue;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (hit[lane] != 0) return static_cast<std::int32_t>(i) + lane;
    }
  }
  for (; c.logits[i] != largest; ++i) {
  }
  return static_cast<std::int32_t>(i);
}

static RowFacts row_facts(const RowCall& c) {
  const std::int32_t best = argmax(c);
  if (best < 0) return {best, 0, 0};
  const float largest = c.logits[best];
  double sum = 0;
  for (std::uint32_t i = 0; i < c.n;) {
    // Partial sums of a few thousand floats keep their error far below that of one exponential.
    Vec part{};
    const std::uint32_t stop = c.n - i < 4096 ? c.n : i + 4096;
    for (; i + kLanes <= stop; i += kLanes) part += exp(load(c.logits + i) - largest);
    sum += static_cast<double>(sum_lanes(part));
    for (; i < stop; ++i) sum += static_cast<double>(exponential(c.logits[i] - largest));
  }
  return {best, largest, sum};
}

}  // namespace metrale::host::decoder::METRALE_ISA
