// SPDX-License-Identifier: Apache-2.0
//
// Captures and graphs. A capture is one WorkBuffer for all of its streams, in the order of the calls, which respects every event
// wait inside, so replaying it front to back is a correct order. Each stream that takes part keeps a clock: how much work of every
// other part it has waited for; the end compares the origin's clock with what the joined streams recorded.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "backends/host/work.h"
#include "metrale/result.h"

namespace metrale::host {

/// For each part of a capture, the work seen of it; parts that joined later are missing and count as 0.
using CaptureClock = std::vector<std::uint64_t>;

struct Capture {
  struct Part {
    Stream* stream = nullptr;
    std::uint64_t num_recorded = 0;
    CaptureClock seen;
  };
  std::uint64_t id = 0;
  WorkBuffer work;
  std::vector<Part> parts;  ///< The first is the origin.

  /// Counts a step of a part, which its own clock has seen.
  void step(std::size_t part);
  /// Makes `part` see what `clock` has seen.
  void merge(std::size_t part, const CaptureClock& clock);
  /// Whether the origin has seen all work of every part.
  bool is_joined() const;
};

class Graph {
 public:
  explicit Graph(WorkBuffer work) : work_(std::move(work)) {}
  const WorkBuffer& work() const noexcept { return work_; }

  // Replays of one graph do not overlap: the next one, on whichever stream, waits for the last.
  std::mutex mutex_;
  Stream* last_stream_ = nullptr;
  Ticket last_ticket_ = 0;

 private:
  WorkBuffer work_;
};

/// The open captures of a device. `mutex` guards them and the capture fields of streams.
struct Captures {
  std::mutex mutex;

  /// Null when `id` is not open.
  Capture* find(std::uint64_t id);
  Result<> begin(Stream& origin);
  /// Adds a stream that waited for an event of the capture.
  void join(Capture& capture, Stream& stream);
  /// Takes out the capture that `stream` takes part in, null if there is none, and sets its streams free.
  std::unique_ptr<Capture> close(const Stream& stream);

 private:
  std::vector<std::unique_ptr<Capture>> open_;
  std::uint64_t next_id_ = 1;
};

}  // namespace metrale::host
