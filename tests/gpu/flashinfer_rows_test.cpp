// SPDX-License-Identifier: Apache-2.0
//
// Norms and sampling of the FlashInfer bridge on a device.
#include <numeric>

#include "gpu/flashinfer_fixture.h"
#include "metrale/graph.h"

namespace metrale::test {
namespace {

using namespace flashinfer;

TEST_F(FlashInferDevice, AddRmsNorm) {
  std::mt19937 random(9);
  std::normal_distribution<float> normal(0.1F, 1);
  for (const bool plus_one : {false, true}) {
    for (const std::uint32_t columns : {576U, 4'096U, 8U, 16'384U}) {
      constexpr std::uint32_t kRows = 5;
      const std::uint32_t stride = columns + 16;
      std::vector<std::uint16_t> x(kRows * stride, 0xFFFF), residual(kRows * columns), weight(columns);
      for (auto* all : {&residual, &weight}) {
        for (std::uint16_t& one : *all) one = to_bf16(normal(random));
      }
      std::vector<double> wanted, wanted_sum;
      for (std::uint32_t r = 0; r < kRows; ++r) {
        double squares = 0;
        for (std::uint32_t c = 0; c < columns; ++c) {
          x[r * stride + c] = to_bf16(normal(random));
          const double sum = static_cast<double>(from_bf16(x[r * stride + c])) + from_bf16(residual[r * columns + c]);
          wanted_sum.push_back(sum);
          squares += sum * sum;
        }
        for (std::uint32_t c = 0; c < columns; ++c) {
          wanted.push_back(wanted_sum[r * columns + c] / std::sqrt(squares / columns + 1e-5) *
                           (from_bf16(weight[c]) + (plus_one ? 1 : 0)));
        }
      }
      const Filled device_x(*backend_, x);
      const Filled device_residual(*backend_, residual);
      const Filled device_weight(*backend_, weight);
      must(bridge_->add_rms_norm({.x = device_x.ptr(),
                                  .residual = device_residual.ptr(),
                                  .weight = device_weight.ptr(),
                                  .rows = kRows,
                                  .columns = columns,
                                  .x_stride = stride,
                                  .residual_stride = 0,
                                  .eps = 1e-5F,
                                  .weight_plus_one = plus_one},
                                 stream_.handle()));
      const std::vector<float> spread = device_x.read_bf16(stream_.handle());
      std::vector<float> got;
      for (std::uint32_t r = 0; r < kRows; ++r) {
        got.insert(got.end(), &spread[r * stride], &spread[r * stride] + columns);
        EXPECT_TRUE(std::isnan(spread[r * stride + columns])) << "written between the rows";
      }
      const Distance normed = distance(got, wanted);
      EXPECT_LE(normed.relative, kTolerance) << columns;
      EXPECT_NEAR(normed.norms, 1, kNormTolerance);
      const Distance summed = distance(device_residual.read_bf16(stream_.handle()), wanted_sum);
      EXPECT_LE(summed.relative, kTolerance);
      EXPECT_NEAR(summed.norms, 1, kNormTolerance);
    }
  }
}

class FlashInferSampling : public FlashInferDevice {
 protected:
  std::vector<std::int32_t> sample(const std::vector<float>& logits, std::uint32_t vocabulary, SampleCall call) {
    const auto rows = static_cast<std::uint32_t>(logits.size() / vocabulary);
    const Filled device(*backend_, logits);
    const Filled tokens(*backend_, std::uint64_t{rows} * 4);
    call.logits = device.ptr();
    call.tokens = tokens.ptr();
    call.rows = rows;
    call.vocabulary = vocabulary;
    must(bridge_->sample(call, stream_.handle()));
    return tokens.read<std::int32_t>(stream_.handle());
  }
};

TEST_F(FlashInferSampling, TheLikeliestAloneWithTopKOne) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal(0, 3);
  for (const std::uint32_t vocabulary : {7U, 1'000U, 128'256U}) {
    std::vector<float> logits(std::size_t{6} * vocabulary);
    for (float& logit : logits) logit = normal(random);
    SampleCall call{.logits = {}, .tokens = {}, .temperature = 1.3F, .top_k = 1};
    const auto tokens = sample(logits, vocabulary, call);
    for (std::size_t r = 0; r < tokens.size(); ++r) {
      const auto row = logits.begin() + static_cast<std::ptrdiff_t>(r * vocabulary);
      EXPECT_EQ(tokens[r], std::max_element(row, row + vocabulary) - row) << vocabulary;
    }
  }
}

TEST_F(FlashInferSampling, FrequenciesAreTheProbabilities) {
  // Temperature 2 halves the logits; top_k 4 leaves out the last, top_p 0.9 then all behind the sum of 0.9 of everything.
  const std::vector<double> logits{2.0, 1.0, 0.0, -1.0, -2.0};
  constexpr std::uint32_t kRows = 20'000;
  std::vector<float> all;
  for (std::uint32_t r = 0; r < kRows; ++r) all.insert(all.end(), logits.begin(), logits.end());
  std::vector<double> probabilities;
  for (const double logit : logits) probabilities.push_back(std::exp(logit / 2));
  const double sum = std::accumulate(probabilities.begin(), probabilities.end(), 0.0);
  for (double& p : probabilities) p /= sum;
  struct Choice {
    std::int32_t top_k;
    float top_p;
    std::size_t left;
  };
  // 0.43, 0.26, 0.16, 0.096, 0.058: the sums are 0.43, 0.69, 0.85, 0.94, 1.
  for (const Choice& choice : {Choice{0, 1, 5}, Choice{3, 1, 3}, Choice{0, 0.8F, 3}, Choice{4, 0.6F, 2}}) {
    const auto tokens =
        sample(all, 5, {.logits = {}, .tokens = {}, .temperature = 2, .top_k = choice.top_k, .top_p = choice.top_p, .seed = 77});
    std::vector<double> counts(5, 0);
    for (const std::int32_t token : tokens) {
      ASSERT_TRUE(token >= 0 && token < 5);
      ++counts[static_cast<std::size_t>(token)];
    }
    const double left =
        std::accumulate(probabilities.begin(), probabilities.begin() + static_cast<std::ptrdiff_t>(choice.left), 0.0);
    for (std::size_t i = 0; i < counts.size(); ++i) {
      const double wanted = i < choice.left ? probabilities[i] / left : 0;
      // Five standard deviations.
      EXPECT_NEAR(counts[i] / kRows, wanted, 5 * std::sqrt(wanted * (1 - wanted) / kRows))
          << "token " << i << ", top_k " << choice.top_k << ", top_p " << choice.top_p;
    }
  }
}

TEST_F(FlashInferSampling, SeedAndOffsetDecide) {
  std::mt19937 random(4);
  std::normal_distribution<float> normal(0, 1);
  constexpr std::uint32_t kVocabulary = 32'000;
  std::vector<float> logits(std::size_t{40} * kVocabulary);
  for (float& logit : logits) logit = normal(random);
  const SampleCall call{.logits = {}, .tokens = {}, .top_k = 0, .top_p = 0.95F, .seed = 5, .offset = 64};
  const auto tokens = sample(logits, kVocabulary, call);
  EXPECT_EQ(sample(logits, kVocabulary, call), tokens);
  SampleCall other = call;
  other.offset = 96;
  EXPECT_NE(sample(logits, kVocabulary, other), tokens);
  other = call;
  other.seed = 6;
  EXPECT_NE(sample(logits, kVocabulary, other), tokens);
  // The same from the device, in a graph.
  const Filled device(*backend_, logits);
  const Filled out(*backend_, std::uint64_t{40} * 4);
  const Filled seed(*backend_, std::vector<std::uint64_t>{5});
  const Filled offset(*backend_, std::vector<std::uint64_t>{64});
  SampleCall captured = call;
  captured.logits = device.ptr();
  captured.tokens = out.ptr();
  captured.rows = 40;
  captured.vocabulary = kVocabulary;
  captured.seed_device = seed.ptr();
  captured.offset_device = offset.ptr();
  CaptureScope capture = must(CaptureScope::begin(*backend_, stream_.handle()));
  must(bridge_->sample(captured, stream_.handle()));
  const Graph graph = must(capture.end());
  must(graph.launch(stream_.handle()));
  EXPECT_EQ(out.read<std::int32_t>(stream_.handle()), tokens);
}

}  // namespace
}  // namespace metrale::test
