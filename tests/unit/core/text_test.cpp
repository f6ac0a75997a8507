// SPDX-License-Identifier: Apache-2.0
#include "core/text.h"

#include <gtest/gtest.h>

#include <new>
#include <stdexcept>
#include <string>
#include <string_view>

namespace metrale::detail {
namespace {

using std::string_view_literals::operator""sv;

TEST(Text, ValidUtf8AcceptsEveryLength) {
  for (const auto text : {""sv, "plain"sv, "\0"sv, "é"sv, "€"sv, "𝄞"sv, "\xC2\x80"sv, "\xED\x9F\xBF"sv, "\xF4\x8F\xBF\xBF"sv}) {
    EXPECT_TRUE(valid_utf8(text)) << text;
  }
}

TEST(Text, ValidUtf8RefusesOverlongSurrogateTruncatedAndBeyond) {
  for (const auto text : {"\x80"sv, "\xC0\xAF"sv, "\xC1\xBF"sv, "\xE0\x9F\xBF"sv, "\xF0\x8F\xBF\xBF"sv, "\xED\xA0\x80"sv,
                          "\xF4\x90\x80\x80"sv, "\xF5\x80\x80\x80"sv, "\xFF"sv, "a\xE2\x82"sv, "\xE2\x28\xA1"sv, "\xC3"sv}) {
    EXPECT_FALSE(valid_utf8(text));
  }
}

TEST(Text, QuoteKeepsOneLineAndEscapes) {
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

TEST(Text, GuardedTurnsExceptionsIntoErrors) {
  const Result<int> memory = guarded("f", []() -> Result<int> { throw std::bad_alloc(); });
  ASSERT_FALSE(memory);
  EXPECT_EQ(memory.error().code(), Errc::out_of_memory);
  const Result<int> other = guarded("f", []() -> Result<int> { throw std::runtime_error("odd"); });
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code(), Errc::internal);
  EXPECT_EQ(other.error().message(), "f: odd");
}

}  // namespace
}  // namespace metrale::detail
