// SPDX-License-Identifier: Apache-2.0
#include "backends/host/event.h"

#include "backends/host/clock.h"
#include "backends/host/host_backend.h"
#include "backends/host/status.h"

namespace metrale::host {

void Event::reset(bool timed) {
  std::lock_guard lock(mutex_);
  mark_ = {};
  ++recording_;  // stamps of the former life are void
  time_ns_.reset();
  timed_ = timed;
}

EventMark Event::mark() const {
  std::lock_guard lock(mutex_);
  return mark_;
}

void Event::set_mark(EventMark mark) {
  std::lock_guard lock(mutex_);
  mark_ = std::move(mark);
}

std::uint64_t Event::begin_recording() {
  std::lock_guard lock(mutex_);
  time_ns_.reset();
  return ++recording_;
}

void Event::stamp(std::uint64_t recording, std::int64_t now_ns) {
  std::lock_guard lock(mutex_);
  if (recording == recording_) time_ns_ = now_ns;
}

std::optional<std::int64_t> Event::time_ns() const {
  std::lock_guard lock(mutex_);
  return time_ns_;
}

// ---- hooks ----

Result<NativeEvent> HostBackend::do_create_event(bool timed) {
  METRALE_TRY(device().alive());
  return guarded("create an event", [&]() -> Result<NativeEvent> { return native(device().make_event(timed)); });
}

Result<> HostBackend::do_destroy_event(NativeEvent event) {
  device().drop_event(event_of(event));
  return {};
}

Result<> HostBackend::do_record_event(NativeEvent event, NativeStream stream) {
  METRALE_TRY(device().alive());
  Event& e = event_of(event);
  Stream& s = stream_of(stream);
  return guarded("record an event", [&]() -> Result<> {
    if (s.is_capturing()) {
      std::lock_guard lock(device().captures.mutex);
      if (Capture* capture = s.capture_.load(std::memory_order_relaxed)) {
        e.set_mark({nullptr, 0, capture->id, capture->parts[s.capture_part_].seen});
        return {};
      }
    }
    if (!e.is_timed()) {
      e.set_mark({&s, s.tail(), 0, {}});
      return {};
    }
    const std::uint64_t recording = e.begin_recording();
    const Ticket ticket = METRALE_TRY(s.submit(
        true, [&] { e.stamp(recording, now_ns()); },
        [&](WorkBuffer& work) {
          auto& stamp = work.append<StampWork>();
          stamp.event = &e;
          stamp.recording = recording;
        }));
    e.set_mark({&s, ticket, 0, {}});
    return {};
  });
}

Result<> HostBackend::do_stream_wait_event(NativeStream stream, NativeEvent event) {
  METRALE_TRY(device().alive());
  Stream& s = stream_of(stream);
  return guarded("make a stream wait", [&]() -> Result<> {
    const EventMark mark = event_of(event).mark();
    if (mark.capture != 0) {
      std::lock_guard lock(device().captures.mutex);
      Capture* capture = device().captures.find(mark.capture);
      if (capture == nullptr) return {};  // its capture has ended: nothing is marked any more
      if (s.capture_.load(std::memory_order_relaxed) == nullptr) device().captures.join(*capture, s);
      if (s.capture_.load(std::memory_order_relaxed) != capture) {
        return Error(Errc::capture_unsafe,
                     "stream_wait_event: the event belongs to another capture; wait for it after both have ended");
      }
      capture->merge(s.capture_part_, mark.clock);
      return {};
    }
    if (s.is_capturing()) {
      return Error(Errc::capture_unsafe,
                   "stream_wait_event: the event was recorded outside the capture; wait for it before it begins");
    }
    if (mark.stream == nullptr || mark.stream == &s || mark.stream->is_done(mark.ticket)) return {};
    METRALE_TRY(s.submit([&](WorkBuffer& work) {
      auto& wait = work.append<WaitWork>();
      wait.stream = mark.stream;
      wait.ticket = mark.ticket;
    }));
    return {};
  });
}

Result<> HostBackend::do_event_synchronize(NativeEvent event) {
  const EventMark mark = event_of(event).mark();
  if (mark.stream != nullptr) {
    METRALE_TRY(mark.stream->release(mark.ticket));
    mark.stream->wait(mark.ticket);
  }
  return device().alive();
}

Result<bool> HostBackend::do_event_query(NativeEvent event) {
  METRALE_TRY(device().alive());
  const EventMark mark = event_of(event).mark();
  if (mark.stream == nullptr) return true;
  METRALE_TRY(mark.stream->release(mark.ticket));
  return mark.stream->is_done(mark.ticket);
}

Result<std::int64_t> HostBackend::do_event_elapsed_ns(NativeEvent start, NativeEvent end) {
  METRALE_TRY(device().alive());
  const std::optional<std::int64_t> first = event_of(start).time_ns();
  const std::optional<std::int64_t> last = event_of(end).time_ns();
  if (!first || !last) {
    return Error(Errc::busy, "event_elapsed_ns: a stream has not come to its event yet; ask again after event_synchronize");
  }
  return *last - *first;
}

}  // namespace metrale::host
