// SPDX-License-Identifier: Apache-2.0
#include "metrale/models/tensor_parallel.h"

#include <fmt/format.h>

#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "core/release_log.h"
#include "metrale/log.h"

namespace metrale {
namespace {

/// One answer for all ranks to each question, whichever of them asks first: ranks that stopped at different tokens would wait for
/// each other.
class OneAnswer {
 public:
  explicit OneAnswer(std::function<bool()> question) : question_(std::move(question)) {}

  bool answer(std::size_t number) {
    std::lock_guard lock(mutex_);
    if (number == answers_.size()) answers_.push_back(question_());
    return answers_[number];
  }

 private:
  std::function<bool()> question_;
  std::mutex mutex_;
  std::vector<bool> answers_;
};

}  // namespace

Result<ModelConfig> part_of_model(const ModelConfig& config, std::uint32_t ranks) {
  if (ranks == 0) return Error(Errc::invalid_argument, "a model over 0 ranks; 1 is the whole model");
  if (ranks == 1) return config;
  if (config.family != ModelFamily::llama) {
    return Error(Errc::unsupported,
                 fmt::format("a model of family {} is not divided among ranks; llama is", to_string(config.family)));
  }
  const auto divides = [&](std::string_view what, std::uint32_t count) -> Result<> {
    if (count % ranks == 0) return {};
    return Error(Errc::unsupported,
                 fmt::format("{} ranks do not divide the model's {} {}; take a number that does", ranks, count, what));
  };
  METRALE_TRY(divides("attention heads", config.num_heads));
  METRALE_TRY(divides("key and value heads", config.num_kv_heads));
  METRALE_TRY(divides("MLP channels", config.intermediate_size));
  ModelConfig part = config;
  part.num_heads /= ranks;
  part.num_kv_heads /= ranks;
  part.intermediate_size /= ranks;
  return part;
}

template <class Body>
Result<> TensorParallelGenerator::on_each(Body&& body) {
  std::mutex mutex;
  std::optional<Error> first;
  const auto run = [&](std::uint32_t rank) noexcept {
    const auto fail = [&](Error error) {
      {
        std::lock_guard lock(mutex);
        if (!first) first.emplace(std::move(error).with_note(fmt::format("rank {}", rank)));
      }
      // The others wait for this rank, and a library may not tell them that it is gone.
      for (Communicator* communicator : communicators_) communicator->abort(first->message());
    };
    try {
      if (Result<> done = body(rank); !done) fail(std::move(done).error());
    } catch (const std::bad_alloc&) {
      fail(Error::no_memory());
    } catch (const std::exception& thrown) {
      fail(Error(Errc::internal, fmt::format("a rank's thread ended by {}", thrown.what())));
    }
  };
  std::vector<std::thread> threads;
  try {
    for (std::uint32_t rank = 1; rank < communicators_.size(); ++rank) threads.emplace_back(run, rank);
    run(0);
  } catch (const std::system_error& refused) {
    for (Communicator* communicator : communicators_) communicator->abort("a rank has no thread");
    std::lock_guard lock(mutex);
    first.emplace(Errc::io, fmt::format("no thread for each of {} ranks: {}", communicators_.size(), refused.what()));
  }
  for (std::thread& thread : threads) thread.join();
  if (first) return *std::move(first);
  return {};
}

Result<std::unique_ptr<TensorParallelGenerator>> TensorParallelGenerator::load(const std::filesystem::path& path,
                                                                               std::span<Communicator* const> ranks,
                                                                               const GeneratorOptions& options) {
  if (ranks.empty()) return Error(Errc::invalid_argument, "a model over 0 ranks; 1 is the whole model");
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] == nullptr || ranks[i]->rank() != i || ranks[i]->size() != ranks.size())
      return Error(Errc::invalid_argument, fmt::format("communicator {} of {} is null or that of another rank", i, ranks.size()));
  }
  std::unique_ptr<TensorParallelGenerator> all(new TensorParallelGenerator(ranks));
  all->ranks_.resize(ranks.size());
  Result<> loaded = all->on_each([&](std::uint32_t rank) -> Result<> {
    GeneratorOptions own = options;
    own.decoder.communicator = ranks[rank];
    all->ranks_[rank] = METRALE_TRY(Generator::load(path, ranks[rank]->backend(), own));
    return {};
  });
  if (!loaded) return std::move(loaded).error();
  return all;
}

TensorParallelGenerator::~TensorParallelGenerator() {
  for (const Receipt& receipt : unload()) {
    if (!receipt.clean()) log(LogLevel::warning, receipt.to_string());
  }
}

Result<Generation> TensorParallelGenerator::generate(const GenerateRequest& request, const Generator::OnText& on_text) {
  Generation text;
  OneAnswer cancelled([&] {
    return (request.cancelled && request.cancelled()) || (request.cancel && request.cancel->load(std::memory_order_relaxed));
  });
  Result<> done = on_each([&](std::uint32_t rank) -> Result<> {
    GenerateRequest own = request;
    own.cancel = nullptr;
    own.cancelled = [&cancelled, asked = std::size_t{0}]() mutable { return cancelled.answer(asked++); };
    Generation made = METRALE_TRY(ranks_[rank]->generate(own, rank == 0 ? on_text : Generator::OnText{}));
    if (rank == 0) text = std::move(made);
    return {};
  });
  if (!done) return std::move(done).error();
  return text;
}

std::vector<Receipt> TensorParallelGenerator::unload() {
  std::vector<Receipt> receipts(ranks_.size());
  // Nothing here waits for another rank.
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank]) receipts[rank] = ranks_[rank]->unload();
  }
  return receipts;
}

}  // namespace metrale
