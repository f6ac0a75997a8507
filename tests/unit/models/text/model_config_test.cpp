// SPDX-License-Identifier: Apache-2.0
#include "metrale/models/model_config.h"

#include <cmath>
#include <functional>
#include <numbers>

#include "support/gguf_writer.h"
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

void expect_one_line(const Error& error, Errc code, const std::vector<const char*>& says) {
  EXPECT_EQ(error.code(), code) << error.to_string();
  for (const char* part : says) EXPECT_NE(error.message().find(part), std::string::npos) << part << " in: " << error.message();
  EXPECT_EQ(error.message().find('\n'), std::string::npos) << error.message();
  EXPECT_LT(error.message().size(), 400U) << error.message();
}

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
                                Refusal{"LinearProjectionTooLarge",
                                        kHybrid,
                                        [](Json& j) {
                                          j["linear_num_value_heads"] = 16384;
                                          j["linear_value_head_dim"] = 16384;
                                        },
                                        Errc::bad_format,
                                        {"linear_value_head_dim", "16384"}},
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

// GGUF

GgufWriter llama_gguf() {
  GgufWriter gguf;
  gguf.key("general.architecture", "llama")
      .key("llama.vocab_size", std::uint32_t{1024})
      .key("llama.embedding_length", std::uint32_t{192})
      .key("llama.feed_forward_length", std::uint32_t{512})
      .key("llama.block_count", std::uint32_t{4})
      .key("llama.attention.head_count", std::uint32_t{6})
      .key("llama.attention.head_count_kv", std::uint32_t{2})
      .key("llama.context_length", std::uint32_t{4096})
      .key("llama.attention.layer_norm_rms_epsilon", 1e-5F)
      .key("llama.rope.freq_base", 10000.0F)
      .key("tokenizer.ggml.eos_token_id", std::uint32_t{2});
  return gguf;
}

GgufWriter hybrid_gguf() {
  GgufWriter gguf;
  gguf.key("general.architecture", "qwen35")
      .key("qwen35.vocab_size", std::uint32_t{1024})
      .key("qwen35.embedding_length", std::uint32_t{192})
      .key("qwen35.feed_forward_length", std::uint32_t{384})
      .key("qwen35.block_count", std::uint32_t{9})
      .key("qwen35.nextn_predict_layers", std::uint32_t{1})
      .key("qwen35.attention.head_count", std::uint32_t{4})
      .key("qwen35.attention.head_count_kv", std::uint32_t{2})
      .key("qwen35.attention.key_length", std::uint32_t{64})
      .key("qwen35.attention.value_length", std::uint32_t{64})
      .key("qwen35.rope.dimension_count", std::uint32_t{16})
      .key("qwen35.context_length", std::uint32_t{4096})
      .key("qwen35.attention.layer_norm_rms_epsilon", 1e-6F)
      .key("qwen35.full_attention_interval", std::uint32_t{4})
      .key("qwen35.ssm.conv_kernel", std::uint32_t{4})
      .key("qwen35.ssm.state_size", std::uint32_t{128})
      .key("qwen35.ssm.group_count", std::uint32_t{1})
      .key("qwen35.ssm.time_step_rank", std::uint32_t{2})
      .key("qwen35.ssm.inner_size", std::uint32_t{256});
  return gguf;
}

Result<ModelConfig> parsed(const GgufWriter& gguf) {
  const auto bytes = gguf.bytes();
  const auto header = parse_gguf(MemorySource(bytes, "model.gguf"));
  EXPECT_TRUE(header) << header.error().to_string();
  if (!header) return Error(Errc::internal, "the test's own file is broken");
  return model_config_from_gguf(*header, "model.gguf");
}

TEST(ModelConfigGguf, ReadsLlama) {
  const auto config = parsed(llama_gguf());
  ASSERT_TRUE(config) << config.error().to_string();
  EXPECT_EQ(config->family, ModelFamily::llama);
  EXPECT_EQ(config->weights, WeightFormat::gguf);
  EXPECT_EQ(config->head_dim, 32U);
  EXPECT_EQ(config->rope.rotary_dim, 32U);
  EXPECT_EQ(config->num_kv_heads, 2U);
  EXPECT_TRUE(config->tie_word_embeddings);
  EXPECT_FALSE(config->rope.freq_factors_in_weights);
  EXPECT_EQ(config->eos_ids, (std::vector<std::int32_t>{2}));
}

TEST(ModelConfigGguf, TensorsTellOfAnOutputMatrixBiasesAndRopeFactors) {
  GgufWriter gguf = llama_gguf();
  const std::vector<std::byte> four(4);
  for (const char* name : {"output.weight", "rope_freqs.weight", "blk.0.attn_q.bias"})
    gguf.tensor(name, GgufWriter::F32, {1}, four);
  const auto config = parsed(gguf);
  ASSERT_TRUE(config) << config.error().to_string();
  EXPECT_FALSE(config->tie_word_embeddings);
  EXPECT_TRUE(config->rope.freq_factors_in_weights);
  EXPECT_TRUE(config->attention_bias);
  EXPECT_FALSE(config->mlp_bias);
}

TEST(ModelConfigGguf, ReadsTheHybridWithoutItsFurtherPredictors) {
  const auto config = parsed(hybrid_gguf());
  ASSERT_TRUE(config) << config.error().to_string();
  EXPECT_EQ(config->family, ModelFamily::qwen3_5);
  EXPECT_EQ(config->num_layers, 8U);
  EXPECT_EQ(config->rope.rotary_dim, 16U);
  EXPECT_EQ(config->layers[3], LayerKind::full_attention);
  EXPECT_EQ(config->num_layers_of(LayerKind::full_attention), 2U);
  EXPECT_EQ(config->linear.value_head_dim, 128U);
  EXPECT_EQ(config->linear.key_head_dim, 128U);
}

TEST(ModelConfigGguf, ListOfRecurrentLayersOverridesTheInterval) {
  GgufWriter gguf = hybrid_gguf();
  gguf.key_array("qwen35.attention.recurrent_layers", std::vector<std::uint32_t>{0, 1, 1, 1, 1, 1, 1, 0, 0});
  const auto config = parsed(gguf);
  ASSERT_TRUE(config) << config.error().to_string();
  EXPECT_EQ(config->layers[0], LayerKind::full_attention);
  EXPECT_EQ(config->layers[3], LayerKind::linear_attention);
  EXPECT_EQ(config->layers[7], LayerKind::full_attention);
}

TEST(ModelConfigGguf, VocabularyIsCountedWhenItsSizeIsNotGiven) {
  GgufWriter gguf;
  gguf.key("general.architecture", "llama")
      .key("llama.embedding_length", std::uint32_t{64})
      .key("llama.feed_forward_length", std::uint32_t{64})
      .key("llama.block_count", std::uint32_t{1})
      .key("llama.attention.head_count", std::uint32_t{1})
      .key("llama.context_length", std::uint32_t{16})
      .key("llama.attention.layer_norm_rms_epsilon", 1e-5F)
      .key_array("tokenizer.ggml.tokens", std::vector<std::string>{"a", "b", "c"});
  const auto config = parsed(gguf);
  ASSERT_TRUE(config) << config.error().to_string();
  EXPECT_EQ(config->vocab_size, 3U);
}

TEST(ModelConfigGguf, ValueHeadsAreAMultipleOfKeyHeads) {
  const auto bytes = hybrid_gguf().bytes();
  auto header = parse_gguf(MemorySource(bytes, "model.gguf"));
  ASSERT_TRUE(header) << header.error().to_string();
  GgufMetadata::Map map = header->metadata.values();
  map["qwen35.ssm.group_count"] = 3U;
  header->metadata = GgufMetadata(std::move(map), "model.gguf");
  const auto config = model_config_from_gguf(*header, "model.gguf");
  ASSERT_FALSE(config);
  expect_one_line(config.error(), Errc::bad_format, {"qwen35.ssm.time_step_rank", "is 2", "multiple of the 3"});
}

struct GgufRefusal {
  const char* name;
  GgufWriter (*base)();
  const char* key;
  GgufValue value;
  Errc code;
  std::vector<const char*> says;
};
void PrintTo(const GgufRefusal& refusal, std::ostream* out) { *out << refusal.name; }

class ModelConfigGgufRefusal : public testing::TestWithParam<GgufRefusal> {};

TEST_P(ModelConfigGgufRefusal, IsOneLineWithFileKeyAndValue) {
  const GgufRefusal& refusal = GetParam();
  const auto bytes = refusal.base().bytes();
  auto header = parse_gguf(MemorySource(bytes, "model.gguf"));
  ASSERT_TRUE(header) << header.error().to_string();
  GgufMetadata::Map map = header->metadata.values();
  map[refusal.key] = refusal.value;
  header->metadata = GgufMetadata(std::move(map), "model.gguf");
  const auto config = model_config_from_gguf(*header, "model.gguf");
  ASSERT_FALSE(config);
  auto says = refusal.says;
  says.push_back(refusal.key);
  says.push_back("model.gguf");
  expect_one_line(config.error(), refusal.code, says);
}

GgufRefusal gguf_key(const char* name, GgufWriter (*base)(), const char* key, GgufValue value, std::vector<const char*> says,
                     Errc code = Errc::bad_format) {
  return {name, base, key, std::move(value), code, std::move(says)};
}
constexpr auto kNan = std::numeric_limits<float>::quiet_NaN();
constexpr auto kInf = std::numeric_limits<float>::infinity();

INSTANTIATE_TEST_SUITE_P(
    All, ModelConfigGgufRefusal,
    Values(gguf_key("UnknownArchitecture", llama_gguf, "general.architecture", std::string("gpt\n2"), {"gpt\\x0a2"},
                    Errc::unsupported),
           gguf_key("ArchitectureIsANumber", llama_gguf, "general.architecture", 5U, {}),
           gguf_key("ZeroLayers", llama_gguf, "llama.block_count", 0U, {"is 0"}),
           gguf_key("NegativeLayers", llama_gguf, "llama.block_count", std::int32_t{-3}, {"is -3"}),
           gguf_key("LayersAreText", llama_gguf, "llama.block_count", std::string("4"), {}),
           gguf_key("HeadsArePerLayer", llama_gguf, "llama.attention.head_count_kv", std::vector<std::uint32_t>{2, 2, 2, 2}, {}),
           gguf_key("KvHeadsDoNotDivide", llama_gguf, "llama.attention.head_count_kv", 4U, {"is 4", "6 query heads"}),
           gguf_key("OddHeadDim", llama_gguf, "llama.attention.key_length", 31U, {}, Errc::bad_format),
           gguf_key("ValuesDiffer", llama_gguf, "llama.attention.value_length", 64U, {"is 64", "32"}, Errc::unsupported),
           gguf_key("EpsIsNan", llama_gguf, "llama.attention.layer_norm_rms_epsilon", kNan, {"positive"}),
           gguf_key("EpsIsInf", llama_gguf, "llama.attention.layer_norm_rms_epsilon", kInf, {"finite"}),
           gguf_key("ThetaIsNan", llama_gguf, "llama.rope.freq_base", kNan, {"positive"}),
           gguf_key("RotaryTooWide", llama_gguf, "llama.rope.dimension_count", 34U, {"is 34", "32"}),
           gguf_key("RotaryOdd", llama_gguf, "llama.rope.dimension_count", 31U, {"is 31", "even"}),
           gguf_key("UnknownRope", llama_gguf, "llama.rope.scaling.type", std::string("yarn"), {"\"yarn\""}, Errc::unsupported),
           gguf_key("Experts", llama_gguf, "llama.expert_count", 8U, {"is 8"}, Errc::unsupported),
           gguf_key("SlidingWindow", llama_gguf, "llama.attention.sliding_window", 128U, {"is 128"}, Errc::unsupported),
           gguf_key("VocabularyBeyond31Bits", llama_gguf, "llama.vocab_size", std::uint64_t{1} << 31, {"2147483648"}),
           gguf_key("EndOutside", llama_gguf, "tokenizer.ggml.eos_token_id", 1024U, {"is 1024"}),
           gguf_key("InnerNoMultiple", hybrid_gguf, "qwen35.ssm.inner_size", 257U, {"is 257", "2 value heads"}),
           gguf_key("OnlyFurtherPredictors", hybrid_gguf, "qwen35.nextn_predict_layers", 9U, {"is 9"}),
           gguf_key("RecurrentListTooShort", hybrid_gguf, "qwen35.attention.recurrent_layers", std::vector<bool>{true},
                    {"a list of 1"}),
           gguf_key("IntervalZero", hybrid_gguf, "qwen35.full_attention_interval", 0U, {"is 0"})),
    [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace metrale::test
