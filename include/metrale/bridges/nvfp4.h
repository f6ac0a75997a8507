// SPDX-License-Identifier: Apache-2.0
//
// NVFP4 on the host: 4-bit values (E2M1) with a scale (E4M3 without sign) for each 16 in a row and one factor (alpha) for the whole
// matrix; value = alpha · scale · code. What the device packs, these functions give bit for bit. Pure; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <source_location>
#include <span>
#include <vector>

#include "metrale/result.h"

namespace metrale::cutlass {

/// Values that share a scale.
inline constexpr std::uint32_t kNvfp4Group = 16;
/// Largest magnitudes of a code and of a scale.
inline constexpr float kMostE2m1 = 6;
inline constexpr float kMostUe4m3 = 448;

struct Nvfp4Matrix {
  std::uint32_t rows = 0;
  std::uint32_t cols = 0;
  float alpha = 1;
  std::vector<std::uint8_t> values;  ///< [rows, cols / 2]: the even column in the low half of a byte.
  std::vector<std::uint8_t> scales;  ///< [rows, cols / 16]
};

/// The code nearest to `value`, of two as near the even one; beyond 6 the largest, NaN as +6: as the device converts.
std::uint8_t to_e2m1(float value) noexcept;
float from_e2m1(std::uint8_t code) noexcept;
/// The scale nearest to `value`, of two as near the even one; beyond 448 the largest. Negative values are 0, NaN stays NaN (0x7F).
std::uint8_t to_ue4m3(float value) noexcept;
float from_ue4m3(std::uint8_t code) noexcept;

/// Packs a matrix [rows, cols]. Without `alpha` it is the largest magnitude / (6 · 448), so that every scale fits.
/// Errors: invalid_argument (no rows or columns, columns no multiple of 16, another number of values, alpha not finite and above 0,
/// a value that is not finite).
Result<Nvfp4Matrix> pack_nvfp4(std::span<const float> values, std::uint32_t rows, std::uint32_t cols,
                               std::optional<float> alpha = std::nullopt,
                               std::source_location site = std::source_location::current());
/// [rows, cols]. Errors: invalid_argument (sizes that do not go together).
Result<std::vector<float>> unpack_nvfp4(const Nvfp4Matrix& matrix, std::source_location site = std::source_location::current());

/// Bytes of the scales of [rows, cols] in tiles: rows padded to 128, groups to 4.
std::uint64_t tiled_scale_bytes(std::uint32_t rows, std::uint32_t cols) noexcept;
/// The scales as tensor cores of SM100 and SM120 read them: tiles of 128 rows by 4 groups, 512 bytes each, row-major; in a tile,
/// row r and group g are at (r % 32) · 16 + r / 32 · 4 + g. Padding is 0.
/// Errors: invalid_argument (sizes that do not go together).
Result<std::vector<std::uint8_t>> tile_nvfp4_scales(std::span<const std::uint8_t> scales, std::uint32_t rows, std::uint32_t cols,
                                                    std::source_location site = std::source_location::current());

}  // namespace metrale::cutlass
