// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "core/text.h"
#include "models/text/json_reader.h"
#include "models/text/nfc.h"
#include "models/text/tokenizer_json_stages.h"
#include "models/text/tokenizer_parts.h"

namespace metrale {
namespace {

using text::JsonNode;
using text::TokenizerParts;

constexpr text::JsonLimits kLimits{.depth = 64, .values = 8U << 20};
constexpr std::uint64_t kMaxSideFileBytes = std::uint64_t{8} << 20;

// Entries by id while they are gathered from the vocabulary and the added tokens, which often repeat entries of it.
class EntryTable {
 public:
  EntryTable(std::string_view file, std::size_t limit) : file_(file), limit_(limit) {}

  Result<> add(std::string_view text, TokenId id, bool may_repeat) {
    const auto i = static_cast<std::size_t>(id);
    // As many ids as entries: an id beyond that leaves another one out.
    if (i >= limit_)
      return Error(Errc::bad_format,
                   fmt::format("{}: token {} has id {}, but there are {} tokens at most", file_, detail::quote(text), id, limit_));
    if (i >= entries_.size()) {
      entries_.resize(i + 1);
      known_.resize(i + 1);
    }
    if (known_[i] && !(may_repeat && entries_[i] == text))
      return Error(Errc::bad_format,
                   fmt::format("{}: tokens {} and {} both have id {}", file_, detail::quote(entries_[i]), detail::quote(text), id));
    entries_[i] = text;
    known_[i] = true;
    return {};
  }

  Result<std::vector<std::string_view>> take() {
    const auto hole = std::find(known_.begin(), known_.end(), false);
    if (hole != known_.end())
      return Error(Errc::bad_format, fmt::format("{}: no token has id {}, though there are ids up to {}", file_,
                                                 hole - known_.begin(), known_.size() - 1));
    return std::move(entries_);
  }

 private:
  std::string_view file_;
  std::size_t limit_;
  std::vector<std::string_view> entries_;
  std::vector<bool> known_;
};

Result<> read_added(const JsonNode& root, TokenizerParts& parts, EntryTable& table) {
  const auto list = root.find("added_tokens");
  if (!list) return {};
  METRALE_TRY(list->require_array());
  for (std::size_t i = 0; i < list->value().size(); ++i) {
    const JsonNode node = list->at(i);
    const JsonNode content = METRALE_TRY(node.require("content"));
    const JsonNode id_node = METRALE_TRY(node.require("id"));
    text::AddedToken token;
    const std::string_view text = METRALE_TRY(content.string());
    token.content = text;
    token.id = static_cast<TokenId>(METRALE_TRY(id_node.integer(0, INT32_MAX - 1)));
    token.special = METRALE_TRY(node.flag_or("special", false));
    token.strip_left = METRALE_TRY(node.flag_or("lstrip", false));
    token.strip_right = METRALE_TRY(node.flag_or("rstrip", false));
    if (METRALE_TRY(node.flag_or("single_word", false)))
      return METRALE_TRY(node.require("single_word")).error(Errc::unsupported, "metrale finds added tokens inside words too");
    METRALE_TRY(table.add(text, token.id, true));
    const bool normalised = METRALE_TRY(node.flag_or("normalized", !token.special));
    if (normalised && parts.nfc) token.content = text::to_nfc(token.content);
    (normalised ? parts.added_after : parts.added).push_back(std::move(token));
  }
  for (auto* tokens : {&parts.added, &parts.added_after}) {
    std::vector<std::string_view> contents;
    for (const auto& token : *tokens) contents.push_back(token.content);
    std::sort(contents.begin(), contents.end());
    if (const auto twice = std::adjacent_find(contents.begin(), contents.end()); twice != contents.end())
      return list->error(Errc::bad_format, fmt::format("{} is in it twice", detail::quote(*twice)));
  }
  return {};
}

Result<> read_merges(const JsonNode& model, TokenizerParts& parts) {
  const JsonNode list = METRALE_TRY(model.require("merges"));
  METRALE_TRY(list.require_array());
  parts.merges.reserve(list.value().size());
  for (std::size_t rank = 0; rank < list.value().size(); ++rank) {
    // Hundreds of thousands of them: a node with its place in words only where it is needed.
    const nlohmann::json& merge = list.value()[rank];
    if (merge.is_string()) {
      const std::string_view text = merge.get_ref<const std::string&>();
      const std::size_t space = text.find(' ');
      if (space == 0 || space == std::string_view::npos || space + 1 == text.size() ||
          text.find(' ', space + 1) != std::string_view::npos)
        return list.at(rank).error(Errc::bad_format, "two tokens with one space between are needed");
      parts.merges.emplace_back(text.substr(0, space), text.substr(space + 1));
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      parts.merges.emplace_back(merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>());
    } else {
      return list.at(rank).error(Errc::bad_format, "a string or two strings are needed");
    }
  }
  return {};
}

Result<> refuse_variants(const JsonNode& model) {
  if (const auto type = model.find("type"); type && METRALE_TRY(type->string()) != "BPE")
    return type->error(Errc::unsupported, "metrale reads BPE tokenizers");
  for (const std::string_view key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const auto affix = model.find(key);
    if (affix && !METRALE_TRY(affix->string()).empty())
      return affix->error(Errc::unsupported, "metrale reads byte-level vocabularies");
  }
  for (const std::string_view key : {"byte_fallback", "fuse_unk"}) {
    const auto flag = model.find(key);
    if (flag && METRALE_TRY(flag->flag())) return flag->error(Errc::unsupported, "metrale reads byte-level vocabularies");
  }
  if (const auto dropout = model.find("dropout"); dropout && METRALE_TRY(dropout->number()) != 0.0)
    return dropout->error(Errc::unsupported, "metrale encodes without chance");
  return {};
}

Result<> read_document(const JsonNode& root, TokenizerParts& parts) {
  METRALE_TRY(root.require_object());
  const JsonNode model = METRALE_TRY(root.require("model"));
  METRALE_TRY(model.require_object());
  METRALE_TRY(refuse_variants(model));
  METRALE_TRY(text::read_normalizer(root, parts));
  METRALE_TRY(text::read_pre_tokenizer(root, parts));
  METRALE_TRY(text::check_decoder(root));

  const JsonNode vocab = METRALE_TRY(model.require("vocab"));
  METRALE_TRY(vocab.require_object());
  const auto added = root.find("added_tokens");
  EntryTable table(root.file(), vocab.value().size() + (added ? added->value().size() : 0));
  for (const auto& [entry, id] : vocab.value().items()) {
    const auto number = METRALE_TRY(JsonNode(id, root.file(), "model.vocab." + entry).integer(0, INT32_MAX - 1));
    METRALE_TRY(table.add(entry, static_cast<TokenId>(number), false));
  }
  METRALE_TRY(read_added(root, parts, table));
  parts.entries = METRALE_TRY(table.take());
  METRALE_TRY(read_merges(model, parts));
  if (const auto unknown = model.find("unk_token")) parts.unknown = METRALE_TRY(unknown->string());
  parts.ignore_merges = METRALE_TRY(model.flag_or("ignore_merges", false));
  return text::read_post_processor(root, parts);
}

Result<TokenId> id_of(const TokenizerParts& parts, const JsonNode& node) {
  // A token is given as a string or as an object with its content.
  const JsonNode content = node.value().is_object() ? METRALE_TRY(node.require("content")) : node;
  const std::string_view text = METRALE_TRY(content.string());
  const auto it = std::find(parts.entries.begin(), parts.entries.end(), text);
  if (it == parts.entries.end()) return node.error(Errc::bad_format, "tokenizer.json has no such token");
  return static_cast<TokenId>(it - parts.entries.begin());
}

Result<> read_end_ids(const JsonNode& root, TokenizerParts& parts) {
  const auto node = root.find("eos_token_id");
  if (!node) return {};
  const auto last = static_cast<std::int64_t>(parts.entries.size()) - 1;
  const bool list = node->value().is_array();
  for (std::size_t i = 0; i < (list ? node->value().size() : 1); ++i) {
    const JsonNode id = list ? node->at(i) : *node;
    parts.end_ids.push_back(static_cast<TokenId>(METRALE_TRY(id.integer(0, last))));
  }
  return {};
}

Result<> read_template(const JsonNode& root, TokenizerParts& parts) {
  const auto node = root.find("chat_template");
  if (!node) return {};
  if (!node->value().is_array()) {
    parts.chat_template = METRALE_TRY(node->string());
    return {};
  }
  for (std::size_t i = 0; i < node->value().size(); ++i) {
    const JsonNode named = node->at(i);
    if (METRALE_TRY(named.string_or("name", "")) != "default") continue;
    const JsonNode body = METRALE_TRY(named.require("template"));
    parts.chat_template = METRALE_TRY(body.string());
  }
  return {};
}

Result<> read_tokenizer_config(const JsonNode& root, TokenizerParts& parts) {
  if (const auto bos = root.find("bos_token")) parts.bos = METRALE_TRY(id_of(parts, *bos));
  if (const auto eos = root.find("eos_token")) parts.end_ids.push_back(METRALE_TRY(id_of(parts, *eos)));
  parts.add_bos = METRALE_TRY(root.flag_or("add_bos_token", parts.add_bos));
  return read_template(root, parts);
}

Result<> read_config(const JsonNode& root, TokenizerParts& parts) {
  METRALE_TRY(read_end_ids(root, parts));
  if (const auto text = root.find("text_config")) return read_end_ids(*text, parts);
  return {};
}

// Lets `reader` have the file's root where the folder has the file.
Result<> read_side_file(const std::filesystem::path& folder, std::string_view name, TokenizerParts& parts,
                        Result<> (*reader)(const JsonNode&, TokenizerParts&)) {
  const std::filesystem::path path = folder / name;
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return {};
  const std::string json = METRALE_TRY(text::read_text_file(path, kMaxSideFileBytes));
  const std::string file = path.string();
  const nlohmann::json document = METRALE_TRY(text::parse_json(json, file, {}));
  const JsonNode root(document, file);
  METRALE_TRY(root.require_object());
  return reader(root, parts);
}

Result<> read_side_files(const std::filesystem::path& folder, TokenizerParts& parts) {
  METRALE_TRY(read_side_file(folder, "tokenizer_config.json", parts, read_tokenizer_config));
  METRALE_TRY(read_side_file(folder, "generation_config.json", parts, read_end_ids));
  METRALE_TRY(read_side_file(folder, "config.json", parts, read_config));
  const std::filesystem::path jinja = folder / "chat_template.jinja";
  std::error_code ignored;
  if (std::filesystem::exists(jinja, ignored)) parts.chat_template = METRALE_TRY(text::read_text_file(jinja, kMaxSideFileBytes));
  return {};
}

Result<std::unique_ptr<Tokenizer::Impl>> read(std::string_view json, std::string_view file, const std::filesystem::path* folder) {
  if (json.size() > kMaxTokenizerJsonBytes)
    return Error(Errc::bad_format, fmt::format("{}: {} bytes; at most {} are read", file, json.size(), kMaxTokenizerJsonBytes));
  const nlohmann::json document = METRALE_TRY(text::parse_json(json, file, kLimits));
  return detail::guarded(file, [&]() -> Result<std::unique_ptr<Tokenizer::Impl>> {
    TokenizerParts parts;
    parts.file = file;
    METRALE_TRY(read_document(JsonNode(document, file), parts));
    if (folder != nullptr) METRALE_TRY(read_side_files(*folder, parts));
    return text::build_tokenizer(std::move(parts));
  });
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> Tokenizer::from_json(std::string_view json, std::string_view file) {
  auto impl = METRALE_TRY(read(json, file, nullptr));
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::move(impl)));
}

Result<std::unique_ptr<Tokenizer>> Tokenizer::from_folder(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "tokenizer.json";
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored))
    return Error(Errc::not_found, fmt::format("{}: the folder has no tokenizer.json", folder.string()));
  const std::string json = METRALE_TRY(text::read_text_file(path, kMaxTokenizerJsonBytes));
  auto impl = METRALE_TRY(read(json, path.string(), &folder));
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::move(impl)));
}

}  // namespace metrale
