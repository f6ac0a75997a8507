// SPDX-License-Identifier: Apache-2.0
//
// Plain host code that turns stored weights into floats: the reference that fast kernels are compared with, and the converter for
// small tensors at load. Pure functions over caller's memory, any thread.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "metrale/dtype.h"
#include "metrale/result.h"

namespace metrale {

/// The value of an IEEE half, exactly; NaN keeps its sign and payload.
constexpr float f16_to_f32(std::uint16_t bits) noexcept {
  const std::uint32_t sign = std::uint32_t{bits & 0x8000U} << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1FU;
  const std::uint32_t mantissa = bits & 0x3FFU;
  if (exponent == 0x1F) return std::bit_cast<float>(sign | 0x7F800000U | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;  // subnormal or zero
  return sign != 0 ? -magnitude : magnitude;
}

/// The value of a bfloat16, exactly.
constexpr float bf16_to_f32(std::uint16_t bits) noexcept { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

/// The nearest bfloat16, ties to even; NaN stays NaN.
constexpr std::uint16_t f32_to_bf16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

/// Whether `dequantise` knows the type: f32, f16, bf16, q4_0, q4_1, q8_0, q4_k, q6_k.
bool can_dequantise(DType type) noexcept;

/// Writes the `dst.size()` elements that `src` stores as `type`. Exact for f32, f16, bf16, q4_0 and q8_0 with at most one rounding
/// per element; the others multiply and add in float, and a compiler that fuses the two changes the last bit.
/// Errors: unsupported (another type), invalid_argument (`src` is not the size of `dst.size()` elements); `dst` is untouched.
/// Source: block layouts of the ggml repository, ggml-common.h.
Result<> dequantise(DType type, std::span<const std::byte> src, std::span<float> dst);

}  // namespace metrale
