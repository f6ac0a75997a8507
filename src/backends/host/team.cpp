// SPDX-License-Identifier: Apache-2.0
#include "backends/host/team.h"

#include <algorithm>
#include <chrono>

namespace metrale::host {

namespace {

// Longer than the gap between the launches of a replayed graph, shorter than what another process would notice.
constexpr std::chrono::microseconds kHelperSpin{60};

/// Runs blocks [first, last) and returns a fault text or null.
const char* run_blocks(const LaunchWork& launch, std::uint64_t first, std::uint64_t last, Scratch& scratch) noexcept {
  const char* fault = nullptr;
  std::byte* shared = nullptr;
  if (launch.shared_bytes != 0) {
    shared = scratch.get(launch.shared_bytes);
    if (shared == nullptr) return "no memory for the shared memory of a block";
  }
  const Dim3 grid = launch.grid;
  const std::uint64_t row = first / grid.x;
  BlockContext context{grid,
                       launch.block,
                       {static_cast<std::uint32_t>(first % grid.x), static_cast<std::uint32_t>(row % grid.y),
                        static_cast<std::uint32_t>(row / grid.y)},
                       {shared, launch.shared_bytes},
                       launch.params,
                       &fault};
  try {
    for (std::uint64_t i = first; i < last && fault == nullptr; ++i) {
      launch.kernel->fn(context);
      if (++context.index.x == grid.x) {
        context.index.x = 0;
        if (++context.index.y == grid.y) {
          context.index.y = 0;
          ++context.index.z;
        }
      }
    }
  } catch (...) {
    return "it threw an exception";
  }
  return fault;
}

}  // namespace

const char* Team::run(const LaunchWork& launch, Scratch& scratch) noexcept {
  const std::uint64_t num_blocks = launch.grid.count();
  if (num_helpers_ == 0 || num_blocks == 1 || taken_.exchange(true, std::memory_order_acquire)) {
    return run_blocks(launch, 0, num_blocks, scratch);
  }
  if (num_running_.load(std::memory_order_relaxed) == 0) start_helpers();
  publish(launch, num_blocks);
  run_share(scratch);
  close();
  const char* fault = fault_.load(std::memory_order_relaxed);
  taken_.store(false, std::memory_order_release);
  return fault;
}

void Team::publish(const LaunchWork& launch, std::uint64_t num_blocks) {
  job_.launch = &launch;
  job_.num_blocks = num_blocks;
  job_.step = std::clamp<std::uint64_t>(num_blocks / (8 * (std::uint64_t{num_helpers_} + 1)), 1, 64);
  next_block_.store(0, std::memory_order_relaxed);
  fault_.store(nullptr, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_seq_cst);  // odd: open
  if (sleepers_.load(std::memory_order_seq_cst) != 0) {
    {
      std::lock_guard lock(sleep_mutex_);
    }
    wake_.notify_all();
  }
}

void Team::close() {
  epoch_.fetch_add(1, std::memory_order_seq_cst);  // even: closed
  for (int spins = 0; inside_.load(std::memory_order_seq_cst) != 0; ++spins) {
    // A helper that lost its core in the middle of a block needs ours more than we do.
    spins < 300 ? pause_cpu() : std::this_thread::yield();
  }
}

void Team::run_share(Scratch& scratch) noexcept {
  const Job job = job_;
  for (;;) {
    const std::uint64_t first = next_block_.fetch_add(job.step, std::memory_order_relaxed);
    if (first >= job.num_blocks) return;
    const char* fault = run_blocks(*job.launch, first, std::min(first + job.step, job.num_blocks), scratch);
    if (fault != nullptr) {
      const char* none = nullptr;
      fault_.compare_exchange_strong(none, fault, std::memory_order_relaxed);
      next_block_.store(job.num_blocks, std::memory_order_relaxed);  // the rest of the grid is not run
      return;
    }
  }
}

void Team::help() {
  Scratch scratch;
  std::uint64_t seen = 0;  // the last epoch this helper took part in or missed
  for (;;) {
    const auto news = [&] {
      const std::uint64_t epoch = epoch_.load(std::memory_order_acquire);
      return (epoch != seen && (epoch & 1) != 0) || stopping_.load(std::memory_order_relaxed);
    };
    if (!spin_until(news, kHelperSpin)) {
      std::unique_lock lock(sleep_mutex_);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] {
        const std::uint64_t epoch = epoch_.load(std::memory_order_seq_cst);
        return (epoch != seen && (epoch & 1) != 0) || stopping_.load(std::memory_order_relaxed);
      });
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }
    if (stopping_.load(std::memory_order_relaxed)) return;
    const std::uint64_t epoch = epoch_.load(std::memory_order_acquire);
    if ((epoch & 1) == 0) continue;
    inside_.fetch_add(1, std::memory_order_seq_cst);
    if (epoch_.load(std::memory_order_seq_cst) == epoch) run_share(scratch);
    seen = epoch;
    inside_.fetch_sub(1, std::memory_order_release);
  }
}

void Team::start_helpers() noexcept {
  std::lock_guard lock(start_mutex_);
  if (!helpers_.empty()) return;
  try {
    helpers_.reserve(num_helpers_);
    while (helpers_.size() < num_helpers_) helpers_.emplace_back([this] { help(); });
  } catch (...) {  // fewer helpers are slower, not wrong
  }
  num_running_.store(static_cast<std::uint32_t>(std::max<std::size_t>(helpers_.size(), 1)), std::memory_order_relaxed);
}

void Team::stop() noexcept {
  stopping_.store(true, std::memory_order_relaxed);
  {
    std::lock_guard lock(sleep_mutex_);
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
  helpers_.clear();
}

}  // namespace metrale::host
