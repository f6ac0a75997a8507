// SPDX-License-Identifier: Apache-2.0
#include "models/text/pre_tokenizer.h"

#include <gtest/gtest.h>

#include <chrono>

#include "models/text/utf8.h"

namespace metrale::text {
namespace {

using Pieces = std::vector<std::string_view>;

constexpr std::string_view kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

Regex compiled(std::string_view pattern) {
  auto regex = Regex::compile(pattern, "test");
  EXPECT_TRUE(regex) << regex.error().to_string();
  return regex.value();
}

Result<Pieces> cut(std::string_view pattern, std::string_view text, SplitBehavior behavior = SplitBehavior::isolated) {
  PreTokenizer pre;
  pre.add_split(compiled(pattern), behavior);
  PreTokenizer::Scratch scratch;
  METRALE_TRY(pre.split(text, scratch));
  return scratch.pieces;
}

TEST(PreTokenizer, EmptyTextHasNoPieces) { EXPECT_EQ(cut("a", "")->size(), 0U); }

TEST(PreTokenizer, StagesSeeNothingOfTheirNeighbours) {
  // After the first stage the blank before the digit is the end of its piece, so the look-ahead finds nothing there.
  PreTokenizer pre;
  pre.add_split(compiled(R"(\p{N})"), SplitBehavior::isolated);
  pre.add_split(compiled(R"(\s+(?!\S)|\s+|\S+)"), SplitBehavior::isolated);
  PreTokenizer::Scratch scratch;
  ASSERT_TRUE(pre.split("a  1b", scratch));
  EXPECT_EQ(scratch.pieces, (Pieces{"a", "  ", "1", "b"}));
}

TEST(PreTokenizer, PrefixSpaceIsAddedOnce) {
  PreTokenizer pre;
  pre.add_prefix_space();
  PreTokenizer::Scratch scratch;
  ASSERT_TRUE(pre.split("ab", scratch));
  EXPECT_EQ(scratch.pieces, (Pieces{" ab"}));
  ASSERT_TRUE(pre.split(" ab", scratch));
  EXPECT_EQ(scratch.pieces, (Pieces{" ab"}));
}

TEST(PreTokenizer, EmptyMatchesSeparateAndEnd) {
  EXPECT_EQ(*cut("(?=b)", "abab"), (Pieces{"a", "ba", "b"}));
  EXPECT_EQ(*cut("", "\u00e9a\U0001f600"), (Pieces{"\u00e9", "a", "\U0001f600"}));
}

TEST(PreTokenizer, WhiteSpaceIsThatOfUnicode) {
  EXPECT_EQ(*cut(R"(\s)", "a\u0085b\u2003c\u180ed"), (Pieces{"a", "\u0085", "b", "\u2003", "c\u180ed"}));
  EXPECT_EQ(*cut(R"([^\s]+)", "a\u180e \u00a0b"), (Pieces{"a\u180e", " \u00a0", "b"}));
}

TEST(PreTokenizer, DollarIsTheEndOfALine) { EXPECT_EQ(*cut("a$", "a\naa"), (Pieces{"a", "\na", "a"})); }

TEST(PreTokenizer, MatchFarBehindIsFoundAtItsPlace) {
  // The search looks at some places at a time, and must start each time at the start of a character.
  for (std::size_t before = 0; before < 700; ++before) {
    for (const std::string_view filler : {"a", "\u00e9", "\u65e5", "\U0001f600"}) {
      std::string text;
      for (std::size_t i = 0; i < before; ++i) text += filler;
      const std::size_t place = text.size();
      text += "xy";
      const auto match = [&] {
        Regex::Scratch scratch;
        return compiled("x(?=y)").find(text, 0, scratch);
      }();
      ASSERT_TRUE(match && *match) << before << filler;
      ASSERT_EQ((*match)->begin, place) << before << filler;
    }
  }
}

TEST(PreTokenizer, SearchEndsWhereverTheStepsRunOut) {
  // The place where a search needs more steps may lie in a window of any width, since windows double on the way to it.
  for (const std::size_t before : {0, 1, 63, 64, 65, 200, 1000, 5000, 70000}) {
    const auto pieces = cut(R"(x|\s*[\r\n]+)", std::string(before, 'a') + std::string(3000, ' ') + "x");
    ASSERT_TRUE(pieces);
    EXPECT_EQ(pieces->size(), 2U) << before;
  }
}

TEST(PreTokenizer, LongRunsAreNoExplosion) {
  const std::string blanks(1 << 20, ' ');
  const std::string letters(1 << 20, 'e');
  EXPECT_EQ(cut(kQwen2, blanks)->size(), 1U);
  EXPECT_EQ(cut(kQwen2, blanks + "x")->size(), 2U);
  EXPECT_EQ(cut(kQwen2, blanks + "\n")->size(), 1U);
  EXPECT_EQ(cut(kQwen2, letters)->size(), 1U);
  std::string runs;
  while (runs.size() < (1 << 20)) runs += std::string(3000, ' ') + "x" + std::string(3000, '!');
  EXPECT_TRUE(cut(kQwen2, runs));
}

TEST(PreTokenizer, PatternThatIsSlowAtEveryPlaceIsAnErrorAndNotAWait) {
  const auto start = std::chrono::steady_clock::now();
  // 2^14 steps at each of a million places: minutes, although no place is beyond the limit of one search.
  const auto pieces = cut("(?:a?){14}b", std::string(1 << 20, 'a') + "cb");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  ASSERT_FALSE(pieces);
  EXPECT_EQ(pieces.error().code(), Errc::bad_format);
}

}  // namespace
}  // namespace metrale::text
