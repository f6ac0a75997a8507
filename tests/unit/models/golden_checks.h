// SPDX-License-Identifier: Apache-2.0
//
// Ways to ask a decoder for what golden files hold, and to compare. Pure functions.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "model_fixture.h"

namespace metrale::test {

/// The logits of every id, [ids, vocab], `chunk` ids at a time.
inline std::vector<float> prompt_logits(Decoder& decoder, std::span<const TokenId> ids, std::size_t chunk) {
  Sequence sequence = ok(decoder.start());
  std::vector<float> logits;
  for (std::size_t at = 0; at < ids.size(); at += chunk) {
    const auto part = ok(decoder.append_all_logits(sequence, ids.subspan(at, std::min(chunk, ids.size() - at))));
    logits.insert(logits.end(), part.begin(), part.end());
  }
  return logits;
}

/// The same through the captured step, one id at a time.
inline std::vector<float> step_logits(Decoder& decoder, std::span<const TokenId> ids) {
  Sequence sequence = ok(decoder.start());
  std::vector<float> logits;
  for (const TokenId id : ids) {
    const Decoder::Step step = ok(decoder.append(sequence, {&id, 1}, StepOutput::logits));
    logits.insert(logits.end(), step.logits.begin(), step.logits.end());
  }
  return logits;
}

/// `prompt` and what follows greedily, `count` ids in all.
inline std::vector<TokenId> greedy_text(Decoder& decoder, std::vector<TokenId> ids, std::size_t count) {
  Sequence sequence = ok(decoder.start());
  ids.push_back(ok(decoder.append(sequence, ids)).token);
  while (ids.size() < count) ids.push_back(ok(decoder.append(sequence, std::span(ids).last(1))).token);
  return ids;
}

/// The same by as many tokens a replay as the decoder makes.
inline std::vector<TokenId> greedy_text_in_replays(Decoder& decoder, std::vector<TokenId> ids, std::size_t count) {
  Sequence sequence = ok(decoder.start());
  ids.push_back(ok(decoder.append(sequence, ids)).token);
  while (ids.size() < count) {
    const auto choices = ok(decoder.append_greedy(sequence, ids.back(), count - ids.size()));
    ids.insert(ids.end(), choices.begin(), choices.end());
  }
  return ids;
}

/// Expects the same largest logit in every row where the two largest of `want` are further apart than `margin`. Returns how many
/// rows those are.
inline int expect_same_choice(std::span<const float> got, std::span<const float> want, std::size_t vocab, float margin) {
  int clear = 0;
  for (std::size_t at = 0; at < want.size(); at += vocab) {
    const auto row = want.subspan(at, vocab), other = got.subspan(at, vocab);
    const auto best = std::ranges::max_element(row);
    float second = -HUGE_VALF;
    for (auto it = row.begin(); it != row.end(); ++it) second = it == best ? second : std::max(second, *it);
    if (*best - second <= margin) continue;
    ++clear;
    EXPECT_EQ(std::ranges::max_element(other) - other.begin(), best - row.begin())
        << "row " << at / vocab << ", margin " << *best - second;
  }
  return clear;
}

}  // namespace metrale::test
