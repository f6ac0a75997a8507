// SPDX-License-Identifier: Apache-2.0
//
// Giving back what work in flight may still use. The driver's cuMemFree waits for every stream of the context, also one that is
// held, so memory goes back to it only while nothing runs; until then it is put off, and comes round again where the same size is
// asked for.
#include <algorithm>
#include <thread>

#include "backends/cuda/cuda_backend.h"

namespace metrale::cuda {

namespace {

constexpr std::chrono::seconds kReleasePatience{10};
constexpr std::chrono::microseconds kFirstSleep{20};
constexpr std::chrono::microseconds kLongestSleep{500};

bool all_done(const std::vector<MarkPtr>& marks) noexcept {
  return std::all_of(marks.begin(), marks.end(), [](const MarkPtr& mark) { return mark->is_done(); });
}

}  // namespace

bool CudaBackend::Parting::is_due() const noexcept { return !until_shutdown && !is_unmarked && all_done(marks); }

Result<> CudaBackend::part_with(Parting parting) {
  reap();
  if (waits_for_device(parting.kind) && work().is_idle()) return give_back(parting);
  Result<std::vector<MarkPtr>> marks = marks_of_own_work();
  if (!marks) {
    Error error = context_->noted(std::move(marks).error());
    if (error.code() == Errc::device_lost) return error;
    // The driver waits by itself before it takes memory; nobody does for the rest.
    if (waits_for_device(parting.kind)) return give_back(parting);
    (error.code() == Errc::capture_unsafe ? parting.is_unmarked : parting.until_shutdown) = true;
  } else if (marks->empty() && !waits_for_device(parting.kind)) {
    return give_back(parting);
  } else {
    parting.marks = std::move(*marks);
  }
  if (keep_for_later(std::move(parting))) return {};
  // Graphs and pinned memory are known to those that made them, and go with those. What was not kept is as it was.
  return waits_for_device(parting.kind) ? give_back(parting) : Result<>();  // NOLINT(bugprone-use-after-move)
}

Result<std::vector<MarkPtr>> CudaBackend::marks_of_own_work() noexcept {
  try {
    return work().marks(this);
  } catch (...) {
    return Error::no_memory();
  }
}

bool CudaBackend::keep_for_later(Parting&& parting) noexcept {
  try {
    std::lock_guard lock(partings_mutex_);
    partings_.push_back(std::move(parting));
    num_partings_.store(partings_.size(), std::memory_order_release);
    return true;
  } catch (...) {
    return false;
  }
}

void CudaBackend::part_with_spares() noexcept {
  // Nothing uses them, so they need no marks; the driver takes them while nothing runs.
  while (const auto block = context_->spares().take_any()) {
    if (keep_for_later({.kind = Parting::Kind::memory, .value = block->base.address, .bytes = block->bytes})) continue;
    static_cast<void>(context_->spares().put(block->base, block->bytes));
    return;
  }
}

Result<> CudaBackend::give_back(const Parting& parting) noexcept {
  CUresult code = CUDA_SUCCESS;
  std::string_view what;
  switch (parting.kind) {
    case Parting::Kind::memory:
    case Parting::Kind::managed:
      what = "cuMemFree";
      code = driver_.cuMemFree_(parting.value);
      break;
    case Parting::Kind::pinned: pinned_->give(reinterpret_cast<void*>(static_cast<std::uintptr_t>(parting.value))); return {};
    case Parting::Kind::graph: {
      what = "cuGraphExecDestroy";
      auto* graph = reinterpret_cast<GraphRecord*>(static_cast<std::uintptr_t>(parting.value));
      code = driver_.cuGraphExecDestroy_(graph->exec);
      if (code == CUDA_SUCCESS || is_gone(code) || is_sticky(code)) forget_graph(graph);
      break;
    }
    case Parting::Kind::stream:
      what = "cuStreamDestroy";
      code = driver_.cuStreamDestroy_(reinterpret_cast<CUstream>(static_cast<std::uintptr_t>(parting.value)));
      break;
    case Parting::Kind::event:
      what = "cuEventDestroy";
      code = driver_.cuEventDestroy_(reinterpret_cast<CUevent>(static_cast<std::uintptr_t>(parting.value)));
      break;
  }
  if (code == CUDA_SUCCESS || is_gone(code)) return {};
  if (!is_sticky(code)) keep_for_later({.kind = parting.kind, .value = parting.value, .bytes = parting.bytes});
  return check(code, what);
}

void CudaBackend::mark_unmarked() {
  // Locked throughout: what comes meanwhile may be used by work behind these marks.
  std::lock_guard lock(partings_mutex_);
  if (std::none_of(partings_.begin(), partings_.end(), [](const Parting& parting) { return parting.is_unmarked; })) return;
  const Result<std::vector<MarkPtr>> marks = marks_of_own_work();
  if (!marks) return;
  for (Parting& parting : partings_) {
    if (!parting.is_unmarked) continue;
    parting.marks = *marks;
    parting.is_unmarked = false;
  }
}

void CudaBackend::reap() noexcept {
  if (num_partings_.load(std::memory_order_acquire) == 0) return;
  try {
    mark_unmarked();
    const bool is_idle = work().is_idle();
    std::vector<Parting> due;
    {
      std::lock_guard lock(partings_mutex_);
      for (const Parting& parting : partings_) {
        if (parting.is_due() && (is_idle || !waits_for_device(parting.kind))) due.emplace_back();
      }
      if (!due.empty()) {
        // From here on nothing may fail half-way.
        std::size_t taken = 0;
        std::erase_if(partings_, [&](Parting& parting) {
          if (taken == due.size() || !parting.is_due() || (!is_idle && waits_for_device(parting.kind))) return false;
          due[taken++] = std::move(parting);
          return true;
        });
        due.resize(taken);
        num_partings_.store(partings_.size(), std::memory_order_release);
      }
    }
    for (const Parting& parting : due) static_cast<void>(give_back(parting).has_value());
    if (is_idle && pinned_->has_surplus()) pinned_->trim();
  } catch (...) {  // NOLINT(bugprone-empty-catch): without memory for the list it is tried again later
  }
}

bool CudaBackend::reap_waiting(std::uint64_t bytes) {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  if (driver_.cuMemGetInfo_(&free_bytes, &total_bytes) != CUDA_SUCCESS) return false;
  std::uint64_t coming = free_bytes;
  // All that is in flight: the driver waits for it, and a stream that is held has to show.
  Result<std::vector<MarkPtr>> marks = work().marks(nullptr);
  if (!marks) return false;
  {
    std::lock_guard lock(partings_mutex_);
    for (const Parting& parting : partings_) {
      if (waits_for_device(parting.kind)) coming += parting.bytes;
      marks->insert(marks->end(), parting.marks.begin(), parting.marks.end());
    }
  }
  if (coming < bytes) return false;
  const auto deadline = std::chrono::steady_clock::now() + kReleasePatience;
  for (auto pause = kFirstSleep; !all_done(*marks); pause = std::min(2 * pause, kLongestSleep)) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(pause);
  }
  std::vector<Parting> due;
  {
    std::lock_guard lock(partings_mutex_);
    due.reserve(partings_.size());
    std::erase_if(partings_, [&](Parting& parting) {
      if (!parting.is_due()) return false;
      due.push_back(std::move(parting));
      return true;
    });
    num_partings_.store(partings_.size(), std::memory_order_release);
  }
  for (const Parting& parting : due) static_cast<void>(give_back(parting).has_value());
  return !due.empty();
}

std::optional<DevicePtr> CudaBackend::take_put_off(std::uint64_t bytes, MemoryKind kind) noexcept {
  const auto wanted = kind == MemoryKind::managed ? Parting::Kind::managed : Parting::Kind::memory;
  std::lock_guard lock(partings_mutex_);
  for (Parting& parting : partings_) {
    if (parting.kind != wanted || parting.bytes != bytes || !parting.is_due()) continue;
    const DevicePtr ptr{parting.value};
    if (&parting != &partings_.back()) parting = std::move(partings_.back());
    partings_.pop_back();
    num_partings_.store(partings_.size(), std::memory_order_release);
    return ptr;
  }
  return std::nullopt;
}

void CudaBackend::reap_all() noexcept {
  // Where another backend's work runs, the driver would wait for that; the spare blocks stay for whoever is left then.
  const bool is_last = context_.use_count() == 1;
  while (is_last || work().is_idle()) {
    const auto block = context_->spares().take_any();
    if (!block) break;
    static_cast<void>(give_back({.kind = Parting::Kind::memory, .value = block->base.address, .bytes = block->bytes}).has_value());
  }
  std::vector<Parting> all;
  // Twice: what the driver refused once, as a busy one may, is tried again.
  for (int round = 0; round < 2; ++round) {
    {
      std::lock_guard lock(partings_mutex_);
      all.swap(partings_);
      num_partings_.store(0, std::memory_order_release);
    }
    for (const Parting& parting : all) {
      for (const MarkPtr& mark : parting.marks) static_cast<void>(mark->wait());
      static_cast<void>(give_back(parting).has_value());
    }
    all.clear();
  }
  std::lock_guard lock(graphs_mutex_);
  for (const auto& [graph, owned] : graphs_) {
    if (owned->exec == nullptr) continue;
    static_cast<void>(give_back_insisting([&] { return driver_.cuGraphExecDestroy_(owned->exec); }));
  }
  graphs_.clear();
}

}  // namespace metrale::cuda
