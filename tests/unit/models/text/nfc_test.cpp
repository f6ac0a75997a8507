// SPDX-License-Identifier: Apache-2.0
#include "models/text/nfc.h"

#include <gtest/gtest.h>

#include "models/text/utf8.h"

namespace metrale::text {
namespace {

TEST(Nfc, ComposesWhatComposes) {
  EXPECT_EQ(to_nfc("e\u0301"), "\u00e9");
  EXPECT_EQ(to_nfc("A\u030a"), "\u00c5");
  EXPECT_EQ(to_nfc("\u1112\u1161\u11ab"), "\ud55c");
  EXPECT_EQ(to_nfc("\uac00\u11a8"), "\uac01");
}

TEST(Nfc, OrdersMarksAndComposesAcrossThem) {
  // The dot below comes first and composes; the dot above stays.
  EXPECT_EQ(to_nfc("q\u0307\u0323"), "q\u0323\u0307");
  EXPECT_EQ(to_nfc("s\u0307\u0323"), "\u1e69");
  EXPECT_EQ(to_nfc("a\u0327\u0301"), "\u00e1\u0327");
}

TEST(Nfc, BlockedMarksStay) {
  EXPECT_EQ(to_nfc("e\u0301\u0301"), "\u00e9\u0301");
  EXPECT_EQ(to_nfc("a\u0308\u0301b"), "\u00e4\u0301b");
  EXPECT_EQ(to_nfc("\u0301e"), "\u0301e");
}

TEST(Nfc, SingletonsAndExclusionsAreTakenApartForGood) {
  EXPECT_EQ(to_nfc("\u212b"), "\u00c5");        // angstrom sign
  EXPECT_EQ(to_nfc("\u2126"), "\u03a9");        // ohm sign
  EXPECT_EQ(to_nfc("\u0958"), "\u0915\u093c");  // excluded from composition
  EXPECT_EQ(to_nfc("\u0344"), "\u0308\u0301");
}

TEST(Nfc, WhatIsNormalStays) {
  for (const char* text : {"", "plain", "\u00e9\u00df", "\u65e5\u672c\u8a9e", "\U0001f600", "\u00bd\ufb01"})
    EXPECT_EQ(to_nfc(text), text);
}

TEST(Nfc, QuickCheckNeverMissesAChange) {
  for (std::uint32_t c = 1; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text = "a";
    append_utf8(c, text);
    if (!is_surely_nfc(text)) continue;
    ASSERT_EQ(to_nfc(text), text) << c;
  }
}

TEST(Utf8, StepsOverEachPieceOfNoCharacterOnce) {
  const auto lengths = [](std::string_view text) {
    std::string out;
    while (!text.empty()) {
      const Utf8Step step = utf8_step(text);
      out += step.valid ? 'v' : step.truncated ? 't' : 'x';
      out += std::to_string(step.length);
      text.remove_prefix(step.length);
    }
    return out;
  };
  EXPECT_EQ(lengths("a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"), "v1v2v3v4");
  EXPECT_EQ(lengths("\x80\xbf"), "x1x1");
  EXPECT_EQ(lengths("\xc0\xaf\xc1\x81"), "x1x1x1x1");
  EXPECT_EQ(lengths("\xe0\x80\x80"), "x1x1x1");        // overlong
  EXPECT_EQ(lengths("\xed\xa0\x80"), "x1x1x1");        // surrogate
  EXPECT_EQ(lengths("\xf4\x90\x80\x80"), "x1x1x1x1");  // beyond U+10FFFF
  EXPECT_EQ(lengths("\xf0\x9f\x98"
                    "a"),
            "x3v1");
  EXPECT_EQ(lengths("\xf0\x9f\x98"), "t3");
  EXPECT_EQ(lengths("\xe2"), "t1");
}

TEST(Utf8, PrefixEndsBeforeTheFirstBadByte) {
  EXPECT_EQ(valid_utf8_prefix(""), 0U);
  EXPECT_EQ(valid_utf8_prefix("twelve bytes\xff and more"), 12U);
  EXPECT_EQ(valid_utf8_prefix("\u00e9\u00e9\u00e9\u00e9\u00e9\xe2\x82"), 10U);
  const std::string text = "ascii \u65e5\u672c \U0001f600 ascii";
  EXPECT_EQ(valid_utf8_prefix(text), text.size());
}

}  // namespace
}  // namespace metrale::text
