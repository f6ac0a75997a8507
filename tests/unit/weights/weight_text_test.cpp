// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <stdexcept>
#include <string_view>
#include <vector>

#include "weights/tensor_table.h"
#include "weights/text.h"

namespace metrale::weights {
namespace {

using std::string_view_literals::operator""sv;

TEST(WeightText, ValidUtf8AcceptsEveryLength) {
  for (const auto text : {""sv, "plain"sv, "\0"sv, "é"sv, "€"sv, "𝄞"sv, "\xC2\x80"sv, "\xED\x9F\xBF"sv, "\xF4\x8F\xBF\xBF"sv}) {
    EXPECT_TRUE(valid_utf8(text)) << text;
  }
}

TEST(WeightText, ValidUtf8RefusesOverlongSurrogateTruncatedAndBeyond) {
  for (const auto text : {"\x80"sv, "\xC0\xAF"sv, "\xC1\xBF"sv, "\xE0\x9F\xBF"sv, "\xF0\x8F\xBF\xBF"sv, "\xED\xA0\x80"sv,
                          "\xF4\x90\x80\x80"sv, "\xF5\x80\x80\x80"sv, "\xFF"sv, "a\xE2\x82"sv, "\xE2\x28\xA1"sv, "\xC3"sv}) {
    EXPECT_FALSE(valid_utf8(text));
  }
}

TEST(WeightText, QuoteKeepsOneLineAndEscapes) {
  EXPECT_EQ(quote("blk.0"), "\"blk.0\"");
  EXPECT_EQ(quote("a\nb\x1B[31m"), "\"a\\x0ab\\x1b[31m\"");
  EXPECT_EQ(quote("\xFFok"), "\"\\xffok\"");
  EXPECT_EQ(quote("\xC2\x9B"
                  "1m"),
            "\"\\xc2\\x9b1m\"");
  EXPECT_EQ(quote("größe"), "\"größe\"");
  const std::string longer(5000, 'x');
  EXPECT_EQ(quote(longer), "\"" + std::string(100, 'x') + "…\"");
}

TEST(WeightText, GuardedTurnsExceptionsIntoErrors) {
  const Result<int> memory = guarded("f", []() -> Result<int> { throw std::bad_alloc(); });
  ASSERT_FALSE(memory);
  EXPECT_EQ(memory.error().code(), Errc::out_of_memory);
  const Result<int> other = guarded("f", []() -> Result<int> { throw std::runtime_error("odd"); });
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code(), Errc::internal);
  EXPECT_EQ(other.error().message(), "f: odd");
}

TEST(WeightText, NearestNamesRanksByEditDistance) {
  const std::vector<std::string_view> names{"model.norm.weight", "model.layers.0.mlp.up_proj.weight",
                                            "model.layers.1.mlp.up_proj.weight", "lm_head.weight"};
  const auto nearest = nearest_names("model.layers.1.mlp.up.weight", names, 2);
  ASSERT_EQ(nearest.size(), 2U);
  EXPECT_EQ(nearest[0], "model.layers.1.mlp.up_proj.weight");
  EXPECT_EQ(nearest[1], "model.layers.0.mlp.up_proj.weight");
  EXPECT_TRUE(nearest_names("x", {}, 3).empty());
}

TEST(WeightText, ElementCountDetectsOverflowBehindAZero) {
  const std::vector<std::uint64_t> scalar;
  EXPECT_EQ(element_count(scalar), 1U);
  const std::vector<std::uint64_t> matrix{3, 5};
  EXPECT_EQ(element_count(matrix), 15U);
  const std::vector<std::uint64_t> empty{3, 0};
  EXPECT_EQ(element_count(empty), 0U);
  const std::vector<std::uint64_t> wraps_to_zero{std::uint64_t{1} << 32, std::uint64_t{1} << 32};
  EXPECT_EQ(element_count(wraps_to_zero), std::nullopt);
  const std::vector<std::uint64_t> hidden{0, std::uint64_t{1} << 40, std::uint64_t{1} << 40};
  EXPECT_EQ(element_count(hidden), std::nullopt);
}

}  // namespace
}  // namespace metrale::weights
