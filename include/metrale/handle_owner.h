// SPDX-License-Identifier: Apache-2.0
//
// HandleOwner: what `Stream`, `Event` and `Graph` have in common. It owns one handle of a backend, which it holds by reference: the
// backend outlives its owners. Move-only; one thread at a time.
#pragma once

#include <cstdint>
#include <source_location>
#include <string_view>
#include <utility>

#include "metrale/backend.h"
#include "metrale/result.h"

namespace metrale::detail {

/// Whether a release that failed with `code` left its object untouched, so that releasing again later makes sense.
constexpr bool left_untouched(Errc code) noexcept {
  return code == Errc::capture_unsafe || code == Errc::in_use || code == Errc::busy;
}

/// Logs that an owner could not give back what it holds. Never throws.
void log_release_failure(std::string_view noun, std::uint64_t value, const Error& error) noexcept;

/// `Traits` has the `Handle` type, a `kNoun` for messages and `destroy(backend, handle, site)`.
template <class Traits>
class HandleOwner {
 public:
  using Handle = typename Traits::Handle;

  /// Owns nothing.
  HandleOwner() noexcept = default;
  HandleOwner(HandleOwner&& other) noexcept
      : backend_(std::exchange(other.backend_, nullptr)), handle_(std::exchange(other.handle_, Handle{})) {}
  /// Gives back what it held; a failure is logged.
  HandleOwner& operator=(HandleOwner&& other) noexcept {
    if (this != &other) {
      release_and_log();
      backend_ = std::exchange(other.backend_, nullptr);
      handle_ = std::exchange(other.handle_, Handle{});
    }
    return *this;
  }
  HandleOwner(const HandleOwner&) = delete;
  HandleOwner& operator=(const HandleOwner&) = delete;
  /// Gives back what it holds. A failure is logged, and the backend's sweep or shutdown takes over.
  ~HandleOwner() { release_and_log(); }

  /// Null when it owns nothing.
  Handle handle() const noexcept { return handle_; }
  explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  /// Gives the handle back; again: a no-op.
  /// Errors: as the backend's destroy call. After capture_unsafe, in_use and busy it still owns the handle; after others it is
  ///   empty.
  Result<> release(std::source_location site = std::source_location::current()) {
    if (!handle_) return {};
    Result<> result = Traits::destroy(*backend_, handle_, site);
    if (result || !left_untouched(result.error().code())) forget();
    return result;
  }

 protected:
  HandleOwner(GpuBackend& backend, Handle handle) noexcept : backend_(&backend), handle_(handle) {}
  /// Null when it owns nothing.
  GpuBackend* backend() const noexcept { return backend_; }

 private:
  void forget() noexcept {
    handle_ = {};
    backend_ = nullptr;
  }
  void release_and_log() noexcept {
    if (!handle_) return;
    const std::uint64_t value = handle_.value;
    if (const Result<> result = release(); !result) log_release_failure(Traits::kNoun, value, result.error());
    forget();
  }

  GpuBackend* backend_ = nullptr;
  Handle handle_;
};

}  // namespace metrale::detail
