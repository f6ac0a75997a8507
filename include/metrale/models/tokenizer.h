// SPDX-License-Identifier: Apache-2.0
//
// Tokenizer: byte-level BPE, from a Hugging Face tokenizer.json or from the tokenizer part of GGUF metadata. It owns everything it
// needs; the file may go after loading. A loaded tokenizer never changes, so any number of threads may use one. StreamDecoder keeps
// the bytes of a character that is not complete yet and belongs to one thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/gguf.h"
#include "metrale/result.h"

namespace metrale {

/// A token's number. Negative values are never valid; the type is signed because files and peers write it so.
using TokenId = std::int32_t;

/// Longest tokenizer.json that is read, in bytes; the largest published ones are near 35 MB.
inline constexpr std::uint64_t kMaxTokenizerJsonBytes = std::uint64_t{64} << 20;
/// Longest added token (such as "<|im_end|>"), in bytes.
inline constexpr std::size_t kMaxAddedTokenBytes = 256;

/// What `encode` makes of the text of a control token inside its input.
enum class SpecialTokens : std::uint8_t {
  as_text,    ///< Ordinary characters. For text from outside, which must not be able to end a turn.
  recognise,  ///< The token itself.
};

/// What `decode` does with control tokens.
enum class SpecialText : std::uint8_t { keep, drop };

class Tokenizer {
 public:
  /// Reads the text of a tokenizer.json; `file` names it in messages.
  /// Errors: bad_format (no JSON, too deep, a part missing or of the wrong type, an id twice, out of range or left out, a merge of
  /// unknown tokens, a regular expression that does not compile), unsupported (another model than byte-level BPE, or a step that
  /// metrale has no code for). One line: file, place, value.
  /// Threads: any.
  static Result<std::unique_ptr<Tokenizer>> from_json(std::string_view json, std::string_view file);

  /// Reads `tokenizer.json` of a Hugging Face folder, and from tokenizer_config.json, generation_config.json and config.json, where
  /// they exist, which tokens start and end a text.
  /// Errors: as `from_json`, and not_found (the folder has no tokenizer.json), io.
  static Result<std::unique_ptr<Tokenizer>> from_folder(const std::filesystem::path& folder);

  /// Reads the keys `tokenizer.ggml.*` of a GGUF file; `file` names it in messages.
  /// Errors: as `from_json`.
  static Result<std::unique_ptr<Tokenizer>> from_gguf(const GgufMetadata& metadata, std::string_view file);

  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  /// The ids of `text`. Nothing is added at either end: see `add_bos`. Bytes that are no UTF-8 are encoded as bytes, apart from
  /// their neighbours; a byte for which the vocabulary has no token gives its unknown token, or nothing where it names none (the
  /// sources of such vocabularies do the same). Time grows with the length as n log n, also within one word.
  /// Errors: bad_format (the tokenizer's own regular expression exceeds its step limit on this text), out_of_memory.
  /// Threads: any.
  Result<std::vector<TokenId>> encode(std::string_view text, SpecialTokens special = SpecialTokens::as_text) const;

  /// The text of `ids`, always valid UTF-8: what is no character becomes U+FFFD.
  /// Errors: out_of_range (an id outside the vocabulary: the message names it, its place and the size).
  /// Threads: any.
  Result<std::string> decode(std::span<const TokenId> ids, SpecialText special = SpecialText::keep) const;

  /// The bytes that `id` stands for, which may be part of a character. Valid while the tokenizer lives.
  /// Errors: out_of_range.
  Result<std::string_view> bytes(TokenId id) const;

  /// The id of an added token by its exact text, e.g. "<|im_start|>".
  std::optional<TokenId> find_added(std::string_view text) const;
  /// Whether `id` is a control token. False outside the vocabulary.
  bool is_special(TokenId id) const noexcept;

  /// Ids are 0 … vocab_size() - 1. A model may have more rows than this: padding that it never produces.
  std::size_t vocab_size() const noexcept;
  /// The token that starts a text, where the files name one.
  std::optional<TokenId> bos() const noexcept;
  /// Whether the model expects `bos` before each text. The caller adds it.
  bool add_bos() const noexcept;
  /// Tokens after which a text is over: those the files name, and tokens with well-known names such as "<|endoftext|>". Ascending.
  std::span<const TokenId> end_ids() const noexcept;
  /// The chat template that came with the tokenizer, in Jinja; empty where there was none. See chat_template.h.
  std::string_view chat_template() const noexcept;

  struct Impl;

 private:
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Turns ids into text one at a time, for printing while generating. The pieces joined are what `decode` gives for all ids at once.
/// Lifetime: the tokenizer must outlive it.
/// Threads: one at a time.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, SpecialText special = SpecialText::drop)
      : tokenizer_(&tokenizer), special_(special) {}

  /// The text that is complete with this token; often empty inside a character. At most three bytes are held back.
  /// Errors: out_of_range; the decoder is as before.
  Result<std::string> push(TokenId id);
  /// What was held back, as U+FFFD; the decoder starts anew.
  std::string finish();

 private:
  const Tokenizer* tokenizer_;
  SpecialText special_;
  std::string pending_;
};

}  // namespace metrale
