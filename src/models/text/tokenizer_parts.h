// SPDX-License-Identifier: Apache-2.0
//
// What a tokenizer is made of, whatever file it came from, and the checks that all of them share.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "metrale/models/tokenizer.h"
#include "models/text/added_tokens.h"
#include "models/text/bpe.h"
#include "models/text/pre_tokenizer.h"

namespace metrale::text {

/// As read from a file. Texts are views into it: it must outlive this.
struct TokenizerParts {
  std::string_view file;
  std::vector<std::string_view> entries;  ///< Vocabulary by id, in the byte-level alphabet; added tokens as plain text.
  std::vector<AddedToken> added;          ///< Found in the raw text.
  std::vector<AddedToken> added_after;    ///< Found once the text is normalised.
  std::vector<std::pair<std::string_view, std::string_view>> merges;  ///< By rank.
  std::optional<std::string_view> unknown;
  bool ignore_merges = false;  ///< A word that is in the vocabulary is one token, whatever the merges would make of it.
  bool nfc = false;
  bool add_bos = false;
  std::optional<TokenId> bos;
  std::vector<TokenId> end_ids;
  PreTokenizer pre_tokenizer;
  std::string chat_template;
};

/// Checks the parts against each other and builds the tokenizer. Errors: bad_format, unsupported.
Result<std::unique_ptr<Tokenizer::Impl>> build_tokenizer(TokenizerParts parts);

/// Sorted and without repetition.
void normalise_ids(std::vector<TokenId>& ids);

/// The pattern of GPT-2, which ByteLevel pre-tokenisation uses.
extern const std::string_view kGpt2Pattern;

}  // namespace metrale::text

namespace metrale {

struct Tokenizer::Impl {
  std::string pool;                    // the bytes of all tokens, by id
  std::vector<std::uint32_t> offsets;  // token i is pool[offsets[i] … offsets[i + 1]]
  std::vector<bool> special;
  text::Bpe bpe;
  std::vector<TokenId> whole_words;  // with ignore_merges: ordinary tokens by their bytes
  text::AddedTokens added;
  text::AddedTokens added_after;
  text::PreTokenizer pre_tokenizer;
  bool nfc = false;
  bool add_bos = false;
  std::optional<TokenId> bos;
  std::vector<TokenId> end_ids;
  std::string chat_template;

  std::size_t size() const noexcept { return offsets.size() - 1; }
  std::string_view bytes(TokenId id) const noexcept {
    const auto i = static_cast<std::size_t>(id);
    return std::string_view(pool).substr(offsets[i], offsets[i + 1] - offsets[i]);
  }
};

}  // namespace metrale
