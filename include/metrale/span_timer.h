// SPDX-License-Identifier: Apache-2.0
//
// SpanTimer: how long work took on the device, measured by pairs of timed events in a ring and read without ever waiting. It
// belongs to its backend. The entry points are the same on every backend; where there are no timed events, arming answers
// unsupported and the rest does nothing. While it is off, beginning a span is one relaxed load. Any thread may time; one thread at
// a time arms and releases.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string_view>
#include <vector>

#include "metrale/result.h"
#include "metrale/types.h"

namespace metrale {

class GpuBackend;

class SpanTimer {
 public:
  /// Spans that may be begun and not yet harvested.
  static constexpr std::size_t kCapacity = 4096;

  /// A span that was begun; 0: none, and ending it does nothing.
  struct Token {
    std::uint64_t value = 0;
    constexpr explicit operator bool() const noexcept { return value != 0; }
  };
  /// A measured span.
  struct Span {
    std::string_view name;
    StreamHandle stream;
    std::uint64_t index = 0;  ///< In the order in which spans were begun.
    std::int64_t elapsed_ns = 0;
  };
  struct Counts {
    std::uint64_t num_begun = 0;
    std::uint64_t num_dropped = 0;  ///< The slot was still busy.
    std::uint64_t num_skipped = 0;  ///< The stream was being captured, where an event is a graph node and no time.
    std::uint64_t num_failed = 0;   ///< The backend refused an event, or the times made no sense.
    std::uint64_t num_harvested = 0;
  };

  /// Asks nothing of `backend` before it is armed.
  explicit SpanTimer(GpuBackend& backend) noexcept;
  SpanTimer(const SpanTimer&) = delete;
  SpanTimer& operator=(const SpanTimer&) = delete;
  /// Does not reach the backend: events that were not released go with it.
  ~SpanTimer();

  /// Makes the events at the first call, and turns timing on.
  /// Errors: unsupported (Capability::timed_events), otherwise as `GpuBackend::create_timed_event`; timing stays off, nothing is
  ///   kept.
  Result<> arm(std::source_location site = std::source_location::current());
  /// Turns timing off; spans already begun can be ended and harvested.
  void disarm() noexcept { armed_.store(false, std::memory_order_relaxed); }
  bool armed() const noexcept { return armed_.load(std::memory_order_relaxed); }

  /// Begins a span on `stream`. Lifetime: the text of `name` lives until the span is harvested; literals do.
  /// Ordering: enqueues one event; never on a stream that is being captured.
  Token begin(std::string_view name, StreamHandle stream) noexcept {
    if (!armed()) [[likely]]
      return {};
    return begin_armed(name, stream);
  }
  /// Ends a span. Call it once, on any thread.
  void end(Token token) noexcept {
    if (token) end_armed(token);
  }

  /// The spans that are done by now, in the order in which they were begun; those that are not stay. Never waits: also when another
  /// thread is harvesting, and then returns none.
  std::vector<Span> harvest();
  Counts counts() const noexcept;

  /// Turns timing off and destroys the events; spans not harvested are lost. Errors: the first of `GpuBackend::destroy_event`.
  /// Threads: no span is begun or ended meanwhile.
  Result<> release();

 private:
  struct Ring;
  Result<> make_ring(std::source_location site);
  Token begin_armed(std::string_view name, StreamHandle stream) noexcept;
  void end_armed(Token token) noexcept;

  GpuBackend& backend_;
  std::atomic<bool> armed_{false};
  std::atomic<Ring*> ring_{nullptr};  // owned
};

/// A span as long as a scope.
class TimedScope {
 public:
  TimedScope(SpanTimer& timer, std::string_view name, StreamHandle stream) noexcept
      : timer_(timer), token_(timer.begin(name, stream)) {}
  TimedScope(const TimedScope&) = delete;
  TimedScope& operator=(const TimedScope&) = delete;
  ~TimedScope() { timer_.end(token_); }

 private:
  SpanTimer& timer_;
  SpanTimer::Token token_;
};

}  // namespace metrale
