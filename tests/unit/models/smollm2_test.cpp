// SPDX-License-Identifier: Apache-2.0
//
// A real model, where there is one: SmolLM2-135M-Instruct as a quantised GGUF file, named by METRALE_SMOLLM2_GGUF. Against
// llama.cpp where its choice is clear, and against the same weights dequantised to float32.
#include "metrale/models/generator.h"
#include "smollm2_golden.h"

namespace metrale::test {
namespace {

// llama.cpp's choice counts where its two largest logits are further apart than this.
constexpr float kClearMargin = 0.25F;
constexpr double kQuantisedTolerance = 2e-2;

class SmolLm2 : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = smollm2_path();
    if (path_.empty()) GTEST_SKIP() << "METRALE_SMOLLM2_GGUF is not set: no model to run";
  }

  struct Loaded {
    std::unique_ptr<GpuBackend> backend = host_backend();
    std::unique_ptr<Generator> model;
  };
  Loaded load(Precision precision = Precision::fast) {
    Loaded loaded;
    GeneratorOptions options;
    options.decoder.precision = precision;
    loaded.model = ok(Generator::load(path_, *loaded.backend, options));
    ok(loaded.model->decoder()->reserve(256));
    return loaded;
  }

  std::filesystem::path path_;
};

TEST_F(SmolLm2, NamesTheCapitalOfFranceInLittleMemory) {
  const auto backend = host_backend();
  const auto model = ok(Generator::load(path_, *backend));
  const Generation out = ok(model->generate({.prompt = "What is the capital of France?", .chat = true, .max_tokens = 64}));
  EXPECT_THAT(out.text, ::testing::HasSubstr("Paris"));
  EXPECT_EQ(out.stop, StopReason::end_of_text);
  const std::uint64_t allowed = model->load_stats().file_bytes + out.stats.kv_bytes + (150U << 20);
  if (!METRALE_SANITIZED) {
    EXPECT_LE(out.stats.peak_resident_bytes, allowed);
  }
  const Receipt receipt = model->unload();
  EXPECT_TRUE(receipt.clean()) << receipt.to_string();
}

TEST_F(SmolLm2, AgreesWithLlamaCppWhereverItsMarginIsClear) {
  const Loaded loaded = load();
  int steps = 0;
  for (const GoldenPrompt& golden : golden_prompts()) {
    Sequence sequence = ok(loaded.model->decoder()->start());
    std::span<const TokenId> next = golden.prompt;
    for (std::size_t i = 0; i < golden.greedy.size(); ++i) {
      const TokenId token = ok(loaded.model->decoder()->append(sequence, next)).token;
      if (golden.margins[i] > kClearMargin) {
        ++steps;
        EXPECT_EQ(token, golden.greedy[i]) << "step " << i << ", margin " << golden.margins[i];
      }
      next = {&golden.greedy[i], 1};
    }
  }
  EXPECT_GT(steps, 250) << "the golden file has lost its steps";
}

TEST_F(SmolLm2, QuantisedLogitsAreThoseOfDequantisedWeights) {
  const Loaded fast = load(), exact = load(Precision::exact);
  double worst = 0;
  for (const GoldenPrompt& golden : golden_prompts()) {
    // The oracle reads the whole text at once, the other as it would have been generated: a prompt, then token by token.
    std::vector<TokenId> text = golden.prompt;
    text.insert(text.end(), golden.greedy.begin(), golden.greedy.end());
    Sequence oracle = ok(exact.model->decoder()->start());
    const std::size_t vocab = exact.model->config().vocab_size;
    const std::vector<float> expected = ok(exact.model->decoder()->append_all_logits(oracle, text));
    Sequence sequence = ok(fast.model->decoder()->start());
    std::span<const TokenId> next = golden.prompt;
    for (std::size_t i = 0; i < golden.greedy.size(); ++i) {
      const Decoder::Step step = ok(fast.model->decoder()->append(sequence, next, StepOutput::logits));
      const std::span row = std::span(expected).subspan((golden.prompt.size() - 1 + i) * vocab, vocab);
      const double error = relative_l2(step.logits, row);
      EXPECT_LT(error, kQuantisedTolerance) << "step " << i;
      worst = std::max(worst, error);
      next = {&golden.greedy[i], 1};
    }
  }
  RecordProperty("worst_relative_l2", std::to_string(worst));
  EXPECT_GT(worst, 0) << "the two paths are one";
}

TEST_F(SmolLm2, APromptOfManyChunksGivesTheSameAsOne) {
  const Loaded loaded = load();
  const auto prompts = golden_prompts();
  std::vector<TokenId> ids;
  for (const GoldenPrompt& golden : prompts) ids.insert(ids.end(), golden.greedy.begin(), golden.greedy.begin() + 48);
  std::vector<float> whole;
  {
    Sequence sequence = ok(loaded.model->decoder()->start());
    const Decoder::Step step = ok(loaded.model->decoder()->append(sequence, ids, StepOutput::logits));
    whole.assign(step.logits.begin(), step.logits.end());
  }
  Sequence sequence = ok(loaded.model->decoder()->start());
  Decoder::Step step;
  for (std::size_t at = 0; at < ids.size(); at += 37)
    step = ok(loaded.model->decoder()->append(sequence, std::span(ids).subspan(at, std::min<std::size_t>(37, ids.size() - at)),
                                              StepOutput::logits));
  EXPECT_LT(relative_l2(step.logits, whole), kQuantisedTolerance);
}

}  // namespace
}  // namespace metrale::test
