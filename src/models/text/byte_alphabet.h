// SPDX-License-Identifier: Apache-2.0
//
// The alphabet of byte-level vocabularies: each byte is written as one printable character. Bytes that print stand for themselves
// as Latin-1; the others take the code points from U+0100 on, in order.
// Source: bytes_to_unicode in the GPT-2 encoder.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace metrale::text {

/// The code point that stands for a byte.
const std::array<std::uint16_t, 256>& byte_alphabet() noexcept;

/// The bytes that a vocabulary entry stands for, or none when it holds a character outside the alphabet.
std::optional<std::string> bytes_of_entry(std::string_view entry);

}  // namespace metrale::text
