// SPDX-License-Identifier: Apache-2.0
//
// The codes of NVFP4, for host and device: constant expressions of integer and exact float operations, so that both have the same
// bits.
#pragma once

#include <bit>
#include <cstdint>

namespace metrale::cutlass::codes {

/// Rows and groups of a tile of scales, and its bytes.
inline constexpr std::uint32_t kTileRows = 128;
inline constexpr std::uint32_t kTileGroups = 4;
inline constexpr std::uint32_t kTileBytes = kTileRows * kTileGroups;

/// Where the scale of a row and group lies in the tiles of a matrix that has `tiles_across` of them side by side.
constexpr std::uint64_t tiled_place(std::uint64_t row, std::uint64_t group, std::uint64_t tiles_across) noexcept {
  return (row / kTileRows * tiles_across + group / kTileGroups) * kTileBytes + row % 32 * 16 + row % kTileRows / 32 * 4 +
         group % kTileGroups;
}

constexpr std::uint8_t to_e2m1(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return 7;  // NaN
  const float m = std::bit_cast<float>(bits & 0x7FFFFFFFU);
  // Ties, the last of each pair, go to the even code.
  const std::uint32_t code = m <= 0.25F   ? 0
                             : m < 0.75F  ? 1
                             : m <= 1.25F ? 2
                             : m < 1.75F  ? 3
                             : m <= 2.5F  ? 4
                             : m < 3.5F   ? 5
                             : m <= 5.0F  ? 6
                                          : 7;
  return static_cast<std::uint8_t>(code | ((bits >> 31) << 3));
}

constexpr float from_e2m1(std::uint8_t code) noexcept {
  const std::uint32_t c = code & 7U;
  // Two bits of exponent with bias 1, one of mantissa; code 1 is the only one below the least power.
  const float magnitude = c < 2 ? 0.5F * static_cast<float>(c) : std::bit_cast<float>(((c >> 1) + 126U) << 23 | (c & 1U) << 22);
  return (code & 8U) != 0 ? -magnitude : magnitude;
}

constexpr std::uint8_t to_ue4m3(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return 0x7F;  // NaN
  if (bits >> 31 != 0) return 0;
  if (value >= 448.0F) return 0x7E;
  if (value < 0.015625F) {
    // Steps of 2^-9. Adding 2^23 rounds to a whole number, of two as near the even one.
    const float sum = value * 512.0F + 8388608.0F;
    return static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(sum) & 0xFFU);
  }
  const std::uint32_t rounded = (bits + 0x7FFFFU + ((bits >> 20) & 1U)) >> 20;
  const std::uint32_t code = rounded - (120U << 3);
  return static_cast<std::uint8_t>(code < 0x7EU ? code : 0x7EU);
}

constexpr float from_ue4m3(std::uint8_t code) noexcept {
  const std::uint32_t c = code & 0x7FU;
  if (c == 0x7FU) return std::bit_cast<float>(0x7FC00000U);
  return c < 8 ? static_cast<float>(c) * 0.001953125F : std::bit_cast<float>(((c >> 3) + 120U) << 23 | (c & 7U) << 20);
}

/// The scale of a group whose largest magnitude is `largest`, and what a code of 1 stands for with it.
constexpr std::uint8_t group_scale(float largest, float alpha) noexcept { return to_ue4m3(largest / 6.0F / alpha); }
constexpr float group_step(std::uint8_t scale, float alpha) noexcept { return from_ue4m3(scale) * alpha; }
constexpr std::uint8_t group_code(float value, float step) noexcept { return step > 0 ? to_e2m1(value / step) : std::uint8_t{0}; }

}  // namespace metrale::cutlass::codes
