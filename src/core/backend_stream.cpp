// SPDX-License-Identifier: Apache-2.0
//
// GpuBackend: streams, events, host functions.
#include <algorithm>

#include <fmt/format.h>

#include "core/face_state.h"

namespace metrale {

using detail::EventRecord;
using detail::FaceState;
using detail::StreamRecord;

namespace {

/// Gives a driver's stream a handle; without one, `give_back` is called.
template <class GiveBack>
Result<StreamHandle> issue(FaceState& f, NativeStream native, bool is_foreign, GpuBackend::Site site, GiveBack give_back) {
  detail::Undo undo(std::move(give_back));
  const StreamRecord* by_default = f.streams.find(f.default_stream.value);
  const bool is_default = by_default != nullptr && by_default->native == native;
  const std::uint64_t value = f.streams.insert([&](StreamRecord& record, std::uint64_t handle) {
    record.handle = {handle};
    record.native = native;
    record.capture.bind(f.capture_words.acquire(native.value));
    record.is_default = is_default;
    record.is_foreign = is_foreign;
  });
  if (value == 0) return Error(Errc::internal, "no stream handle is left", site);
  undo.keep();
  return StreamHandle{value};
}

}  // namespace

Result<StreamHandle> GpuBackend::create_stream(int priority, Site site) {
  FaceState& f = *face_;
  return f.run({.op = Op::create_stream, .site = site}, [&]() -> Result<StreamHandle> {
    const NativeStream native = METRALE_TRY(do_create_stream(priority));
    return issue(f, native, false, site, [&] { static_cast<void>(do_destroy_stream(native).has_value()); });
  });
}

Result<StreamHandle> GpuBackend::wrap_stream(std::uint64_t native, Site site) {
  FaceState& f = *face_;
  return f.run({.op = Op::wrap_stream, .site = site}, [&]() -> Result<StreamHandle> {
    if (native == 0)
      return Error(Errc::invalid_argument, "wrap_stream of stream 0: the legacy stream orders against all others", site);
    const NativeStream wrapped = METRALE_TRY(do_wrap_stream(native));
    return issue(f, wrapped, true, site, [&] { do_unwrap_stream(wrapped); });
  });
}

Result<std::uint64_t> GpuBackend::native_stream(StreamHandle stream, Site site) const {
  return FaceState::caught("native_stream", site, [&]() -> Result<std::uint64_t> {
    METRALE_TRY(health(site));
    StreamRecord* record = METRALE_TRY(face_->stream(stream, site));
    face_->hooks.do_share_stream(record->native);
    return record->native.value;
  });
}

Result<> GpuBackend::destroy_stream(StreamHandle stream, Site site) {
  if (!stream) return {};
  FaceState& f = *face_;
  OpRecord op{.op = Op::destroy_stream, .stream = stream, .site = site};
  return f.run_always(op, [&]() -> Result<> {
    if (!f.usable()) {
      f.streams.erase(stream.value);
      return {};
    }
    StreamRecord* record = METRALE_TRY(f.stream(stream, site));
    if (stream == f.default_stream)
      return Error(Errc::invalid_argument, "the default stream belongs to the backend and is not destroyed", site);
    METRALE_TRY(f.guard_not_captured(op.op, record->capture.load(std::memory_order_acquire), site));
    f.mark_replays_on(*record);
    f.pool.retire(record->native, record->pool);
    const NativeStream native = record->native;
    const bool foreign = record->is_foreign;
    if (!f.streams.erase(stream.value)) return Error(Errc::invalid_argument, "the stream was destroyed by another thread", site);
    f.capture_words.release(native.value);
    if (!foreign) return do_destroy_stream(native);
    do_unwrap_stream(native);
    return {};
  });
}

Result<> GpuBackend::synchronize(StreamHandle stream, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::synchronize, .stream = stream, .site = site};
  return f.run(op, [&]() -> Result<> {
    StreamRecord* record = METRALE_TRY(f.stream(stream, site));
    METRALE_TRY(f.guard_not_captured(op.op, record->capture.load(std::memory_order_acquire), site));
    return do_synchronize(record->native);
  });
}

Result<> GpuBackend::synchronize_for(StreamHandle stream, std::chrono::nanoseconds timeout, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::synchronize_for, .stream = stream, .site = site};
  return f.run(op, [&]() -> Result<> {
    StreamRecord* record = METRALE_TRY(f.stream(stream, site));
    METRALE_TRY(f.guard_not_captured(op.op, record->capture.load(std::memory_order_acquire), site));
    if (timeout.count() < 0) return Error(Errc::invalid_argument, "synchronize_for: the timeout is negative", site);
    return do_synchronize_for(record->native, timeout);
  });
}

Result<> GpuBackend::synchronize_device(Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::synchronize_device, .site = site};
  return f.run(op, [&]() -> Result<> {
    METRALE_TRY(f.guard_device(op.op, site));
    return do_synchronize_device();
  });
}

Result<bool> GpuBackend::query(StreamHandle stream, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::query, .stream = stream, .site = site};
  return f.run(op, [&]() -> Result<bool> {
    StreamRecord* record = METRALE_TRY(f.stream(stream, site));
    METRALE_TRY(f.guard_not_captured(op.op, record->capture.load(std::memory_order_acquire), site));
    return do_query(record->native);
  });
}

Result<> GpuBackend::enqueue_host(StreamHandle stream, std::function<void()> fn, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::enqueue_host, .stream = stream, .site = site};
  return f.run(op, [&]() -> Result<> {
    StreamRecord* record = METRALE_TRY(f.stream_for_work(op.op, stream, site));
    if (!fn) return Error(Errc::invalid_argument, "enqueue_host of an empty function", site);
    return do_enqueue_host(record->native, std::move(fn));
  });
}

// ---- events ----

namespace {

template <class GiveBack>
Result<EventHandle> make_event(FaceState& f, Result<NativeEvent> native, bool timed, GpuBackend::Site site, GiveBack give_back) {
  if (!native) return Error(std::move(native).error());
  detail::Undo undo([&] { give_back(*native); });
  const std::uint64_t value = f.events.insert([&](EventRecord& record, std::uint64_t handle) {
    record.handle = {handle};
    record.native = *native;
    record.capture.store(0);
    record.recorded.store(false);
    record.timed = timed;
  });
  if (value == 0) return Error(Errc::internal, "no event handle is left", site);
  undo.keep();
  return EventHandle{value};
}

}  // namespace

Result<EventHandle> GpuBackend::create_event(Site site) {
  const auto give_back = [&](NativeEvent event) { static_cast<void>(do_destroy_event(event).has_value()); };
  return face_->run({.op = Op::create_event, .site = site},
                    [&] { return make_event(*face_, do_create_event(false), false, site, give_back); });
}

Result<EventHandle> GpuBackend::create_timed_event(Site site) {
  return face_->run({.op = Op::create_event, .site = site}, [&]() -> Result<EventHandle> {
    METRALE_TRY(face_->require(Capability::timed_events, site));
    return make_event(*face_, do_create_event(true), true, site,
                      [&](NativeEvent event) { static_cast<void>(do_destroy_event(event).has_value()); });
  });
}

Result<> GpuBackend::destroy_event(EventHandle event, Site site) {
  if (!event) return {};
  FaceState& f = *face_;
  OpRecord op{.op = Op::destroy_event, .dst = event.value, .site = site};
  return f.run_always(op, [&]() -> Result<> {
    if (!f.usable()) {
      f.events.erase(event.value);
      return {};
    }
    EventRecord* record = METRALE_TRY(f.event(event, site));
    METRALE_TRY(f.guard_not_captured(op.op, record->capture.load(std::memory_order_acquire), site));
    const NativeEvent native = record->native;
    if (!f.events.erase(event.value)) return Error(Errc::invalid_argument, "the event was destroyed by another thread", site);
    return do_destroy_event(native);
  });
}

Result<> GpuBackend::record_event(EventHandle event, StreamHandle stream, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::record_event, .stream = stream, .dst = event.value, .site = site};
  return f.run(op, [&]() -> Result<> {
    EventRecord* e = METRALE_TRY(f.event(event, site));
    StreamRecord* s = METRALE_TRY(f.stream_for_work(op.op, stream, site));
    METRALE_TRY(do_record_event(e->native, s->native));
    const std::uint32_t capture = s->capture.load(std::memory_order_acquire);
    if (capture != 0) {
      f.captures.with(capture, [&](detail::Capture& c) {
        if (std::find(c.events.begin(), c.events.end(), event) == c.events.end()) c.events.push_back(event);
      });
    }
    e->capture.store(capture, std::memory_order_release);
    e->recorded.store(true, std::memory_order_release);
    return {};
  });
}

Result<> GpuBackend::stream_wait_event(StreamHandle stream, EventHandle event, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::stream_wait_event, .stream = stream, .src = event.value, .site = site};
  return f.run(op, [&]() -> Result<> {
    EventRecord* e = METRALE_TRY(f.event(event, site));
    StreamRecord* s = METRALE_TRY(f.stream_for_work(op.op, stream, site));
    if (!e->recorded.load(std::memory_order_acquire)) return {};
    const std::uint32_t of_stream = s->capture.load(std::memory_order_acquire);
    const std::uint32_t of_event = e->capture.load(std::memory_order_acquire);
    if (of_stream != 0 && of_event != of_stream) {
      return Error(
          Errc::capture_unsafe,
          fmt::format(
              "stream_wait_event: the event was last recorded {} this capture; record it inside, or wait before begin_capture",
              of_event == 0 ? "outside" : "in another capture than"),
          site);
    }
    if (of_event != 0 && of_stream == 0) {
      if (s->is_default) {
        return Error(Errc::invalid_argument, "stream_wait_event: the default stream cannot join a capture; blocking copies use it",
                     site);
      }
      f.mark_replays_on(*s);
    }
    METRALE_TRY(do_stream_wait_event(s->native, e->native));
    if (of_event != 0 && of_stream == 0) {
      f.captures.with(of_event, [&](detail::Capture& c) {
        c.streams.push_back(stream);
        s->capture.store(of_event, std::memory_order_release);
      });
    }
    return {};
  });
}

Result<> GpuBackend::event_synchronize(EventHandle event, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::event_synchronize, .dst = event.value, .site = site};
  return f.run(op, [&]() -> Result<> {
    EventRecord* record = METRALE_TRY(f.event(event, site));
    METRALE_TRY(f.guard_not_captured(op.op, record->capture.load(std::memory_order_acquire), site));
    if (!record->recorded.load(std::memory_order_acquire)) return {};
    return do_event_synchronize(record->native);
  });
}

Result<bool> GpuBackend::event_query(EventHandle event, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::event_query, .dst = event.value, .site = site};
  return f.run(op, [&]() -> Result<bool> {
    EventRecord* record = METRALE_TRY(f.event(event, site));
    METRALE_TRY(f.guard_not_captured(op.op, record->capture.load(std::memory_order_acquire), site));
    if (!record->recorded.load(std::memory_order_acquire)) return true;
    return do_event_query(record->native);
  });
}

Result<std::int64_t> GpuBackend::event_elapsed_ns(EventHandle start, EventHandle end, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::event_elapsed_ns, .dst = end.value, .src = start.value, .site = site};
  return f.run(op, [&]() -> Result<std::int64_t> {
    EventRecord* first = METRALE_TRY(f.event(start, site));
    EventRecord* second = METRALE_TRY(f.event(end, site));
    for (EventRecord* record : {first, second}) {
      METRALE_TRY(f.guard_not_captured(op.op, record->capture.load(std::memory_order_acquire), site));
      if (!record->timed)
        return Error(Errc::invalid_argument, "event_elapsed_ns: an event was not made by create_timed_event", site);
      if (!record->recorded.load(std::memory_order_acquire)) {
        return Error(Errc::invalid_argument, "event_elapsed_ns: an event was never recorded", site);
      }
    }
    return do_event_elapsed_ns(first->native, second->native);
  });
}

}  // namespace metrale
