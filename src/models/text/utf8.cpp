// SPDX-License-Identifier: Apache-2.0
#include "models/text/utf8.h"

#include <cstring>

namespace metrale::text {

Utf8Step utf8_step(std::string_view text) noexcept {
  Utf8Step step;
  if (text.empty()) return step;
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const std::uint32_t lead = byte(0);
  step.length = 1;
  if (lead < 0x80) {
    step.code_point = lead;
    step.valid = true;
    return step;
  }
  if (lead < 0xC2 || lead > 0xF4) return step;
  const std::uint8_t needed = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte's range excludes overlong forms, surrogates and what lies beyond U+10FFFF.
  std::uint32_t low = 0x80;
  std::uint32_t high = 0xBF;
  if (lead == 0xE0) low = 0xA0;
  if (lead == 0xED) high = 0x9F;
  if (lead == 0xF0) low = 0x90;
  if (lead == 0xF4) high = 0x8F;
  std::uint32_t code_point = lead & (0x7FU >> needed);
  while (step.length < needed) {
    if (step.length == text.size()) {
      step.truncated = true;
      return step;
    }
    const std::uint32_t next = byte(step.length);
    if (next < low || next > high) return step;
    code_point = code_point << 6 | (next & 0x3F);
    low = 0x80;
    high = 0xBF;
    ++step.length;
  }
  step.code_point = code_point;
  step.valid = true;
  return step;
}

void append_utf8(std::uint32_t code_point, std::string& out) {
  const auto put = [&](std::uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | code_point >> 6);
    put(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    put(0xE0 | code_point >> 12);
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  } else {
    put(0xF0 | code_point >> 18);
    put(0x80 | (code_point >> 12 & 0x3F));
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  }
}

std::size_t valid_utf8_prefix(std::string_view text) noexcept {
  std::size_t at = 0;
  while (at < text.size()) {
    // Eight bytes of ASCII at a time: nearly all there is in most texts.
    std::uint64_t word = 0;
    if (text.size() - at >= sizeof(word)) {
      std::memcpy(&word, text.data() + at, sizeof(word));
      if ((word & 0x8080808080808080U) == 0) {
        at += sizeof(word);
        continue;
      }
    }
    const Utf8Step step = utf8_step(text.substr(at));
    if (!step.valid) break;
    at += step.length;
  }
  return at;
}

bool is_white_space(std::uint32_t c) noexcept {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
         c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

}  // namespace metrale::text
