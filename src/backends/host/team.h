// SPDX-License-Identifier: Apache-2.0
//
// The helpers that share the blocks of a grid with the thread of its stream. The team serves one grid at a time; a stream that
// finds it taken runs its grid alone, so no grid ever waits for another. Between grids helpers spin briefly and then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "backends/host/work.h"
#include "backends/host/workers.h"

namespace metrale::host {

class Team {
 public:
  explicit Team(std::uint32_t num_helpers) : num_helpers_(num_helpers) {}
  ~Team() { stop(); }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  /// Runs every block of the grid and returns the text of the first fault, or null.
  const char* run(const LaunchWork& launch, Scratch& scratch) noexcept;
  /// Joins the helpers. No grid is running, and none will.
  void stop() noexcept;

 private:
  /// The running grid. Written while no helper is inside.
  struct Job {
    const LaunchWork* launch = nullptr;
    std::uint64_t num_blocks = 0;
    std::uint64_t step = 1;  ///< Blocks claimed at a time.
  };

  void start_helpers() noexcept;
  void help();
  void publish(const LaunchWork& launch, std::uint64_t num_blocks);
  void close();
  /// Claims and runs blocks until none are left.
  void run_share(Scratch& scratch) noexcept;

  const std::uint32_t num_helpers_;
  std::mutex start_mutex_;
  std::vector<std::thread> helpers_;
  std::atomic<std::uint32_t> num_running_{0};

  // A helper enters by raising `inside_` and then finding the epoch unchanged and odd; the leader closes by making the epoch even
  // and then waits for `inside_` to fall to 0. Both sides write before they read,
  // so either the helper sees the close or the leader sees it.
  alignas(64) std::atomic<bool> taken_{false};
  Job job_;
  alignas(64) std::atomic<std::uint64_t> epoch_{0};
  alignas(64) std::atomic<std::uint32_t> inside_{0};
  alignas(64) std::atomic<std::uint64_t> next_block_{0};
  alignas(64) std::atomic<const char*> fault_{nullptr};

  std::atomic<std::uint32_t> sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
};

}  // namespace metrale::host
