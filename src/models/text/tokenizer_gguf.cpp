// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "core/text.h"
#include "models/text/tokenizer_parts.h"

namespace metrale {
namespace {

using text::Regex;
using text::SplitBehavior;
using text::TokenizerParts;

// Values of tokenizer.ggml.token_type.
constexpr std::int64_t kUnknown = 2, kControl = 3, kUserDefined = 4;

// Words as the tokenizers behind these names cut them. The first three are named in full in the models' own tokenizer.json.
constexpr std::string_view kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen2Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen35Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

enum class Scheme : std::uint8_t { gpt2, digits_gpt2, llama3, qwen2, qwen35, fallback };

struct NamedScheme {
  std::string_view name;
  Scheme scheme;
};
constexpr NamedScheme kSchemes[] = {
    {"gpt-2", Scheme::gpt2},
    {"gpt2", Scheme::gpt2},
    {"olmo", Scheme::gpt2},
    {"mpt", Scheme::gpt2},
    {"smollm", Scheme::digits_gpt2},
    {"starcoder", Scheme::digits_gpt2},
    {"refact", Scheme::digits_gpt2},
    {"command-r", Scheme::digits_gpt2},
    {"llama-bpe", Scheme::llama3},
    {"llama3", Scheme::llama3},
    {"llama-v3", Scheme::llama3},
    {"qwen2", Scheme::qwen2},
    {"deepseek-r1-qwen", Scheme::qwen2},
    {"qwen35", Scheme::qwen35},
    {"default", Scheme::fallback},
};

Result<> set_scheme(std::string_view name, TokenizerParts& parts) {
  const auto add = [&](std::string_view pattern) -> Result<> {
    parts.pre_tokenizer.add_split(METRALE_TRY(Regex::compile(pattern, parts.file)), SplitBehavior::isolated);
    return {};
  };
  const auto* it = std::find_if(std::begin(kSchemes), std::end(kSchemes), [&](const NamedScheme& s) { return s.name == name; });
  if (it == std::end(kSchemes)) {
    std::string known;
    for (const NamedScheme& scheme : kSchemes) known += fmt::format("{}{}", known.empty() ? "" : " ", scheme.name);
    return Error(Errc::unsupported,
                 fmt::format("{}: \"tokenizer.ggml.pre\" is {}: metrale knows {}", parts.file, detail::quote(name), known));
  }
  switch (it->scheme) {
    case Scheme::gpt2: return add(text::kGpt2Pattern);
    case Scheme::digits_gpt2: METRALE_TRY(add(R"(\p{N})")); return add(text::kGpt2Pattern);
    case Scheme::llama3:
      parts.ignore_merges = true;
      parts.add_bos = parts.bos.has_value();
      return add(kLlama3Pattern);
    case Scheme::qwen2: parts.nfc = true; return add(kQwen2Pattern);
    case Scheme::qwen35: parts.nfc = true; return add(kQwen35Pattern);
    case Scheme::fallback:
      // What llama.cpp does for a file that names nothing.
      METRALE_TRY(add(R"([\p{P}\$\+<=>\^~\|]+)"));
      METRALE_TRY(add(text::kGpt2Pattern));
      METRALE_TRY(add(R"(\p{N}+)"));
      return add(R"([0-9][0-9][0-9])");
  }
  return Error(Errc::internal, "a scheme without patterns");
}

Result<> read_ids(const GgufMetadata& metadata, TokenizerParts& parts) {
  if (metadata.contains("tokenizer.ggml.bos_token_id"))
    parts.bos = METRALE_TRY(metadata.get<std::int32_t>("tokenizer.ggml.bos_token_id"));
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    if (metadata.contains(key)) parts.end_ids.push_back(METRALE_TRY(metadata.get<std::int32_t>(key)));
  }
  return {};
}

Result<> read_types(const GgufMetadata& metadata, TokenizerParts& parts) {
  constexpr std::string_view kKey = "tokenizer.ggml.token_type";
  if (!metadata.contains(kKey)) return {};
  const auto types = METRALE_TRY(metadata.ints(kKey));
  if (types.size() != parts.entries.size())
    return Error(Errc::bad_format,
                 fmt::format("{}: \"{}\" has {} elements for {} tokens", parts.file, kKey, types.size(), parts.entries.size()));
  for (std::size_t i = 0; i < types.size(); ++i) {
    if (types[i] != kUnknown && types[i] != kControl && types[i] != kUserDefined) continue;
    text::AddedToken token;
    token.content = parts.entries[i];
    token.id = static_cast<TokenId>(i);
    token.special = types[i] != kUserDefined;
    parts.added.push_back(std::move(token));
  }
  return {};
}

Result<> read_merges(const GgufMetadata& metadata, TokenizerParts& parts) {
  constexpr std::string_view kKey = "tokenizer.ggml.merges";
  const auto merges = METRALE_TRY(metadata.strings(kKey));
  parts.merges.reserve(merges.size());
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    const std::string_view text = merges[rank];
    const std::size_t space = text.find(' ');
    if (space == 0 || space == std::string_view::npos || space + 1 == text.size() ||
        text.find(' ', space + 1) != std::string_view::npos)
      return Error(Errc::bad_format, fmt::format("{}: \"{}\"[{}] is {}: two tokens with one space between are needed", parts.file,
                                                 kKey, rank, detail::quote(text)));
    parts.merges.emplace_back(text.substr(0, space), text.substr(space + 1));
  }
  return {};
}

Result<std::unique_ptr<Tokenizer::Impl>> read(const GgufMetadata& metadata, std::string_view file) {
  TokenizerParts parts;
  parts.file = file;
  const auto model = METRALE_TRY(metadata.get<std::string>("tokenizer.ggml.model"));
  if (model != "gpt2")
    return Error(Errc::unsupported,
                 fmt::format("{}: \"tokenizer.ggml.model\" is {}: metrale reads gpt2, byte-level BPE", file, detail::quote(model)));
  const auto tokens = METRALE_TRY(metadata.strings("tokenizer.ggml.tokens"));
  if (tokens.size() > static_cast<std::size_t>(INT32_MAX))
    return Error(Errc::bad_format, fmt::format("{}: \"tokenizer.ggml.tokens\" has {} elements", file, tokens.size()));
  parts.entries.assign(tokens.begin(), tokens.end());
  METRALE_TRY(read_ids(metadata, parts));
  METRALE_TRY(read_types(metadata, parts));
  METRALE_TRY(read_merges(metadata, parts));
  const auto pre = METRALE_TRY(metadata.get_or<std::string>("tokenizer.ggml.pre", "default"));
  METRALE_TRY(set_scheme(pre, parts));
  parts.add_bos = METRALE_TRY(metadata.get_or<bool>("tokenizer.ggml.add_bos_token", parts.add_bos));
  parts.chat_template = METRALE_TRY(metadata.get_or<std::string>("tokenizer.chat_template", ""));
  return text::build_tokenizer(std::move(parts));
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> Tokenizer::from_gguf(const GgufMetadata& metadata, std::string_view file) {
  auto impl = METRALE_TRY(detail::guarded(file, [&] { return read(metadata, file); }));
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::move(impl)));
}

}  // namespace metrale
