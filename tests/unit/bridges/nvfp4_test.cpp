// SPDX-License-Identifier: Apache-2.0
//
// NVFP4 on the host: every code, every tie, and what a matrix keeps of its values.
#include "metrale/bridges/nvfp4.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace metrale::cutlass {
namespace {

using ::testing::HasSubstr;

TEST(Nvfp4, EveryCodeComesBackAsItself) {
  for (int code = 0; code < 16; ++code) {
    EXPECT_EQ(to_e2m1(from_e2m1(static_cast<std::uint8_t>(code))), code);
  }
  for (int code = 0; code < 0x7F; ++code) {
    EXPECT_EQ(to_ue4m3(from_ue4m3(static_cast<std::uint8_t>(code))), code);
  }
  EXPECT_TRUE(std::isnan(from_ue4m3(0x7F)));
  EXPECT_EQ(to_ue4m3(std::nanf("")), 0x7F);
}

TEST(Nvfp4, TiesGoToTheEvenCode) {
  const std::pair<float, float> ties[] = {{0.25F, 0}, {0.75F, 1}, {1.25F, 1}, {1.75F, 2}, {2.5F, 2}, {3.5F, 4}, {5, 4}};
  for (const auto& [value, want] : ties) {
    EXPECT_EQ(from_e2m1(to_e2m1(value)), want) << value;
    EXPECT_EQ(from_e2m1(to_e2m1(-value)), -want) << -value;
    EXPECT_LE(from_e2m1(to_e2m1(std::nextafter(value, 0.0F))), want) << "below " << value;
    EXPECT_GE(from_e2m1(to_e2m1(std::nextafter(value, 9.0F))), want) << "above " << value;
    EXPECT_NE(from_e2m1(to_e2m1(std::nextafter(value, 0.0F))), from_e2m1(to_e2m1(std::nextafter(value, 9.0F)))) << value;
  }
}

TEST(Nvfp4, TheNearestScaleIsTaken) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> exponent(-11, 9.5F);
  for (int i = 0; i < 20'000; ++i) {
    const float value = std::exp2(exponent(random));
    const float got = from_ue4m3(to_ue4m3(value));
    for (int code = 0; code < 0x7F; ++code) {
      ASSERT_LE(std::fabs(got - value), std::fabs(from_ue4m3(static_cast<std::uint8_t>(code)) - value)) << value;
    }
  }
  EXPECT_EQ(to_ue4m3(1.0625F), to_ue4m3(1.0F));   // between 0x38 and 0x39
  EXPECT_EQ(to_ue4m3(1.1875F), to_ue4m3(1.25F));  // between 0x39 and 0x3A
}

TEST(Nvfp4, WhatIsTooLargeIsTheLargest) {
  EXPECT_EQ(from_e2m1(to_e2m1(1e9F)), 6);
  EXPECT_EQ(from_e2m1(to_e2m1(-std::numeric_limits<float>::infinity())), -6);
  EXPECT_EQ(from_e2m1(to_e2m1(std::nanf(""))), 6);
  EXPECT_EQ(from_ue4m3(to_ue4m3(1e9F)), 448);
  EXPECT_EQ(to_ue4m3(-1), 0);
}

TEST(Nvfp4, AMatrixKeepsItsValuesToWithinHalfAStep) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 0.02F);
  std::vector<float> values(33 * 80);
  for (float& value : values) value = normal(random);
  values[5] = 9;  // an outlier costs its own group alone
  const auto packed = pack_nvfp4(values, 33, 80);
  ASSERT_TRUE(packed);
  const auto back = unpack_nvfp4(*packed);
  ASSERT_TRUE(back);
  double worst = 0;
  double difference = 0;
  double norm = 0;
  for (std::size_t g = 1; g < values.size() / kNvfp4Group; ++g) {
    float largest = 0;
    for (std::size_t i = g * kNvfp4Group; i < (g + 1) * kNvfp4Group; ++i) largest = std::max(largest, std::fabs(values[i]));
    for (std::size_t i = g * kNvfp4Group; i < (g + 1) * kNvfp4Group; ++i) {
      worst = std::max<double>(worst, std::fabs((*back)[i] - values[i]) / largest);
      difference += std::pow((*back)[i] - values[i], 2);
      norm += std::pow(values[i], 2);
    }
  }
  EXPECT_LT(worst, 0.22);  // a step of 2 of 6 at most, and what rounding the scale takes
  EXPECT_LT(std::sqrt(difference / norm), 0.12);
  EXPECT_GT(std::sqrt(difference / norm), 0.05);  // four bits have an error
  EXPECT_NEAR((*back)[5], 9, 0.01);
}

TEST(Nvfp4, ZerosStayZerosAndAlphaMayBeGiven) {
  const std::vector<float> zeros(32, 0.0F);
  const auto packed = pack_nvfp4(zeros, 2, 16);
  ASSERT_TRUE(packed);
  EXPECT_EQ(*unpack_nvfp4(*packed), zeros);
  const std::vector<float> ones(16, 1.0F);
  const auto halves = pack_nvfp4(ones, 1, 16, 0.5F);
  ASSERT_TRUE(halves);
  EXPECT_EQ(halves->alpha, 0.5F);
  // 1 / 6 / 0.5 is 0.333; the nearest scale is 0.34375, and 1 / 0.171875 is nearest to 6.
  EXPECT_EQ(halves->scales[0], to_ue4m3(0.34375F));
  EXPECT_EQ((*unpack_nvfp4(*halves))[0], 6 * 0.34375F * 0.5F);
}

TEST(Nvfp4, WhatDoesNotGoTogetherIsRefused) {
  const std::vector<float> values(32, 1.0F);
  const auto words = [](const auto& result) { return result ? std::string("ok") : result.error().to_string(); };
  EXPECT_THAT(words(pack_nvfp4(values, 0, 16)), HasSubstr("0 by 16"));
  EXPECT_THAT(words(pack_nvfp4(values, 4, 8)), HasSubstr("groups of 16"));
  EXPECT_THAT(words(pack_nvfp4(values, 3, 16)), HasSubstr("32 values, and the matrix has 48"));
  EXPECT_THAT(words(pack_nvfp4(values, 0x80000000U, 0x80000000U)), HasSubstr("the matrix has 4611686018427387904"));
  EXPECT_THAT(words(pack_nvfp4(values, 2, 16, 0.0F)), HasSubstr("alpha is 0"));
  EXPECT_THAT(words(pack_nvfp4(values, 2, 16, std::nanf(""))), HasSubstr("alpha is nan"));
  std::vector<float> bad = values;
  bad[3] = std::numeric_limits<float>::infinity();
  EXPECT_THAT(words(pack_nvfp4(bad, 2, 16)), HasSubstr("inf is among the values"));
  auto packed = pack_nvfp4(values, 2, 16);
  ASSERT_TRUE(packed);
  packed->scales.pop_back();
  EXPECT_THAT(words(unpack_nvfp4(*packed)), HasSubstr("1 scales, and the matrix has 2"));
  packed->values.pop_back();
  EXPECT_THAT(words(unpack_nvfp4(*packed)), HasSubstr("15 bytes of values, and the matrix has 16"));
  EXPECT_THAT(words(tile_nvfp4_scales(packed->scales, 2, 16)), HasSubstr("1 scales, and the matrix has 2"));
}

TEST(Nvfp4, TilesOfScalesAreWhereTensorCoresLookForThem) {
  // 130 rows by 5 groups: two tiles down, two across.
  std::vector<std::uint8_t> scales(130 * 5);
  for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<std::uint8_t>(i % 126 + 1);
  ASSERT_EQ(tiled_scale_bytes(130, 80), 4U * 512);
  const auto tiled = tile_nvfp4_scales(scales, 130, 80);
  ASSERT_TRUE(tiled);
  ASSERT_EQ(tiled->size(), 4U * 512);
  const auto at = [&](int row, int group) { return scales[static_cast<std::size_t>(row * 5 + group)]; };
  EXPECT_EQ((*tiled)[0], at(0, 0));
  EXPECT_EQ((*tiled)[3], at(0, 3));
  EXPECT_EQ((*tiled)[4], at(32, 0));
  EXPECT_EQ((*tiled)[16], at(1, 0));
  EXPECT_EQ((*tiled)[31 * 16 + 3 * 4 + 2], at(127, 2));
  EXPECT_EQ((*tiled)[512], at(0, 4));
  EXPECT_EQ((*tiled)[512 + 1], 0);  // no such group
  EXPECT_EQ((*tiled)[2 * 512 + 16], at(129, 0));
  EXPECT_EQ((*tiled)[2 * 512 + 32], 0);  // no such row
  EXPECT_EQ(std::count_if(tiled->begin(), tiled->end(), [](std::uint8_t v) { return v != 0; }), 130 * 5);
}

}  // namespace
}  // namespace metrale::cutlass
