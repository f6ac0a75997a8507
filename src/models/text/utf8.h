// SPDX-License-Identifier: Apache-2.0
//
// UTF-8 by hand: what text from outside needs that the standard library lacks.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace metrale::text {

/// What stands at the start of a string.
struct Utf8Step {
  std::uint32_t code_point = 0;  ///< Meaningless unless `valid`.
  std::uint8_t length = 0;       ///< Bytes to step over; at least 1, except at the end of the string, where it is 0.
  bool valid = false;
  bool truncated = false;  ///< Not valid, but would become so with further bytes.
};

/// Reads one code point. What is not valid has the length of the longest start of a code point, so that each such piece is replaced
/// by one U+FFFD, as the Unicode standard recommends and other decoders do.
Utf8Step utf8_step(std::string_view text) noexcept;

void append_utf8(std::uint32_t code_point, std::string& out);

/// How many leading bytes are valid UTF-8.
std::size_t valid_utf8_prefix(std::string_view text) noexcept;

/// Whether the code point has the property White_Space.
bool is_white_space(std::uint32_t code_point) noexcept;

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

}  // namespace metrale::text
