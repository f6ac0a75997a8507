// SPDX-License-Identifier: Apache-2.0
#include "bench/statistics.h"

#include <gtest/gtest.h>

#include <vector>

namespace metrale::bench {
namespace {

TEST(Statistics, QuantilesLieBetweenNeighbours) {
  const std::vector<double> sorted{1, 2, 4, 8};
  EXPECT_DOUBLE_EQ(quantile(sorted, 0), 1);
  EXPECT_DOUBLE_EQ(quantile(sorted, 0.5), 3);
  EXPECT_DOUBLE_EQ(quantile(sorted, 0.9), 4 + 0.7 * 4);
  EXPECT_DOUBLE_EQ(quantile(sorted, 1), 8);
}

TEST(Statistics, ASummaryDoesNotAskForOrder) {
  const std::vector<double> samples{9, 1, 5, 3, 7};
  const Summary s = summarise(samples);
  EXPECT_EQ(s.count, 5U);
  EXPECT_DOUBLE_EQ(s.min, 1);
  EXPECT_DOUBLE_EQ(s.p10, 1.8);
  EXPECT_DOUBLE_EQ(s.median, 5);
  EXPECT_DOUBLE_EQ(s.p90, 8.2);
  EXPECT_DOUBLE_EQ(s.max, 9);
  EXPECT_DOUBLE_EQ(samples[0], 9) << "the samples stay in the order they were taken";
}

TEST(Statistics, OneSampleIsEveryFigure) {
  const std::vector<double> one{4.5};
  const Summary s = summarise(one);
  EXPECT_DOUBLE_EQ(s.min, 4.5);
  EXPECT_DOUBLE_EQ(s.median, 4.5);
  EXPECT_DOUBLE_EQ(s.p90, 4.5);
}

TEST(Statistics, NoSamplesAreZeros) {
  const Summary s = summarise({});
  EXPECT_EQ(s.count, 0U);
  EXPECT_DOUBLE_EQ(s.median, 0);
}

}  // namespace
}  // namespace metrale::bench
