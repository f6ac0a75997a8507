// SPDX-License-Identifier: Apache-2.0
#include "models/text/byte_alphabet.h"

#include "models/text/utf8.h"

namespace metrale::text {
namespace {

constexpr bool prints(std::uint32_t byte) noexcept {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

constexpr std::array<std::uint16_t, 256> kAlphabet = [] {
  std::array<std::uint16_t, 256> table{};
  std::uint16_t next = 0x100;
  for (std::uint32_t byte = 0; byte < 256; ++byte) table[byte] = prints(byte) ? static_cast<std::uint16_t>(byte) : next++;
  return table;
}();

// 68 bytes do not print.
constexpr std::uint32_t kEnd = 0x100 + 68;
static_assert(kAlphabet[' '] == 0x120 && kAlphabet['\n'] == 0x10A && kAlphabet[0xAD] == kEnd - 1);

constexpr std::array<std::int16_t, kEnd> kBytes = [] {
  std::array<std::int16_t, kEnd> table{};
  for (auto& byte : table) byte = -1;
  for (std::uint32_t byte = 0; byte < 256; ++byte) table[kAlphabet[byte]] = static_cast<std::int16_t>(byte);
  return table;
}();

}  // namespace

const std::array<std::uint16_t, 256>& byte_alphabet() noexcept { return kAlphabet; }

std::optional<std::string> bytes_of_entry(std::string_view entry) {
  std::string bytes;
  bytes.reserve(entry.size());
  while (!entry.empty()) {
    const Utf8Step step = utf8_step(entry);
    if (!step.valid || step.code_point >= kEnd || kBytes[step.code_point] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(kBytes[step.code_point]));
    entry.remove_prefix(step.length);
  }
  return bytes;
}

}  // namespace metrale::text
