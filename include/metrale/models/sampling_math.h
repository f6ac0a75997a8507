// SPDX-License-Identifier: Apache-2.0
//
// Probabilities as whole numbers, so that their sums do not depend on the order and a token drawn on a device is the one that the
// host would have drawn. Every operation rounds on its own: compile host code that includes this without contraction. Pure
// functions; any thread.
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define METRALE_HOST_DEVICE __host__ __device__
#else
#define METRALE_HOST_DEVICE
#endif

namespace metrale::sampling {

#if defined(__CUDA_ARCH__)
__device__ inline double mul(double a, double b) { return __dmul_rn(a, b); }
__device__ inline double add(double a, double b) { return __dadd_rn(a, b); }
__device__ inline double bits_to_double(std::uint64_t bits) { return __longlong_as_double(static_cast<long long>(bits)); }
__device__ inline std::uint32_t float_to_bits(float x) { return __float_as_uint(x); }
#else
inline double mul(double a, double b) { return a * b; }
inline double add(double a, double b) { return a + b; }
inline double bits_to_double(std::uint64_t bits) { return std::bit_cast<double>(bits); }
inline std::uint32_t float_to_bits(float x) { return std::bit_cast<std::uint32_t>(x); }
#endif

/// Bits of the weight of the largest of `n` logits: as many as leave the sum of all below 2^63.
METRALE_HOST_DEVICE constexpr int weight_bits(std::uint32_t n) { return n <= (1U << 22) ? 40 : 31; }

/// e^x for x <= 0 in units of 2^-bits, cut off.
METRALE_HOST_DEVICE inline std::uint64_t weight(double x, int bits) {
  if (!(x > -46.0)) return 0;  // below 2^-66
  const double shifted = add(mul(x, 1.4426950408889634), 0.5);
  auto k = static_cast<std::int64_t>(shifted);
  if (static_cast<double>(k) > shifted) --k;  // the floor
  const auto whole = static_cast<double>(k);
  // ln(2) in two parts, the first short enough that its product with k is exact.
  const double r = add(add(x, -mul(whole, 0x1.62e42fee00000p-1)), -mul(whole, 0x1.a39ef35793c76p-33));
  // Taylor: |r| <= ln(2) / 2, so the first term left out is below 2^-57.
  constexpr double kInverseFactorials[] = {
      1.0,        1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,
      1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
  double sum = kInverseFactorials[13];
  for (int i = 12; i >= 0; --i) sum = add(kInverseFactorials[i], mul(sum, r));
  const double scale = bits_to_double(static_cast<std::uint64_t>(1023 + k + bits) << 52);  // 2^(k + bits)
  return static_cast<std::uint64_t>(mul(sum, scale));
}

/// The weight of a logit beside the largest.
METRALE_HOST_DEVICE inline std::uint64_t weight_of(float logit, float largest, double inverse_temperature, int bits) {
  return weight(mul(static_cast<double>(logit) - static_cast<double>(largest), inverse_temperature), bits);
}

/// Orders finite logits as whole numbers; the two zeros are one. -inf comes below all.
METRALE_HOST_DEVICE inline std::uint32_t order_key(float logit) {
  const std::uint32_t bits = logit == 0.0F ? 0 : float_to_bits(logit);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000U;
}

/// The weight that the most probable tokens must reach together, at least 1.
METRALE_HOST_DEVICE inline std::uint64_t wanted_weight(std::uint64_t total, float top_p) {
  const auto wanted = static_cast<std::uint64_t>(mul(static_cast<double>(total), static_cast<double>(top_p)));
  return wanted == 0 ? 1 : wanted;
}

/// Where a uniform number in [0, 1) falls: the first token whose running sum of weights, by rising id, exceeds it is drawn.
METRALE_HOST_DEVICE inline std::uint64_t draw_target(std::uint64_t total, double uniform) {
  return static_cast<std::uint64_t>(mul(static_cast<double>(total), uniform));
}

}  // namespace metrale::sampling
