// SPDX-License-Identifier: Apache-2.0
//
// Tokenizer files that are broken, lie or ask for what metrale lacks: one line that names the thing, and nothing else happens.
#include <unistd.h>

#include <functional>

#include "tokenizer_fixture.h"

namespace metrale::test {
namespace {

using Json = nlohmann::json;
using testing::Values;

struct Refusal {
  const char* name;
  std::function<void(Json&)> breaks;
  Errc code;
  std::vector<const char*> says;
};
void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.name; }

void expect_one_line(const Error& error, const Refusal& refusal) {
  EXPECT_EQ(error.code(), refusal.code) << error.to_string();
  for (const char* part : refusal.says)
    EXPECT_NE(error.message().find(part), std::string::npos) << part << " in: " << error.message();
  EXPECT_EQ(error.message().find('\n'), std::string::npos) << error.message();
  EXPECT_LT(error.message().size(), 600U) << error.message();
}

class TokenizerJsonRefusal : public testing::TestWithParam<Refusal> {};

TEST_P(TokenizerJsonRefusal, IsOneLineThatNamesTheThing) {
  Json json = small_json();
  GetParam().breaks(json);
  const auto tokenizer = Tokenizer::from_json(json.dump(), "test.json");
  ASSERT_FALSE(tokenizer);
  expect_one_line(tokenizer.error(), GetParam());
  EXPECT_EQ(tokenizer.error().message().rfind("test.json", 0), 0U) << tokenizer.error().message();
}

Json split(const char* pattern, const char* behavior = "Isolated") {
  return {{"type", "Sequence"},
          {"pretokenizers",
           {{{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", behavior}, {"invert", false}},
            {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
}

INSTANTIATE_TEST_SUITE_P(
    Vocabulary, TokenizerJsonRefusal,
    Values(
        Refusal{"NoModel", [](Json& j) { j.erase("model"); }, Errc::bad_format, {"model is missing"}},
        Refusal{"NoVocabulary", [](Json& j) { j["model"].erase("vocab"); }, Errc::bad_format, {"model.vocab is missing"}},
        Refusal{
            "VocabularyIsAList", [](Json& j) { j["model"]["vocab"] = {"a", "b"}; }, Errc::bad_format, {"model.vocab", "an object"}},
        Refusal{"EmptyVocabulary",
                [](Json& j) {
                  j["model"]["vocab"] = Json::object();
                  j["added_tokens"] = Json::array();
                  j["model"]["merges"] = Json::array();
                },
                Errc::bad_format,
                {"vocabulary is empty"}},
        Refusal{"IdTwice", [](Json& j) { j["model"]["vocab"]["twin"] = 259; }, Errc::bad_format, {"\"ab\"", "\"twin\"", "259"}},
        Refusal{"HoleInIds", [](Json& j) { j["model"]["vocab"]["far"] = 263; }, Errc::bad_format, {"no token has id 262"}},
        Refusal{"IdFarAway", [](Json& j) { j["model"]["vocab"]["far"] = 2000000000; }, Errc::bad_format, {"\"far\"", "2000000000"}},
        Refusal{"IdBeyond31Bits",
                [](Json& j) { j["model"]["vocab"]["far"] = 2147483648; },
                Errc::bad_format,
                {"model.vocab.far", "2147483648"}},
        Refusal{"IdNegative", [](Json& j) { j["model"]["vocab"]["neg"] = -1; }, Errc::bad_format, {"model.vocab.neg", "-1"}},
        Refusal{"IdIsText", [](Json& j) { j["model"]["vocab"]["x\ny"] = "7"; }, Errc::bad_format, {"model.vocab.x\\x0ay", "\"7\""}},
        Refusal{"IdIsAFraction", [](Json& j) { j["model"]["vocab"]["half"] = 0.5; }, Errc::bad_format, {"model.vocab.half", "0.5"}},
        Refusal{"AddedTokenHasAnotherText",
                [](Json& j) { j["added_tokens"][0]["content"] = "<|other|>"; },
                Errc::bad_format,
                {"<|other|>", "<|endoftext|>", "id 0"}},
        Refusal{"AddedTokenEmpty",
                [](Json& j) { j["added_tokens"].push_back({{"id", 262}, {"content", ""}}); },
                Errc::bad_format,
                {"added token 262", "0 bytes"}},
        Refusal{"AddedTokenTooLong",
                [](Json& j) { j["added_tokens"].push_back({{"id", 262}, {"content", std::string(257, 'x')}}); },
                Errc::bad_format,
                {"added token 262", "257 bytes"}},
        Refusal{"AddedTokenWithoutId",
                [](Json& j) { j["added_tokens"].push_back({{"content", "x"}}); },
                Errc::bad_format,
                {"added_tokens[3].id is missing"}},
        Refusal{"AddedTokenTwice",
                [](Json& j) { j["added_tokens"].push_back(j["added_tokens"][1]); },
                Errc::bad_format,
                {"<|im_start|>", "twice"}},
        Refusal{"AddedTokensAreAnObject", [](Json& j) { j["added_tokens"] = Json::object(); }, Errc::bad_format, {"added_tokens"}},
        Refusal{"AddedTokenInsideWordsOnly",
                [](Json& j) { j["added_tokens"][0]["single_word"] = true; },
                Errc::unsupported,
                {"added_tokens[0].single_word"}},
        Refusal{"UnknownTokenUnknown", [](Json& j) { j["model"]["unk_token"] = "<unk>"; }, Errc::bad_format, {"<unk>"}}),
    [](const auto& param) { return std::string(param.param.name); });

INSTANTIATE_TEST_SUITE_P(
    Merges, TokenizerJsonRefusal,
    Values(Refusal{"NoMerges", [](Json& j) { j["model"].erase("merges"); }, Errc::bad_format, {"model.merges is missing"}},
           Refusal{"MergesAreText", [](Json& j) { j["model"]["merges"] = "a b"; }, Errc::bad_format, {"model.merges"}},
           Refusal{"MergeOfUnknownToken",
                   [](Json& j) { j["model"]["merges"].push_back("nope b"); },
                   Errc::bad_format,
                   {"merge 3", "\"nope\"", "lacks"}},
           Refusal{"MergeIntoUnknownToken",
                   [](Json& j) { j["model"]["merges"].push_back({"b", "a"}); },
                   Errc::bad_format,
                   {"merge 3", "\"ba\"", "lacks"}},
           Refusal{"MergeTwice",
                   [](Json& j) { j["model"]["merges"].push_back("a b"); },
                   Errc::bad_format,
                   {"merges 0 and 3", "\"a\"", "\"b\""}},
           Refusal{
               "MergeOfThree", [](Json& j) { j["model"]["merges"][1] = {"a", "b", "c"}; }, Errc::bad_format, {"model.merges[1]"}},
           Refusal{"MergeOfOne", [](Json& j) { j["model"]["merges"][1] = "ab"; }, Errc::bad_format, {"model.merges[1]", "\"ab\""}},
           Refusal{"MergeWithTwoSpaces", [](Json& j) { j["model"]["merges"][1] = "a  b"; }, Errc::bad_format, {"model.merges[1]"}},
           Refusal{"MergeIsANumber", [](Json& j) { j["model"]["merges"][2] = 5; }, Errc::bad_format, {"model.merges[2]", "5"}}),
    [](const auto& param) { return std::string(param.param.name); });

INSTANTIATE_TEST_SUITE_P(
    Steps, TokenizerJsonRefusal,
    Values(
        Refusal{"AnotherModel", [](Json& j) { j["model"]["type"] = "Unigram"; }, Errc::unsupported, {"model.type", "Unigram"}},
        Refusal{"ByteFallback", [](Json& j) { j["model"]["byte_fallback"] = true; }, Errc::unsupported, {"model.byte_fallback"}},
        Refusal{"WordSuffix", [](Json& j) { j["model"]["end_of_word_suffix"] = "</w>"; }, Errc::unsupported, {"</w>"}},
        Refusal{"Dropout", [](Json& j) { j["model"]["dropout"] = 0.1; }, Errc::unsupported, {"model.dropout"}},
        Refusal{"NoPreTokenizer", [](Json& j) { j["pre_tokenizer"] = nullptr; }, Errc::unsupported, {"pre_tokenizer", "ByteLevel"}},
        Refusal{"Metaspace", [](Json& j) { j["pre_tokenizer"] = {{"type", "Metaspace"}}; }, Errc::unsupported, {"Metaspace"}},
        Refusal{"StepAfterByteLevel",
                [](Json& j) {
                  j["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {j["pre_tokenizer"], {{"type", "Digits"}}}}};
                },
                Errc::unsupported,
                {"pre_tokenizer.pretokenizers[1].type", "Digits"}},
        Refusal{"TooManySteps",
                [](Json& j) {
                  Json list = Json::array();
                  for (int i = 0; i < 40; ++i) list.push_back({{"type", "Digits"}});
                  j["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", list}};
                },
                Errc::bad_format,
                {"pre_tokenizer.pretokenizers", "array of 40"}},
        Refusal{"AnotherNormalizer", [](Json& j) { j["normalizer"] = {{"type", "Lowercase"}}; }, Errc::unsupported, {"Lowercase"}},
        Refusal{"AnotherDecoder", [](Json& j) { j["decoder"] = {{"type", "WordPiece"}}; }, Errc::unsupported, {"WordPiece"}},
        Refusal{"AnotherPostProcessor",
                [](Json& j) { j["post_processor"] = {{"type", "BertProcessing"}}; },
                Errc::unsupported,
                {"BertProcessing"}},
        Refusal{"UnknownStartToken",
                [](Json& j) {
                  j["post_processor"] = {{"type", "TemplateProcessing"},
                                         {"single", {{{"SpecialToken", {{"id", "<bos>"}}}}, {{"Sequence", {{"id", "A"}}}}}}};
                },
                Errc::bad_format,
                {"<bos>"}},
        Refusal{"NormalizerIsText", [](Json& j) { j["normalizer"] = "NFC"; }, Errc::bad_format, {"normalizer", "object"}},
        Refusal{"StepWithoutType", [](Json& j) { j["decoder"] = Json::object(); }, Errc::bad_format, {"decoder.type is missing"}},
        Refusal{"PatternDoesNotCompile",
                [](Json& j) { j["pre_tokenizer"] = split("(a"); },
                Errc::bad_format,
                {"pattern.Regex", "\"(a\"", "does not compile"}},
        Refusal{"PatternTooLarge",
                [](Json& j) { j["pre_tokenizer"] = split("((a{1,1000}){1,1000}){1,1000}"); },
                Errc::bad_format,
                {"does not compile"}},
        Refusal{"PatternTooLong",
                [](Json& j) { j["pre_tokenizer"] = split(std::string(20000, 'a').c_str()); },
                Errc::bad_format,
                {"20000 bytes"}},
        Refusal{"PatternWithSetOperation", [](Json& j) { j["pre_tokenizer"] = split("[a-z&&[^b]]"); }, Errc::unsupported, {"&&"}},
        Refusal{"UnknownBehavior",
                [](Json& j) { j["pre_tokenizer"] = split("a", "Sometimes"); },
                Errc::bad_format,
                {"behavior", "Sometimes"}}),
    [](const auto& param) { return std::string(param.param.name); });

TEST(TokenizerJson, TextThatIsNoJsonIsOneLine) {
  const std::string deep = std::string(100000, '[');
  for (const std::string& text : {std::string(), std::string("{"), std::string("[]"), std::string("nul"),
                                  std::string("{\"a\": \xff}"), std::string("\"\xed\xa0\x80\""), std::string("{\"model\": 1e999}"),
                                  std::string("{} x\n\n"), deep, std::string("{\"model\":") + deep}) {
    const auto tokenizer = Tokenizer::from_json(text, "test.json");
    ASSERT_FALSE(tokenizer);
    expect_one_line(tokenizer.error(), {"", {}, Errc::bad_format, {"test.json"}});
  }
}

TEST(TokenizerJson, PatternThatExplodesIsAnErrorAndNotAWait) {
  Json json = small_json();
  json["pre_tokenizer"] = split("(a+)+$x|(?:a|aa)+y");
  const auto tokenizer = load(json);
  const auto ids = tokenizer->encode(std::string(5000, 'a'));
  ASSERT_FALSE(ids);
  expect_one_line(ids.error(), {"", {}, Errc::bad_format, {"pattern", "5000 bytes", "limit"}});
  EXPECT_TRUE(tokenizer->encode("bbb"));
}

TEST(TokenizerFolder, WithoutTokenizerIsNamed) {
  const auto tokenizer = Tokenizer::from_folder(test_data("tokenizer/no-such-folder"));
  ASSERT_FALSE(tokenizer);
  expect_one_line(tokenizer.error(), {"", {}, Errc::not_found, {"no-such-folder", "no tokenizer.json"}});
}

// A folder of its own for each test, gone afterwards.
class TokenizerSideFiles : public testing::Test {
 protected:
  TokenizerSideFiles()
      : folder_(std::filesystem::temp_directory_path() / ("metrale-tokenizer-test-" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(folder_);
    write("tokenizer.json", small_json().dump());
  }
  ~TokenizerSideFiles() override {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  void write(const char* name, const std::string& text) { std::ofstream(folder_ / name, std::ios::binary) << text; }
  void expect_refused(std::vector<const char*> says) {
    const auto tokenizer = Tokenizer::from_folder(folder_);
    ASSERT_FALSE(tokenizer);
    expect_one_line(tokenizer.error(), {"", {}, Errc::bad_format, std::move(says)});
  }

  std::filesystem::path folder_;
};

TEST_F(TokenizerSideFiles, NameStartEndAndTemplate) {
  write("tokenizer_config.json", R"({"bos_token": {"content": "<|im_start|>"}, "eos_token": "ab", "add_bos_token": true,
                                     "chat_template": [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]})");
  write("generation_config.json", R"({"eos_token_id": [7, 5]})");
  write("config.json", R"({"text_config": {"eos_token_id": 9}})");
  const auto tokenizer = Tokenizer::from_folder(folder_);
  ASSERT_TRUE(tokenizer) << tokenizer.error().to_string();
  EXPECT_EQ((*tokenizer)->bos(), TokenId{1});
  EXPECT_TRUE((*tokenizer)->add_bos());
  const auto ends = (*tokenizer)->end_ids();
  EXPECT_EQ(std::vector<TokenId>(ends.begin(), ends.end()), (std::vector<TokenId>{0, 2, 5, 7, 9, 259}));
  EXPECT_EQ((*tokenizer)->chat_template(), "D");
  write("chat_template.jinja", "J");
  EXPECT_EQ((*Tokenizer::from_folder(folder_))->chat_template(), "J");
}

TEST_F(TokenizerSideFiles, EndOutsideTheVocabularyIsNamed) {
  write("generation_config.json", R"({"eos_token_id": 262})");
  expect_refused({"generation_config.json", "eos_token_id", "262", "261"});
}

TEST_F(TokenizerSideFiles, StartThatIsNoTokenIsNamed) {
  write("tokenizer_config.json", R"({"bos_token": "<s>"})");
  expect_refused({"tokenizer_config.json", "bos_token", "<s>"});
}

TEST_F(TokenizerSideFiles, StartToBeAddedMustBeNamed) {
  write("tokenizer_config.json", R"({"add_bos_token": true})");
  expect_refused({"start token"});
}

TEST_F(TokenizerSideFiles, BrokenSideFileIsNamed) {
  write("config.json", "{");
  expect_refused({"config.json", "JSON"});
}

struct GgufRefusal {
  const char* name;
  std::function<void(GgufMetadata::Map&)> breaks;
  Errc code;
  std::vector<const char*> says;
};
void PrintTo(const GgufRefusal& refusal, std::ostream* out) { *out << refusal.name; }

class TokenizerGgufRefusal : public testing::TestWithParam<GgufRefusal> {};

TEST_P(TokenizerGgufRefusal, IsOneLineThatNamesTheThing) {
  GgufMetadata::Map map = gguf_of(small_json(), "gpt-2").values();
  GetParam().breaks(map);
  const auto tokenizer = Tokenizer::from_gguf(GgufMetadata(std::move(map), "test.gguf"), "test.gguf");
  ASSERT_FALSE(tokenizer);
  expect_one_line(tokenizer.error(), {"", {}, GetParam().code, GetParam().says});
}

using Map = GgufMetadata::Map;
INSTANTIATE_TEST_SUITE_P(
    All, TokenizerGgufRefusal,
    Values(GgufRefusal{"NoModel", [](Map& m) { m.erase("tokenizer.ggml.model"); }, Errc::not_found, {"tokenizer.ggml.model"}},
           GgufRefusal{
               "AnotherModel", [](Map& m) { m["tokenizer.ggml.model"] = std::string("llama"); }, Errc::unsupported, {"\"llama\""}},
           GgufRefusal{"NoTokens", [](Map& m) { m.erase("tokenizer.ggml.tokens"); }, Errc::not_found, {"tokenizer.ggml.tokens"}},
           GgufRefusal{
               "TokensAreANumber", [](Map& m) { m["tokenizer.ggml.tokens"] = 7U; }, Errc::bad_format, {"tokenizer.ggml.tokens"}},
           GgufRefusal{"NoMerges", [](Map& m) { m.erase("tokenizer.ggml.merges"); }, Errc::not_found, {"tokenizer.ggml.merges"}},
           GgufRefusal{"UnknownPre",
                       [](Map& m) { m["tokenizer.ggml.pre"] = std::string("vik\ning"); },
                       Errc::unsupported,
                       {"tokenizer.ggml.pre", "vik\\x0aing", "smollm"}},
           GgufRefusal{"TypesOfAnotherLength",
                       [](Map& m) { m["tokenizer.ggml.token_type"] = std::vector<std::int32_t>{1, 2}; },
                       Errc::bad_format,
                       {"tokenizer.ggml.token_type", "2 elements", "262"}},
           GgufRefusal{"TokenTwice",
                       [](Map& m) { std::get<std::vector<std::string>>(m["tokenizer.ggml.tokens"])[261] = "ab"; },
                       Errc::bad_format,
                       {"tokens 259 and 261", "\"ab\""}},
           GgufRefusal{"MergeWithoutASpace",
                       [](Map& m) { std::get<std::vector<std::string>>(m["tokenizer.ggml.merges"])[1] = "abc"; },
                       Errc::bad_format,
                       {"tokenizer.ggml.merges", "[1]", "\"abc\""}},
           GgufRefusal{"MergeOfUnknownToken",
                       [](Map& m) { std::get<std::vector<std::string>>(m["tokenizer.ggml.merges"])[1] = "q\xff c"; },
                       Errc::bad_format,
                       {"merge 1", "q\\xff"}},
           GgufRefusal{"ControlTokenIsNoUtf8",
                       [](Map& m) { std::get<std::vector<std::string>>(m["tokenizer.ggml.tokens"])[0] = "\xff"; },
                       Errc::bad_format,
                       {"added token 0", "\\xff"}},
           GgufRefusal{"EndOutside",
                       [](Map& m) { m["tokenizer.ggml.eos_token_id"] = std::uint32_t{262}; },
                       Errc::bad_format,
                       {"end of a text", "262"}},
           GgufRefusal{"StartBeyond31Bits",
                       [](Map& m) { m["tokenizer.ggml.bos_token_id"] = std::uint32_t{0xFFFFFFFF}; },
                       Errc::bad_format,
                       {"tokenizer.ggml.bos_token_id"}},
           GgufRefusal{"StartToBeAddedIsNotNamed",
                       [](Map& m) { m["tokenizer.ggml.add_bos_token"] = true; },
                       Errc::bad_format,
                       {"start token"}}),
    [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace metrale::test
