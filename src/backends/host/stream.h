// SPDX-License-Identifier: Apache-2.0
//
// A stream: a queue of work, run in order by one worker at a time. Producers append to one buffer while the worker walks another,
// and the two change places when the worker has finished. Short work on an idle stream runs at once in the thread that enqueues it.
// A destroyed stream is kept and used again once it is idle, so that its address and its tickets stay valid for events. Any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "backends/host/device.h"
#include "backends/host/work.h"

namespace metrale::host {

class Stream {
 public:
  explicit Stream(Device& device) : device_(device) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  /// Enqueues work: `append(WorkBuffer&)` adds one record; where `may_run_now` and the stream is idle, `run()` does the work
  /// instead. On a capturing stream the record goes to the capture. Returns the ticket of the work; 0 when captured.
  template <class Run, class Append>
  Result<Ticket> submit(bool may_run_now, Run&& run, Append&& append);
  /// As above, for work that never runs in the caller.
  template <class Append>
  Result<Ticket> submit(Append&& append) {
    return submit(false, [] {}, std::forward<Append>(append));
  }

  /// The ticket of the newest work.
  Ticket tail() const noexcept { return enqueued_.load(std::memory_order_acquire); }
  bool is_done(Ticket ticket) const noexcept { return completed_.load(std::memory_order_seq_cst) >= ticket; }
  bool is_idle() const noexcept { return is_done(tail()); }
  /// Lets held-back work up to `ticket` run.
  Result<> release(Ticket ticket);
  /// Waits for work up to `ticket`, which must have been released.
  void wait(Ticket ticket);
  bool wait_until(Ticket ticket, std::chrono::steady_clock::time_point deadline);
  Result<> synchronize() {
    const Ticket ticket = tail();
    METRALE_TRY(release(ticket));
    wait(ticket);
    return {};
  }

  /// A worker's turn: runs until nothing is left to do and nothing more comes for a little while.
  void run(Scratch& scratch);

  bool is_capturing() const noexcept { return capture_.load(std::memory_order_acquire) != nullptr; }

  // Guarded by the device's capture mutex.
  std::atomic<Capture*> capture_{nullptr};
  std::size_t capture_part_ = 0;
  // Guarded by the device's mutex.
  bool in_use_ = true;

 private:
  /// Whether the next piece of work is in the queue and may run. The mutex is held.
  bool is_runnable() const noexcept {
    return !running_in_caller_ && completed_.load(std::memory_order_relaxed) < released_.load(std::memory_order_relaxed);
  }
  /// Sees to it that a worker looks at the queue. The mutex is held.
  Result<> ensure_worker();
  void finish_one() noexcept;

  Device& device_;
  std::mutex mutex_;           // of everything up to the atomics, except what the worker owns
  WorkBuffer pending_;         // appended to by producers
  WorkBuffer running_;         // the worker's: what it walks
  WorkBuffer::Cursor cursor_;  // the worker's: next record of running_
  bool has_worker_ = false;
  bool running_in_caller_ = false;
  std::atomic<bool> news_{false};  // tells a worker that is about to leave to look again

  std::atomic<Ticket> enqueued_{0};
  std::atomic<Ticket> released_{0};  // enqueued_, unless work is held back
  alignas(64) std::atomic<Ticket> completed_{0};
  std::atomic<std::uint32_t> waiters_{0};
  std::mutex wait_mutex_;
  std::condition_variable completion_;
};

template <class Run, class Append>
Result<Ticket> Stream::submit(bool may_run_now, Run&& run, Append&& append) {
  return guarded("enqueue", [&]() -> Result<Ticket> {
    if (is_capturing()) [[unlikely]] {
      std::lock_guard capture_lock(device_.captures.mutex);
      if (Capture* capture = capture_.load(std::memory_order_relaxed)) {
        append(capture->work);
        capture->step(capture_part_);
        return Ticket{0};
      }
    }
    std::unique_lock lock(mutex_);
    const bool held = device_.is_holding_back();
    const Ticket ticket = enqueued_.load(std::memory_order_relaxed) + 1;
    if (may_run_now && !held && !running_in_caller_ && completed_.load(std::memory_order_acquire) + 1 == ticket) {
      enqueued_.store(ticket, std::memory_order_release);
      released_.store(ticket, std::memory_order_release);
      running_in_caller_ = true;
      lock.unlock();
      run();
      finish_one();
      lock.lock();
      running_in_caller_ = false;
      if (is_runnable()) METRALE_TRY(ensure_worker());
      return ticket;
    }
    if (!held && !running_in_caller_) METRALE_TRY(ensure_worker());  // first, since it may fail
    append(pending_);
    enqueued_.store(ticket, std::memory_order_release);
    if (!held) {
      released_.store(ticket, std::memory_order_release);
      news_.store(true, std::memory_order_release);
    }
    return ticket;
  });
}

}  // namespace metrale::host
