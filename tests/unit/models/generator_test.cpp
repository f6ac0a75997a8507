// SPDX-License-Identifier: Apache-2.0
#include "metrale/models/generator.h"

#include <atomic>
#include <cstring>
#include <fstream>

#include "model_fixture.h"
#include "support/byte_writer.h"
#include "support/safetensors_writer.h"

namespace metrale::test {
namespace {

namespace fs = std::filesystem;

class GeneratorTest : public ::testing::TestWithParam<const char*> {
 protected:
  const fs::path folder = model_folder(GetParam());
  const Golden golden{folder};
  const std::unique_ptr<GpuBackend> backend = host_backend();

  void TearDown() override { EXPECT_TRUE(backend->live_allocations().empty()) << backend->alloc_report(); }
};

TEST_P(GeneratorTest, AnswersGoldenPromptsWithGoldenTokens) {
  const auto model = ok(Generator::load(folder, *backend));
  for (int n = 0; n < Golden::kPrompts; ++n) {
    const auto prompt = golden.prompt(n);
    const auto expected = golden.greedy(n);
    std::string pieces;
    GenerateRequest request;
    request.prompt = ok(model->tokenizer().decode(prompt));
    request.max_tokens = static_cast<std::uint32_t>(expected.size() - prompt.size());
    const Generation out = ok(model->generate(request, [&](std::string_view piece) {
      EXPECT_FALSE(piece.empty());
      pieces += piece;
    }));
    EXPECT_EQ(out.prompt_ids, prompt);
    EXPECT_EQ(out.ids, std::vector<TokenId>(expected.begin() + static_cast<std::ptrdiff_t>(prompt.size()), expected.end()));
    EXPECT_EQ(out.text, ok(model->tokenizer().decode(out.ids)));
    EXPECT_EQ(out.text, pieces);
    EXPECT_EQ(out.stop, StopReason::max_tokens);
    EXPECT_EQ(out.stats.generated_tokens, out.ids.size());
    EXPECT_GT(out.stats.decode_tokens_per_second(), 0);
    EXPECT_GT(out.stats.kv_bytes, 0U);
  }
}

TEST_P(GeneratorTest, SeveralTokensAReplayGiveTheSameText) {
  const auto prompt = golden.prompt(1);
  const auto ids = [&](std::uint32_t several, std::uint32_t max_tokens, std::uint64_t context) {
    GeneratorOptions options;
    options.max_context_tokens = context;
    options.decoder.tokens_per_replay = several;
    const auto model = ok(Generator::load(folder, *backend, options));
    return ok(model->generate(prompt, {.max_tokens = max_tokens})).ids;
  };
  for (const std::uint32_t max_tokens : {1U, 2U, 8U, 9U, 30U}) {
    const auto expected = ids(1, max_tokens, 0);
    EXPECT_EQ(expected.size(), max_tokens);
    EXPECT_EQ(ids(8, max_tokens, 0), expected) << max_tokens << " tokens";
  }
  // The context ends in the middle of a replay.
  EXPECT_EQ(ids(8, 100, prompt.size() + 11), ids(1, 100, prompt.size() + 11));
}

TEST_P(GeneratorTest, SeededSamplingRepeats) {
  const auto model = ok(Generator::load(folder, *backend));
  GenerateRequest request{
      .prompt = "And God said", .max_tokens = 40, .sampling = {.temperature = 1.0F, .top_k = 50, .top_p = 0.95F, .seed = 7}};
  const Generation first = ok(model->generate(request));
  EXPECT_EQ(ok(model->generate(request)).ids, first.ids);
  request.sampling.seed = 8;
  EXPECT_NE(ok(model->generate(request)).ids, first.ids);
  request.sampling = {};
  EXPECT_NE(ok(model->generate(request)).ids, first.ids);
}

TEST_P(GeneratorTest, StopsWhenTheContextIsFull) {
  const auto model = ok(Generator::load(folder, *backend, {.max_context_tokens = 24}));
  const auto prompt = golden.prompt(0);
  const Generation out = ok(model->generate(prompt, {.max_tokens = 1000}));
  EXPECT_EQ(out.stop, StopReason::context_full);
  EXPECT_EQ(out.prompt_ids.size() + out.ids.size(), 25U) << "the last token is made of a full context and read by nobody";
}

TEST_P(GeneratorTest, APromptLongerThanTheContextIsRefused) {
  const auto model = ok(Generator::load(folder, *backend, {.max_context_tokens = 24}));
  expect_error(model->generate(std::vector<TokenId>(25, 5), {}), Errc::out_of_range, {"25 tokens", "24"});
  EXPECT_EQ(ok(model->generate(std::vector<TokenId>(24, 5), {})).ids.size(), 1U);
}

TEST_P(GeneratorTest, AnIdOutsideTheVocabularyIsRefusedAndTheModelGoesOn) {
  const auto model = ok(Generator::load(folder, *backend));
  expect_error(model->generate(std::vector<TokenId>{1, 1024}, {}), Errc::out_of_range, {"token 1024 at position 1"});
  EXPECT_EQ(ok(model->generate(golden.prompt(1), {.max_tokens = 1})).ids[0], golden.greedy(1)[golden.prompt(1).size()]);
}

TEST_P(GeneratorTest, CancellingKeepsTheTextSoFar) {
  const auto model = ok(Generator::load(folder, *backend));
  std::atomic<bool> cancel{false};
  int pieces = 0;
  const Generation out = ok(model->generate(golden.prompt(0), {.max_tokens = 1000, .cancel = &cancel}, [&](std::string_view) {
    if (++pieces == 5) cancel = true;
  }));
  EXPECT_EQ(out.stop, StopReason::cancelled);
  EXPECT_EQ(pieces, 5);
  EXPECT_FALSE(out.text.empty());
}

TEST_P(GeneratorTest, CancellingEndsALongPromptBetweenTwoChunks) {
  const auto model = ok(Generator::load(folder, *backend, {.decoder = {.chunk_tokens = 8, .logit_rows = 4}}));
  /// Cancels as the first kernel starts.
  struct Canceller final : Observer {
    void on_op(const OpRecord& record) noexcept override {
      if (record.op == Op::launch) cancel = true;
    }
    std::atomic<bool> cancel{false};
  } canceller;
  const auto prompt = golden.get<TokenId>("long_ids");
  ok(model->decoder()->reserve(256));  // captures launches too
  const std::uint64_t before = model->decoder()->stats().tokens;
  backend->attach(canceller);
  const auto out = model->generate(prompt, {.max_tokens = 8, .cancel = &canceller.cancel});
  backend->detach(canceller);
  EXPECT_EQ(ok(out).stop, StopReason::cancelled);
  EXPECT_TRUE(out->ids.empty());
  EXPECT_EQ(out->stats.prompt_tokens, 8U);
  EXPECT_EQ(model->decoder()->stats().tokens - before, 8U) << "one chunk of " << prompt.size();
}

TEST_P(GeneratorTest, APromptInChunksGivesTheSameTokens) {
  for (const std::uint32_t chunk : {4U, 7U, 512U}) {
    SCOPED_TRACE(chunk);
    const auto model = ok(Generator::load(folder, *backend, {.decoder = {.chunk_tokens = chunk, .logit_rows = 4}}));
    for (int n = 0; n < Golden::kPrompts; ++n) {
      const auto prompt = golden.prompt(n);
      const auto expected = golden.greedy(n);
      const auto more = expected.size() - prompt.size();
      EXPECT_EQ(ok(model->generate(prompt, {.max_tokens = static_cast<std::uint32_t>(more)})).ids,
                std::vector<TokenId>(expected.begin() + static_cast<std::ptrdiff_t>(prompt.size()), expected.end()));
    }
  }
}

TEST_P(GeneratorTest, EmptyPromptsAndWrongSamplingAreRefused) {
  const auto model = ok(Generator::load(folder, *backend));
  expect_error(model->generate({.prompt = ""}), Errc::invalid_argument, {"empty"});
  expect_error(model->generate({.prompt = "In", .sampling = {.temperature = -1.0F}}), Errc::invalid_argument, {"temperature"});
  expect_error(model->generate({.prompt = "In", .chat = true}), Errc::unsupported, {"chat"});
}

TEST_P(GeneratorTest, NoTokensAskedForIsNoTokens) {
  const auto model = ok(Generator::load(folder, *backend));
  const Generation out = ok(model->generate({.prompt = "In", .max_tokens = 0}));
  EXPECT_TRUE(out.ids.empty());
  EXPECT_EQ(out.stop, StopReason::max_tokens);
}

TEST_P(GeneratorTest, RoomGrowsWithTheRequestsAndStays) {
  const auto model = ok(Generator::load(folder, *backend));
  EXPECT_EQ(model->decoder()->context_tokens(), 0U);
  ok(model->generate({.prompt = "In", .max_tokens = 4}));
  EXPECT_EQ(model->decoder()->context_tokens(), 256U);
  ok(model->generate({.prompt = "In", .max_tokens = 300}));
  EXPECT_EQ(model->decoder()->context_tokens(), 512U);
  ok(model->generate({.prompt = "In", .max_tokens = 4}));
  EXPECT_EQ(model->decoder()->context_tokens(), 512U);
}

TEST_P(GeneratorTest, UnloadGivesACleanReceipt) {
  const auto model = ok(Generator::load(folder, *backend));
  ok(model->generate({.prompt = "In", .max_tokens = 4}));
  const Receipt receipt = model->unload();
  EXPECT_TRUE(receipt.clean()) << receipt.to_string();
  EXPECT_EQ(receipt.balance_bytes, 0);
  EXPECT_EQ(receipt.balance_blocks, 0);
  EXPECT_GT(receipt.released_bytes(), model->load_stats().weight_bytes);
  expect_error(model->generate({.prompt = "In"}), Errc::invalid_argument, {"unloaded"});
  EXPECT_TRUE(model->unload().lines.empty());
}

TEST_P(GeneratorTest, TwoModelsShareABackend) {
  const auto first = ok(Generator::load(folder, *backend));
  const auto second = ok(Generator::load(model_folder("kjv-llama-2m"), *backend));
  ok(second->generate({.prompt = "In", .max_tokens = 4}));
  // Receipts balance against what was there before, so the last to come goes first.
  const Receipt last = second->unload();
  EXPECT_TRUE(last.clean()) << last.to_string();
  EXPECT_EQ(ok(first->generate(golden.prompt(0), {.max_tokens = 1})).ids[0], golden.greedy(0)[golden.prompt(0).size()]);
  const Receipt receipt = first->unload();
  EXPECT_TRUE(receipt.clean()) << receipt.to_string();
}

INSTANTIATE_TEST_SUITE_P(Models, GeneratorTest, ::testing::ValuesIn(kModels), model_name);

/// A copy of a model whose files a test may spoil.
class SpoiltModel : public ::testing::Test {
 protected:
  SpoiltModel() {
    for (const char* name : {"config.json", "tokenizer.json", "model.safetensors"})
      fs::copy_file(model_folder("kjv-hybrid-4m") / name, folder_ / name);
  }
  void TearDown() override { EXPECT_TRUE(backend->live_allocations().empty()) << backend->alloc_report(); }

  std::string read(const char* name) const {
    std::ifstream file(folder_ / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void replace(const char* name, std::string_view from, std::string_view to) {
    std::string text = read(name);
    const std::size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    write_file(folder_ / name, std::string_view(text.replace(at, from.size(), to)));
  }
  void expect_refused(Errc code, const std::vector<std::string>& parts) {
    expect_error(Generator::load(folder_.path(), *backend), code, parts);
  }

  TempFolder folder_;
  const std::unique_ptr<GpuBackend> backend = host_backend();
};

TEST_F(SpoiltModel, TheCopyItselfLoads) { ok(Generator::load(folder_.path(), *backend)); }

TEST_F(SpoiltModel, NoSuchPath) { expect_error(Generator::load(folder_ / "nowhere", *backend), Errc::not_found, {"nowhere"}); }

TEST_F(SpoiltModel, AFileThatIsNoModel) {
  expect_error(Generator::load(folder_ / "config.json", *backend), Errc::bad_format, {"config.json", "GGUF"});
}

TEST_F(SpoiltModel, AFolderWithoutTokenizer) {
  fs::remove(folder_ / "tokenizer.json");
  expect_refused(Errc::not_found, {"tokenizer.json"});
}

TEST_F(SpoiltModel, AFolderWithoutWeights) {
  fs::remove(folder_ / "model.safetensors");
  expect_refused(Errc::not_found, {"safetensors"});
}

TEST_F(SpoiltModel, AMissingTensorIsNamed) {
  // Of equal length, so that the header keeps its size.
  replace("model.safetensors", "model.layers.3.self_attn.k_norm.weight", "model.layers.3.self_attn.x_norm.weight");
  expect_refused(Errc::not_found, {"model.layers.3.self_attn.k_norm.weight"});
}

TEST_F(SpoiltModel, AWrongShapeIsShownBesideTheRightOne) {
  replace("config.json", "\"intermediate_size\": 384", "\"intermediate_size\": 416");
  expect_refused(Errc::bad_format, {"gate_proj", "[384, 192]", "[416, 192]"});
}

TEST_F(SpoiltModel, AWrongConvolutionIsRefused) {
  replace("config.json", "\"linear_conv_kernel_dim\": 4", "\"linear_conv_kernel_dim\": 5");
  expect_refused(Errc::bad_format, {"conv1d", "[512, 1, 4]", "[512, 5]"});
}

TEST_F(SpoiltModel, AnUntiedHeadThatIsNotThereIsNamed) {
  replace("config.json", "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
  expect_refused(Errc::not_found, {"lm_head.weight"});
}

TEST_F(SpoiltModel, AVectorOfIntegersIsRefused) {
  replace("model.safetensors", R"("model.norm.weight":{"dtype":"BF16")", R"("model.norm.weight":{"dtype":"U16" )");
  expect_refused(Errc::unsupported, {"model.norm.weight", "U16"});
}

TEST_F(SpoiltModel, ATypeNameMadeToHurtStaysOnOneLine) {
  std::string text = read("model.safetensors");
  std::uint64_t length = 0;
  std::memcpy(&length, text.data(), sizeof(length));
  const std::string right = R"("model.norm.weight":{"dtype":"BF16")";
  const std::string wrong = R"("model.norm.weight":{"dtype":"\u001b[31m\nok")";
  text.replace(text.find(right), right.size(), wrong);
  length += wrong.size() - right.size();
  std::memcpy(text.data(), &length, sizeof(length));
  write_file(folder_ / "model.safetensors", std::string_view(text));
  expect_refused(Errc::unsupported, {"model.norm.weight", R"("\x1b[31m\x0aok")"});
}

TEST_F(SpoiltModel, ARotaryBaseThatNoFloatHoldsIsRefused) {
  replace("config.json", "\"rope_theta\": 10000.0", "\"rope_theta\": 1e-308");
  expect_refused(Errc::bad_format, {folder_.path().string(), "rotary pair", "base of 1e-308"});
}

TEST_F(SpoiltModel, WhatADecoderCannotHaveNamesTheModel) {
  expect_error(Generator::load(folder_.path(), *host_backend({})), Errc::not_found,
               {"matmul", "repack", "model " + folder_.path().string()});
}

TEST_F(SpoiltModel, ATruncatedWeightFile) {
  fs::resize_file(folder_ / "model.safetensors", fs::file_size(folder_ / "model.safetensors") - 1);
  expect_refused(Errc::bad_format, {"model.safetensors"});
}

TEST_F(SpoiltModel, MoreMemoryThanThereIs) {
  int refused = 0;
  for (std::uint64_t mib = 1; mib <= 24; ++mib) {
    host::Options options;
    options.kernels = host::kernel_tables();
    options.memory_limit_bytes = mib << 20;
    const auto small = ok(host::create(options));
    if (const auto model = Generator::load(folder_.path(), *small); !model) {
      ++refused;
      expect_error(model, Errc::out_of_memory, {std::to_string(mib << 20)});
    }
    EXPECT_TRUE(small->live_allocations().empty()) << small->alloc_report();
  }
  EXPECT_GT(refused, 8);
  EXPECT_LT(refused, 24);
}

TEST_F(SpoiltModel, LogitsThatAreNotFiniteAreAnError) {
  std::string text = read("model.safetensors");
  // The last tensor is the final norm; NaN in all of it.
  std::fill(text.end() - 384, text.end(), '\x7f');
  for (std::size_t i = text.size() - 384; i < text.size(); i += 2) text[i] = '\xff';
  write_file(folder_ / "model.safetensors", std::string_view(text));
  const auto model = ok(Generator::load(folder_.path(), *backend));
  expect_error(model->generate({.prompt = "In"}), Errc::internal, {"not finite", "model " + folder_.path().string()});
}

}  // namespace
}  // namespace metrale::test
