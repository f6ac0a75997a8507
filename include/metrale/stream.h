// SPDX-License-Identifier: Apache-2.0
//
// Stream: a queue of device work with an owner. It holds its backend by reference, so the backend outlives it. Destroying it
// returns at once and pending work completes. Move-only; one thread at a time, while the handle may be used from any.
#pragma once

#include <cstdint>
#include <source_location>

#include "metrale/handle_owner.h"

namespace metrale {

namespace detail {
struct StreamTraits {
  using Handle = StreamHandle;
  static constexpr std::string_view kNoun = "stream";
  static Result<> destroy(GpuBackend& backend, StreamHandle stream, std::source_location site) {
    return backend.destroy_stream(stream, site);
  }
};
}  // namespace detail

class Stream : public detail::HandleOwner<detail::StreamTraits> {
 public:
  Stream() noexcept = default;

  /// Creates a stream that runs independently of all others. Errors: as `GpuBackend::create_stream`.
  static Result<Stream> create(GpuBackend& backend, int priority = 0, std::source_location site = std::source_location::current());
  /// Takes another library's stream, which stays that library's. Errors: as `GpuBackend::wrap_stream`.
  static Result<Stream> wrap(GpuBackend& backend, std::uint64_t native,
                             std::source_location site = std::source_location::current());

  /// As the backend's call on this stream. Errors: also invalid_argument when the owner is empty.
  Result<> synchronize(std::source_location site = std::source_location::current()) const;
  Result<bool> query(std::source_location site = std::source_location::current()) const;

 private:
  Stream(GpuBackend& backend, StreamHandle stream) noexcept : HandleOwner(backend, stream) {}
};

}  // namespace metrale
