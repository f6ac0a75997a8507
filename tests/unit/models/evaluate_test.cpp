// SPDX-License-Identifier: Apache-2.0
#include "metrale/models/evaluate.h"

#include <numeric>

#include "metrale/models/generator.h"
#include "model_fixture.h"

namespace metrale::test {
namespace {

/// Public-domain prose in the manner of what the models were trained on.
constexpr std::string_view kText =
    "And it came to pass in those days, that the king sent messengers unto all the cities of the land, saying, Gather the people "
    "together, the men, and the women, and the children, that they may hear the words of the LORD. And the people came up, and "
    "stood "
    "before the house of the LORD; and the priest read the book of the law in the ears of all the people, from the morning until "
    "the "
    "evening. And they said, All that the LORD hath spoken will we do, and we will hear.";

class EvaluateTest : public ::testing::TestWithParam<const char*> {
 protected:
  const std::filesystem::path folder = model_folder(GetParam());
  const Golden golden{folder};
  const std::unique_ptr<GpuBackend> backend = host_backend();
};

TEST_P(EvaluateTest, LossIsThatOfTheGoldenLogits) {
  LoadedModel model(*backend, folder);
  const std::size_t vocab = model.config.vocab_size;
  for (int n = 0; n < Golden::kPrompts; ++n) {
    const auto ids = golden.prompt(n);
    const auto logits = golden.logits(n);
    double loss = 0, hits = 0;
    for (std::size_t i = 0; i + 1 < ids.size(); ++i) {
      const std::span<const float> row(&logits[i * vocab], vocab);
      const auto best = std::max_element(row.begin(), row.end());
      const double sum = std::accumulate(row.begin(), row.end(), 0.0,
                                         [&](double s, float x) { return s + std::exp(static_cast<double>(x) - *best); });
      loss += std::log(sum) + *best - row[static_cast<std::size_t>(ids[i + 1])];
      hits += best - row.begin() == ids[i + 1] ? 1 : 0;
    }
    const auto count = static_cast<double>(ids.size() - 1);
    const Evaluation e = ok(evaluate(*model.decoder, ids));
    EXPECT_EQ(e.num_tokens, ids.size() - 1);
    EXPECT_EQ(e.num_windows, 1U);
    EXPECT_NEAR(e.mean_loss, loss / count, 1e-4);
    EXPECT_NEAR(e.perplexity, std::exp(loss / count), 1e-2);
    EXPECT_NEAR(e.top1, hits / count, 1e-9);
  }
}

TEST_P(EvaluateTest, ProseOfItsKindIsNoHarderThanTheHeldOutText) {
  const auto model = ok(Generator::load(folder, *backend));
  const auto ids = ok(model->tokenizer().encode(kText));
  ok(model->decoder()->reserve(ids.size()));
  const Evaluation e = ok(evaluate(*model->decoder(), ids));
  // Stock phrases are easier than a whole book, and nothing is as hard as drawing from 1,024 at random: 6.9.
  EXPECT_LT(e.mean_loss, golden.get<float>("heldout_loss")[0]);
  EXPECT_GT(e.mean_loss, 1);
  // Shuffled, the same tokens must surprise it.
  auto shuffled = ids;
  for (std::size_t i = 0; i < ids.size(); ++i) shuffled[i] = ids[(i * 37 + 11) % ids.size()];
  EXPECT_GT(ok(evaluate(*model->decoder(), shuffled)).mean_loss, e.mean_loss + 1);
}

TEST_P(EvaluateTest, WindowsCutALongText) {
  LoadedModel model(*backend, folder, {.context_tokens = 64});
  const auto ids = golden.get<TokenId>("long_ids");
  const Evaluation whole = ok(evaluate(*model.decoder, ids));  // windows of 65: three, and one of 5
  EXPECT_EQ(whole.num_windows, 4U);
  EXPECT_EQ(whole.num_tokens, 196U);
  const Evaluation cut = ok(evaluate(*model.decoder, ids, {.window_tokens = 20}));
  EXPECT_EQ(cut.num_windows, 10U);
  EXPECT_EQ(cut.num_tokens, 190U);
  EXPECT_GT(cut.mean_loss, whole.mean_loss) << "less context, more surprise";
}

TEST_P(EvaluateTest, WhatCannotBePredictedIsRefused) {
  LoadedModel model(*backend, folder, {.context_tokens = 64});
  const std::vector<TokenId> ids(10, 5);
  expect_error(evaluate(*model.decoder, std::span(ids).first(1)), Errc::invalid_argument, {"1 tokens"});
  expect_error(evaluate(*model.decoder, ids, {.window_tokens = 1}), Errc::invalid_argument, {"window of 1"});
  expect_error(evaluate(*model.decoder, std::vector<TokenId>(100, 5), {.window_tokens = 90}), Errc::out_of_range,
               {"a window of 90", "context of 64", "windows of 65"});
  EXPECT_EQ(model.decoder->stats().tokens, 0U) << "refused before the first step";
  EXPECT_TRUE(evaluate(*model.decoder, ids, {.window_tokens = 90})) << "the text is shorter than the window";
  expect_error(evaluate(*model.decoder, std::vector<TokenId>{5, 5000}), Errc::out_of_range, {"5000"});
}

INSTANTIATE_TEST_SUITE_P(Models, EvaluateTest, ::testing::ValuesIn(kModels), model_name);

}  // namespace
}  // namespace metrale::test
