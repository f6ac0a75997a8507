// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>

#include "host_launch.h"

namespace metrale::host::decoder::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class Rows : public EachIsa {
 protected:
  std::int32_t argmax(const std::vector<float>& row) {
    std::int32_t id = -2;
    const RowsParams params{1, static_cast<std::uint32_t>(row.size()), static_cast<std::uint32_t>(row.size())};
    EXPECT_EQ(launch.run("argmax", {1, 1, 1}, 0, row.data(), &id, params), "");
    return id;
  }
};

TEST_P(Rows, ArgmaxFindsEveryPosition) {
  for (const std::size_t n : {1U, 15U, 16U, 17U, 50U}) {
    for (std::size_t at = 0; at < n; ++at) {
      std::vector<float> row(n, -3.0F);
      row[at] = -2.0F;
      ASSERT_EQ(argmax(row), static_cast<std::int32_t>(at)) << n;
    }
  }
}

TEST_P(Rows, ArgmaxOfEqualLogitsIsTheLowestId) {
  std::vector<float> row(100, 0.0F);
  row[77] = row[33] = row[34] = row[99] = 1.0F;
  EXPECT_EQ(argmax(row), 33);
}

TEST_P(Rows, ArgmaxRefusesWhatIsNoNumber) {
  for (const std::size_t n : {16U, 50U}) {
    for (std::size_t at = 0; at < n; ++at) {
      std::vector<float> row(n, 1.0F);
      row[at] = kNan;
      ASSERT_EQ(argmax(row), -1) << at;
      row[at] = kInfinity;
      ASSERT_EQ(argmax(row), -1) << at;
      row[at] = -kInfinity;
      ASSERT_EQ(argmax(row), at == 0 ? 1 : 0);
    }
  }
  EXPECT_EQ(argmax(std::vector<float>(20, -kInfinity)), -1);
}

TEST_P(Rows, ScoreIsTheNegativeLogProbability) {
  constexpr std::uint32_t kRows = 3, kN = 9001, kLd = 9010;
  const auto logits = random_floats(std::size_t{kRows} * kLd, 1, 30.0F);
  const std::vector<std::int32_t> targets{0, 9000, 4567};
  std::vector<RowScore> scores(kRows);
  ASSERT_EQ(launch.run("score", {kRows, 1, 1}, 0, logits.data(), targets.data(), scores.data(), RowsParams{kRows, kN, kLd}), "");
  for (std::uint32_t r = 0; r < kRows; ++r) {
    const float* row = &logits[std::size_t{r} * kLd];
    const auto best = std::max_element(row, row + kN) - row;
    double sum = 0;
    for (std::uint32_t i = 0; i < kN; ++i) sum += std::exp(static_cast<double>(row[i]) - row[best]);
    EXPECT_EQ(scores[r].best, best);
    EXPECT_NEAR(scores[r].loss, std::log(sum) + row[best] - row[targets[r]], 1e-5);
  }
}

TEST_P(Rows, ScoreOfATargetOutsideTheVocabularyIsAFault) {
  const std::vector<float> logits(16);
  RowScore score;
  for (const std::int32_t target : {-1, 16}) {
    EXPECT_NE(launch.run("score", {1, 1, 1}, 0, logits.data(), &target, &score, RowsParams{1, 16, 16}), "");
  }
}

TEST_P(Rows, ScoreOfLogitsThatAreNoNumbersIsNan) {
  std::vector<float> logits(16);
  logits[3] = kNan;
  const std::int32_t target = 0;
  RowScore score;
  ASSERT_EQ(launch.run("score", {1, 1, 1}, 0, logits.data(), &target, &score, RowsParams{1, 16, 16}), "");
  EXPECT_TRUE(std::isnan(score.loss));
  EXPECT_EQ(score.best, -1);
}

INSTANTIATE_TEST_SUITE_P(Isa, Rows, ::testing::ValuesIn(all_isas()), isa_name);

class Widen : public EachIsa {};

TEST_P(Widen, EveryTypeGivesTheSameValues) {
  const std::vector<float> exact{0.0F, -0.0F, 1.0F, -2.5F, 0.015625F, 65504.0F, 0x1p-24F, -0x1p-14F, kInfinity, -kInfinity};
  const std::vector<std::uint16_t> half{0x0000, 0x8000, 0x3c00, 0xc100, 0x2400, 0x7bff, 0x0001, 0x8400, 0x7c00, 0xfc00};
  const auto n = static_cast<std::uint32_t>(exact.size());
  std::vector<float> got(n, 9.0F);
  ASSERT_EQ(launch.run("widen", {3, 1, 1}, 0, exact.data(), got.data(), WidenParams{1, n, static_cast<std::uint32_t>(DType::f32)}),
            "");
  EXPECT_EQ(got, exact);
  got.assign(n, 9.0F);
  ASSERT_EQ(launch.run("widen", {4, 1, 1}, 0, half.data(), got.data(), WidenParams{1, n, static_cast<std::uint32_t>(DType::f16)}),
            "");
  EXPECT_EQ(got, exact);
  std::vector<std::uint16_t> bf16(n);
  for (std::uint32_t i = 0; i < n; ++i) bf16[i] = to_bf16(exact[i]);
  ASSERT_EQ(launch.run("widen", {1, 1, 1}, 0, bf16.data(), got.data(), WidenParams{1, n, static_cast<std::uint32_t>(DType::bf16)}),
            "");
  for (std::uint32_t i = 0; i < n; ++i) EXPECT_EQ(got[i], from_bf16(bf16[i]));
}

TEST_P(Widen, TransformsAndTransposes) {
  const std::vector<float> from{1, 2, 3, 4, 5, 6};
  std::vector<float> got(6);
  constexpr auto kF32 = static_cast<std::uint32_t>(DType::f32);
  ASSERT_EQ(launch.run("widen", {2, 1, 1}, 0, from.data(), got.data(), WidenParams{2, 3, kF32, WidenOp::plus_one, 1}), "");
  EXPECT_EQ(got, (std::vector<float>{2, 5, 3, 6, 4, 7}));
  ASSERT_EQ(launch.run("widen", {1, 1, 1}, 0, from.data(), got.data(), WidenParams{1, 6, kF32, WidenOp::negative_exp, 0}), "");
  for (int i = 0; i < 6; ++i) EXPECT_FLOAT_EQ(got[static_cast<std::size_t>(i)], -std::exp(static_cast<float>(i + 1)));
}

TEST_P(Widen, QuantisedTypesAreAFault) {
  float x = 0, y = 0;
  EXPECT_NE(launch.run("widen", {1, 1, 1}, 0, &x, &y, WidenParams{1, 1, static_cast<std::uint32_t>(DType::q8_0)}), "");
}

INSTANTIATE_TEST_SUITE_P(Isa, Widen, ::testing::ValuesIn(all_isas()), isa_name);

}  // namespace
}  // namespace metrale::host::decoder::testing
