// SPDX-License-Identifier: Apache-2.0
#include "bench/statistics.h"

#include <algorithm>
#include <vector>

namespace metrale::bench {

double quantile(std::span<const double> sorted, double fraction) noexcept {
  const double place = fraction * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  if (below + 1 >= sorted.size()) return sorted.back();
  const double share = place - static_cast<double>(below);
  return sorted[below] + share * (sorted[below + 1] - sorted[below]);
}

Summary summarise(std::span<const double> samples) {
  if (samples.empty()) return {};
  std::vector<double> sorted(samples.begin(), samples.end());
  std::ranges::sort(sorted);
  return {.count = sorted.size(),
          .min = sorted.front(),
          .p10 = quantile(sorted, 0.1),
          .median = quantile(sorted, 0.5),
          .p90 = quantile(sorted, 0.9),
          .max = sorted.back()};
}

}  // namespace metrale::bench
