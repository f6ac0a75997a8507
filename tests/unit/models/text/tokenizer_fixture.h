// SPDX-License-Identifier: Apache-2.0
//
// Tokenizers for tests: those of the test data, and small ones written in place.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/models/tokenizer.h"

namespace metrale::test {

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in) << path;
  return {std::istreambuf_iterator<char>(in), {}};
}

inline std::filesystem::path test_data(std::string_view name) { return std::filesystem::path(METRALE_TEST_DATA) / name; }

/// The keys that a GGUF would hold for a tokenizer.json whose pre-tokenisation `pre` names.
inline GgufMetadata gguf_of(const nlohmann::json& json, std::string pre) {
  std::map<int, std::string> by_id;
  for (const auto& [text, id] : json["model"]["vocab"].items()) by_id[id] = text;
  std::map<int, bool> added;
  for (const auto& token : json["added_tokens"]) {
    by_id[token["id"]] = token["content"];
    added[token["id"]] = token["special"];
  }
  std::vector<std::string> tokens;
  std::vector<std::int32_t> types;
  for (const auto& [id, text] : by_id) {
    tokens.push_back(text);
    types.push_back(!added.contains(id) ? 1 : added[id] ? 3 : 4);
  }
  std::vector<std::string> merges;
  for (const auto& merge : json["model"]["merges"])
    merges.push_back(merge.is_string() ? merge.get<std::string>()
                                       : merge[0].get<std::string>() + " " + merge[1].get<std::string>());
  GgufMetadata::Map map;
  map["tokenizer.ggml.model"] = std::string("gpt2");
  map["tokenizer.ggml.pre"] = std::move(pre);
  map["tokenizer.ggml.tokens"] = std::move(tokens);
  map["tokenizer.ggml.token_type"] = std::move(types);
  map["tokenizer.ggml.merges"] = std::move(merges);
  return GgufMetadata(std::move(map), "test.gguf");
}

/// A tokenizer.json of the 256 bytes, merges for "ab", "abc", " ab", and two control tokens.
inline nlohmann::json small_json() {
  nlohmann::json json = nlohmann::json::parse(read_file(test_data("tokenizer/split_removed.json")));
  nlohmann::json& model = json["model"];
  // Keeps the control tokens and the alphabet, which come first.
  nlohmann::json vocab = nlohmann::json::object();
  for (const auto& [text, id] : model["vocab"].items()) {
    if (id.get<int>() < 3 + 256) vocab[text] = id;
  }
  vocab["ab"] = 259;
  vocab["abc"] = 260;
  vocab["Ġab"] = 261;
  model["vocab"] = vocab;
  model["merges"] = nlohmann::json::parse(R"([["a", "b"], ["ab", "c"], ["Ġ", "ab"]])");
  json["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
  return json;
}

inline std::unique_ptr<Tokenizer> load(const nlohmann::json& json) {
  auto tokenizer = Tokenizer::from_json(json.dump(), "test.json");
  EXPECT_TRUE(tokenizer) << tokenizer.error().to_string();
  return tokenizer ? std::move(*tokenizer) : nullptr;
}

}  // namespace metrale::test
