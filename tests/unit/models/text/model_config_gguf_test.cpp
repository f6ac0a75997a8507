// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "metrale/models/model_config.h"
#include "refusal.h"
#include "support/gguf_writer.h"

namespace metrale::test {
namespace {

using testing::Values;

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
           gguf_key("LinearKeyHeadsTooWide", hybrid_gguf, "qwen35.ssm.state_size", 1025U, {"is 1025", "1 to 1024"}),
           gguf_key("LinearValueHeadsTooWide", hybrid_gguf, "qwen35.ssm.inner_size", 4096U, {"is 4096", "at most 1024"}),
           gguf_key("OnlyFurtherPredictors", hybrid_gguf, "qwen35.nextn_predict_layers", 9U, {"is 9"}),
           gguf_key("RecurrentListTooShort", hybrid_gguf, "qwen35.attention.recurrent_layers", std::vector<bool>{true},
                    {"a list of 1"}),
           gguf_key("IntervalZero", hybrid_gguf, "qwen35.full_attention_interval", 0U, {"is 0"})),
    [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace metrale::test
