// SPDX-License-Identifier: Apache-2.0
//
// PinnedBuffer: page-locked host memory with an owner, zeroed when made. It holds its backend by reference, so the backend outlives
// it. Move-only; one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <span>
#include <type_traits>

#include "metrale/backend.h"
#include "metrale/result.h"
#include "metrale/types.h"

namespace metrale {

class PinnedBuffer {
 public:
  /// Owns nothing.
  PinnedBuffer() noexcept = default;
  PinnedBuffer(PinnedBuffer&& other) noexcept;
  /// Gives back what it held; a failure is logged.
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept;
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  /// Gives back what it holds; waits for the device if a destroyed graph still replays on it. A failure is logged, and the memory
  /// stays on the ledger for the sweep.
  ~PinnedBuffer();

  /// Allocates `bytes` > 0, aligned to kPinnedAlignment and zeroed. Errors: as `GpuBackend::alloc_host_pinned`.
  static Result<PinnedBuffer> create(GpuBackend& backend, std::uint64_t bytes,
                                     std::source_location site = std::source_location::current());

  std::span<std::byte> bytes() const noexcept { return bytes_; }
  std::uint64_t size_bytes() const noexcept { return bytes_.size(); }
  explicit operator bool() const noexcept { return !bytes_.empty(); }
  /// The memory as whole elements of `T`; a rest shorter than one is left out.
  template <class T>
    requires(std::is_trivially_copyable_v<T> && alignof(T) <= kPinnedAlignment)
  std::span<T> as() const noexcept {
    return {reinterpret_cast<T*>(bytes_.data()), bytes_.size() / sizeof(T)};
  }

  /// Gives the memory back; again: a no-op.
  /// Errors: as `GpuBackend::free_host_pinned`. After in_use and capture_unsafe the buffer still owns it; after others it is empty.
  Result<> release(std::source_location site = std::source_location::current());

 private:
  PinnedBuffer(GpuBackend& backend, std::span<std::byte> bytes) noexcept : backend_(&backend), bytes_(bytes) {}
  void release_and_log() noexcept;

  GpuBackend* backend_ = nullptr;
  std::span<std::byte> bytes_;
};

}  // namespace metrale
