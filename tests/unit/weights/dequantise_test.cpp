// SPDX-License-Identifier: Apache-2.0
#include "metrale/dequantise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "metrale/weight_file.h"
#include "unit/weights/error_matchers.h"

namespace metrale {
namespace {

using test::expect_error;

class DequantiseGolden : public testing::TestWithParam<DType> {};

TEST_P(DequantiseGolden, MatchesTheGgufPackage) {
  auto file = WeightFile::open(METRALE_TEST_DATA "/dequantise/golden.safetensors");
  ASSERT_TRUE(file) << file.error().to_string();
  const std::string type(to_string(GetParam()));
  const TensorInfo* blocks = (*file)->find(type + ".blocks");
  const TensorInfo* golden = (*file)->find(type + ".values");
  ASSERT_TRUE(blocks != nullptr && golden != nullptr);
  const auto stored = (*file)->read(*blocks);
  const auto wanted_bytes = (*file)->read(*golden);
  ASSERT_TRUE(stored && wanted_bytes);
  std::vector<float> wanted(golden->num_elements());
  std::memcpy(wanted.data(), wanted_bytes->data(), wanted_bytes->size());

  std::vector<float> got(wanted.size(), -12345.0F);
  const Result<> done = dequantise(GetParam(), *stored, got);
  ASSERT_TRUE(done) << done.error().to_string();
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::isinf(wanted[i])) {
      EXPECT_EQ(got[i], wanted[i]) << i;
    } else {
      EXPECT_NEAR(got[i], wanted[i], 4e-7F * std::fabs(wanted[i]) + 1e-7F) << type << " element " << i;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Types, DequantiseGolden,
                         testing::Values(DType::f16, DType::bf16, DType::q4_0, DType::q4_1, DType::q8_0, DType::q4_k, DType::q6_k),
                         [](const auto& param) { return std::string(to_string(param.param)); });

TEST(Dequantise, CopiesF32) {
  const std::vector<float> values{1.5F, -0.0F, 3e38F};
  std::vector<float> got(3);
  ASSERT_TRUE(dequantise(DType::f32, std::as_bytes(std::span(values)), got));
  EXPECT_EQ(got, values);
}

TEST(Dequantise, RefusesOtherTypesAndWrongSizes) {
  std::vector<std::byte> src(18);
  std::vector<float> dst(32, 7.0F);
  expect_error(dequantise(DType::i8, src, dst), Errc::unsupported, {"i8"});
  expect_error(dequantise(DType::q8_0, src, dst), Errc::invalid_argument, {"q8_0", "18", "32"});
  expect_error(dequantise(DType::q4_0, src, std::span(dst).first(31)), Errc::invalid_argument, {"q4_0"});
  EXPECT_EQ(dst, std::vector<float>(32, 7.0F));
  EXPECT_TRUE(can_dequantise(DType::q4_k));
  EXPECT_FALSE(can_dequantise(DType::f8_e4m3));
}

TEST(Dequantise, HalfConversionIsExactForEveryFiniteHalf) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const std::uint32_t exponent = (bits >> 10) & 0x1F;
    const float got = f16_to_f32(static_cast<std::uint16_t>(bits));
    if (exponent == 0x1F) {
      EXPECT_EQ(std::isnan(got), (bits & 0x3FF) != 0) << bits;
      continue;
    }
    const double mantissa = exponent == 0 ? (bits & 0x3FF) : 0x400 + (bits & 0x3FF);
    const double wanted = std::ldexp(mantissa, static_cast<int>(exponent == 0 ? 1 : exponent) - 25);
    ASSERT_EQ(static_cast<double>(std::fabs(got)), wanted) << bits;
    ASSERT_EQ(std::signbit(got), bits >> 15 != 0) << bits;
  }
}

TEST(Dequantise, Bfloat16RoundsToNearestEvenAndKeepsNaN) {
  EXPECT_EQ(f32_to_bf16(1.0F), 0x3F80);
  EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x3F808000U)), 0x3F80);  // tie, to even
  EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x3F818000U)), 0x3F82);  // tie, to even
  EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x3F808001U)), 0x3F81);
  EXPECT_EQ(f32_to_bf16(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_EQ(f32_to_bf16(-std::numeric_limits<float>::infinity()), 0xFF80);
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(0x7F800001U)))));  // its payload would be cut to infinity
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = bf16_to_f32(static_cast<std::uint16_t>(bits));
    if (!std::isnan(value)) {
      ASSERT_EQ(f32_to_bf16(value), bits);
    }
  }
}

}  // namespace
}  // namespace metrale
