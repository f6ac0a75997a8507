// SPDX-License-Identifier: Apache-2.0
#include "metrale/bridges/nvfp4.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include <fmt/format.h>

#include "metrale/types.h"

namespace metrale::cutlass {
namespace {

using Site = std::source_location;

constexpr std::array<float, 8> kE2m1{0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
constexpr std::uint64_t kTileRows = 128;
constexpr std::uint64_t kTileGroups = 4;
constexpr std::uint64_t kTileBytes = kTileRows * kTileGroups;

Result<> check_size(std::uint64_t rows, std::uint64_t cols, Site site) {
  if (rows == 0 || cols == 0 || cols % kNvfp4Group != 0) {
    return Error(Errc::invalid_argument,
                 fmt::format("a matrix of {} by {}: it has rows, and columns in groups of {}", rows, cols, kNvfp4Group), site);
  }
  return {};
}

Result<> check_count(std::string_view what, std::size_t there, std::uint64_t asked, Site site) {
  if (there == asked) return {};
  return Error(Errc::invalid_argument, fmt::format("{} {}, and the matrix has {}", there, what, asked), site);
}

}  // namespace

std::uint8_t to_e2m1(float value) noexcept {
  if (std::isnan(value)) return 7;
  const float magnitude = std::fabs(value);
  std::uint8_t code = 7;
  for (std::uint8_t i = 0; i < 7; ++i) {
    const float middle = (kE2m1[i] + kE2m1[i + 1U]) / 2;
    if (magnitude < middle || (magnitude == middle && i % 2 == 0)) {
      code = i;
      break;
    }
  }
  return static_cast<std::uint8_t>(code | (std::signbit(value) ? 8 : 0));
}

float from_e2m1(std::uint8_t code) noexcept {
  const float magnitude = kE2m1[code & 7U];
  return (code & 8U) != 0 ? -magnitude : magnitude;
}

std::uint8_t to_ue4m3(float value) noexcept {
  if (std::isnan(value)) return 0x7F;
  if (!(value > 0)) return 0;
  if (value >= kMostUe4m3) return 0x7E;
  // Below 2^-6 steps are 2^-9; above, an eighth of the power of two.
  int exponent = 0;
  std::frexp(value, &exponent);  // value = f · 2^exponent, f in [0.5, 1)
  exponent = std::max(exponent - 1, -6);
  const float steps = std::nearbyint(std::ldexp(value, 3 - exponent));  // 8 to 16, or 0 to 8 below 2^-6
  const int code = ((exponent + 6) << 3) + static_cast<int>(steps);
  return static_cast<std::uint8_t>(std::min(code, 0x7E));
}

float from_ue4m3(std::uint8_t code) noexcept {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  if ((code & 0x7F) == 0x7F) return std::nanf("");
  return exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9) : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
}

Result<Nvfp4Matrix> pack_nvfp4(std::span<const float> values, std::uint32_t rows, std::uint32_t cols, std::optional<float> alpha,
                               Site site) {
  METRALE_TRY(check_size(rows, cols, site));
  METRALE_TRY(check_count("values", values.size(), std::uint64_t{rows} * cols, site));
  float most = 0;
  for (const float value : values) {
    if (!std::isfinite(value)) return Error(Errc::invalid_argument, fmt::format("{} is among the values", value), site);
    most = std::max(most, std::fabs(value));
  }
  Nvfp4Matrix m{.rows = rows, .cols = cols, .values = {}, .scales = {}};
  m.alpha = alpha.value_or(most > 0 ? most / (kMostE2m1 * kMostUe4m3) : 1.0F);
  if (!std::isfinite(m.alpha) || m.alpha <= 0) {
    return Error(Errc::invalid_argument, fmt::format("alpha is {}; it is finite and above 0", m.alpha), site);
  }
  const std::uint64_t groups = values.size() / kNvfp4Group;
  m.values.resize(values.size() / 2);
  m.scales.resize(groups);
  for (std::uint64_t g = 0; g < groups; ++g) {
    const std::span group = values.subspan(g * kNvfp4Group, kNvfp4Group);
    float largest = 0;
    for (const float value : group) largest = std::max(largest, std::fabs(value));
    // The same operations in the same order as on the device: both are exact to the bit.
    m.scales[g] = to_ue4m3(largest / kMostE2m1 / m.alpha);
    const float step = from_ue4m3(m.scales[g]) * m.alpha;
    for (std::uint32_t i = 0; i < kNvfp4Group; i += 2) {
      const auto low = step > 0 ? to_e2m1(group[i] / step) : std::uint8_t{0};
      const auto high = step > 0 ? to_e2m1(group[i + 1] / step) : std::uint8_t{0};
      m.values[g * kNvfp4Group / 2 + i / 2] = static_cast<std::uint8_t>(low | high << 4);
    }
  }
  return m;
}

Result<std::vector<float>> unpack_nvfp4(const Nvfp4Matrix& m, Site site) {
  METRALE_TRY(check_size(m.rows, m.cols, site));
  const std::uint64_t count = std::uint64_t{m.rows} * m.cols;
  METRALE_TRY(check_count("bytes of values", m.values.size(), count / 2, site));
  METRALE_TRY(check_count("scales", m.scales.size(), count / kNvfp4Group, site));
  std::vector<float> values(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint8_t code = static_cast<std::uint8_t>(m.values[i / 2] >> (i % 2 * 4)) & 15U;
    values[i] = from_e2m1(code) * (from_ue4m3(m.scales[i / kNvfp4Group]) * m.alpha);
  }
  return values;
}

std::uint64_t tiled_scale_bytes(std::uint32_t rows, std::uint32_t cols) noexcept {
  return round_up(rows, kTileRows) * round_up(div_ceil(cols, kNvfp4Group), kTileGroups);
}

Result<std::vector<std::uint8_t>> tile_nvfp4_scales(std::span<const std::uint8_t> scales, std::uint32_t rows, std::uint32_t cols,
                                                    Site site) {
  METRALE_TRY(check_size(rows, cols, site));
  const std::uint64_t groups = cols / kNvfp4Group;
  METRALE_TRY(check_count("scales", scales.size(), rows * groups, site));
  const std::uint64_t tiles_across = div_ceil(groups, kTileGroups);
  std::vector<std::uint8_t> tiled(tiled_scale_bytes(rows, cols));
  for (std::uint64_t r = 0; r < rows; ++r) {
    for (std::uint64_t g = 0; g < groups; ++g) {
      const std::uint64_t tile = r / kTileRows * tiles_across + g / kTileGroups;
      const std::uint64_t place = r % 32 * 16 + r % kTileRows / 32 * 4 + g % kTileGroups;
      tiled[tile * kTileBytes + place] = scales[r * groups + g];
    }
  }
  return tiled;
}

}  // namespace metrale::cutlass
