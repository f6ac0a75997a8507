// SPDX-License-Identifier: Apache-2.0
#include "models/text/tokenizer_json_stages.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/text.h"

namespace metrale::text {
namespace {

// The steps of a member: those of a Sequence, or the one step itself. `list_key` is what a Sequence calls its list.
Result<std::vector<JsonNode>> steps_of(const JsonNode& root, std::string_view member, std::string_view list_key) {
  std::vector<JsonNode> steps;
  const auto node = root.find(member);
  if (!node) return steps;
  METRALE_TRY(node->require_object());
  const JsonNode type = METRALE_TRY(node->require("type"));
  if (METRALE_TRY(type.string()) != "Sequence") {
    steps.push_back(*node);
    return steps;
  }
  const JsonNode list = METRALE_TRY(node->require(list_key));
  METRALE_TRY(list.require_array());
  if (list.value().size() > PreTokenizer::kMaxStages)
    return list.error(Errc::bad_format, fmt::format("at most {} steps are read", PreTokenizer::kMaxStages));
  for (std::size_t i = 0; i < list.value().size(); ++i) {
    steps.push_back(list.at(i));
    METRALE_TRY(steps.back().require_object());
  }
  return steps;
}

Result<JsonNode> type_of(const JsonNode& step) {
  JsonNode type = METRALE_TRY(step.require("type"));
  METRALE_TRY(type.string());
  return type;
}

std::string place(const JsonNode& node) { return fmt::format("{}: {}", node.file(), node.place()); }

Result<SplitBehavior> behavior_of(const JsonNode& step) {
  const JsonNode node = METRALE_TRY(step.require("behavior"));
  const std::string_view name = METRALE_TRY(node.string());
  constexpr std::pair<std::string_view, SplitBehavior> kNames[] = {
      {"Removed", SplitBehavior::removed},
      {"Isolated", SplitBehavior::isolated},
      {"MergedWithPrevious", SplitBehavior::merged_with_previous},
      {"MergedWithNext", SplitBehavior::merged_with_next},
      {"Contiguous", SplitBehavior::contiguous},
  };
  for (const auto& [known, behavior] : kNames) {
    if (name == known) return behavior;
  }
  return node.error(Errc::bad_format, "Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous is needed");
}

Result<> add_split(const JsonNode& step, PreTokenizer& out) {
  const JsonNode pattern = METRALE_TRY(step.require("pattern"));
  METRALE_TRY(pattern.require_object());
  const SplitBehavior behavior = METRALE_TRY(behavior_of(step));
  const bool invert = METRALE_TRY(step.flag_or("invert", false));
  if (const auto regex = pattern.find("Regex")) {
    const std::string_view source = METRALE_TRY(regex->string());
    out.add_split(METRALE_TRY(Regex::compile(source, place(*regex))), behavior, invert);
    return {};
  }
  const JsonNode literal = METRALE_TRY(pattern.require("String"));
  const std::string_view text = METRALE_TRY(literal.string());
  if (text.empty()) return literal.error(Errc::bad_format, "a string to cut at is needed");
  out.add_split(METRALE_TRY(Regex::literal(text, place(literal))), behavior, invert);
  return {};
}

Result<> add_byte_level(const JsonNode& step, PreTokenizer& out) {
  if (METRALE_TRY(step.flag_or("add_prefix_space", true))) out.add_prefix_space();
  if (METRALE_TRY(step.flag_or("use_regex", true)))
    out.add_split(METRALE_TRY(Regex::compile(kGpt2Pattern, place(step))), SplitBehavior::isolated);
  return {};
}

}  // namespace

Result<> read_normalizer(const JsonNode& root, TokenizerParts& parts) {
  for (const JsonNode& step : METRALE_TRY(steps_of(root, "normalizer", "normalizers"))) {
    const JsonNode type = METRALE_TRY(type_of(step));
    if (type.value() != "NFC") return type.error(Errc::unsupported, "metrale knows the normalizer NFC");
    parts.nfc = true;
  }
  return {};
}

Result<> read_pre_tokenizer(const JsonNode& root, TokenizerParts& parts) {
  const auto steps = METRALE_TRY(steps_of(root, "pre_tokenizer", "pretokenizers"));
  bool byte_level = false;
  for (const JsonNode& step : steps) {
    const JsonNode type = METRALE_TRY(type_of(step));
    if (byte_level) return type.error(Errc::unsupported, "no step may follow ByteLevel");
    if (type.value() == "ByteLevel") {
      METRALE_TRY(add_byte_level(step, parts.pre_tokenizer));
      byte_level = true;
    } else if (type.value() == "Split") {
      METRALE_TRY(add_split(step, parts.pre_tokenizer));
    } else if (type.value() == "Digits") {
      const bool individual = METRALE_TRY(step.flag_or("individual_digits", false));
      parts.pre_tokenizer.add_split(METRALE_TRY(Regex::compile(R"(\p{N})", place(step))),
                                    individual ? SplitBehavior::isolated : SplitBehavior::contiguous);
    } else {
      return type.error(Errc::unsupported, "metrale knows the pre-tokenizers Split, Digits and ByteLevel");
    }
  }
  if (!byte_level)
    return Error(Errc::unsupported,
                 fmt::format("{}: \"pre_tokenizer\" has no ByteLevel step; metrale reads byte-level tokenizers", root.file()));
  return {};
}

Result<> read_post_processor(const JsonNode& root, TokenizerParts& parts) {
  for (const JsonNode& step : METRALE_TRY(steps_of(root, "post_processor", "processors"))) {
    const JsonNode type = METRALE_TRY(type_of(step));
    if (type.value() == "ByteLevel") continue;  // concerns offsets only
    if (type.value() != "TemplateProcessing")
      return type.error(Errc::unsupported, "metrale knows the post-processors ByteLevel and TemplateProcessing");
    const JsonNode single = METRALE_TRY(step.require("single"));
    METRALE_TRY(single.require_array());
    const std::size_t count = single.value().size();
    for (std::size_t i = 0; i < count; ++i) {
      const JsonNode part = single.at(i);
      const auto special = part.find("SpecialToken");
      if (!special) continue;
      if (i != 0 || count != 2) return part.error(Errc::unsupported, "metrale adds one token before a text and none after it");
      const JsonNode id = METRALE_TRY(special->require("id"));
      const std::string_view text = METRALE_TRY(id.string());
      const auto it = std::find(parts.entries.begin(), parts.entries.end(), text);
      if (it == parts.entries.end()) return id.error(Errc::bad_format, "the vocabulary has no such token");
      parts.bos = static_cast<TokenId>(it - parts.entries.begin());
      parts.add_bos = true;
    }
  }
  return {};
}

Result<> check_decoder(const JsonNode& root) {
  for (const JsonNode& step : METRALE_TRY(steps_of(root, "decoder", "decoders"))) {
    const JsonNode type = METRALE_TRY(type_of(step));
    if (type.value() != "ByteLevel") return type.error(Errc::unsupported, "metrale knows the decoder ByteLevel");
  }
  return {};
}

}  // namespace metrale::text
