// SPDX-License-Identifier: Apache-2.0
#include "models/text/added_tokens.h"

#include <algorithm>

#include "models/text/utf8.h"

namespace metrale::text {

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::sort(tokens_.begin(), tokens_.end(), [](const AddedToken& a, const AddedToken& b) { return a.content < b.content; });
  for (const AddedToken& token : tokens_) starts_with_[static_cast<unsigned char>(token.content[0])] = true;
}

const AddedToken* AddedTokens::longest_at(std::string_view text, SpecialTokens special) const {
  // Sorted contents that agree on their first bytes stand together, the shortest first. Narrow that range byte by byte.
  auto low = tokens_.begin();
  auto high = tokens_.end();
  const AddedToken* best = nullptr;
  for (std::size_t depth = 0; low != high; ++depth) {
    if (low->content.size() == depth) {
      if (special == SpecialTokens::recognise || !low->special) best = &*low;
      if (++low == high) break;
    }
    if (depth == text.size()) break;
    const auto byte = static_cast<unsigned char>(text[depth]);
    const auto at_depth = [depth](const AddedToken& token) { return static_cast<unsigned char>(token.content[depth]); };
    low = std::partition_point(low, high, [&](const AddedToken& token) { return at_depth(token) < byte; });
    high = std::partition_point(low, high, [&](const AddedToken& token) { return at_depth(token) == byte; });
  }
  return best;
}

AddedTokens::Match AddedTokens::find(std::string_view text, std::size_t from, SpecialTokens special) const {
  for (std::size_t at = from; at < text.size(); ++at) {
    if (!starts_with_[static_cast<unsigned char>(text[at])]) continue;
    const AddedToken* token = longest_at(text.substr(at), special);
    if (token == nullptr) continue;
    Match match{at, at + token->content.size(), token};
    if (token->strip_left) {
      while (match.begin > from) {
        std::size_t previous = match.begin - 1;
        while (previous > from && (static_cast<unsigned char>(text[previous]) & 0xC0) == 0x80) --previous;
        const Utf8Step step = utf8_step(text.substr(previous, match.begin - previous));
        if (!step.valid || !is_white_space(step.code_point)) break;
        match.begin = previous;
      }
    }
    if (token->strip_right) {
      while (match.end < text.size()) {
        const Utf8Step step = utf8_step(text.substr(match.end));
        if (!step.valid || !is_white_space(step.code_point)) break;
        match.end += step.length;
      }
    }
    return match;
  }
  return {text.size(), text.size(), nullptr};
}

const AddedToken* AddedTokens::by_content(std::string_view content) const {
  const auto it = std::lower_bound(tokens_.begin(), tokens_.end(), content,
                                   [](const AddedToken& token, std::string_view value) { return token.content < value; });
  return it != tokens_.end() && it->content == content ? &*it : nullptr;
}

}  // namespace metrale::text
