// SPDX-License-Identifier: Apache-2.0
#include "models/text/tokenizer_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "core/text.h"
#include "models/text/byte_alphabet.h"
#include "models/text/utf8.h"

namespace metrale::text {

const std::string_view kGpt2Pattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

namespace {

using Ids = std::unordered_map<std::string_view, TokenId>;

// Texts that end a document or a turn in published models. A file need not name all of its own.
constexpr std::string_view kEndNames[] = {"<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>",
                                          "</s>",          "<eos>"};

Result<Ids> index_entries(const TokenizerParts& parts) {
  if (parts.entries.empty()) return Error(Errc::bad_format, fmt::format("{}: the vocabulary is empty", parts.file));
  Ids ids;
  ids.reserve(parts.entries.size());
  for (std::size_t i = 0; i < parts.entries.size(); ++i) {
    const auto id = static_cast<TokenId>(i);
    if (const auto [it, fresh] = ids.emplace(parts.entries[i], id); !fresh)
      return Error(Errc::bad_format,
                   fmt::format("{}: tokens {} and {} are both {}", parts.file, it->second, id, detail::quote(parts.entries[i])));
  }
  return ids;
}

Result<> check_added(const TokenizerParts& parts, const std::vector<AddedToken>& tokens) {
  for (const AddedToken& token : tokens) {
    if (token.content.empty() || token.content.size() > kMaxAddedTokenBytes)
      return Error(Errc::bad_format, fmt::format("{}: added token {} has {} bytes; 1 to {} are allowed", parts.file, token.id,
                                                 token.content.size(), kMaxAddedTokenBytes));
    if (!detail::valid_utf8(token.content))
      return Error(Errc::bad_format,
                   fmt::format("{}: added token {} is {}, no UTF-8", parts.file, token.id, detail::quote(token.content)));
  }
  return {};
}

Result<std::vector<Merge>> resolve_merges(const TokenizerParts& parts, const Ids& ids) {
  std::vector<Merge> merges;
  merges.reserve(parts.merges.size());
  std::string joined;
  for (std::size_t rank = 0; rank < parts.merges.size(); ++rank) {
    const auto& [left, right] = parts.merges[rank];
    joined.assign(left).append(right);
    const auto lookup = [&](std::string_view text) -> Result<TokenId> {
      if (const auto it = ids.find(text); it != ids.end()) return it->second;
      return Error(Errc::bad_format, fmt::format("{}: merge {} ({} {}) needs token {}, which the vocabulary lacks", parts.file,
                                                 rank, detail::quote(left), detail::quote(right), detail::quote(text)));
    };
    const TokenId left_id = METRALE_TRY(lookup(left));
    const TokenId right_id = METRALE_TRY(lookup(right));
    const TokenId result_id = METRALE_TRY(lookup(joined));
    merges.push_back({left_id, right_id, result_id});
  }
  return merges;
}

Result<> refuse_repeated_merges(const TokenizerParts& parts, const std::vector<Merge>& merges) {
  std::vector<std::uint32_t> order(merges.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto key = [&](std::uint32_t i) { return std::pair(merges[i].left, merges[i].right); };
  std::sort(order.begin(), order.end(),
            [&](std::uint32_t a, std::uint32_t b) { return key(a) != key(b) ? key(a) < key(b) : a < b; });
  const auto twice =
      std::adjacent_find(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) { return key(a) == key(b); });
  if (twice == order.end()) return {};
  return Error(Errc::bad_format,
               fmt::format("{}: merges {} and {} are both {} {}", parts.file, twice[0], twice[1],
                           detail::quote(parts.merges[*twice].first), detail::quote(parts.merges[*twice].second)));
}

Result<> check_id(const TokenizerParts& parts, std::string_view what, TokenId id) {
  if (id >= 0 && static_cast<std::size_t>(id) < parts.entries.size()) return {};
  return Error(Errc::bad_format,
               fmt::format("{}: {} is token {}; the vocabulary has {}", parts.file, what, id, parts.entries.size()));
}

}  // namespace

void normalise_ids(std::vector<TokenId>& ids) {
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
}

Result<std::unique_ptr<Tokenizer::Impl>> build_tokenizer(TokenizerParts parts) {
  const Ids ids = METRALE_TRY(index_entries(parts));
  METRALE_TRY(check_added(parts, parts.added));
  METRALE_TRY(check_added(parts, parts.added_after));
  if (parts.bos) METRALE_TRY(check_id(parts, "the start of a text", *parts.bos));
  for (const TokenId id : parts.end_ids) METRALE_TRY(check_id(parts, "the end of a text", id));
  if (parts.add_bos && !parts.bos)
    return Error(Errc::bad_format, fmt::format("{}: a start token is to be added, but none is named", parts.file));

  auto impl = std::make_unique<Tokenizer::Impl>();
  const std::size_t count = parts.entries.size();
  impl->special.resize(count);
  std::vector<bool> plain_text(count);
  for (const auto* list : {&parts.added, &parts.added_after}) {
    for (const AddedToken& token : *list) {
      impl->special[static_cast<std::size_t>(token.id)] = token.special;
      plain_text[static_cast<std::size_t>(token.id)] = true;
      if (token.special && std::find(std::begin(kEndNames), std::end(kEndNames), token.content) != std::end(kEndNames))
        parts.end_ids.push_back(token.id);
    }
  }

  impl->offsets.reserve(count + 1);
  impl->offsets.push_back(0);
  for (std::size_t i = 0; i < count; ++i) {
    // An entry outside the alphabet can never come out of merging; it is shown as it is written.
    auto bytes = plain_text[i] ? std::nullopt : bytes_of_entry(parts.entries[i]);
    impl->pool += bytes ? *bytes : std::string(parts.entries[i]);
    if (impl->pool.size() > UINT32_MAX) return Error(Errc::bad_format, fmt::format("{}: the vocabulary exceeds 4 GiB", parts.file));
    impl->offsets.push_back(static_cast<std::uint32_t>(impl->pool.size()));
  }
  impl->pool.shrink_to_fit();

  std::array<TokenId, 256> byte_ids{};
  for (std::size_t byte = 0; byte < 256; ++byte) {
    std::string entry;
    append_utf8(byte_alphabet()[byte], entry);
    const auto it = ids.find(entry);
    byte_ids[byte] = it != ids.end() && !plain_text[static_cast<std::size_t>(it->second)] ? it->second : Bpe::kNoToken;
  }
  TokenId unknown = Bpe::kNoToken;
  if (parts.unknown) {
    const auto it = ids.find(*parts.unknown);
    if (it == ids.end())
      return Error(Errc::bad_format,
                   fmt::format("{}: the unknown token {} is not in the vocabulary", parts.file, detail::quote(*parts.unknown)));
    unknown = it->second;
  }
  const std::vector<Merge> merges = METRALE_TRY(resolve_merges(parts, ids));
  METRALE_TRY(refuse_repeated_merges(parts, merges));
  impl->bpe = Bpe(byte_ids, merges, count, unknown);

  if (parts.ignore_merges) {
    for (std::size_t i = 0; i < count; ++i) {
      if (!plain_text[i] && bytes_of_entry(parts.entries[i])) impl->whole_words.push_back(static_cast<TokenId>(i));
    }
    std::sort(impl->whole_words.begin(), impl->whole_words.end(),
              [&](TokenId a, TokenId b) { return impl->bytes(a) < impl->bytes(b); });
  }
  normalise_ids(parts.end_ids);
  impl->added = AddedTokens(std::move(parts.added));
  impl->added_after = AddedTokens(std::move(parts.added_after));
  impl->pre_tokenizer = std::move(parts.pre_tokenizer);
  impl->nfc = parts.nfc;
  impl->add_bos = parts.add_bos;
  impl->bos = parts.bos;
  impl->end_ids = std::move(parts.end_ids);
  impl->chat_template = std::move(parts.chat_template);
  return impl;
}

}  // namespace metrale::text
