// SPDX-License-Identifier: Apache-2.0
//
// DeviceBuffer: one block of device memory with an owner. It holds its backend by reference, so the backend outlives it, and gives
// the block back when it dies. Move-only; one thread at a time, while views of the memory go where they like.
#pragma once

#include <cstdint>
#include <source_location>

#include "metrale/backend.h"
#include "metrale/result.h"
#include "metrale/types.h"

namespace metrale {

class DeviceBuffer {
 public:
  /// Owns nothing.
  DeviceBuffer() noexcept = default;
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  /// Gives back what it held; a failure is logged.
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  /// Gives back what it holds; waits for the device if a destroyed graph still replays on it. A failure is logged, and the block
  /// stays on the ledger for the sweep.
  ~DeviceBuffer();

  /// Allocates `bytes` > 0 of device memory. Errors: as `GpuBackend::alloc`.
  static Result<DeviceBuffer> create(GpuBackend& backend, std::uint64_t bytes,
                                     std::source_location site = std::source_location::current());
  /// Allocates memory that host and device may both touch. Errors: as `GpuBackend::alloc_managed`.
  static Result<DeviceBuffer> create_managed(GpuBackend& backend, std::uint64_t bytes,
                                             std::source_location site = std::source_location::current());
  /// Allocates from the pool, ordered on `stream`.
  /// Lifetime: `stream` outlives the buffer, or the buffer is given back by `release_on`. Errors: as `GpuBackend::alloc_async`.
  static Result<DeviceBuffer> create_async(GpuBackend& backend, std::uint64_t bytes, StreamHandle stream,
                                           std::source_location site = std::source_location::current());

  /// Null when it owns nothing.
  DevicePtr ptr() const noexcept { return ptr_; }
  std::uint64_t size_bytes() const noexcept { return bytes_; }
  explicit operator bool() const noexcept { return static_cast<bool>(ptr_); }

  /// Gives the block back; again: a no-op.
  /// Ordering: as `GpuBackend::free`; a pooled block in the order of the stream it was created on.
  /// Errors: as `free` and `free_async`. The buffer still owns the block after in_use and capture_unsafe, and a pooled one after
  ///   invalid_argument (its stream has gone: use `release_on`); after others it is empty.
  Result<> release(std::source_location site = std::source_location::current());
  /// As `release`, in the order of another stream; the caller orders that one behind the block's last use.
  /// Errors: as `release`, and invalid_argument when the block is not pooled.
  Result<> release_on(StreamHandle stream, std::source_location site = std::source_location::current());
  /// Hands the block to the caller, who frees it.
  DevicePtr detach() noexcept;

 private:
  DeviceBuffer(GpuBackend& backend, DevicePtr ptr, std::uint64_t bytes, StreamHandle stream) noexcept
      : backend_(&backend), ptr_(ptr), bytes_(bytes), stream_(stream) {}
  void release_and_log() noexcept;

  GpuBackend* backend_ = nullptr;
  DevicePtr ptr_;
  std::uint64_t bytes_ = 0;
  StreamHandle stream_;  // null: not pooled
};

}  // namespace metrale
