// SPDX-License-Identifier: Apache-2.0
#include "metrale/bridges/nvfp4.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "bridges/cutlass/nvfp4_codes.h"
#include "metrale/types.h"

namespace metrale::cutlass {
namespace {

using Site = std::source_location;

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

std::uint8_t to_e2m1(float value) noexcept { return codes::to_e2m1(value); }
float from_e2m1(std::uint8_t code) noexcept { return codes::from_e2m1(code); }
std::uint8_t to_ue4m3(float value) noexcept { return codes::to_ue4m3(value); }
float from_ue4m3(std::uint8_t code) noexcept { return codes::from_ue4m3(code); }

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
    m.scales[g] = codes::group_scale(largest, m.alpha);
    const float step = codes::group_step(m.scales[g], m.alpha);
    for (std::uint32_t i = 0; i < kNvfp4Group; i += 2) {
      const std::uint8_t low = codes::group_code(group[i], step);
      const std::uint8_t high = codes::group_code(group[i + 1], step);
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
    values[i] = from_e2m1(code) * codes::group_step(m.scales[i / kNvfp4Group], m.alpha);
  }
  return values;
}

std::uint64_t tiled_scale_bytes(std::uint32_t rows, std::uint32_t cols) noexcept {
  return round_up(rows, codes::kTileRows) * round_up(div_ceil(cols, kNvfp4Group), codes::kTileGroups);
}

Result<std::vector<std::uint8_t>> tile_nvfp4_scales(std::span<const std::uint8_t> scales, std::uint32_t rows, std::uint32_t cols,
                                                    Site site) {
  METRALE_TRY(check_size(rows, cols, site));
  const std::uint64_t groups = cols / kNvfp4Group;
  METRALE_TRY(check_count("scales", scales.size(), rows * groups, site));
  const std::uint64_t tiles_across = div_ceil(groups, codes::kTileGroups);
  std::vector<std::uint8_t> tiled(tiled_scale_bytes(rows, cols));
  for (std::uint64_t r = 0; r < rows; ++r) {
    for (std::uint64_t g = 0; g < groups; ++g) {
      tiled[codes::tiled_place(r, g, tiles_across)] = scales[r * groups + g];
    }
  }
  return tiled;
}

}  // namespace metrale::cutlass
