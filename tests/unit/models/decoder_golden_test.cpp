// SPDX-License-Identifier: Apache-2.0
//
// The two tiny models against what the Transformers library computed from the same weights.
#include "decoder/decoder.h"

#include "golden_checks.h"
#include "matmul/matmul.h"
#include "model_fixture.h"
#include "sampling/sampling.h"

namespace metrale::test {
namespace {

constexpr double kTolerance = 1e-4;

class GoldenDecoder : public ::testing::TestWithParam<const char*> {
 protected:
  const std::filesystem::path folder = model_folder(GetParam());
  const Golden golden{folder};
  const std::unique_ptr<GpuBackend> backend = host_backend();

  /// Every prompt's logits, `chunk` tokens of the prompt at a time.
  void expect_prompt_logits(Decoder& decoder, std::size_t chunk) {
    const std::size_t vocab = decoder.config().vocab_size;
    for (int n = 0; n < Golden::kPrompts; ++n) {
      const auto logits = prompt_logits(decoder, golden.prompt(n), chunk);
      EXPECT_LT(worst_row(logits, golden.logits(n), vocab), kTolerance) << "prompt " << n << ", " << chunk << " at a time";
    }
  }
};

TEST_P(GoldenDecoder, GreedyTokensAreEqualEveryOne) {
  LoadedModel model(*backend, folder);
  for (int n = 0; n < Golden::kPrompts; ++n) {
    const auto expected = golden.greedy(n);
    EXPECT_EQ(greedy_text(*model.decoder, golden.prompt(n), expected.size()), expected) << "prompt " << n;
  }
}

TEST_P(GoldenDecoder, LogitsOfEachPromptPosition) {
  LoadedModel model(*backend, folder);
  expect_prompt_logits(*model.decoder, 512);
  expect_prompt_logits(*model.decoder, 5);
}

TEST_P(GoldenDecoder, LogitsOfTheCapturedStep) {
  LoadedModel model(*backend, folder);
  const std::size_t vocab = model.config.vocab_size;
  for (int n = 0; n < Golden::kPrompts; ++n) {
    const auto logits = step_logits(*model.decoder, golden.prompt(n));
    EXPECT_LT(worst_row(logits, golden.logits(n), vocab), kTolerance) << "prompt " << n;
  }
}

TEST_P(GoldenDecoder, LogitsAfterTwoHundredTokens) {
  const auto ids = golden.get<TokenId>("long_ids");
  const auto expected = golden.get<float>("long_last_logits");
  for (const std::uint32_t chunk : {512U, 64U, 33U}) {
    LoadedModel model(*backend, folder, {.chunk_tokens = chunk});
    Sequence sequence = ok(model.decoder->start());
    const Decoder::Step step = ok(model.decoder->append(sequence, ids, StepOutput::logits));
    EXPECT_LT(relative_l2(step.logits, expected), kTolerance) << "in chunks of " << chunk;
  }
}

TEST_P(GoldenDecoder, KeysAndValuesOfEachAttentionLayer) {
  LoadedModel model(*backend, folder, {.chunk_tokens = 48});
  const auto ids = golden.get<TokenId>("long_ids");
  Sequence sequence = ok(model.decoder->start());
  ok(model.decoder->append(sequence, ids));
  const PagedKvCache& cache = *model.decoder->kv_cache();
  const ModelConfig& config = model.config;
  const std::size_t token_size = config.kv_dim(), block_tokens = cache.block_size();
  std::uint32_t attention_layer = 0;
  for (std::uint32_t layer = 0; layer < config.num_layers; ++layer) {
    if (config.layers[layer] != LayerKind::full_attention) continue;
    for (const char* side : {"keys", "values"}) {
      const DevicePtr pool = side[0] == 'k' ? cache.k_pool(attention_layer) : cache.v_pool(attention_layer);
      std::vector<float> got(token_size * ids.size());  // [kv_heads, tokens, head_dim], as the golden tensor is
      for (std::size_t t = 0; t < ids.size(); ++t) {
        const auto block = static_cast<std::uint64_t>(sequence.blocks()[t / block_tokens]);
        std::vector<float> row(token_size);
        ok(backend->copy_d2h(std::as_writable_bytes(std::span(row)),
                             pool.offset((block * block_tokens + t % block_tokens) * token_size * sizeof(float))));
        for (std::size_t h = 0; h < config.num_kv_heads; ++h)
          std::copy_n(&row[h * config.head_dim], config.head_dim, &got[(h * ids.size() + t) * config.head_dim]);
      }
      const auto expected = golden.get<float>("layer" + std::to_string(layer) + "." + side);
      EXPECT_LT(relative_l2(got, expected), kTolerance) << "layer " << layer << ' ' << side;
    }
    ++attention_layer;
  }
  EXPECT_EQ(attention_layer, cache.num_layers());
}

TEST_P(GoldenDecoder, LogitsOnEveryInstructionSet) {
  using host::matmul::Isa;
  for (const Isa isa : {Isa::generic, Isa::avx2, Isa::avx512, Isa::amx}) {
    if (host::matmul::select_isa(isa) != isa) continue;
    SCOPED_TRACE(host::matmul::to_string(isa));
    const auto other = host_backend({host::matmul::kernels(isa), host::decoder::kernels(isa), host::sampling::kernels()});
    LoadedModel model(*other, folder);
    expect_prompt_logits(*model.decoder, 512);
    expect_prompt_logits(*model.decoder, 1);
  }
}

TEST_P(GoldenDecoder, ExactPrecisionGivesTheSame) {
  LoadedModel model(*backend, folder, {.precision = Precision::exact});
  expect_prompt_logits(*model.decoder, 512);
  expect_prompt_logits(*model.decoder, 1);
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenDecoder, ::testing::ValuesIn(kModels), model_name);

}  // namespace
}  // namespace metrale::test
