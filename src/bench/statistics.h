// SPDX-License-Identifier: Apache-2.0
//
// What a series of measurements comes to. Plain functions over values; any thread.
#pragma once

#include <cstddef>
#include <span>

namespace metrale::bench {

/// A series in five figures, in the unit of its samples; all 0 for an empty one.
struct Summary {
  std::size_t count = 0;
  double min = 0;
  double p10 = 0;
  double median = 0;
  double p90 = 0;
  double max = 0;
};

/// The value below which `fraction` of the samples lie, interpolated between neighbours. `sorted` ascends and is not empty.
double quantile(std::span<const double> sorted, double fraction) noexcept;

Summary summarise(std::span<const double> samples);

}  // namespace metrale::bench
