// SPDX-License-Identifier: Apache-2.0
//
// Event: a mark in a stream with an owner. It holds its backend by reference, so the backend outlives it. Move-only; one thread at
// a time, while the handle may be used from any.
#pragma once

#include <cstdint>
#include <source_location>

#include "metrale/handle_owner.h"

namespace metrale {

namespace detail {
struct EventTraits {
  using Handle = EventHandle;
  static constexpr std::string_view kNoun = "event";
  static Result<> destroy(GpuBackend& backend, EventHandle event, std::source_location site) {
    return backend.destroy_event(event, site);
  }
};
}  // namespace detail

class Event : public detail::HandleOwner<detail::EventTraits> {
 public:
  Event() noexcept = default;

  /// Creates an event that orders. Errors: as `GpuBackend::create_event`.
  static Result<Event> create(GpuBackend& backend, std::source_location site = std::source_location::current());
  /// Creates an event that also measures. Errors: as `GpuBackend::create_timed_event`.
  static Result<Event> create_timed(GpuBackend& backend, std::source_location site = std::source_location::current());

  /// As the backend's call on this event. Errors: also invalid_argument when the owner is empty.
  Result<> record(StreamHandle stream, std::source_location site = std::source_location::current()) const;
  Result<> hold(StreamHandle stream, std::source_location site = std::source_location::current()) const;  ///< stream_wait_event
  Result<> synchronize(std::source_location site = std::source_location::current()) const;
  Result<bool> query(std::source_location site = std::source_location::current()) const;
  /// Nanoseconds from `start`'s mark to this one's.
  Result<std::int64_t> elapsed_ns_since(const Event& start, std::source_location site = std::source_location::current()) const;

 private:
  Event(GpuBackend& backend, EventHandle event) noexcept : HandleOwner(backend, event) {}
};

}  // namespace metrale
