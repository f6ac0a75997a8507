// SPDX-License-Identifier: Apache-2.0
//
// Checks that the parsers share.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/result.h"
#include "metrale/tensor_info.h"

namespace metrale::weights {

/// Product of `shape`, or nullopt on overflow. 1 for an empty shape.
std::optional<std::uint64_t> element_count(std::span<const std::uint64_t> shape) noexcept;

/// Checks that the ranges of `tensors`, which are sorted by offset and lie in one file, do not overlap. Empty tensors
/// overlap nothing.
/// Errors: bad_format, naming both tensors.
Result<> check_no_overlap(std::span<const TensorInfo> tensors, std::string_view label);

/// Up to `limit` of `names` that resemble `name`, by edit distance, most similar first.
std::vector<std::string> nearest_names(std::string_view name, std::span<const std::string_view> names, std::size_t limit);

/// Orders names so that numbers in them count as numbers: "table.2" before "table.10".
bool natural_less(std::string_view a, std::string_view b) noexcept;

/// "; nearest: "a", "b"", or nothing when there are none.
std::string nearest_text(std::span<const std::string> names);

}  // namespace metrale::weights
