// SPDX-License-Identifier: Apache-2.0
//
// The input up to its first zero byte is a tokenizer.json, the rest a text to encode. Where the first part does not start with a
// brace it is a regular expression instead, by which a tokenizer of the 256 bytes cuts its words.
#include <nlohmann/json.hpp>

#include "fuzz/check_text.h"
#include "models/text/byte_alphabet.h"
#include "models/text/utf8.h"

namespace {

using namespace metrale;

nlohmann::json byte_tokenizer() {
  nlohmann::json vocab;
  for (int byte = 0; byte < 256; ++byte) {
    std::string entry;
    text::append_utf8(text::byte_alphabet()[static_cast<std::size_t>(byte)], entry);
    vocab[entry] = byte;
  }
  vocab["ab"] = 256;
  vocab["abab"] = 257;
  vocab["ĠĠ"] = 258;
  nlohmann::json json;
  json["model"]["vocab"] = vocab;
  json["model"]["merges"] = nlohmann::json::parse(R"([["a", "b"], ["ab", "ab"], ["Ġ", "Ġ"]])");
  json["added_tokens"] =
      nlohmann::json::parse(R"([{"id": 259, "content": "<|x|>", "special": true}, {"id": 260, "content": "<|xy|>"}])");
  json["pre_tokenizer"] = nlohmann::json::parse(
      R"({"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated"},
                                                {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]})");
  return json;
}

void check_pattern(std::string_view pattern, std::string_view text) {
  if (!detail::valid_utf8(pattern)) return;
  nlohmann::json json = byte_tokenizer();
  json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern;
  const auto tokenizer = Tokenizer::from_json(json.dump(), "input");
  if (!tokenizer) return fuzz::check_refusal(tokenizer.error());
  fuzz::must(fuzz::check_tokenizer(**tokenizer, text) == text, "no byte is lost or changed");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view all(reinterpret_cast<const char*>(data), size);
  const std::string_view file = all.substr(0, all.find('\0'));
  const std::string_view text = all.substr(std::min(all.size(), file.size() + 1));
  if (!file.starts_with('{')) {
    check_pattern(file, text);
    return 0;
  }
  const auto tokenizer = Tokenizer::from_json(file, "input");
  if (!tokenizer) {
    fuzz::check_refusal(tokenizer.error());
    return 0;
  }
  static_cast<void>(fuzz::check_tokenizer(**tokenizer, text));
  fuzz::check_template(**tokenizer, text, text);
  return 0;
}
