// SPDX-License-Identifier: Apache-2.0
//
// A model over several devices. Each rank holds a part of every layer: some of the heads with their rows of the query, key and
// value matrices and columns of the output matrix, and some of the MLP's channels likewise. The ranks add up what attention and MLP
// gave, once each; embedding, norms and output matrix are whole on every rank, so that each has all logits.
// Ranks are either threads of this process, as here, or processes that each make a Generator with `DecoderOptions::communicator`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "metrale/bridges/communicator.h"
#include "metrale/models/generator.h"
#include "metrale/models/model_config.h"
#include "metrale/result.h"
#include "metrale/teardown.h"

namespace metrale {

/// The shape of one rank's part.
/// Errors: invalid_argument (no rank), unsupported (a family without such a division; heads, key and value heads or channels that
///   `ranks` does not divide: says which).
Result<ModelConfig> part_of_model(const ModelConfig& config, std::uint32_t ranks);

/// A Generator for each rank of this process, each driven by a thread of its own for the length of a call. One thread at a time.
class TensorParallelGenerator {
 public:
  /// Loads a model, on each rank the rank's part. `options.decoder.communicator` is ignored.
  /// Lifetime: the communicators outlive the generator.
  /// Errors: as `Generator::load` and `part_of_model`, with the rank as a note: of the rank that failed first. The communicators
  ///   are aborted then.
  static Result<std::unique_ptr<TensorParallelGenerator>> load(const std::filesystem::path& path,
                                                               std::span<Communicator* const> ranks,
                                                               const GeneratorOptions& options = {});
  TensorParallelGenerator(const TensorParallelGenerator&) = delete;
  TensorParallelGenerator& operator=(const TensorParallelGenerator&) = delete;
  /// Unloads, and logs receipts that are not clean.
  ~TensorParallelGenerator();

  /// As `Generator::generate`; the text is that of rank 0. `request.cancelled` is asked by one rank for all.
  /// Errors: those of the rank that failed first; the ranks can only be unloaded then.
  Result<Generation> generate(const GenerateRequest& request, const Generator::OnText& on_text = {});

  /// One for each rank. Ordering: all ranks at a time.
  std::vector<Receipt> unload();

  std::uint32_t num_ranks() const noexcept { return static_cast<std::uint32_t>(ranks_.size()); }
  Generator& rank(std::uint32_t index) noexcept { return *ranks_[index]; }

 private:
  explicit TensorParallelGenerator(std::span<Communicator* const> ranks) : communicators_(ranks.begin(), ranks.end()) {}
  template <class Body>
  Result<> on_each(Body&& body);

  std::vector<Communicator*> communicators_;
  std::vector<std::unique_ptr<Generator>> ranks_;
};

}  // namespace metrale
