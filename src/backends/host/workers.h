// SPDX-License-Identifier: Apache-2.0
//
// The threads that run streams. A stream with work holds one worker for itself until it falls idle, so streams never wait for each
// other's host functions; idle workers are kept for the next stream. Also how threads here spin: briefly, and then they sleep.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "metrale/result.h"

namespace metrale::host {

class Stream;

inline void pause_cpu() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Spins until `done()` or for about `limit`; returns the last `done()`.
template <class Done>
bool spin_until(Done&& done, std::chrono::nanoseconds limit) {
  if (done()) return true;
  const auto deadline = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 16; ++i) {
      pause_cpu();
      if (done()) return true;
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

/// Shared memory of the blocks that one thread runs.
class Scratch {
 public:
  /// At least `bytes`, 64-byte aligned; null when there is none to be had.
  std::byte* get(std::size_t bytes) noexcept;
  ~Scratch();
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

 private:
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

class Workers {
 public:
  Workers() = default;
  ~Workers() { stop(); }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  /// Has a worker call `stream.run`. Errors: internal (no thread could be started).
  Result<> serve(Stream& stream);
  /// Joins the threads. No stream has work, and none gets any.
  void stop() noexcept;

 private:
  struct Worker {
    std::mutex mutex;
    std::condition_variable wake;
    Stream* stream = nullptr;
    bool stopping = false;
    Scratch scratch;
    std::thread thread;
  };
  void loop(Worker& worker);

  std::mutex mutex_;
  std::vector<std::unique_ptr<Worker>> all_;
  std::vector<Worker*> idle_;
};

}  // namespace metrale::host
