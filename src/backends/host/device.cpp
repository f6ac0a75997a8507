// SPDX-License-Identifier: Apache-2.0
#include "backends/host/device.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "backends/host/clock.h"
#include "backends/host/status.h"
#include "backends/host/stream.h"

namespace metrale::host {

Device::~Device() { shut_down(); }

void Device::lose(std::string_view reason) noexcept {
  std::lock_guard lock(fault_mutex_);
  if (is_lost()) return;  // the first reason stays
  try {
    fault_ = reason;
  } catch (const std::bad_alloc&) {  // lost all the same, without words
  }
  lost_.store(true, std::memory_order_release);
}

Error Device::lost() const {
  std::lock_guard lock(fault_mutex_);
  return lost_error(fault_);
}

void Device::execute(const Work& work, Scratch& scratch) noexcept {
  if (is_lost()) [[unlikely]]
    return;
  switch (work.kind) {
    case WorkKind::copy: {
      const auto& copy = static_cast<const CopyWork&>(work);
      std::memmove(copy.dst, copy.src, copy.bytes);
      return;
    }
    case WorkKind::copy_2d: return static_cast<const Copy2DWork&>(work).run();
    case WorkKind::fill: {
      const auto& fill = static_cast<const FillWork&>(work);
      std::memset(fill.dst, fill.value, fill.bytes);
      return;
    }
    case WorkKind::launch: {
      const auto& launch = static_cast<const LaunchWork&>(work);
      if (const char* fault = team.run(launch, scratch)) [[unlikely]] {
        try {
          lose(fmt::format("kernel {}.{} faulted: {}", launch.kernel->module, launch.kernel->function, fault));
        } catch (...) {
          lose(fault);
        }
      }
      return;
    }
    case WorkKind::call: try { static_cast<const CallWork&>(work).fn();
      } catch (...) {
        lose("a host function threw an exception");
      }
      return;
    case WorkKind::wait: {
      const auto& wait = static_cast<const WaitWork&>(work);
      if (const Result<> released = wait.stream->release(wait.ticket); !released) return lose(released.error().message());
      wait.stream->wait(wait.ticket);
      return;
    }
    case WorkKind::stamp: {
      const auto& stamp = static_cast<const StampWork&>(work);
      stamp.event->stamp(stamp.recording, now_ns());
      return;
    }
    case WorkKind::replay:
      for (WorkBuffer::Cursor cursor(static_cast<const ReplayWork&>(work).graph->work()); cursor.get() != nullptr;
           cursor.advance()) {
        execute(*cursor.get(), scratch);
      }
      return;
    case WorkKind::destroyed: return;
  }
}

Stream& Device::make_stream() {
  std::lock_guard lock(mutex_);
  const auto idle = std::find_if(spare_streams_.begin(), spare_streams_.end(), [](const Stream* s) { return s->is_idle(); });
  if (idle != spare_streams_.end()) {
    Stream& stream = **idle;
    spare_streams_.erase(idle);
    stream.in_use_ = true;
    return stream;
  }
  spare_streams_.reserve(streams_.size() + 1);  // so that dropping one needs no memory
  return streams_.emplace_back(*this);
}

void Device::drop_stream(Stream& stream) {
  std::lock_guard lock(mutex_);
  stream.in_use_ = false;
  spare_streams_.push_back(&stream);
}

bool Device::owns(const Stream* stream) const {
  std::lock_guard lock(mutex_);
  return std::any_of(streams_.begin(), streams_.end(), [&](const Stream& s) { return &s == stream && s.in_use_; });
}

Event& Device::make_event(bool timed) {
  std::lock_guard lock(mutex_);
  Event* event = nullptr;
  if (spare_events_.empty()) {
    spare_events_.reserve(events_.size() + 1);
    event = &events_.emplace_back();
  } else {
    event = spare_events_.back();
    spare_events_.pop_back();
  }
  event->reset(timed);
  return *event;
}

void Device::drop_event(Event& event) {
  std::lock_guard lock(mutex_);
  spare_events_.push_back(&event);
}

Graph& Device::keep(std::unique_ptr<Graph> graph) {
  std::lock_guard lock(mutex_);
  Graph& kept = *graph;
  graphs_.emplace(&kept, std::move(graph));
  return kept;
}

void Device::drop_graph(const Graph& graph) {
  std::shared_ptr<Graph> dropped;
  {
    std::lock_guard lock(mutex_);
    const auto it = graphs_.find(&graph);
    if (it == graphs_.end()) return;
    dropped = std::move(it->second);
    graphs_.erase(it);
  }
  after_current_work([dropped] {});
}

Result<> Device::synchronize() {
  std::vector<Stream*> streams;
  {
    std::lock_guard lock(mutex_);
    for (Stream& stream : streams_) streams.push_back(&stream);
  }
  for (Stream* stream : streams) METRALE_TRY(stream->synchronize());
  return {};
}

void Device::after_current_work(std::function<void()> release, std::uint64_t bytes) {
  Waiting waiting;
  {
    std::lock_guard lock(mutex_);
    for (Stream& stream : streams_) {
      const Ticket tail = stream.tail();
      if (!stream.is_done(tail)) waiting.behind.emplace_back(&stream, tail);
    }
    if (!waiting.behind.empty()) {
      waiting.release = std::move(release);
      waiting.bytes = bytes;
      waiting_.push_back(std::move(waiting));
      waiting_bytes_.fetch_add(bytes);
      num_waiting_.store(waiting_.size(), std::memory_order_release);
      return;
    }
  }
  release();
}

void Device::reap() noexcept {
  if (num_waiting_.load(std::memory_order_acquire) == 0) return;
  // One pass over what waits now: another thread that goes on adding must not keep this one from the work of its stream. A list,
  // since moving its nodes cannot fail.
  std::list<Waiting> due;
  {
    std::lock_guard lock(mutex_);
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      const auto waiting = it++;
      if (std::all_of(waiting->behind.begin(), waiting->behind.end(), [](const auto& b) { return b.first->is_done(b.second); })) {
        due.splice(due.end(), waiting_, waiting);
      }
    }
    num_waiting_.store(waiting_.size(), std::memory_order_release);
  }
  for (Waiting& w : due) {
    w.release();
    waiting_bytes_.fetch_sub(w.bytes);
  }
}

Result<bool> Device::wait_for_release(std::chrono::steady_clock::time_point deadline) {
  std::vector<std::pair<Stream*, Ticket>> behind;
  {
    std::lock_guard lock(mutex_);
    const auto oldest = std::find_if(waiting_.begin(), waiting_.end(), [](const Waiting& w) { return w.bytes != 0; });
    if (oldest == waiting_.end()) return false;
    behind = oldest->behind;
  }
  for (const auto& [stream, ticket] : behind) {
    METRALE_TRY(stream->release(ticket));
    if (!stream->wait_until(ticket, deadline)) return false;
  }
  reap();
  return true;
}

void Device::shut_down() noexcept {
  (void)guarded("shut down", [&] { return synchronize(); });
  reap();
  workers.stop();
  team.stop();
}

}  // namespace metrale::host
