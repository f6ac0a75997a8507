// SPDX-License-Identifier: Apache-2.0
//
// Unicode normalisation form C, which some tokenizers apply to their input.
#pragma once

#include <string>
#include <string_view>

namespace metrale::text {

/// Whether `text` is surely in form C already; false means that only `to_nfc` can tell.
bool is_surely_nfc(std::string_view text) noexcept;

/// `text`, which must be valid UTF-8, in form C. Linear but for runs of combining marks, which are sorted.
/// Source: Unicode Standard Annex #15; the tables are those of nfc_tables.inc.
std::string to_nfc(std::string_view text);

}  // namespace metrale::text
