// SPDX-License-Identifier: Apache-2.0
#include "metrale/models/model_config.h"

#include <cmath>
#include <functional>
#include <numbers>

#include "refusal.h"
#include "tokenizer_fixture.h"

namespace metrale::test {
namespace {

using Json = nlohmann::json;
using testing::Values;

Json config_of(const char* folder) { return Json::parse(read_file(test_data(std::string(folder) + "/config.json"))); }

Result<ModelConfig> parsed(const Json& json) { return parse_model_config(json.dump(), "config.json"); }

TEST(ModelConfig, ReadsTheLlamaCheckpoint) {
  const auto config = load_model_config(test_data("kjv-llama-2m"));
  ASSERT_TRUE(config) << config.error().to_string();
  EXPECT_EQ(config->family, ModelFamily::llama);
  EXPECT_EQ(config->weights, WeightFormat::hugging_face);
  EXPECT_EQ(config->tensor_prefix, "model.");
  EXPECT_EQ(config->vocab_size, 1024U);
  EXPECT_EQ(config->hidden_size, 192U);
  EXPECT_EQ(config->intermediate_size, 512U);
  EXPECT_EQ(config->num_layers, 4U);
  EXPECT_EQ(config->num_heads, 6U);
  EXPECT_EQ(config->num_kv_heads, 2U);
  EXPECT_EQ(config->head_dim, 64U);
  EXPECT_EQ(config->max_position, 4096U);
  EXPECT_FLOAT_EQ(config->rms_norm_eps, 1e-5F);
  EXPECT_EQ(config->rope.theta, 10000.0);
  EXPECT_EQ(config->rope.rotary_dim, 64U);
  EXPECT_EQ(config->rope.scaling, RopeScaling::none);
  EXPECT_TRUE(config->tie_word_embeddings);
  EXPECT_EQ(config->layers, std::vector<LayerKind>(4, LayerKind::full_attention));
  EXPECT_TRUE(config->eos_ids.empty());
  EXPECT_EQ(config->query_dim(), 384U);
  EXPECT_EQ(config->kv_dim(), 128U);
  // embedding, then per layer: q and o, k and v, gate, up and down
  EXPECT_EQ(config->num_parameters(), 1024U * 192 + 4U * (2 * 192 * 384 + 2 * 192 * 128 + 3 * 192 * 512));
}

TEST(ModelConfig, ReadsTheHybridCheckpoint) {
  const auto config = load_model_config(test_data("kjv-hybrid-4m"));
  ASSERT_TRUE(config) << config.error().to_string();
  EXPECT_EQ(config->family, ModelFamily::qwen3_5);
  EXPECT_EQ(config->rope.rotary_dim, 16U);
  ASSERT_EQ(config->layers.size(), 8U);
  for (std::size_t i = 0; i < 8; ++i)
    EXPECT_EQ(config->layers[i], i % 4 == 3 ? LayerKind::full_attention : LayerKind::linear_attention) << i;
  EXPECT_EQ(config->num_layers_of(LayerKind::linear_attention), 6U);
  EXPECT_EQ(config->linear.conv_kernel, 4U);
  EXPECT_EQ(config->linear.num_key_heads, 1U);
  EXPECT_EQ(config->linear.num_value_heads, 2U);
  EXPECT_EQ(config->linear.key_dim(), 128U);
  EXPECT_EQ(config->linear.value_dim(), 256U);
  EXPECT_EQ(config->linear.conv_dim(), 512U);
}

TEST(ModelConfig, OlderFormsMeanTheSame) {
  Json json = config_of("kjv-llama-2m");
  json.erase("rope_parameters");
  json.erase("head_dim");
  json.erase("num_key_value_heads");
  json["rope_theta"] = 5000;
  json["rope_scaling"] = {{"type", "linear"}, {"factor", 2.0}};
  json["eos_token_id"] = {1, 2};
  const auto config = parsed(json);
  ASSERT_TRUE(config) << config.error().to_string();
  EXPECT_EQ(config->head_dim, 32U);
  EXPECT_EQ(config->num_kv_heads, 6U);
  EXPECT_EQ(config->rope.theta, 5000.0);
  EXPECT_EQ(config->rope.scaling, RopeScaling::linear);
  EXPECT_EQ(config->rope.factor, 2.0);
  EXPECT_EQ(config->eos_ids, (std::vector<std::int32_t>{1, 2}));
}

TEST(ModelConfig, OlderAndNewerRotaryScalingMayStandTogetherWhenTheyAgree) {
  Json json = config_of("kjv-llama-2m");
  json["rope_scaling"] = {{"type", "linear"}, {"factor", 2.0}};
  json["rope_parameters"] = {{"rope_type", "linear"}, {"factor", 2}, {"rope_theta", 5000}};
  const auto config = parsed(json);
  ASSERT_TRUE(config) << config.error().to_string();
  EXPECT_EQ(config->rope.theta, 5000.0);
  EXPECT_EQ(config->rope.scaling, RopeScaling::linear);
  EXPECT_EQ(config->rope.factor, 2.0);
  json["rope_parameters"] = {{"rope_theta", 5000}};
  EXPECT_EQ(parsed(json)->rope.scaling, RopeScaling::linear) << "what names no type says nothing of scaling";
}

TEST(ModelConfig, LayersFollowTheIntervalWhenTheyAreNotListed) {
  Json json = config_of("kjv-hybrid-4m");
  json.erase("layer_types");
  json["full_attention_interval"] = 3;
  const auto config = parsed(json);
  ASSERT_TRUE(config) << config.error().to_string();
  for (std::size_t i = 0; i < 8; ++i)
    EXPECT_EQ(config->layers[i], i % 3 == 2 ? LayerKind::full_attention : LayerKind::linear_attention) << i;
}

TEST(ModelConfig, CheckpointWithAVisionPartKeepsItsTextInside) {
  const Json inner = config_of("kjv-hybrid-4m");
  const Json json = {
      {"architectures", Json::array({"Qwen3_5ForConditionalGeneration"})}, {"model_type", "qwen3_5"}, {"text_config", inner}};
  const auto config = parsed(json);
  ASSERT_TRUE(config) << config.error().to_string();
  EXPECT_EQ(config->tensor_prefix, "model.language_model.");
  EXPECT_EQ(config->hidden_size, 192U);
}

TEST(RopeConfig, PlainFrequenciesFallGeometrically) {
  const RopeConfig rope{.theta = 10000.0, .rotary_dim = 8};
  const auto frequencies = rope.inverse_frequencies();
  ASSERT_EQ(frequencies.size(), 4U);
  EXPECT_DOUBLE_EQ(frequencies[0], 1.0);
  EXPECT_DOUBLE_EQ(frequencies[1], 0.1);
  EXPECT_DOUBLE_EQ(frequencies[3], 0.001);
}

TEST(RopeConfig, LinearScalingDividesEachFrequency) {
  const RopeConfig rope{.theta = 10000.0, .rotary_dim = 8, .scaling = RopeScaling::linear, .factor = 4.0};
  EXPECT_DOUBLE_EQ(rope.inverse_frequencies()[1], 0.025);
}

TEST(RopeConfig, Llama3ScalingKeepsHighFrequenciesAndDividesLowOnes) {
  Json json = config_of("kjv-llama-2m");
  json["rope_parameters"] = {{"rope_type", "llama3"},  {"rope_theta", 500000.0},  {"factor", 8.0},
                             {"low_freq_factor", 1.0}, {"high_freq_factor", 4.0}, {"original_max_position_embeddings", 8192}};
  json["head_dim"] = 128;
  const auto config = parsed(json);
  ASSERT_TRUE(config) << config.error().to_string();
  const auto frequencies = config->rope.inverse_frequencies();
  bool between = false;
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const double plain = std::pow(500000.0, -2.0 * static_cast<double>(i) / 128.0);
    const double wavelength = 2.0 * std::numbers::pi / plain;
    if (wavelength < 8192.0 / 4.0) {
      EXPECT_DOUBLE_EQ(frequencies[i], plain) << i;
    } else if (wavelength > 8192.0) {
      EXPECT_DOUBLE_EQ(frequencies[i], plain / 8.0) << i;
    } else {
      EXPECT_GT(frequencies[i], plain / 8.0) << i;
      EXPECT_LT(frequencies[i], plain) << i;
      between = true;
    }
  }
  EXPECT_TRUE(between);
  // Pair 32 of the published 3.1 models, worked out by hand: 8192 / (2 pi sqrt(500000)) turns.
  const double turns = 8192.0 / (2.0 * std::numbers::pi * std::sqrt(500000.0));
  const double keep = (turns - 1.0) / 3.0;
  EXPECT_NEAR(frequencies[32], ((1.0 - keep) / 8.0 + keep) / std::sqrt(500000.0), 1e-12);
}

struct Refusal {
  const char* name;
  const char* base;
  std::function<void(Json&)> breaks;
  Errc code;
  std::vector<const char*> says;
};
void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.name; }

class ModelConfigRefusal : public testing::TestWithParam<Refusal> {};

TEST_P(ModelConfigRefusal, IsOneLineWithFileKeyAndValue) {
  Json json = config_of(GetParam().base);
  GetParam().breaks(json);
  const auto config = parsed(json);
  ASSERT_FALSE(config);
  expect_one_line(config.error(), GetParam().code, GetParam().says);
  EXPECT_EQ(config.error().message().rfind("config.json: ", 0), 0U) << config.error().message();
}

constexpr const char* kLlama = "kjv-llama-2m";
constexpr const char* kHybrid = "kjv-hybrid-4m";

// A key set to a value that cannot be.
Refusal key(const char* name, const char* base, const char* key, Json value, std::vector<const char*> says,
            Errc code = Errc::bad_format) {
  says.push_back(key);
  return {name, base, [key, value](Json& j) { j[key] = value; }, code, std::move(says)};
}

INSTANTIATE_TEST_SUITE_P(
    Values, ModelConfigRefusal,
    Values(key("ZeroLayers", kLlama, "num_hidden_layers", 0, {"is 0", "1 to 4096"}),
           key("TooManyLayers", kLlama, "num_hidden_layers", 4097, {"is 4097", "1 to 4096"}),
           key("NegativeHidden", kLlama, "hidden_size", -192, {"is -192"}),
           key("HiddenIsText", kLlama, "hidden_size", "192", {"\"192\""}),
           key("HiddenIsAFraction", kLlama, "hidden_size", 192.0, {"192.0", "integer"}),
           key("HiddenIsNull", kLlama, "hidden_size", nullptr, {"hidden_size is missing"}),
           key("HiddenIsHuge", kLlama, "hidden_size", 18446744073709551615U, {"18446744073709551615"}),
           key("ZeroVocabulary", kLlama, "vocab_size", 0, {"is 0"}),
           key("VocabularyBeyond31Bits", kLlama, "vocab_size", 2147483648, {"2147483648"}),
           key("ZeroHeads", kLlama, "num_attention_heads", 0, {"is 0"}),
           key("ZeroKvHeads", kLlama, "num_key_value_heads", 0, {"is 0"}),
           key("KvHeadsDoNotDivide", kLlama, "num_key_value_heads", 4, {"is 4", "6 query heads"}),
           key("MoreKvHeadsThanHeads", kLlama, "num_key_value_heads", 12, {"is 12"}),
           key("OddHeadDim", kLlama, "head_dim", 63, {"is 63", "even"}), key("ZeroHeadDim", kLlama, "head_dim", 0, {"is 0"}),
           key("ZeroContext", kLlama, "max_position_embeddings", 0, {"is 0"}),
           key("ZeroEps", kLlama, "rms_norm_eps", 0, {"positive"}), key("NegativeEps", kLlama, "rms_norm_eps", -1e-6, {"positive"}),
           key("TinyEps", kLlama, "rms_norm_eps", 1e-60, {"positive"}), key("HugeEps", kLlama, "rms_norm_eps", 1e60, {"finite"}),
           key("EpsIsABoolean", kLlama, "rms_norm_eps", true, {"true", "a number"}),
           key("TieIsANumber", kLlama, "tie_word_embeddings", 1, {"is 1", "true or false"}),
           key("EndOutside", kLlama, "eos_token_id", 1024, {"1024", "0 to 1023"}),
           key("EndIsText", kLlama, "eos_token_id", Json::array({1, "x"}), {"[1]", "\"x\""}),
           key("UnknownActivation", kLlama, "hidden_act", "gelu", {"\"gelu\"", "silu"}, Errc::unsupported),
           key("Experts", kLlama, "num_local_experts", 8, {"is 8"}, Errc::unsupported),
           key("Quantised", kLlama, "quantization_config", {{"quant_method", "gptq"}}, {"an object"}, Errc::unsupported),
           key("UnknownArchitecture", kLlama, "architectures", Json::array({"GPT2LMHeadModel"}),
               {"GPT2LMHeadModel", "LlamaForCausalLM"}, Errc::unsupported),
           key("ArchitecturesIsText", kLlama, "architectures", "LlamaForCausalLM", {"an array"}),
           key("RopeIsAList", kLlama, "rope_parameters", Json::array(), {"an object"}),
           key("UnknownRope", kLlama, "rope_parameters", {{"rope_type", "yarn"}}, {"yarn"}, Errc::unsupported),
           key("Llama3WithoutFactor", kLlama, "rope_parameters", {{"rope_type", "llama3"}}, {"factor is missing"}),
           key("OlderAndNewerRopeDisagree", kLlama, "rope_scaling", {{"type", "linear"}, {"factor", 0}},
               {"rope_parameters", "rope_scaling"}),
           key("LinearKeyHeadsTooWide", kHybrid, "linear_key_head_dim", 1025, {"is 1025", "1 to 1024"}),
           key("LinearValueHeadsTooWide", kHybrid, "linear_value_head_dim", 16384, {"is 16384", "1 to 1024"}),
           key("LayerTypesTooShort", kHybrid, "layer_types", Json::array({"full_attention"}), {"an array of 1", "is 8"}),
           key("LayerTypesIsText", kHybrid, "layer_types", "full_attention", {"an array"}),
           key("ConvKernelOne", kHybrid, "linear_conv_kernel_dim", 1, {"is 1", "2 to 64"}),
           key("NoKeyHeads", kHybrid, "linear_num_key_heads", 0, {"is 0"}),
           key("GateOff", kHybrid, "attn_output_gate", false, {"gate"}, Errc::unsupported)),
    [](const auto& param) { return std::string(param.param.name); });

INSTANTIATE_TEST_SUITE_P(Shapes, ModelConfigRefusal,
                         Values(Refusal{"UnknownLayerType",
                                        kHybrid,
                                        [](Json& j) { j["layer_types"][2] = "mamba"; },
                                        Errc::unsupported,
                                        {"layer_types[2]", "mamba"}},
                                Refusal{"LinearLayerInLlama",
                                        kLlama,
                                        [](Json& j) {
                                          j["layer_types"] = Json::array(
                                              {"full_attention", "linear_attention", "full_attention", "full_attention"});
                                        },
                                        Errc::unsupported,
                                        {"layer_types[1]", "linear_attention"}},
                                Refusal{"HiddenNoMultipleOfHeads",
                                        kLlama,
                                        [](Json& j) {
                                          j.erase("head_dim");
                                          j["hidden_size"] = 193;
                                        },
                                        Errc::bad_format,
                                        {"hidden_size", "193", "6 heads"}},
                                Refusal{"ProjectionOverflows",
                                        kLlama,
                                        [](Json& j) {
                                          j["num_attention_heads"] = 16384;
                                          j["num_key_value_heads"] = 1;
                                          j["head_dim"] = 16384;
                                        },
                                        Errc::bad_format,
                                        {"head_dim", "16384"}},
                                Refusal{"ParametersOverflow",
                                        kLlama,
                                        [](Json& j) {
                                          j["hidden_size"] = 1 << 20;
                                          j["intermediate_size"] = 1 << 22;
                                          j["vocab_size"] = 0x7fffffff;
                                          j["num_hidden_layers"] = 4096;
                                        },
                                        Errc::bad_format,
                                        {"parameters"}},
                                Refusal{"NothingNamesTheArchitecture",
                                        kLlama,
                                        [](Json& j) {
                                          j.erase("architectures");
                                          j.erase("model_type");
                                        },
                                        Errc::bad_format,
                                        {"model_type is missing"}},
                                Refusal{"ThetaZero",
                                        kLlama,
                                        [](Json& j) { j["rope_parameters"]["rope_theta"] = 0; },
                                        Errc::bad_format,
                                        {"rope_theta", "is 0", "positive"}},
                                Refusal{"PartialRotaryZero",
                                        kHybrid,
                                        [](Json& j) { j["rope_parameters"]["partial_rotary_factor"] = 0; },
                                        Errc::bad_format,
                                        {"partial_rotary_factor", "is 0"}},
                                Refusal{"PartialRotaryOdd",
                                        kHybrid,
                                        [](Json& j) { j["rope_parameters"]["partial_rotary_factor"] = 0.05; },
                                        Errc::bad_format,
                                        {"partial_rotary_factor", "is 3", "even"}},
                                Refusal{"ValueHeadsNoMultiple",
                                        kHybrid,
                                        [](Json& j) { j["linear_num_key_heads"] = 3; },
                                        Errc::bad_format,
                                        {"linear_num_value_heads", "is 2", "multiple of the 3"}},
                                Refusal{"LinearStateTooLarge",
                                        kHybrid,
                                        [](Json& j) {
                                          j["linear_num_value_heads"] = 16384;
                                          j["linear_value_head_dim"] = 1024;
                                        },
                                        Errc::bad_format,
                                        {"linear_value_head_dim", "16384 heads", "67108864"}},
                                Refusal{"IntervalZero",
                                        kHybrid,
                                        [](Json& j) {
                                          j.erase("layer_types");
                                          j["full_attention_interval"] = 0;
                                        },
                                        Errc::bad_format,
                                        {"full_attention_interval", "is 0"}},
                                Refusal{"NoTextPart",
                                        kLlama,
                                        [](Json& j) { j["architectures"] = Json::array({"Qwen3_5ForConditionalGeneration"}); },
                                        Errc::bad_format,
                                        {"text_config is missing"}}),
                         [](const auto& param) { return std::string(param.param.name); });

TEST(ModelConfig, TextThatIsNoConfigIsOneLine) {
  for (const std::string& text :
       {std::string(), std::string("{"), std::string("[1]"), std::string("{\"hidden_size\": NaN}"),
        std::string("{\"rms_norm_eps\": Infinity}"), std::string("{\"rms_norm_eps\": 1e999}"), std::string("{\"\xff\": 1}"),
        std::string(1 << 20, '['), std::string(std::size_t{5} << 20, ' ')}) {
    const auto config = parse_model_config(text, "config.json");
    ASSERT_FALSE(config);
    expect_one_line(config.error(), Errc::bad_format, {"config.json"});
  }
}

TEST(ModelConfig, FolderWithoutConfigIsNamed) {
  const auto config = load_model_config(test_data("no-such-folder"));
  ASSERT_FALSE(config);
  expect_one_line(config.error(), Errc::not_found, {"no-such-folder", "config.json"});
}

}  // namespace
}  // namespace metrale::test
