// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <numeric>

#include "metrale/observer.h"
#include "model_fixture.h"

namespace metrale::test {
namespace {

/// Counts operations by kind.
class OpCounter final : public Observer {
 public:
  void on_op(const OpRecord& record) noexcept override { ++counts_[static_cast<std::size_t>(record.op)]; }
  std::uint64_t operator[](Op op) const { return counts_[static_cast<std::size_t>(op)]; }
  void reset() {
    for (auto& count : counts_) count = 0;
  }

 private:
  std::array<std::atomic<std::uint64_t>, kNumOps> counts_{};
};

class DecoderTest : public ::testing::TestWithParam<const char*> {
 protected:
  const std::filesystem::path folder = model_folder(GetParam());
  const Golden golden{folder};
  const std::unique_ptr<GpuBackend> backend = host_backend();
};

TEST_P(DecoderTest, ChunksOfAnySizeGiveTheSameAsTokenByToken) {
  const auto ids = golden.get<TokenId>("long_ids");
  LoadedModel model(*backend, folder, {.chunk_tokens = 128});
  Decoder& decoder = *model.decoder;
  std::vector<float> expected;
  {
    Sequence sequence = ok(decoder.start());
    for (const TokenId id : ids) {
      const Decoder::Step step = ok(decoder.append(sequence, {&id, 1}, StepOutput::logits));
      expected.assign(step.logits.begin(), step.logits.end());
    }
  }
  for (const std::size_t size : {2U, 7U, 8U, 9U, 16U, 31U, 100U, 200U}) {
    Sequence sequence = ok(decoder.start());
    Decoder::Step step;
    for (std::size_t at = 0; at < ids.size(); at += size)
      step = ok(decoder.append(sequence, std::span(ids).subspan(at, std::min(size, ids.size() - at)), StepOutput::logits));
    EXPECT_LT(relative_l2(step.logits, expected), 2e-5) << size << " at a time";
    EXPECT_EQ(sequence.length(), ids.size());
  }
}

TEST_P(DecoderTest, OneTokenIsOneReplayAndOneWait) {
  LoadedModel model(*backend, folder);
  Decoder& decoder = *model.decoder;
  Sequence sequence = ok(decoder.start());
  ok(decoder.append(sequence, golden.prompt(0)));
  OpCounter ops;
  backend->attach(ops);
  const DecoderStats before = decoder.stats();
  TokenId id = 5;
  for (int i = 0; i < 20; ++i) id = ok(decoder.append(sequence, {&id, 1})).token;
  backend->detach(ops);
  EXPECT_EQ(decoder.stats().graph_replays - before.graph_replays, 20U);
  EXPECT_EQ(decoder.stats().graph_captures, before.graph_captures);
  EXPECT_EQ(decoder.stats().waits - before.waits, 20U);
  EXPECT_EQ(ops[Op::launch_graph], 20U);
  EXPECT_EQ(ops[Op::synchronize], 20U);
  EXPECT_EQ(ops[Op::launch], 0U);
}

TEST_P(DecoderTest, StepsAllocateNothing) {
  LoadedModel model(*backend, folder);
  Decoder& decoder = *model.decoder;
  OpCounter ops;
  backend->attach(ops);
  Sequence sequence = ok(decoder.start());
  TokenId id = ok(decoder.append(sequence, golden.get<TokenId>("long_ids"))).token;
  for (int i = 0; i < 40; ++i)
    id = ok(decoder.append(sequence, {&id, 1}, i % 2 == 0 ? StepOutput::token : StepOutput::logits)).token;
  backend->detach(ops);
  for (const Op op : {Op::alloc, Op::alloc_managed, Op::alloc_async, Op::alloc_arena, Op::alloc_host_pinned, Op::free,
                      Op::free_async, Op::free_arena, Op::free_host_pinned, Op::begin_capture, Op::kernel}) {
    EXPECT_EQ(ops[op], 0U) << to_string(op);
  }
}

TEST_P(DecoderTest, SequencesDoNotSeeEachOther) {
  LoadedModel model(*backend, folder, {.context_tokens = 400, .max_sequences = 2});
  Decoder& decoder = *model.decoder;
  Sequence first = ok(decoder.start());
  Sequence second = ok(decoder.start());
  std::vector<TokenId> a = golden.prompt(0), b = golden.prompt(1);
  a.push_back(ok(decoder.append(first, a)).token);
  b.push_back(ok(decoder.append(second, b)).token);
  while (a.size() < golden.greedy(0).size() || b.size() < golden.greedy(1).size()) {
    if (a.size() < golden.greedy(0).size()) a.push_back(ok(decoder.append(first, std::span(a).last(1))).token);
    if (b.size() < golden.greedy(1).size()) b.push_back(ok(decoder.append(second, std::span(b).last(1))).token);
  }
  EXPECT_EQ(a, golden.greedy(0));
  EXPECT_EQ(b, golden.greedy(1));
  expect_error(decoder.start(), Errc::busy, {"2 sequences"});
}

TEST_P(DecoderTest, ASequenceStartsFreshWhateverWasThereBefore) {
  LoadedModel model(*backend, folder);
  Decoder& decoder = *model.decoder;
  for (int round = 0; round < 3; ++round) {
    Sequence sequence = ok(decoder.start());
    auto ids = golden.prompt(2);
    ids.push_back(ok(decoder.append(sequence, ids)).token);
    while (ids.size() < 40) ids.push_back(ok(decoder.append(sequence, std::span(ids).last(1))).token);
    EXPECT_TRUE(std::equal(ids.begin(), ids.end(), golden.greedy(2).begin())) << "round " << round;
    EXPECT_GT(decoder.kv_cache()->num_blocks(), decoder.kv_cache()->num_free_blocks());
  }
  EXPECT_EQ(decoder.kv_cache()->num_blocks(), decoder.kv_cache()->num_free_blocks());
}

TEST_P(DecoderTest, AMovedSequenceGoesOn) {
  LoadedModel model(*backend, folder);
  Decoder& decoder = *model.decoder;
  Sequence sequence = ok(decoder.start());
  auto ids = golden.prompt(0);
  ids.push_back(ok(decoder.append(sequence, ids)).token);
  Sequence moved = std::move(sequence);
  ids.push_back(ok(decoder.append(moved, std::span(ids).last(1))).token);
  EXPECT_TRUE(std::equal(ids.begin(), ids.end(), golden.greedy(0).begin()));
  expect_error(decoder.append(sequence, ids), Errc::invalid_argument, {"moved from"});  // NOLINT(bugprone-use-after-move)
  expect_error(decoder.start(), Errc::busy, {});
}

TEST_P(DecoderTest, Bf16CacheIsClose) {
  LoadedModel model(*backend, folder, {.kv_type = DType::bf16});
  Sequence sequence = ok(model.decoder->start());
  const auto logits = ok(model.decoder->append_all_logits(sequence, golden.prompt(3)));
  const double error = worst_row(logits, golden.logits(3), model.config.vocab_size);
  EXPECT_LT(error, 2e-2);
  EXPECT_GT(error, 1e-6) << "the cache is bf16, so something must differ";
}

TEST_P(DecoderTest, SeveralTokensAReplayAreTheGoldenOnes) {
  for (const std::uint32_t several : {2U, 5U, 8U}) {
    LoadedModel model(*backend, folder, {.tokens_per_replay = several});
    Decoder& decoder = *model.decoder;
    for (int n = 0; n < Golden::kPrompts; ++n) {
      SCOPED_TRACE(several);
      const auto expected = golden.greedy(n);
      auto ids = golden.prompt(n);
      Sequence sequence = ok(decoder.start());
      ids.push_back(ok(decoder.append(sequence, ids)).token);
      const DecoderStats before = decoder.stats();
      std::uint64_t calls = 0;
      while (ids.size() < expected.size()) {
        const auto choices = ok(decoder.append_greedy(sequence, ids.back(), expected.size() - ids.size()));
        ids.insert(ids.end(), choices.begin(), choices.end());
        ASSERT_EQ(sequence.length(), ids.size() - 1);
        ++calls;
      }
      EXPECT_EQ(ids, expected) << "prompt " << n;
      const std::uint64_t made = expected.size() - golden.prompt(n).size() - 1;
      EXPECT_EQ(calls, made / several + made % several);
      EXPECT_EQ(decoder.stats().waits - before.waits, calls);
      EXPECT_EQ(decoder.stats().graph_replays - before.graph_replays, calls);
    }
  }
}

TEST_P(DecoderTest, SeveralDrawnTokensAreThoseDrawnOneByOne) {
  const SamplerOptions kinds[] = {{.temperature = 1.0F, .seed = 3},
                                  {.temperature = 0.8F, .top_k = 40, .seed = 4},
                                  {.temperature = 1.2F, .top_p = 0.9F, .seed = 5},
                                  {.temperature = 1.0F, .top_k = 20, .top_p = 0.8F, .seed = 6}};
  const auto text = [&](Decoder& decoder, const SamplerOptions& options) {
    Sampler sampler = ok(Sampler::create(options));
    auto ids = golden.prompt(2);
    Sequence sequence = ok(decoder.start());
    ids.push_back(ok(sampler.next(ok(decoder.append(sequence, ids, StepOutput::logits)).logits)));
    while (ids.size() < 60) {
      const auto choices = ok(decoder.append_sampled(sequence, ids.back(), 60 - ids.size(), sampler));
      ids.insert(ids.end(), choices.begin(), choices.end());
    }
    return ids;
  };
  LoadedModel one(*backend, folder, {.tokens_per_replay = 1}), several(*backend, folder, {.tokens_per_replay = 6});
  for (const SamplerOptions& options : kinds) {
    SCOPED_TRACE(options.seed);
    const auto expected = text(*one.decoder, options);
    EXPECT_EQ(text(*several.decoder, options), expected);
    EXPECT_FALSE(std::equal(expected.begin(), expected.end(), golden.greedy(2).begin())) << "nothing was drawn";
  }
  EXPECT_EQ(several.decoder->stats().graph_captures, one.decoder->stats().graph_captures + 2);
}

TEST_P(DecoderTest, SeveralTokensGoNoFurtherThanTheContext) {
  LoadedModel model(*backend, folder, {.context_tokens = 20, .tokens_per_replay = 8});
  Sequence sequence = ok(model.decoder->start());
  const auto prompt = golden.prompt(0);
  TokenId id = ok(model.decoder->append(sequence, prompt)).token;
  std::vector<TokenId> ids = prompt;
  while (sequence.length() < 20) {
    ids.push_back(id);
    const auto choices = ok(model.decoder->append_greedy(sequence, id, 1000));
    ids.insert(ids.end(), choices.begin(), choices.end() - 1);
    id = choices.back();
  }
  EXPECT_EQ(sequence.length(), 20U);
  EXPECT_TRUE(std::equal(ids.begin(), ids.end(), golden.greedy(0).begin()));
  expect_error(model.decoder->append_greedy(sequence, id, 8), Errc::out_of_range, {"context of 20"});
}

TEST_P(DecoderTest, ScoresAreThoseOfTheLogits) {
  LoadedModel model(*backend, folder, {.chunk_tokens = 16, .logit_rows = 3});
  const auto ids = golden.prompt(3);
  const std::size_t vocab = model.config.vocab_size;
  const auto logits = golden.logits(3);
  std::vector<TokenId> targets(ids.begin() + 1, ids.end());
  targets.push_back(7);
  Sequence sequence = ok(model.decoder->start());
  const auto scores = ok(model.decoder->append_scores(sequence, ids, targets));
  ASSERT_EQ(scores.size(), ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::span<const float> row(&logits[i * vocab], vocab);
    const auto best = std::max_element(row.begin(), row.end());
    const double sum = std::accumulate(row.begin(), row.end(), 0.0,
                                       [&](double s, float x) { return s + std::exp(static_cast<double>(x) - *best); });
    EXPECT_NEAR(scores[i].loss, std::log(sum) + *best - row[static_cast<std::size_t>(targets[i])], 1e-3);
    EXPECT_EQ(scores[i].best, best - row.begin());
  }
}

TEST_P(DecoderTest, AnIdOutsideTheVocabularyChangesNothing) {
  LoadedModel model(*backend, folder);
  Decoder& decoder = *model.decoder;
  Sequence sequence = ok(decoder.start());
  auto ids = golden.prompt(0);
  for (const TokenId wrong : {-1, 1024, 2'000'000'000}) {
    auto bad = ids;
    bad[3] = wrong;
    expect_error(decoder.append(sequence, bad), Errc::out_of_range, {std::to_string(wrong), "position 3", "1024"});
    expect_error(decoder.append(sequence, {&wrong, 1}), Errc::out_of_range, {std::to_string(wrong)});
    const std::vector<TokenId> targets(ids.size(), wrong);
    expect_error(decoder.append_scores(sequence, ids, targets), Errc::out_of_range, {"target " + std::to_string(wrong)});
  }
  EXPECT_EQ(sequence.length(), 0U);
  EXPECT_EQ(ok(decoder.append(sequence, ids)).token, golden.greedy(0)[ids.size()]);
}

TEST_P(DecoderTest, MoreTokensThanTheContextHoldsChangeNothing) {
  LoadedModel model(*backend, folder, {.context_tokens = 20});
  Decoder& decoder = *model.decoder;
  Sequence sequence = ok(decoder.start());
  expect_error(decoder.append(sequence, std::vector<TokenId>(21, 5)), Errc::out_of_range, {"21 tokens", "context of 20"});
  const auto ids = golden.prompt(0);
  TokenId id = ok(decoder.append(sequence, ids)).token;
  for (std::size_t n = ids.size(); n < 20; ++n) id = ok(decoder.append(sequence, {&id, 1})).token;
  expect_error(decoder.append(sequence, {&id, 1}), Errc::out_of_range, {"1 tokens after 20", "context of 20"});
  EXPECT_EQ(sequence.length(), 20U);
}

TEST_P(DecoderTest, ReserveMakesRoomOnlyWhileNoSequenceLives) {
  LoadedModel model(*backend, folder, {.context_tokens = 32});
  Decoder& decoder = *model.decoder;
  {
    Sequence sequence = ok(decoder.start());
    ok(decoder.reserve(32));
    expect_error(decoder.reserve(33), Errc::busy, {"33 tokens"});
  }
  expect_error(decoder.reserve(1 << 20), Errc::out_of_range, {"4096"});
  ok(decoder.reserve(300));
  EXPECT_EQ(decoder.context_tokens(), 300U);
  Sequence sequence = ok(decoder.start());
  EXPECT_LT(relative_l2(ok(decoder.append(sequence, golden.get<TokenId>("long_ids"), StepOutput::logits)).logits,
                        golden.get<float>("long_last_logits")),
            1e-4);
}

TEST_P(DecoderTest, WrongOptionsAreRefused) {
  const ModelConfig config = ok(load_model_config(folder));
  const auto file = ok(WeightFile::open(folder));
  const auto names = ok(Decoder::tensors(*backend, config, *file));
  const auto weights = ok(WeightStore::load(*backend, *file, names));
  const auto with = [&](DecoderOptions options) { return Decoder::create(*backend, config, *file, *weights, options); };
  expect_error(with({.chunk_tokens = 0}), Errc::invalid_argument, {"chunk_tokens"});
  expect_error(with({.chunk_tokens = 4, .logit_rows = 5}), Errc::invalid_argument, {"logit_rows 5"});
  expect_error(with({.kv_type = DType::f8_e4m3}), Errc::invalid_argument, {"f8_e4m3"});
  expect_error(with({.tokens_per_replay = 257}), Errc::invalid_argument, {"tokens_per_replay 257"});
  expect_error(with({.max_sequences = 0}), Errc::invalid_argument, {"max_sequences"});
}

TEST_P(DecoderTest, EverythingIsGivenBack) {
  {
    LoadedModel model(*backend, folder);
    Sequence sequence = ok(model.decoder->start());
    ok(model.decoder->append(sequence, golden.prompt(0)));
    EXPECT_FALSE(backend->live_allocations().empty());
  }
  EXPECT_TRUE(backend->live_allocations().empty()) << backend->alloc_report();
  EXPECT_EQ(backend->live_graph_count(), 0U);
}

INSTANTIATE_TEST_SUITE_P(Models, DecoderTest, ::testing::ValuesIn(kModels), model_name);

TEST(DecoderBackends, ABackendWithoutKernelsIsToldApart) {
  const auto bare = host_backend({});
  const std::filesystem::path folder = model_folder("kjv-llama-2m");
  const ModelConfig config = ok(load_model_config(folder));
  const auto file = ok(WeightFile::open(folder));
  const auto names = ok(Decoder::tensors(*bare, config, *file));
  const auto weights = ok(WeightStore::load(*bare, *file, names));
  expect_error(Decoder::create(*bare, config, *file, *weights), Errc::not_found, {"matmul", "repack"});
}

}  // namespace
}  // namespace metrale::test
