// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <thread>

#include "tokenizer_fixture.h"

namespace metrale::test {
namespace {

using Ids = std::vector<TokenId>;

std::unique_ptr<Tokenizer> kjv() {
  auto tokenizer = Tokenizer::from_folder(test_data("kjv-llama-2m"));
  EXPECT_TRUE(tokenizer) << tokenizer.error().to_string();
  return tokenizer ? std::move(*tokenizer) : nullptr;
}

Ids encoded(const Tokenizer& tokenizer, std::string_view text, SpecialTokens special = SpecialTokens::as_text) {
  const auto ids = tokenizer.encode(text, special);
  EXPECT_TRUE(ids) << ids.error().to_string();
  return ids ? *ids : Ids{};
}

TEST(Tokenizer, FolderNamesSizeAndEnds) {
  const auto tokenizer = kjv();
  EXPECT_EQ(tokenizer->vocab_size(), 1024U);
  EXPECT_FALSE(tokenizer->bos());
  EXPECT_FALSE(tokenizer->add_bos());
  EXPECT_EQ(Ids(tokenizer->end_ids().begin(), tokenizer->end_ids().end()), (Ids{0}));
  EXPECT_TRUE(tokenizer->is_special(0));
  EXPECT_FALSE(tokenizer->is_special(1));
  EXPECT_FALSE(tokenizer->is_special(-1));
  EXPECT_FALSE(tokenizer->is_special(1024));
  EXPECT_EQ(tokenizer->find_added("<|endoftext|>"), TokenId{0});
  EXPECT_FALSE(tokenizer->find_added("the"));
}

TEST(Tokenizer, MergesTheLowestRankFirst) {
  // " ab" could be made of " abc" too, but "abc" comes before it.
  const auto tokenizer = load(small_json());
  const TokenId space = encoded(*tokenizer, " ").front();
  EXPECT_EQ(encoded(*tokenizer, "ab ab abc"), (Ids{259, 261, space, 260}));
  EXPECT_EQ(encoded(*tokenizer, "abcab"), (Ids{260, 259}));
}

TEST(Tokenizer, LongAndShortWordsMergeAlike) {
  // Words up to 24 symbols and longer ones take different ways through the code.
  const auto tokenizer = kjv();
  const std::string text = "thethatandthecainsonofabelwiththeirfathersandmothersunto";
  for (std::size_t length = 1; length < text.size(); ++length) {
    const auto ids = encoded(*tokenizer, text.substr(0, length));
    // Merging is what it says, done naively: the result does not depend on how the pairs are found.
    std::vector<std::string> pieces;
    for (const char c : text.substr(0, length)) pieces.emplace_back(1, c);
    const auto json = nlohmann::json::parse(read_file(test_data("kjv-llama-2m/tokenizer.json")));
    for (const auto& merge : json["model"]["merges"]) {
      for (std::size_t i = 0; i + 1 < pieces.size(); ++i) {
        if (pieces[i] == merge[0].get<std::string>() && pieces[i + 1] == merge[1].get<std::string>()) {
          pieces[i] += pieces[i + 1];
          pieces.erase(pieces.begin() + static_cast<std::ptrdiff_t>(i) + 1);
        }
      }
    }
    std::vector<std::string> ours;
    for (const TokenId id : ids) ours.emplace_back(*tokenizer->bytes(id));
    EXPECT_EQ(ours, pieces);
  }
}

TEST(Tokenizer, TextOfAControlTokenStaysTextUnlessAskedFor) {
  const auto tokenizer = load(small_json());
  const auto recognised = encoded(*tokenizer, "ab<|im_end|>ab", SpecialTokens::recognise);
  EXPECT_EQ(recognised, (Ids{259, 2, 259}));
  const auto plain = encoded(*tokenizer, "ab<|im_end|>ab");
  EXPECT_EQ(std::count(plain.begin(), plain.end(), 2), 0);
  EXPECT_EQ(*tokenizer->decode(plain), "ab<|im_end|>ab");
}

TEST(Tokenizer, LongestAddedTokenAtTheLeftmostPlaceWins) {
  auto json = small_json();
  const auto added = [&](const char* text, int id) {
    json["added_tokens"].push_back({{"id", id}, {"content", text}, {"special", true}, {"normalized", false}});
  };
  added("<x>", 262);
  added("<x><y>", 263);
  added("x><y><z>", 264);
  const auto tokenizer = load(json);
  EXPECT_EQ(encoded(*tokenizer, "<x><y><z>", SpecialTokens::recognise).front(), 263);
  EXPECT_EQ(encoded(*tokenizer, "<x><x>", SpecialTokens::recognise), (Ids{262, 262}));
  EXPECT_EQ(encoded(*tokenizer, "x><y><z>", SpecialTokens::recognise), (Ids{264}));
}

TEST(Tokenizer, WordsInTheVocabularyNeedNoMergesWhereTheFileSaysSo) {
  auto json = small_json();
  json["model"]["vocab"]["xyz"] = 262;
  EXPECT_EQ(encoded(*load(json), "xyz").size(), 3U);
  json["model"]["ignore_merges"] = true;
  EXPECT_EQ(encoded(*load(json), "xyz"), (Ids{262}));
}

TEST(Tokenizer, BytesThatAreNoUtf8SurviveApartFromTheirNeighbours) {
  const auto tokenizer = kjv();
  for (const std::string& text : {std::string("\xff"), std::string("ab\xc3"), std::string("\xe2\x82 the \xf0\x9f"),
                                  std::string("\x80\x80the\xc0\xaf"), std::string("a\0b\xed\xa0\x80", 6)}) {
    std::string bytes;
    for (const TokenId id : encoded(*tokenizer, text)) bytes += *tokenizer->bytes(id);
    EXPECT_EQ(bytes, text);
  }
  // The word beside the bad byte is what it is alone.
  auto with_word = encoded(*tokenizer, "the\xff");
  with_word.pop_back();
  EXPECT_EQ(with_word, encoded(*tokenizer, "the"));
}

TEST(Tokenizer, ByteWithoutATokenIsTheUnknownTokenOrNothing) {
  auto json = small_json();
  auto& vocab = json["model"]["vocab"];
  const int z = vocab["z"];
  vocab.erase("z");
  vocab["zz"] = z;  // no hole
  EXPECT_EQ(encoded(*load(json), "abz"), (Ids{259}));
  json["model"]["unk_token"] = "<|endoftext|>";
  EXPECT_EQ(encoded(*load(json), "abz"), (Ids{259, 0}));
}

TEST(Tokenizer, IdOutsideTheVocabularyIsNamed) {
  const auto tokenizer = kjv();
  for (const TokenId id : {-1, 1024, INT32_MAX, INT32_MIN}) {
    const auto text = tokenizer->decode(Ids{5, id});
    ASSERT_FALSE(text);
    EXPECT_EQ(text.error().code(), Errc::out_of_range);
    EXPECT_NE(text.error().message().find(std::to_string(id)), std::string::npos);
    EXPECT_NE(text.error().message().find("1024"), std::string::npos);
  }
}

TEST(Tokenizer, DroppedControlTokensLeaveNoText) {
  const auto tokenizer = load(small_json());
  EXPECT_EQ(*tokenizer->decode(Ids{1, 259, 2}, SpecialText::drop), "ab");
  EXPECT_EQ(*tokenizer->decode(Ids{1, 259, 2}, SpecialText::keep), "<|im_start|>ab<|im_end|>");
}

TEST(StreamDecoder, HoldsBackWhatIsNoCharacterYet) {
  const auto tokenizer = load(small_json());
  const auto ids = encoded(*tokenizer, "é😀");
  ASSERT_EQ(ids.size(), 6U);
  StreamDecoder decoder(*tokenizer);
  std::vector<std::string> pieces;
  for (const TokenId id : ids) pieces.push_back(*decoder.push(id));
  EXPECT_EQ(pieces, (std::vector<std::string>{"", "é", "", "", "", "😀"}));
  EXPECT_EQ(decoder.finish(), "");
  ASSERT_TRUE(decoder.push(ids[2]));
  ASSERT_TRUE(decoder.push(ids[3]));
  EXPECT_EQ(decoder.finish(), "\uFFFD");
  EXPECT_EQ(*decoder.push(259), "ab");
}

TEST(StreamDecoder, PiecesJoinedAreTheDecodedText) {
  const auto tokenizer = load(small_json());
  // Bytes in an order that no text has: starts without ends, ends without starts.
  Ids ids;
  std::uint32_t state = 1;
  for (int i = 0; i < 20000; ++i) {
    state = state * 1664525 + 1013904223;
    ids.push_back(static_cast<TokenId>(state >> 8) % 262);
  }
  StreamDecoder decoder(*tokenizer, SpecialText::keep);
  std::string streamed;
  for (const TokenId id : ids) streamed += *decoder.push(id);
  streamed += decoder.finish();
  EXPECT_EQ(streamed, *tokenizer->decode(ids));
  EXPECT_NO_THROW(static_cast<void>(nlohmann::json(streamed).dump()));  // throws on invalid UTF-8
}

TEST(StreamDecoder, RefusedIdLeavesItAsItWas) {
  const auto tokenizer = load(small_json());
  const auto ids = encoded(*tokenizer, "é");
  StreamDecoder decoder(*tokenizer);
  ASSERT_TRUE(decoder.push(ids[0]));
  EXPECT_EQ(decoder.push(9999).error().code(), Errc::out_of_range);
  EXPECT_EQ(*decoder.push(ids[1]), "é");
}

TEST(Tokenizer, AMegabyteWithoutABreakIsEncodedInSeconds) {
  const auto tokenizer = kjv();
  const auto start = std::chrono::steady_clock::now();
  std::string mixed;
  for (int i = 0; i < (1 << 20); ++i) mixed += "the"[i % 3];
  for (const std::string& text : {std::string(1 << 20, 'a'), std::string(1 << 20, ' '), std::string(1 << 20, '\xf0'), mixed}) {
    const auto ids = encoded(*tokenizer, text);
    std::size_t bytes = 0;
    for (const TokenId id : ids) bytes += tokenizer->bytes(id)->size();
    EXPECT_EQ(bytes, text.size());
  }
  // A quadratic encoder needs hours. Sanitized on a slow machine, a linear one needs some tens of seconds.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(120));
}

TEST(Tokenizer, OneServesManyThreads) {
  const auto tokenizer = kjv();
  const std::string text = "And the evening and the morning were the first day. 12 <|endoftext|>";
  const auto expected = encoded(*tokenizer, text, SpecialTokens::recognise);
  std::vector<std::thread> threads;
  std::vector<int> wrong(4);
  for (std::size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        const auto ids = tokenizer->encode(text, SpecialTokens::recognise);
        if (!ids || *ids != expected || *tokenizer->decode(*ids) != text) ++wrong[t];
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4));
}

}  // namespace
}  // namespace metrale::test
