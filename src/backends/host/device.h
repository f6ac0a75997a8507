// SPDX-License-Identifier: Apache-2.0
//
// The machinery behind a host backend: workers, the team of helpers, streams, events, open captures, the fault, and what is
// released once work in flight has passed. It knows addresses, not policy. Any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "backends/host/event.h"
#include "backends/host/graph.h"
#include "backends/host/team.h"
#include "backends/host/work.h"
#include "backends/host/workers.h"
#include "metrale/result.h"

namespace metrale::host {

class Device {
 public:
  /// Copies and fills up to `run_now_bytes` run in the caller when their stream is idle.
  Device(std::uint32_t num_threads, std::uint64_t run_now_bytes)
      : team(num_threads - 1), run_now_bytes_(run_now_bytes), num_threads_(num_threads) {}
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  std::uint32_t num_threads() const noexcept { return num_threads_; }
  std::uint64_t run_now_bytes() const noexcept { return run_now_bytes_; }

  // ---- the fault ----
  bool is_lost() const noexcept { return lost_.load(std::memory_order_acquire); }
  void lose(std::string_view reason) noexcept;
  /// Ok while nothing faulted.
  Result<> alive() const {
    if (is_lost()) [[unlikely]]
      return lost();
    return {};
  }

  // ---- work ----
  /// Does one piece of work; nothing on a lost device.
  void execute(const Work& work, Scratch& scratch) noexcept;
  /// While set, new work waits until it is released (Stream::release).
  void set_holding_back(bool on) noexcept { holding_back_.store(on, std::memory_order_release); }
  bool is_holding_back() const noexcept { return holding_back_.load(std::memory_order_acquire); }

  // ---- objects; they live as long as the device ----
  Stream& make_stream();
  void drop_stream(Stream& stream);
  /// Whether `stream` is a live stream of this device; any pointer may be asked about.
  bool owns(const Stream* stream) const;
  Event& make_event(bool timed);
  void drop_event(Event& event);
  Graph& keep(std::unique_ptr<Graph> graph);
  /// Destroys a graph once its replays have run.
  void drop_graph(const Graph& graph);
  Result<> synchronize();

  /// Calls `release`, which gives `bytes` back, when all work enqueued so far has run: now, or later from whichever thread finds it
  /// so.
  void after_current_work(std::function<void()> release, std::uint64_t bytes = 0);
  /// Bytes that come back with the calls of `after_current_work` that wait or are being made.
  std::uint64_t waiting_bytes() const noexcept { return waiting_bytes_.load(); }
  /// Waits for the work before the oldest of those and makes its call. False when none waits, and at the deadline.
  Result<bool> wait_for_release(std::chrono::steady_clock::time_point deadline);
  /// Makes the calls of `after_current_work` that are due.
  void reap() noexcept;
  /// Completes all work and joins the threads.
  void shut_down() noexcept;

  Workers workers;
  Team team;
  Captures captures;

 private:
  struct Waiting {
    std::vector<std::pair<Stream*, Ticket>> behind;
    std::function<void()> release;
    std::uint64_t bytes = 0;
  };
  Error lost() const;

  const std::uint64_t run_now_bytes_;
  const std::uint32_t num_threads_;
  std::atomic<bool> holding_back_{false};
  std::atomic<bool> lost_{false};
  mutable std::mutex fault_mutex_;
  std::string fault_;

  mutable std::mutex mutex_;  // of the rest
  std::deque<Stream> streams_;
  std::vector<Stream*> spare_streams_;
  std::deque<Event> events_;
  std::vector<Event*> spare_events_;
  std::unordered_map<const Graph*, std::shared_ptr<Graph>> graphs_;  ///< Shared with `waiting_`.
  std::list<Waiting> waiting_;
  std::atomic<std::uint64_t> waiting_bytes_{0};
  std::atomic<std::size_t> num_waiting_{0};
};

}  // namespace metrale::host
