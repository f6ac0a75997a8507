// SPDX-License-Identifier: Apache-2.0
#include "metrale/event.h"

namespace metrale {
namespace {
Error empty(std::source_location site) { return {Errc::invalid_argument, "this Event owns nothing; create one first", site}; }
}  // namespace

Result<Event> Event::create(GpuBackend& backend, std::source_location site) {
  return Event(backend, METRALE_TRY(backend.create_event(site)));
}

Result<Event> Event::create_timed(GpuBackend& backend, std::source_location site) {
  return Event(backend, METRALE_TRY(backend.create_timed_event(site)));
}

Result<> Event::record(StreamHandle stream, std::source_location site) const {
  if (backend() == nullptr) return empty(site);
  return backend()->record_event(handle(), stream, site);
}

Result<> Event::hold(StreamHandle stream, std::source_location site) const {
  if (backend() == nullptr) return empty(site);
  return backend()->stream_wait_event(stream, handle(), site);
}

Result<> Event::synchronize(std::source_location site) const {
  if (backend() == nullptr) return empty(site);
  return backend()->event_synchronize(handle(), site);
}

Result<bool> Event::query(std::source_location site) const {
  if (backend() == nullptr) return empty(site);
  return backend()->event_query(handle(), site);
}

Result<std::int64_t> Event::elapsed_ns_since(const Event& start, std::source_location site) const {
  if (backend() == nullptr) return empty(site);
  return backend()->event_elapsed_ns(start.handle(), handle(), site);
}

}  // namespace metrale
