// SPDX-License-Identifier: Apache-2.0
//
// Models of random weights: they run, they are the same each time, and the named shapes have the sizes that they are named after.
#include "metrale/models/synthetic.h"

#include "metrale/dequantise.h"
#include "model_fixture.h"

namespace metrale::test {
namespace {

class Synthetic : public ::testing::TestWithParam<const char*> {
 protected:
  std::vector<float> read(const SyntheticModel& model, const std::string& name) {
    const Weight weight = ok(model.weights->get(name));
    std::vector<std::byte> bytes(weight.size_bytes);
    ok(backend->copy_d2h(bytes, weight.ptr));
    std::vector<float> values(bytes.size() / dtype_facts(weight.dtype).block_bytes);
    ok(dequantise(weight.dtype, bytes, values));
    return values;
  }

  const std::unique_ptr<GpuBackend> backend = host_backend();
  const ModelConfig config = ok(load_model_config(model_folder(GetParam())));
};

TEST_P(Synthetic, RunsAndStaysFinite) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    const SyntheticModel model = ok(make_synthetic(*backend, config, dtype));
    const auto decoder = ok(model.make_decoder(*backend, {.context_tokens = 64}));
    Sequence sequence = ok(decoder->start());
    const std::vector<TokenId> prompt{1, 2, 3};
    TokenId token = ok(decoder->append(sequence, prompt)).token;
    for (int i = 0; i < 8; ++i) token = ok(decoder->append(sequence, {&token, 1})).token;
    EXPECT_EQ(sequence.length(), 11U);
  }
}

TEST_P(Synthetic, WeightsAreNormalAndNormsAreOne) {
  const SyntheticModel model = ok(make_synthetic(*backend, config, DType::bf16, 7));
  double sum = 0, squares = 0;
  const std::vector<float> embedding = read(model, "model.embed_tokens.weight");
  for (const float v : embedding) sum += v, squares += double{v} * v;
  const auto n = static_cast<double>(embedding.size());
  EXPECT_NEAR(sum / n, 0, 1e-3);
  EXPECT_NEAR(std::sqrt(squares / n), 0.02, 1e-3);
  EXPECT_THAT(read(model, "model.norm.weight"), ::testing::Each(1.0F));
  EXPECT_THAT(read(model, "model.layers.0.input_layernorm.weight"), ::testing::Each(1.0F));
}

TEST_P(Synthetic, TheSeedDecides) {
  const std::string name = "model.layers.1.mlp.down_proj.weight";
  const auto weights = [&](std::uint64_t seed) { return read(ok(make_synthetic(*backend, config, DType::bf16, seed)), name); };
  const std::vector<float> one = weights(1);
  EXPECT_EQ(one, weights(1));
  EXPECT_NE(one, weights(2));
  EXPECT_NE(one, read(ok(make_synthetic(*backend, config, DType::bf16, 1)), "model.layers.0.mlp.down_proj.weight"));
}

TEST_P(Synthetic, OtherTypesAreRefused) {
  expect_error(make_synthetic(*backend, config, DType::q8_0), Errc::unsupported, {"q8_0", "bf16 and f32"});
  ModelConfig gguf = config;
  gguf.weights = WeightFormat::gguf;
  expect_error(make_synthetic(*backend, gguf), Errc::unsupported, {"GGUF"});
  EXPECT_EQ(backend->live_alloc_count(), 0U);
}

INSTANTIATE_TEST_SUITE_P(Models, Synthetic, ::testing::ValuesIn(kModels), model_name);

TEST(ModelShapes, HaveTheSizesTheyAreNamedAfter) {
  EXPECT_NEAR(static_cast<double>(ok(model_shape("llama-8b")).num_parameters()), 8.03e9, 0.01e9);
  EXPECT_NEAR(static_cast<double>(ok(model_shape("smollm2-135m")).num_parameters()), 134.5e6, 0.1e6);
  EXPECT_NEAR(static_cast<double>(ok(model_shape("hybrid-4b")).num_parameters()), 4.1e9, 0.05e9);
  EXPECT_EQ(ok(model_shape("hybrid-4b")).num_layers_of(LayerKind::full_attention), 8U);
  EXPECT_EQ(model_shapes().size(), 3U);
  expect_error(model_shape("gpt-5"), Errc::not_found, {"gpt-5", "llama-8b"});
}

}  // namespace
}  // namespace metrale::test
