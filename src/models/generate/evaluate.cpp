// SPDX-License-Identifier: Apache-2.0
#include "metrale/models/evaluate.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

namespace metrale {

Result<Evaluation> evaluate(Decoder& decoder, std::span<const TokenId> ids, const EvaluateOptions& options) {
  const std::uint64_t room = std::min<std::uint64_t>(decoder.context_tokens(), decoder.config().max_position);
  // The last token of a window is predicted and never read.
  const std::uint64_t window = options.window_tokens == 0 ? room + 1 : options.window_tokens;
  if (ids.size() < 2) return Error(Errc::invalid_argument, fmt::format("{} tokens to evaluate; two are the least", ids.size()));
  if (window < 2)
    return Error(Errc::invalid_argument, fmt::format("a window of {} tokens predicts nothing; two are the least", window));
  // Room 0 is for the decoder to name.
  const std::uint64_t longest = std::min<std::uint64_t>(ids.size(), window);
  if (room != 0 && longest - 1 > room) {
    return Error(Errc::out_of_range,
                 fmt::format("a window of {} tokens, all but the last of which are read, does not fit into a context of {}; take "
                             "windows of {} or make more room",
                             longest, room, room + 1));
  }
  const auto begin = std::chrono::steady_clock::now();
  Evaluation sum;
  double loss = 0;
  std::uint64_t hits = 0;
  while (ids.size() >= 2) {
    const std::span<const TokenId> part = ids.first(std::min<std::size_t>(ids.size(), window));
    Sequence sequence = METRALE_TRY(decoder.start());
    const std::span<const TokenId> targets = part.subspan(1);
    const auto scores = METRALE_TRY(decoder.append_scores(sequence, part.first(part.size() - 1), targets));
    for (std::size_t i = 0; i < scores.size(); ++i) {
      if (scores[i].best < 0) {
        return Error(Errc::internal,
                     fmt::format("the logits at position {} of window {} are not finite: the weights or a kernel are at fault", i,
                                 sum.num_windows));
      }
      loss += static_cast<double>(scores[i].loss);
      hits += scores[i].best == targets[i] ? 1 : 0;
    }
    sum.num_tokens += scores.size();
    ++sum.num_windows;
    ids = ids.subspan(part.size());
  }
  sum.mean_loss = loss / static_cast<double>(sum.num_tokens);
  sum.perplexity = std::exp(sum.mean_loss);
  sum.top1 = static_cast<double>(hits) / static_cast<double>(sum.num_tokens);
  sum.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return sum;
}

}  // namespace metrale
