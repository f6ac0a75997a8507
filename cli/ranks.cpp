// SPDX-License-Identifier: Apache-2.0
#include "ranks.h"

#include <algorithm>
#include <optional>
#include <thread>

#include <fmt/format.h>

#include "command.h"
#include "metrale/bridges/in_process.h"
#include "metrale/bridges/nccl.h"
#include "metrale/bridges/rendezvous.h"
#include "metrale/switches.h"

namespace metrale::cli {
namespace {

/// Backend `index` of `count` on this machine.
Result<std::unique_ptr<GpuBackend>> open_one_of(const std::string& name, std::uint32_t index, std::uint32_t count) {
  BackendOptions options;
  options.cuda_device = static_cast<int>(index);
  // The ranks share the cores.
  if (switches().host_threads == 0) options.host_threads = std::max(1U, std::thread::hardware_concurrency() / count);
  Result<std::unique_ptr<GpuBackend>> opened = open_backend(name, options);
  if (opened) return opened;
  return std::move(opened).error().with_note(fmt::format("rank {} of {} takes device {}", index, count, index));
}

/// The place of this process among `ranks`, if it was started as one of so many.
Result<std::optional<ProcessPlace>> place_among(std::uint32_t ranks) {
  std::optional<ProcessPlace> place = METRALE_TRY(process_place());
  if (!place || place->size == 1) return std::nullopt;
  if (place->size == ranks) return place;
  return Error(
      Errc::invalid_argument,
      fmt::format("--tensor-parallel {} in one of {} processes started by {}; give --tensor-parallel {}, or start one process",
                  ranks, place->size, place->source, place->size));
}

}  // namespace

Result<std::unique_ptr<RankedModel>> RankedModel::load(const std::string& model, const std::string& backend, std::uint32_t ranks,
                                                       const GeneratorOptions& options) {
  std::unique_ptr<RankedModel> made(new RankedModel());
  if (ranks == 1) {
    made->backends_.push_back(METRALE_TRY(open_backend(backend)));
    made->one_ = METRALE_TRY(Generator::load(model, *made->backends_[0], options));
    return made;
  }
  if (const std::optional<ProcessPlace> place = METRALE_TRY(place_among(ranks))) {
    made->is_of_processes_ = true;
    made->is_first_ = place->rank == 0;
    made->backends_.push_back(METRALE_TRY(open_one_of(backend, place->local_rank, 1)));
    GpuBackend& own = *made->backends_[0];
    if (own.name() == "host") {
      return Error(Errc::unsupported,
                   "processes meet by NCCL, and the host has none; on the host start one process, which has the ranks "
                   "as threads");
    }
    made->communicators_.push_back(METRALE_TRY(nccl::join(own, *place)));
    GeneratorOptions part = options;
    part.decoder.communicator = made->communicators_[0].get();
    made->one_ = METRALE_TRY(Generator::load(model, own, part));
    return made;
  }
  std::vector<GpuBackend*> on;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    made->backends_.push_back(METRALE_TRY(open_one_of(backend, rank, ranks)));
    on.push_back(made->backends_.back().get());
  }
  made->communicators_ = METRALE_TRY(on[0]->name() == "host" ? in_process::create(on) : nccl::create_all(on));
  std::vector<Communicator*> world;
  for (const auto& communicator : made->communicators_) world.push_back(communicator.get());
  made->several_ = METRALE_TRY(TensorParallelGenerator::load(model, world, options));
  return made;
}

Result<Generation> RankedModel::generate(const GenerateRequest& request, const Generator::OnText& on_text) {
  return several_ ? several_->generate(request, on_text) : one_->generate(request, is_first_ ? on_text : Generator::OnText{});
}

std::vector<Receipt> RankedModel::unload() {
  if (several_) return several_->unload();
  return {one_->unload()};
}

}  // namespace metrale::cli
