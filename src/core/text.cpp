// SPDX-License-Identifier: Apache-2.0
#include "core/text.h"

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>

namespace metrale::detail {
namespace {

// Length of the well-formed UTF-8 sequence at the start of `text`, 0 when there is none.
std::size_t sequence_length(std::string_view text) noexcept {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const std::uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  const std::size_t length = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
  if (length == 0 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  // The second byte decides about overlong forms, surrogates and values beyond U+10FFFF.
  if (lead == 0xE0 && byte(1) < 0xA0) return 0;
  if (lead == 0xED && byte(1) > 0x9F) return 0;
  if (lead == 0xF0 && byte(1) < 0x90) return 0;
  if (lead == 0xF4 && byte(1) > 0x8F) return 0;
  return length;
}

}  // namespace

bool valid_utf8(std::string_view text) noexcept {
  while (!text.empty()) {
    const std::size_t length = sequence_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string quote(std::string_view text) {
  constexpr std::size_t kLimit = 100;
  std::string out = "\"";
  std::size_t used = 0;
  while (!text.empty()) {
    const std::size_t length = sequence_length(text);
    const auto first = static_cast<std::uint8_t>(text[0]);
    if (used + length > kLimit) {
      out += "…";
      break;
    }
    // C1 control characters are two bytes, C2 80 to C2 9F.
    const bool control =
        first < 0x20 || first == 0x7F || (first == 0xC2 && length == 2 && static_cast<std::uint8_t>(text[1]) < 0xA0);
    if (length == 0 || control) {
      out += fmt::format("\\x{:02x}", first);
      text.remove_prefix(1);
      if (length == 2) {
        out += fmt::format("\\x{:02x}", static_cast<std::uint8_t>(text[0]));
        text.remove_prefix(1);
      }
    } else {
      out += text.substr(0, length);
      text.remove_prefix(length);
    }
    used += length == 0 ? 1 : length;
  }
  return out + "\"";
}

}  // namespace metrale::detail
