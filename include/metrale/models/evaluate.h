// SPDX-License-Identifier: Apache-2.0
//
// Evaluation of a model on a text that is known: every token is predicted from the true ones before it. Values and one function; as
// thread-safe as the decoder, which is one thread at a time.
#pragma once

#include <cstdint>
#include <span>

#include "metrale/models/decoder.h"
#include "metrale/models/tokenizer.h"
#include "metrale/result.h"

namespace metrale {

struct EvaluateOptions {
  /// A longer text is cut into windows of so many tokens, each without the ones before; a window predicts all its tokens but the
  /// first. 0: as many as the decoder has room for.
  std::uint64_t window_tokens = 0;
};

struct Evaluation {
  std::uint64_t num_tokens = 0;  ///< Predictions: one for each token but the first of each window.
  std::uint64_t num_windows = 0;
  double mean_loss = 0;   ///< Nats for a token.
  double perplexity = 0;  ///< exp(mean_loss)
  double top1 = 0;        ///< Share of tokens that were the most probable.
  double seconds = 0;
};

/// Scores `ids` with `decoder`, which has context reserved and no sequence alive.
/// Errors: invalid_argument (fewer than two ids, a window of fewer than two), out_of_range (a window that is longer than the
/// context: nothing was run), internal (logits that are not finite), and those of `Decoder::append_scores`.
Result<Evaluation> evaluate(Decoder& decoder, std::span<const TokenId> ids, const EvaluateOptions& options = {});

}  // namespace metrale
