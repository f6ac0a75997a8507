// SPDX-License-Identifier: Apache-2.0
#include "metrale/models/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>

namespace metrale {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Sampler sampler(const SamplerOptions& options) {
  auto made = Sampler::create(options);
  EXPECT_TRUE(made) << made.error().to_string();
  return *std::move(made);
}

std::map<TokenId, int> counts(const SamplerOptions& options, const std::vector<float>& logits, int draws) {
  Sampler s = sampler(options);
  std::map<TokenId, int> seen;
  for (int i = 0; i < draws; ++i) {
    const auto id = s.next(logits);
    EXPECT_TRUE(id);
    ++seen[id.value_or(-1)];
  }
  return seen;
}

// Pearson's statistic of the draws against probabilities; infinite when something impossible was drawn.
double chi_square(const std::map<TokenId, int>& seen, const std::map<TokenId, double>& probabilities, int draws) {
  for (const auto& [id, count] : seen) {
    if (!probabilities.contains(id)) return std::numeric_limits<double>::infinity();
  }
  double statistic = 0.0;
  for (const auto& [id, probability] : probabilities) {
    const auto it = seen.find(id);
    const double expected = probability * draws;
    const double difference = (it == seen.end() ? 0 : it->second) - expected;
    statistic += difference * difference / expected;
  }
  return statistic;
}

std::map<TokenId, double> softmax(const std::vector<float>& logits, const std::set<TokenId>& among, double temperature) {
  double total = 0.0;
  std::map<TokenId, double> probabilities;
  for (const TokenId id : among) total += std::exp(logits[static_cast<std::size_t>(id)] / temperature);
  for (const TokenId id : among) probabilities[id] = std::exp(logits[static_cast<std::size_t>(id)] / temperature) / total;
  return probabilities;
}

const std::vector<float> kLogits{0.5F, 2.0F, -1.0F, 1.0F, 0.0F, 1.5F, -0.5F, 0.25F};
constexpr int kDraws = 40000;
// 99.9 % quantiles of chi-square with 7, 2 and 3 degrees of freedom. The seeds are fixed, so a pass stays a pass.
constexpr double kQuantile7 = 24.32, kQuantile2 = 13.82, kQuantile3 = 16.27;

TEST(Argmax, TakesTheLargestAndOfSeveralTheLowest) {
  EXPECT_EQ(*argmax(kLogits), 1);
  EXPECT_EQ(*argmax(std::vector<float>{3.0F, 7.0F, 7.0F, 7.0F}), 1);
  EXPECT_EQ(*argmax(std::vector<float>{-kInf, -5.0F}), 1);
  EXPECT_EQ(*argmax(std::vector<float>{0.0F, -0.0F}), 0);
  EXPECT_EQ(*argmax(std::vector<float>{-0.0F, 0.0F}), 0);
}

TEST(Argmax, LogitThatIsNoNumberIsNamed) {
  for (const float bad : {kNan, -kNan, kInf}) {
    std::vector<float> logits(100, 1.0F);
    logits[37] = bad;
    const auto id = argmax(logits);
    ASSERT_FALSE(id);
    EXPECT_EQ(id.error().code(), Errc::internal);
    EXPECT_NE(id.error().message().find("logit 37 of 100"), std::string::npos) << id.error().message();
  }
  EXPECT_EQ(argmax(std::vector<float>(3, -kInf)).error().code(), Errc::internal);
  EXPECT_EQ(argmax({}).error().code(), Errc::invalid_argument);
}

TEST(Sampler, ParametersAreChecked) {
  for (const float temperature : {-0.1F, kNan, kInf}) {
    const auto made = Sampler::create({.temperature = temperature});
    ASSERT_FALSE(made);
    EXPECT_EQ(made.error().code(), Errc::invalid_argument);
    EXPECT_NE(made.error().message().find("temperature"), std::string::npos);
  }
  for (const float top_p : {0.0F, -1.0F, 1.0001F, kNan}) {
    const auto made = Sampler::create({.top_p = top_p});
    ASSERT_FALSE(made);
    EXPECT_EQ(made.error().code(), Errc::invalid_argument);
    EXPECT_NE(made.error().message().find("top_p"), std::string::npos);
  }
}

TEST(Sampler, TemperatureZeroIsGreedyWhateverElseIsSet) {
  EXPECT_EQ(counts({.temperature = 0.0F, .top_k = 3, .top_p = 0.5F, .seed = 9}, kLogits, 100), (std::map<TokenId, int>{{1, 100}}));
}

TEST(Sampler, DrawsFollowTheSoftmax) {
  const auto seen = counts({.temperature = 1.0F, .seed = 1}, kLogits, kDraws);
  EXPECT_LT(chi_square(seen, softmax(kLogits, {0, 1, 2, 3, 4, 5, 6, 7}, 1.0), kDraws), kQuantile7);
}

TEST(Sampler, TemperatureFlattensAndSharpens) {
  for (const float temperature : {0.5F, 2.0F}) {
    const auto seen = counts({.temperature = temperature, .seed = 2}, kLogits, kDraws);
    EXPECT_LT(chi_square(seen, softmax(kLogits, {0, 1, 2, 3, 4, 5, 6, 7}, temperature), kDraws), kQuantile7) << temperature;
    // The test can tell: the draws do not fit another temperature.
    EXPECT_GT(chi_square(seen, softmax(kLogits, {0, 1, 2, 3, 4, 5, 6, 7}, 1.0), kDraws), 10 * kQuantile7) << temperature;
  }
}

TEST(Sampler, TopKKeepsTheLargest) {
  const auto seen = counts({.temperature = 1.0F, .top_k = 3, .seed = 3}, kLogits, kDraws);
  EXPECT_LT(chi_square(seen, softmax(kLogits, {1, 3, 5}, 1.0), kDraws), kQuantile2);
}

TEST(Sampler, TopKOfOneIsGreedyAndOfManyKeepsAll) {
  EXPECT_EQ(counts({.temperature = 5.0F, .top_k = 1}, kLogits, 50), (std::map<TokenId, int>{{1, 50}}));
  EXPECT_EQ(counts({.temperature = 1.0F, .top_k = 8, .seed = 4}, kLogits, 500),
            counts({.temperature = 1.0F, .seed = 4}, kLogits, 500));
  EXPECT_EQ(counts({.temperature = 1.0F, .top_k = UINT32_MAX, .seed = 4}, kLogits, 500),
            counts({.temperature = 1.0F, .seed = 4}, kLogits, 500));
}

TEST(Sampler, TopPKeepsTheFewestThatReachIt) {
  // Probabilities by rank: 0.379 0.230 0.139 0.085 …; 0.8 needs the first four.
  const auto seen = counts({.temperature = 1.0F, .top_p = 0.8F, .seed = 5}, kLogits, kDraws);
  EXPECT_LT(chi_square(seen, softmax(kLogits, {0, 1, 3, 5}, 1.0), kDraws), kQuantile3);
  EXPECT_EQ(counts({.temperature = 1.0F, .top_p = 1e-6F}, kLogits, 50), (std::map<TokenId, int>{{1, 50}}));
}

TEST(Sampler, TopPCountsWhatTopKLeftAtTheGivenTemperature) {
  // Of the three kept, the first two hold 0.81; over all eight they would hold 0.61, and at temperature 4 of three only 0.71.
  EXPECT_EQ(counts({.temperature = 1.0F, .top_k = 3, .top_p = 0.8F, .seed = 6}, kLogits, 2000).size(), 2U);
  EXPECT_EQ(counts({.temperature = 4.0F, .top_k = 3, .top_p = 0.8F, .seed = 6}, kLogits, 2000).size(), 3U);
}

TEST(Sampler, EqualLogitsKeepTheLowerIds) {
  const std::vector<float> flat(10, 1.0F);
  const auto by_k = counts({.temperature = 1.0F, .top_k = 3, .seed = 7}, flat, 1000);
  EXPECT_EQ(by_k.size(), 3U);
  EXPECT_EQ(by_k.rbegin()->first, 2);
  const auto by_p = counts({.temperature = 1.0F, .top_p = 0.35F, .seed = 7}, flat, 1000);
  EXPECT_EQ(by_p.size(), 4U);
  EXPECT_EQ(by_p.rbegin()->first, 3);
}

TEST(Sampler, MaskedTokensAreNeverDrawn) {
  std::vector<float> logits(1000, 0.0F);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (i % 2 == 0) logits[i] = -kInf;
  }
  for (const auto& [id, count] : counts({.temperature = 100.0F, .seed = 8}, logits, 5000)) EXPECT_EQ(id % 2, 1);
}

TEST(Sampler, SeedDecidesEveryToken) {
  std::vector<float> logits(500);
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i * 7919 % 500) * 0.01F;
  const auto run = [&](std::uint64_t seed) {
    Sampler s = sampler({.temperature = 0.9F, .top_k = 100, .top_p = 0.95F, .seed = seed});
    std::vector<TokenId> ids;
    for (int i = 0; i < 50; ++i) ids.push_back(*s.next(logits));
    return ids;
  };
  EXPECT_EQ(run(1), run(1));
  EXPECT_NE(run(1), run(2));
  EXPECT_NE(run(0), run(1));
}

TEST(Sampler, TokensAreTheSameOnEveryPlatform) {
  // Written down once. The generator is xoshiro256** seeded by SplitMix64; seed 42 starts it with 0.08386297105988216 and
  // 0.3789802506626686.
  Sampler s = sampler({.temperature = 1.0F, .seed = 42});
  std::vector<TokenId> ids;
  std::vector<float> logits(64);
  for (int step = 0; step < 16; ++step) {
    for (std::size_t i = 0; i < logits.size(); ++i)
      logits[i] = std::ldexp(static_cast<float>((i * 37 + static_cast<std::size_t>(step) * 11) % 64), -4);
    ids.push_back(*s.next(logits));
  }
  EXPECT_EQ(ids, (std::vector<TokenId>{5, 26, 44, 61, 62, 50, 48, 53, 46, 40, 45, 15, 50, 20, 44, 56}));
}

TEST(Sampler, FailedDrawTakesNoRandomNumber) {
  Sampler a = sampler({.temperature = 1.0F, .seed = 3});
  Sampler b = sampler({.temperature = 1.0F, .seed = 3});
  std::vector<float> bad = kLogits;
  bad[2] = kNan;
  EXPECT_FALSE(a.next(bad));
  EXPECT_FALSE(a.next({}));
  for (int i = 0; i < 20; ++i) EXPECT_EQ(*a.next(kLogits), *b.next(kLogits));
}

TEST(Sampler, ExtremeLogitsAndTemperaturesStayInRange) {
  const std::vector<float> wide{-3.4e38F, 3.4e38F, 0.0F, 1e-38F};
  for (const float temperature : {1e-38F, 1e-30F, 1.0F, 3e38F}) {
    for (const auto& [id, count] : counts({.temperature = temperature, .top_p = 0.99F}, wide, 50)) {
      EXPECT_GE(id, 0);
      EXPECT_LT(id, 4);
      EXPECT_TRUE(temperature > 1.0F || id == 1);
    }
  }
}

}  // namespace
}  // namespace metrale
