// SPDX-License-Identifier: Apache-2.0
//
// A model divided among ranks on host backends, against what the whole model gives.
#include "metrale/models/tensor_parallel.h"

#include <thread>

#include "golden_checks.h"
#include "metrale/bridges/in_process.h"
#include "model_fixture.h"

namespace metrale::test {
namespace {

constexpr float kMargin = 0.2F;

class TensorParallel : public ::testing::Test {
 protected:
  void SetUp() override { make_world(2); }
  void make_world(std::uint32_t size, std::uint64_t last_ranks_memory = 0) {
    communicators.clear();
    ranks.clear();
    backends.clear();
    std::vector<GpuBackend*> on;
    for (std::uint32_t rank = 0; rank < size; ++rank) {
      host::Options options;
      options.num_threads = 1;
      if (rank + 1 == size) options.memory_limit_bytes = last_ranks_memory;
      options.kernels = host::kernel_tables();
      backends.push_back(ok(host::create(options)));
      on.push_back(backends.back().get());
    }
    communicators = ok(in_process::create(on, {.timeout = std::chrono::seconds(60)}));
    for (const auto& communicator : communicators) ranks.push_back(communicator.get());
  }
  std::unique_ptr<TensorParallelGenerator> load() { return ok(TensorParallelGenerator::load(folder, ranks)); }

  /// Runs `body` with each rank's decoder in a thread of its own.
  void on_each(TensorParallelGenerator& model, const std::function<void(std::uint32_t, Decoder&)>& body) {
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < model.num_ranks(); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          body(rank, *model.rank(rank).decoder());
        } catch (const std::exception& thrown) {
          ADD_FAILURE() << "rank " << rank << ": " << thrown.what();
          ranks[rank]->abort("its test failed");
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  const std::filesystem::path folder = model_folder("kjv-llama-2m");
  const Golden golden{folder};
  std::vector<std::unique_ptr<GpuBackend>> backends;
  std::vector<std::unique_ptr<Communicator>> communicators;
  std::vector<Communicator*> ranks;
};

TEST_F(TensorParallel, TwoRanksGiveTheWholeModelsLogitsTeacherForced) {
  const auto model = load();
  const std::size_t vocab = model->rank(0).config().vocab_size;
  int clear = 0;
  for (int n = 0; n < Golden::kPrompts; ++n) {
    const auto ids = golden.greedy(n);
    const auto backend = host_backend();
    LoadedModel whole(*backend, folder);
    const auto want = prompt_logits(*whole.decoder, ids, 512);
    std::vector<std::vector<float>> got(2);
    on_each(*model, [&](std::uint32_t rank, Decoder& decoder) {
      ok(decoder.reserve(320));
      got[rank] = prompt_logits(decoder, ids, 512);
      const auto steps = step_logits(decoder, ids);  // through the captured step
      EXPECT_LT(worst_row(steps, want, vocab), 1e-4) << "prompt " << n << ", rank " << rank;
      if (rank == 0) clear += expect_same_choice(steps, want, vocab, kMargin);
    });
    EXPECT_LT(worst_row(got[0], want, vocab), 1e-4) << "prompt " << n;
    EXPECT_EQ(got[0], got[1]) << "the ranks differ in prompt " << n;
    clear += expect_same_choice(got[0], want, vocab, kMargin);
  }
  EXPECT_GT(clear, 100);
  for (const Receipt& receipt : model->unload()) EXPECT_TRUE(receipt.clean()) << receipt.to_string();
}

TEST_F(TensorParallel, TwoRanksWriteTheGoldenText) {
  const auto model = load();
  for (int n = 0; n < Golden::kPrompts; ++n) {
    const auto prompt = golden.prompt(n);
    const auto expected = golden.greedy(n);
    GenerateRequest request;
    request.prompt = ok(model->rank(0).tokenizer().decode(prompt));
    request.max_tokens = static_cast<std::uint32_t>(expected.size() - prompt.size());
    std::string pieces;
    const Generation out = ok(model->generate(request, [&](std::string_view piece) { pieces += piece; }));
    EXPECT_EQ(out.ids, std::vector<TokenId>(expected.begin() + static_cast<std::ptrdiff_t>(prompt.size()), expected.end()));
    EXPECT_EQ(out.text, pieces);
  }
}

TEST_F(TensorParallel, EachRankHoldsItsPartOfTheWeightsAlone) {
  const auto backend = host_backend();
  const auto whole = ok(Generator::load(folder, *backend));
  const auto model = load();
  const ModelConfig& config = whole->config();
  const std::uint64_t embedding = std::uint64_t{config.vocab_size} * config.hidden_size * 2;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    const std::uint64_t held = model->rank(rank).load_stats().weight_bytes;
    EXPECT_LT(held - embedding, (whole->load_stats().weight_bytes - embedding) * 51 / 100) << "rank " << rank;
    EXPECT_GT(held, embedding);
    EXPECT_EQ(model->rank(rank).config().num_heads, config.num_heads) << "the whole model's";
  }
}

TEST_F(TensorParallel, DrawnTextIsTheSameAgain) {
  const auto prompt = golden.prompt(0);
  GenerateRequest request;
  request.max_tokens = 24;
  request.sampling = {.temperature = 0.7F, .top_k = 40, .seed = 5};
  const auto model = load();
  request.prompt = ok(model->rank(0).tokenizer().decode(prompt));
  const Generation one = ok(model->generate(request));
  const Generation two = ok(model->generate(request));
  EXPECT_EQ(one.ids, two.ids);
  EXPECT_EQ(one.ids.size(), 24U);
}

TEST_F(TensorParallel, CancellingStopsEveryRankAtTheSameToken) {
  const auto model = load();
  std::atomic<bool> stop{false};
  GenerateRequest request;
  request.prompt = "In the beginning";
  request.max_tokens = 200;
  request.cancel = &stop;
  std::size_t pieces = 0;
  const Generation out = ok(model->generate(request, [&](std::string_view) { stop = ++pieces >= 5; }));
  EXPECT_EQ(out.stop, StopReason::cancelled);
  EXPECT_LT(out.ids.size(), 200U);
  stop = false;
  request.max_tokens = 4;
  EXPECT_EQ(ok(model->generate(request)).ids.size(), 4U) << "the ranks are still together";
}

TEST_F(TensorParallel, WhatDoesNotDivideIsRefusedWithTheReason) {
  const ModelConfig config = ok(load_model_config(folder));
  expect_error(part_of_model(config, 0), Errc::invalid_argument, {"0 ranks"});
  expect_error(part_of_model(config, 4), Errc::unsupported, {"4 ranks do not divide the model's 6 attention heads"});
  expect_error(part_of_model(config, 3), Errc::unsupported, {"3 ranks do not divide the model's 2 key and value heads"});
  ModelConfig odd = config;
  odd.intermediate_size = 513;
  expect_error(part_of_model(odd, 2), Errc::unsupported, {"513 MLP channels"});
  expect_error(part_of_model(ok(load_model_config(model_folder("kjv-hybrid-4m"))), 2), Errc::unsupported, {"qwen3_5"});
  EXPECT_EQ(ok(part_of_model(config, 2)).num_heads, 3U);
  make_world(3);
  expect_error(TensorParallelGenerator::load(folder, ranks), Errc::unsupported, {"3 ranks do not divide"});
}

TEST_F(TensorParallel, ARankThatFailsToLoadEndsTheOthers) {
  make_world(2, 1 << 20);
  const auto refused = TensorParallelGenerator::load(folder, ranks);
  expect_error(refused, Errc::out_of_memory, {"rank 1"});
  EXPECT_FALSE(communicators[0]->health());
  for (const auto& backend : backends) EXPECT_EQ(backend->live_bytes(), 0U) << backend->alloc_report();
}

TEST_F(TensorParallel, ADecoderRefusesACommunicatorOfAnotherBackend) {
  const ModelConfig config = ok(load_model_config(folder));
  const auto file = ok(WeightFile::open(folder));
  const auto plan = ok(Decoder::weight_plan(*backends[0], config, *file, ranks[0]));
  const auto weights = ok(WeightStore::load(*backends[0], *file, plan));
  DecoderOptions options;
  options.communicator = ranks[1];
  expect_error(Decoder::create(*backends[0], config, *file, *weights, options), Errc::invalid_argument, {"another backend"});
}

}  // namespace
}  // namespace metrale::test
