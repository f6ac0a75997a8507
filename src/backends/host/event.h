// SPDX-License-Identifier: Apache-2.0
//
// An event: a mark in the work of a stream, as the ticket that must be done. A timed one also keeps the time at which its stream
// came to the mark. Events are kept after destruction and used again, so stamps that come late find a live object. Any thread.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>

#include "backends/host/graph.h"
#include "backends/host/work.h"

namespace metrale::host {

/// Where an event was last recorded: on a stream, in a capture, or nowhere.
struct EventMark {
  Stream* stream = nullptr;
  Ticket ticket = 0;
  std::uint64_t capture = 0;  ///< 0: not in a capture.
  CaptureClock clock;
};

class Event {
 public:
  /// Makes the event as new.
  void reset(bool timed);
  bool is_timed() const noexcept { return timed_; }
  EventMark mark() const;
  void set_mark(EventMark mark);
  /// Starts a timed recording, which voids earlier ones, and returns its number.
  std::uint64_t begin_recording();
  void stamp(std::uint64_t recording, std::int64_t now_ns);
  /// The time of the last recording; nullopt until its stream came to it.
  std::optional<std::int64_t> time_ns() const;

 private:
  mutable std::mutex mutex_;
  EventMark mark_;
  std::uint64_t recording_ = 0;
  std::optional<std::int64_t> time_ns_;
  bool timed_ = false;
};

}  // namespace metrale::host
