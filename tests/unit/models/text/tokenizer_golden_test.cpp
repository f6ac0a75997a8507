// SPDX-License-Identifier: Apache-2.0
//
// Our ids and texts against those of another implementation: see tests/data/tokenizer/make_goldens.py.
#include <cstdlib>

#include "tokenizer_fixture.h"

namespace metrale::test {
namespace {

struct Golden {
  const char* name;       // of the goldens
  const char* tokenizer;  // file
  const char* pre;        // GGUF name of the pre-tokenisation; null where GGUF has none
};

void PrintTo(const Golden& golden, std::ostream* out) { *out << golden.name; }

void check(const Tokenizer& tokenizer, const char* name) {
  const auto json = nlohmann::json::parse(read_file(test_data(std::string("tokenizer/") + name + ".golden.json")));
  ASSERT_GT(json["cases"].size(), 40U);
  for (const auto& golden : json["cases"]) {
    const auto text = golden["text"].get<std::string>();
    const auto ids = tokenizer.encode(text, SpecialTokens::recognise);
    ASSERT_TRUE(ids) << ids.error().to_string();
    EXPECT_EQ(*ids, golden["ids"].get<std::vector<TokenId>>()) << golden["text"];
    const auto plain = tokenizer.encode(text, SpecialTokens::as_text);
    ASSERT_TRUE(plain) << plain.error().to_string();
    EXPECT_EQ(*plain, golden["plain_ids"].get<std::vector<TokenId>>()) << golden["text"];
    const auto decoded = tokenizer.decode(golden["ids"].get<std::vector<TokenId>>());
    ASSERT_TRUE(decoded) << decoded.error().to_string();
    EXPECT_EQ(*decoded, golden["decoded"].get<std::string>()) << golden["text"];
  }
}

class TokenizerGolden : public testing::TestWithParam<Golden> {};

TEST_P(TokenizerGolden, JsonGivesTheSameIdsAndTexts) {
  const auto tokenizer = Tokenizer::from_json(read_file(test_data(GetParam().tokenizer)), GetParam().tokenizer);
  ASSERT_TRUE(tokenizer) << tokenizer.error().to_string();
  check(**tokenizer, GetParam().name);
}

TEST_P(TokenizerGolden, GgufGivesTheSameIdsAndTexts) {
  if (GetParam().pre == nullptr) return;
  const auto json = nlohmann::json::parse(read_file(test_data(GetParam().tokenizer)));
  const auto tokenizer = Tokenizer::from_gguf(gguf_of(json, GetParam().pre), "test.gguf");
  ASSERT_TRUE(tokenizer) << tokenizer.error().to_string();
  check(**tokenizer, GetParam().name);
}

INSTANTIATE_TEST_SUITE_P(All, TokenizerGolden,
                         testing::Values(Golden{"kjv", "kjv-llama-2m/tokenizer.json", "gpt-2"},
                                         Golden{"gpt2_prefix", "tokenizer/gpt2_prefix.json", nullptr},
                                         Golden{"smollm", "tokenizer/smollm.json", "smollm"},
                                         Golden{"qwen2", "tokenizer/qwen2.json", nullptr},
                                         Golden{"qwen35", "tokenizer/qwen35.json", "qwen35"},
                                         Golden{"llama3", "tokenizer/llama3.json", nullptr},
                                         Golden{"split_removed", "tokenizer/split_removed.json", nullptr},
                                         Golden{"split_merged_with_previous", "tokenizer/split_merged_with_previous.json", nullptr},
                                         Golden{"split_merged_with_next", "tokenizer/split_merged_with_next.json", nullptr},
                                         Golden{"split_contiguous", "tokenizer/split_contiguous.json", nullptr},
                                         Golden{"split_inverted", "tokenizer/split_inverted.json", nullptr}),
                         [](const auto& golden) { return std::string(golden.param.name); });

// The model is fetched, not part of the sources: METRALE_SMOLLM2 names it, or scripts/fetch_model has put it in its place.
TEST(TokenizerGoldenModel, SmolLm2GivesTheSameIdsAndTexts) {
  const char* named = std::getenv("METRALE_SMOLLM2");
  const std::filesystem::path path =
      named != nullptr ? std::filesystem::path(named) : test_data("../../build/models/SmolLM2-135M-Instruct.Q4_1.gguf");
  if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is not there: scripts/fetch_model brings it";
  const auto source = FileSource::open(path);
  ASSERT_TRUE(source) << source.error().to_string();
  const auto header = parse_gguf(**source);
  ASSERT_TRUE(header) << header.error().to_string();
  const auto tokenizer = Tokenizer::from_gguf(header->metadata, path.string());
  ASSERT_TRUE(tokenizer) << tokenizer.error().to_string();
  check(**tokenizer, "smollm2");
  EXPECT_EQ((*tokenizer)->vocab_size(), 49152U);
  EXPECT_EQ((*tokenizer)->bos(), TokenId{1});
  EXPECT_FALSE((*tokenizer)->add_bos());
  EXPECT_EQ((*tokenizer)->find_added("<|im_end|>"), TokenId{2});
  const auto ends = (*tokenizer)->end_ids();
  EXPECT_EQ(std::vector<TokenId>(ends.begin(), ends.end()), (std::vector<TokenId>{0, 2}));
}

}  // namespace
}  // namespace metrale::test
