// SPDX-License-Identifier: Apache-2.0
//
// When the decoders take the kernel that runs all layers for one token, and what they tell it. The fake GPU's kernels compute
// nothing.
#include <fmt/format.h>

#include <algorithm>
#include <mutex>

#include "backends/cuda/cuda_backend.h"
#include "cuda_kernels.h"
#include "include/layers_plan.h"
#include "metrale/models/synthetic.h"

namespace metrale::test {
namespace {

/// What launches of the kernel were given.
struct Told {
  std::mutex mutex;
  int launches = 0;
  std::uint32_t blocks = 0;
  LayersParams params;
  std::vector<LayerAddresses> layers;
  std::vector<std::uint64_t> buffers;
};
Told* told = nullptr;

void note_launch(const host::BlockContext& c) {
  if (c.index.x != 0) return;
  const std::lock_guard lock(told->mutex);
  ++told->launches;
  told->blocks = c.grid.x;
  told->params = c.arg<LayersParams>(8);
  told->layers.assign(c.ptr<LayerAddresses>(0), c.ptr<LayerAddresses>(0) + told->params.num_layers);
  told->buffers.clear();
  for (std::size_t i = 0; i < 8; ++i) told->buffers.push_back(c.arg<std::uint64_t>(i));
}

constexpr std::array<std::uint32_t, 9> kLayersBytes{8, 8, 8, 8, 8, 8, 8, 8, sizeof(LayersParams)};

class CudaOneKernel : public ::testing::Test {
 protected:
  CudaOneKernel() { told = &told_; }
  ~CudaOneKernel() override {
    backend.reset();
    told = nullptr;
  }
  void start(int num_multiprocessors, bool has_module, std::string_view entry = cuda::layers::kEntries[0].name) {
    fake_cuda::Options options{.runs_when_idle = true};
    options.devices[0].num_multiprocessors = num_multiprocessors;
    fake.emplace(options);
    cuda::Options backend_options;
    ASSERT_EQ(fake->driver().cuInit_(0), CUDA_SUCCESS);
    backend_options.modules = cuda_decoder_modules(*fake);
    const host::HostKernel kernel{kLayersModule, entry, note_launch, kLayersBytes, {}, false, true};
    if (has_module) backend_options.modules.push_back(fake->add_module(kLayersModule, {&kernel, 1}));
    backend = ok(cuda::create_with_driver(fake->driver(), backend_options));
  }
  static ModelConfig config() {
    ModelConfig c = ok(model_shape("smollm2-135m"));
    c.vocab_size = 64;
    c.num_layers = 2;
    c.layers.assign(2, LayerKind::full_attention);
    return c;
  }
  bool takes_it(const ModelConfig& c, DecoderOptions options = {}, DType weights = DType::bf16) {
    const SyntheticModel model = ok(make_synthetic(*backend, c, weights));
    return ok(model.make_decoder(*backend, options))->has_one_kernel();
  }

  Told told_;
  std::optional<fake_cuda::FakeGpu> fake;
  std::unique_ptr<GpuBackend> backend;
};

TEST_F(CudaOneKernel, RunsAllLayersOfOneToken) {
  start(132, true);
  const SyntheticModel model = ok(make_synthetic(*backend, config()));
  const auto decoder = ok(model.make_decoder(*backend, {.context_tokens = 64, .tokens_per_replay = 3}));
  ASSERT_TRUE(decoder->has_one_kernel());
  Sequence sequence = ok(decoder->start());
  const std::vector<TokenId> prompt{1, 2, 3};
  ok(decoder->append(sequence, prompt));
  EXPECT_EQ(told_.launches, 0) << "a prompt of several tokens goes through the other kernels";
  ok(decoder->append(sequence, std::span(prompt).first(1)));
  EXPECT_EQ(told_.launches, 1);
  EXPECT_EQ(ok(decoder->append_greedy(sequence, 1, 3)).size(), 3U);
  EXPECT_EQ(told_.launches, 4);
}

TEST_F(CudaOneKernel, IsToldWhereEverythingLies) {
  start(132, true);
  const SyntheticModel model = ok(make_synthetic(*backend, config()));
  const auto decoder = ok(model.make_decoder(*backend, {.context_tokens = 64, .kv_block_tokens = 32}));
  Sequence sequence = ok(decoder->start());
  const TokenId id = 1;
  ok(decoder->append(sequence, {&id, 1}));
  EXPECT_EQ(told_.blocks, cuda::layers::kEntries[0].blocks);
  EXPECT_EQ(told_.params.num_layers, 2U);
  EXPECT_EQ(told_.params.interleaved, 0U);
  EXPECT_EQ(told_.params.scale, 0.125F);
  EXPECT_EQ(told_.params.cache.block_tokens, 32U);
  EXPECT_EQ(told_.params.cache.token_stride, 3U * 64);
  EXPECT_EQ(told_.params.cache.block_stride, 32U * 3 * 64);
  EXPECT_THAT(told_.buffers, ::testing::Each(::testing::Ne(0U)));
  ASSERT_EQ(told_.layers.size(), 2U);
  for (std::uint32_t i = 0; i < 2; ++i) {
    const LayerAddresses& l = told_.layers[i];
    const auto tensor = [&](std::string_view name) {
      return ok(model.weights->get(fmt::format("model.layers.{}.{}.weight", i, name))).ptr.address;
    };
    EXPECT_EQ(l.q, tensor("self_attn.q_proj"));
    EXPECT_EQ(l.k, tensor("self_attn.k_proj"));
    EXPECT_EQ(l.v, tensor("self_attn.v_proj"));
    EXPECT_EQ(l.o, tensor("self_attn.o_proj"));
    EXPECT_EQ(l.gate, tensor("mlp.gate_proj"));
    EXPECT_EQ(l.up, tensor("mlp.up_proj"));
    EXPECT_EQ(l.down, tensor("mlp.down_proj"));
    EXPECT_NE(l.input_norm, l.post_norm);
    EXPECT_EQ(l.keys, decoder->kv_cache()->k_pool(i).address);
    EXPECT_EQ(l.values, decoder->kv_cache()->v_pool(i).address);
  }
}

TEST_F(CudaOneKernel, GraphsNameWhatOnlyTheTableNames) {
  start(132, true);
  SyntheticModel model = ok(make_synthetic(*backend, config()));
  const auto decoder = ok(model.make_decoder(*backend, {.context_tokens = 64}));
  const Result<> freed = model.weights->release(*backend);
  ASSERT_FALSE(freed) << "a captured step still reads the weights";
  EXPECT_EQ(freed.error().code(), Errc::in_use) << freed.error().to_string();
}

TEST_F(CudaOneKernel, IsTakenForFewModelsOnly) {
  start(132, true);
  const ModelConfig c = config();
  EXPECT_TRUE(takes_it(c));
  EXPECT_FALSE(takes_it(c, {.one_kernel = false}));
  EXPECT_FALSE(takes_it(c, {.precision = Precision::exact}));
  EXPECT_FALSE(takes_it(c, {.kv_type = DType::f32}));
  EXPECT_FALSE(takes_it(c, {}, DType::f32));
  ModelConfig other = c;
  other.num_kv_heads = 9;
  EXPECT_FALSE(takes_it(other));
  other = c;
  other.rope.rotary_dim = 32;
  EXPECT_FALSE(takes_it(other));
  other = c;
  other.attention_bias = true;
  EXPECT_FALSE(takes_it(other));
  other = c;
  other.num_layers = cuda::layers::kMostLayers + 2;
  other.layers.assign(other.num_layers, LayerKind::full_attention);
  EXPECT_FALSE(takes_it(other));
}

TEST_F(CudaOneKernel, IsLeftOutOnADeviceWithTooFewMultiprocessors) {
  start(112, true);
  EXPECT_FALSE(takes_it(config()));
}

TEST_F(CudaOneKernel, ItsAbsenceIsNoFailedLookUp) {
  start(132, false);
  EXPECT_FALSE(takes_it(config()));
  EXPECT_THAT(backend->kernel_audit().misses, ::testing::IsEmpty());
}

TEST_F(CudaOneKernel, AModuleWithoutItsEntryIsNoFailedLookUpEither) {
  start(132, true, "layers_of_another_model");
  EXPECT_FALSE(takes_it(config()));
  EXPECT_THAT(backend->kernel_audit().misses, ::testing::IsEmpty());
}

}  // namespace
}  // namespace metrale::test
