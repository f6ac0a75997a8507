// SPDX-License-Identifier: Apache-2.0
//
// The kernel that runs all layers of a small model for one token, against the kernels it stands for and against the host. The model
// has the sizes of SmolLM2 135M, fewer layers and a smaller vocabulary.
#include <random>

#include "gpu/gpu_fixture.h"
#include "metrale/models/synthetic.h"
#include "unit/models/golden_checks.h"

namespace metrale::test {
namespace {

class OneKernel : public ::testing::Test {
 protected:
  void SetUp() override {
    METRALE_NEEDS_DEVICE();
    backend = ok(open_device());
    if (!ok(backend->has_module(kLayersModule))) GTEST_SKIP() << "the device is served no kernel of all layers";
  }
  void TearDown() override {
    if (!backend) return;
    EXPECT_TRUE(backend->live_allocations().empty()) << backend->alloc_report();
  }

  static ModelConfig config(std::uint32_t layers) {
    ModelConfig c = ok(model_shape("smollm2-135m"));
    c.vocab_size = 2048;
    c.num_layers = layers;
    c.layers.assign(layers, LayerKind::full_attention);
    return c;
  }
  struct Model {
    Model(GpuBackend& on, const ModelConfig& c, DecoderOptions options) : synthetic(ok(make_synthetic(on, c, DType::bf16, 3))) {
      if (options.context_tokens == 0) options.context_tokens = 512;
      decoder = ok(synthetic.make_decoder(on, options));
    }
    SyntheticModel synthetic;
    std::unique_ptr<Decoder> decoder;
  };
  static std::vector<TokenId> ids(std::size_t count) {
    std::mt19937 random(5);
    std::vector<TokenId> all(count);
    for (TokenId& id : all) id = static_cast<TokenId>(random() % 2048);
    return all;
  }
  /// Logits of the last `steps` of `text`, token by token; the rest is read as a prompt.
  static std::vector<float> last_logits(Decoder& decoder, std::span<const TokenId> text, std::size_t steps) {
    Sequence sequence = ok(decoder.start());
    if (text.size() > steps) ok(decoder.append(sequence, text.first(text.size() - steps)));
    std::vector<float> logits;
    for (const TokenId& id : text.last(steps)) {
      const Decoder::Step step = ok(decoder.append(sequence, {&id, 1}, StepOutput::logits));
      logits.insert(logits.end(), step.logits.begin(), step.logits.end());
    }
    return logits;
  }

  std::unique_ptr<GpuBackend> backend;
};

TEST_F(OneKernel, GivesTheLogitsOfTheKernelsItStandsFor) {
  for (const std::uint32_t layers : {1U, 2U, 5U, 30U}) {
    const ModelConfig c = config(layers);
    const auto text = ids(60);
    Model chain(*backend, c, {.one_kernel = false});
    ASSERT_FALSE(chain.decoder->has_one_kernel());
    const auto want = step_logits(*chain.decoder, text);
    Model one(*backend, c, {});
    ASSERT_TRUE(one.decoder->has_one_kernel());
    const double worst = worst_row(step_logits(*one.decoder, text), want, c.vocab_size);
    std::printf("%u layers: worst relative L2 of a row of logits %.2e\n", layers, worst);
    EXPECT_LT(worst, 5e-3) << layers << " layers";
  }
}

TEST_F(OneKernel, GivesTheLogitsOfTheHost) {
  const ModelConfig c = config(4);
  const auto host = host_backend();
  Model oracle(*host, c, {.precision = Precision::exact});
  Model one(*backend, c, {});
  const auto text = ids(40);
  EXPECT_LT(worst_row(step_logits(*one.decoder, text), prompt_logits(*oracle.decoder, text, 512), c.vocab_size), 1e-2);
}

TEST_F(OneKernel, FollowsPromptsOfAnyLength) {
  const ModelConfig c = config(3);
  for (const std::uint32_t block_tokens : {16U, 24U}) {
    Model chain(*backend, c, {.context_tokens = 4096, .kv_block_tokens = block_tokens, .one_kernel = false});
    Model one(*backend, c, {.context_tokens = 4096, .kv_block_tokens = block_tokens});
    for (const std::size_t length : {3U, 130U, 900U, 1800U, 4000U}) {
      const auto text = ids(length);
      EXPECT_LT(worst_row(last_logits(*one.decoder, text, 3), last_logits(*chain.decoder, text, 3), c.vocab_size), 5e-3)
          << "after " << length << " tokens in blocks of " << block_tokens;
    }
  }
}

TEST_F(OneKernel, GivesTheSameBitsEachTime) {
  const ModelConfig c = config(6);
  Model one(*backend, c, {});
  const auto text = ids(100);
  const auto first = step_logits(*one.decoder, text);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(step_logits(*one.decoder, text), first);
}

TEST_F(OneKernel, SeveralTokensAReplayAreThoseOfSingleSteps) {
  for (const std::uint32_t layers : {3U, 4U}) {
    Model one(*backend, config(layers), {.tokens_per_replay = 8});
    const auto prompt = ids(20);
    const auto expected = greedy_text(*one.decoder, prompt, 120);
    EXPECT_EQ(greedy_text_in_replays(*one.decoder, prompt, 120), expected) << layers << " layers";
  }
}

TEST_F(OneKernel, SequencesTakeTurns) {
  const ModelConfig c = config(3);
  Model one(*backend, c, {.context_tokens = 1024, .max_sequences = 2});
  const auto text = ids(80);
  const auto want = step_logits(*one.decoder, text);
  Sequence a = ok(one.decoder->start()), b = ok(one.decoder->start());
  std::vector<float> got;
  for (const TokenId& id : text) {
    ok(one.decoder->append(b, std::span(text).first(b.length() % 7 + 1)));
    const Decoder::Step step = ok(one.decoder->append(a, {&id, 1}, StepOutput::logits));
    got.insert(got.end(), step.logits.begin(), step.logits.end());
  }
  EXPECT_EQ(got, want);
}

TEST_F(OneKernel, IsLeftOutWhereItWouldBeWrong) {
  const ModelConfig c = config(2);
  EXPECT_FALSE(Model(*backend, c, {.precision = Precision::exact}).decoder->has_one_kernel());
  EXPECT_FALSE(Model(*backend, c, {.kv_type = DType::f32}).decoder->has_one_kernel());
  ModelConfig wide = c;
  wide.intermediate_size = 1600;
  EXPECT_FALSE(Model(*backend, wide, {}).decoder->has_one_kernel());
  ModelConfig partly = c;
  partly.rope.rotary_dim = 32;
  EXPECT_FALSE(Model(*backend, partly, {}).decoder->has_one_kernel());
}

}  // namespace
}  // namespace metrale::test
