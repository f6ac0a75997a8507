// SPDX-License-Identifier: Apache-2.0
//
// A model of this process's share: whole, divided among devices of this process (`--tensor-parallel N`), or one part of several
// where torchrun or MPI started as many processes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "metrale/backend.h"
#include "metrale/bridges/communicator.h"
#include "metrale/models/generator.h"
#include "metrale/models/tensor_parallel.h"
#include "metrale/result.h"
#include "metrale/teardown.h"

namespace metrale::cli {

/// Most parts of a model.
inline constexpr std::uint32_t kMaxRanks = 64;

class RankedModel {
 public:
  /// Opens `backend` once for each part that is this process's, and loads `model`.
  /// Errors: as `open_backend`, `Generator::load` and `TensorParallelGenerator::load`; invalid_argument (started as other than
  ///   `ranks` processes), unsupported (processes on the host).
  static Result<std::unique_ptr<RankedModel>> load(const std::string& model, const std::string& backend, std::uint32_t ranks,
                                                   const GeneratorOptions& options);

  /// As `Generator::generate`.
  Result<Generation> generate(const GenerateRequest& request, const Generator::OnText& on_text);
  /// One receipt for each part.
  std::vector<Receipt> unload();
  /// The first part's.
  const Generator& generator() { return several_ ? several_->rank(0) : *one_; }
  /// Whether this process has the first part, and so prints.
  bool is_first() const noexcept { return is_first_; }
  /// Whether other processes have the other parts. Then no part stops before its text ends.
  bool is_of_processes() const noexcept { return is_of_processes_; }

 private:
  RankedModel() = default;

  // In the order in which they are made.
  std::vector<std::unique_ptr<GpuBackend>> backends_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
  std::unique_ptr<Generator> one_;
  std::unique_ptr<TensorParallelGenerator> several_;
  bool is_first_ = true;
  bool is_of_processes_ = false;
};

}  // namespace metrale::cli
