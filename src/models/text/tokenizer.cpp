// SPDX-License-Identifier: Apache-2.0
#include "metrale/models/tokenizer.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/text.h"
#include "models/text/nfc.h"
#include "models/text/tokenizer_parts.h"
#include "models/text/utf8.h"

namespace metrale {
namespace {

// Offsets of symbols in a word are 32-bit.
constexpr std::size_t kMaxTextBytes = std::size_t{1} << 30;

// One call of encode: the text goes through added tokens, normalisation, added tokens again, cutting into words, merging.
class Encoder {
 public:
  Encoder(const Tokenizer::Impl& impl, SpecialTokens special) : impl_(impl), special_(special) {}

  Result<> text(std::string_view text) {
    return around_added(impl_.added, text, [this](std::string_view part) { return normalise(part); });
  }

  std::vector<TokenId> take() { return std::move(ids_); }

 private:
  template <class Fn>
  Result<> around_added(const text::AddedTokens& added, std::string_view text, Fn&& between) {
    std::size_t at = 0;
    while (!added.empty() && at < text.size()) {
      const auto match = added.find(text, at, special_);
      if (match.token == nullptr) break;
      if (match.begin > at) METRALE_TRY(between(text.substr(at, match.begin - at)));
      ids_.push_back(match.token->id);
      at = match.end;
    }
    if (at < text.size()) return between(text.substr(at));
    return {};
  }

  // Bytes that are no UTF-8 are set apart: patterns and normalisation are defined on characters only.
  Result<> normalise(std::string_view text) {
    while (!text.empty()) {
      const std::size_t valid = text::valid_utf8_prefix(text);
      if (valid > 0) METRALE_TRY(valid_text(text.substr(0, valid)));
      text.remove_prefix(valid);
      std::size_t invalid = 0;
      while (invalid < text.size()) {
        const text::Utf8Step step = text::utf8_step(text.substr(invalid));
        if (step.valid) break;
        invalid += step.length;
      }
      if (invalid > 0) impl_.bpe.encode(text.substr(0, invalid), ids_, bpe_);
      text.remove_prefix(invalid);
    }
    return {};
  }

  Result<> valid_text(std::string_view text) {
    if (impl_.nfc && !text::is_surely_nfc(text)) {
      const std::string normal = text::to_nfc(text);
      return normalised(normal);
    }
    return normalised(text);
  }

  Result<> normalised(std::string_view text) {
    return around_added(impl_.added_after, text, [this](std::string_view part) { return words(part); });
  }

  Result<> words(std::string_view text) {
    METRALE_TRY(impl_.pre_tokenizer.split(text, pre_));
    for (const std::string_view word : pre_.pieces) {
      if (const auto whole = whole_word(word)) {
        ids_.push_back(*whole);
      } else {
        impl_.bpe.encode(word, ids_, bpe_);
      }
    }
    return {};
  }

  std::optional<TokenId> whole_word(std::string_view word) const {
    const auto& list = impl_.whole_words;
    const auto it = std::lower_bound(list.begin(), list.end(), word,
                                     [this](TokenId id, std::string_view value) { return impl_.bytes(id) < value; });
    if (it == list.end() || impl_.bytes(*it) != word) return std::nullopt;
    return *it;
  }

  const Tokenizer::Impl& impl_;
  SpecialTokens special_;
  std::vector<TokenId> ids_;
  text::Bpe::Scratch bpe_;
  text::PreTokenizer::Scratch pre_;
};

// Moves complete characters from the front of `pending` to `out`, what is none as U+FFFD. A start that further bytes could complete
// stays.
void drain(std::string& pending, std::string& out) {
  std::size_t at = 0;
  while (at < pending.size()) {
    const std::string_view rest = std::string_view(pending).substr(at);
    if (const std::size_t valid = text::valid_utf8_prefix(rest); valid > 0) {
      out += rest.substr(0, valid);
      at += valid;
      continue;
    }
    const text::Utf8Step step = text::utf8_step(rest);
    if (step.truncated) break;
    out += text::kReplacementCharacter;
    at += step.length;
  }
  pending.erase(0, at);
}

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;

Result<std::vector<TokenId>> Tokenizer::encode(std::string_view text, SpecialTokens special) const {
  if (text.size() > kMaxTextBytes)
    return Error(Errc::invalid_argument, fmt::format("encode a text of {} bytes: at most {} at once", text.size(), kMaxTextBytes));
  return detail::guarded("encode", [&]() -> Result<std::vector<TokenId>> {
    Encoder encoder(*impl_, special);
    METRALE_TRY(encoder.text(text));
    return encoder.take();
  });
}

Result<std::string> Tokenizer::decode(std::span<const TokenId> ids, SpecialText special) const {
  return detail::guarded("decode", [&]() -> Result<std::string> {
    StreamDecoder decoder(*this, special);
    std::string text;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      auto piece = decoder.push(ids[i]);
      if (!piece) return std::move(piece.error()).with_note(fmt::format("at place {} of {}", i, ids.size()));
      text += *piece;
    }
    text += decoder.finish();
    return text;
  });
}

Result<std::string_view> Tokenizer::bytes(TokenId id) const {
  if (id < 0 || static_cast<std::size_t>(id) >= impl_->size())
    return Error(Errc::out_of_range, fmt::format("token {} of a vocabulary of {}", id, impl_->size()));
  return impl_->bytes(id);
}

std::optional<TokenId> Tokenizer::find_added(std::string_view text) const {
  for (const auto* added : {&impl_->added, &impl_->added_after}) {
    if (const auto* token = added->by_content(text)) return token->id;
  }
  return std::nullopt;
}

bool Tokenizer::is_special(TokenId id) const noexcept {
  return id >= 0 && static_cast<std::size_t>(id) < impl_->size() && impl_->special[static_cast<std::size_t>(id)];
}

std::size_t Tokenizer::vocab_size() const noexcept { return impl_->size(); }
std::optional<TokenId> Tokenizer::bos() const noexcept { return impl_->bos; }
bool Tokenizer::add_bos() const noexcept { return impl_->add_bos; }
std::span<const TokenId> Tokenizer::end_ids() const noexcept { return impl_->end_ids; }
std::string_view Tokenizer::chat_template() const noexcept { return impl_->chat_template; }

Result<std::string> StreamDecoder::push(TokenId id) {
  const std::string_view bytes = METRALE_TRY(tokenizer_->bytes(id));
  std::string text;
  if (special_ == SpecialText::drop && tokenizer_->is_special(id)) return text;
  pending_ += bytes;
  drain(pending_, text);
  return text;
}

std::string StreamDecoder::finish() {
  std::string text;
  // At most one start of a character is left, and it is one character that could not be read.
  if (!pending_.empty()) text += text::kReplacementCharacter;
  pending_.clear();
  return text;
}

}  // namespace metrale
