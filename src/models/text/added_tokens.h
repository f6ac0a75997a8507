// SPDX-License-Identifier: Apache-2.0
//
// Tokens that stand outside the merges: control tokens such as "<|im_end|>" and entries added to a vocabulary later. They are found
// in the text before anything else is done to it: the leftmost first, the longest of those that start there.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/models/tokenizer.h"

namespace metrale::text {

struct AddedToken {
  std::string content;
  TokenId id = 0;
  bool special = false;
  bool strip_left = false;   ///< Takes in white space before it.
  bool strip_right = false;  ///< Takes in white space after it.
};

class AddedTokens {
 public:
  AddedTokens() = default;
  /// Contents must be non-empty and differ.
  explicit AddedTokens(std::vector<AddedToken> tokens);

  struct Match {
    std::size_t begin = 0;  ///< Of what the token takes in, in bytes.
    std::size_t end = 0;
    const AddedToken* token = nullptr;
  };
  /// The first match at or after `from`; token is null when there is none. Control tokens count only where `special` says so.
  Match find(std::string_view text, std::size_t from, SpecialTokens special) const;

  const AddedToken* by_content(std::string_view content) const;
  bool empty() const noexcept { return tokens_.empty(); }

 private:
  const AddedToken* longest_at(std::string_view text, SpecialTokens special) const;

  std::vector<AddedToken> tokens_;  // by content
  std::array<bool, 256> starts_with_ = {};
};

}  // namespace metrale::text
