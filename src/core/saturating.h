// SPDX-License-Identifier: Apache-2.0
//
// Count: a non-negative number that sticks at its limit instead of wrapping, so that a formula over unchecked shapes can be written
// plainly and judged once, at its end.
#pragma once

#include <algorithm>
#include <cstdint>

namespace metrale::detail {

class Count {
 public:
  /// Larger values are all this one.
  static constexpr std::uint64_t kLimit = std::uint64_t{1} << 62;

  constexpr Count() noexcept = default;
  constexpr Count(std::uint64_t value) noexcept : value_(std::min(value, kLimit)) {}  // NOLINT(google-explicit-constructor)

  constexpr std::uint64_t value() const noexcept { return value_; }
  constexpr bool saturated() const noexcept { return value_ == kLimit; }

  friend constexpr Count operator+(Count a, Count b) noexcept { return {a.value_ + b.value_}; }  // two limits do not wrap
  friend constexpr Count operator*(Count a, Count b) noexcept {
    std::uint64_t product = 0;
    return __builtin_mul_overflow(a.value_, b.value_, &product) ? Count(kLimit) : Count(product);
  }
  friend constexpr auto operator<=>(Count, Count) noexcept = default;

 private:
  std::uint64_t value_ = 0;
};

/// Rounded up to a multiple of `step`, or divided by it rounding up; `step` > 0 is small.
constexpr Count align_up(Count n, std::uint64_t step) noexcept { return {(n.value() + step - 1) / step * step}; }
constexpr Count ceil_div(Count n, std::uint64_t step) noexcept { return n.saturated() ? n : Count((n.value() + step - 1) / step); }

}  // namespace metrale::detail
