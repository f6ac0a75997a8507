// SPDX-License-Identifier: Apache-2.0
//
// The kernel of module "layers" on the emulated GPU: it gives what sums in double precision give, and ends, in whatever order its
// warps run; what blocks exchange is never overwritten before it is read.
#include <gtest/gtest.h>

#include <functional>

// In this order: the first has the words of CUDA for what the second includes.
#include <layers_device.cuh>

#include "benchmarks/kernels/cuda_layers_model.h"
#include "sm_90a/layers.cu"

namespace metrale::test {
namespace {

using bench::Half;
using bench::kKvWidth;
using bench::Model;
using bench::S;

class LayersEmulated : public ::testing::Test {
 protected:
  /// Runs steps at these positions, one after the other over the same exchange buffer, and compares each.
  static void compare(std::uint32_t layers, std::initializer_list<std::uint32_t> positions, bool interleaved, std::uint32_t seed) {
    std::mt19937 random(seed);
    Model model(layers, 1200);
    std::vector<bench::Layer> own = model.layers;
    std::vector<LayerAddresses> table;
    for (const bench::Layer& l : own) table.push_back(addresses_of(l, [](const auto& values) { return at(values); }));
    std::vector<float4> exchange(S::kExchangeFloats / 4 + 1, float4{0, 0, 0, 0});
    std::vector<float> hidden(S::kHidden);
    for (const std::uint32_t position : positions) {
      SCOPED_TRACE(::testing::Message() << layers << " layers, position " << position << ", seed " << seed);
      const auto token = static_cast<std::int32_t>(position % bench::kVocab);
      const StepHeader step{.position = static_cast<std::int32_t>(position), .slot = 0};
      const LayersParams params{.num_layers = layers,
                                .interleaved = interleaved,
                                .norm_eps = 1e-5F,
                                .scale = 0.125F,
                                .cache = {.dtype = 0,
                                          .block_tokens = bench::kBlockTokens,
                                          .block_stride = std::uint64_t{bench::kBlockTokens} * kKvWidth,
                                          .token_stride = kKvWidth,
                                          .head_stride = S::kHeadDim}};
      const std::string wrong =
          emulated::run({S::kBlocks, cuda::layers::kThreads, cuda::layers::kClusterBlocks, S::kSharedBytes}, random, [&] {
            layers_576_9_3_64_1536(table.data(), model.embedding.data(), &token, model.frequencies.data(), &step,
                                   model.table.data(), &exchange[0].x, hidden.data(), params);
          });
      ASSERT_EQ(wrong, "");
      const std::vector<double> want = model.step(static_cast<std::uint32_t>(token), position, interleaved);
      EXPECT_LT(bench::difference(want, {hidden.begin(), hidden.end()}), 1e-3);
      for (std::uint32_t l = 0; l < layers; ++l) {
        expect_row(own[l].keys, model.layers[l].keys, model.row(position));
        expect_row(own[l].values, model.layers[l].values, model.row(position));
      }
    }
  }

 private:
  template <class T>
  static std::uint64_t at(const std::vector<T>& values) {
    return reinterpret_cast<std::uint64_t>(values.data());
  }
  /// The step's row is there and nothing else has changed. Later steps start from the same cache.
  static void expect_row(Half& got, const Half& want, std::size_t row) {
    std::vector<double> own, expected;
    std::size_t strays = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      if (i >= row && i < row + kKvWidth) {
        own.push_back(bench::from_bf16(got[i]));
        expected.push_back(bench::from_bf16(want[i]));
      } else if (got[i] != want[i]) {
        ++strays;
      }
    }
    EXPECT_EQ(strays, 0U);
    EXPECT_LT(bench::difference(expected, own), 2e-3);
    got = want;
  }
};

TEST_F(LayersEmulated, StepsAreRightWhateverTheOrder) {
  for (const std::uint32_t seed : {1U, 2U}) compare(2, {0, 17, 300}, false, seed);
}
TEST_F(LayersEmulated, RotatesNeighboursWherePairsAreInterleaved) { compare(2, {5, 130}, true, 3); }
TEST_F(LayersEmulated, TakesMoreKeysThanItHoldsAtOnce) { compare(2, {895, 896, 1100}, false, 4); }
TEST_F(LayersEmulated, ManyLayersShareTheSameBuffers) { compare(8, {40}, false, 5); }

}  // namespace
}  // namespace metrale::test
