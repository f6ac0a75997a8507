// SPDX-License-Identifier: Apache-2.0
#include "metrale/device_buffer.h"

#include <fmt/format.h>

#include <utility>

#include "core/release_log.h"
#include "metrale/handle_owner.h"

namespace metrale {

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : backend_(std::exchange(other.backend_, nullptr)),
      ptr_(std::exchange(other.ptr_, {})),
      bytes_(std::exchange(other.bytes_, 0)),
      stream_(std::exchange(other.stream_, {})) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  if (this != &other) {
    release_and_log();
    backend_ = std::exchange(other.backend_, nullptr);
    ptr_ = std::exchange(other.ptr_, {});
    bytes_ = std::exchange(other.bytes_, 0);
    stream_ = std::exchange(other.stream_, {});
  }
  return *this;
}

DeviceBuffer::~DeviceBuffer() { release_and_log(); }

Result<DeviceBuffer> DeviceBuffer::create(GpuBackend& backend, std::uint64_t bytes, std::source_location site) {
  return DeviceBuffer(backend, METRALE_TRY(backend.alloc(bytes, site)), bytes, {});
}

Result<DeviceBuffer> DeviceBuffer::create_managed(GpuBackend& backend, std::uint64_t bytes, std::source_location site) {
  return DeviceBuffer(backend, METRALE_TRY(backend.alloc_managed(bytes, site)), bytes, {});
}

Result<DeviceBuffer> DeviceBuffer::create_async(GpuBackend& backend, std::uint64_t bytes, StreamHandle stream,
                                                std::source_location site) {
  return DeviceBuffer(backend, METRALE_TRY(backend.alloc_async(bytes, stream, site)), bytes, stream);
}

Result<> DeviceBuffer::release(std::source_location site) {
  if (!ptr_) return {};
  if (stream_) return release_on(stream_, site);
  Result<> result = backend_->free(ptr_, site);
  if (result || !detail::left_untouched(result.error().code())) detach();
  return result;
}

Result<> DeviceBuffer::release_on(StreamHandle stream, std::source_location site) {
  if (!ptr_) return {};
  if (!stream_) {
    return Error(Errc::invalid_argument,
                 fmt::format("release {} bytes at {:#x} on a stream: the block is not pooled; use release()", bytes_, ptr_.address),
                 site);
  }
  Result<> result = backend_->free_async(ptr_, stream, site);
  // A stream that has gone is the usual invalid_argument, and says nothing against the block.
  if (result || !(detail::left_untouched(result.error().code()) || result.error().code() == Errc::invalid_argument)) detach();
  return result;
}

DevicePtr DeviceBuffer::detach() noexcept {
  backend_ = nullptr;
  bytes_ = 0;
  stream_ = {};
  return std::exchange(ptr_, {});
}

void DeviceBuffer::release_and_log() noexcept {
  if (!ptr_) return;
  const DevicePtr ptr = ptr_;
  const std::uint64_t bytes = bytes_;
  const Result<> result = detail::release_for_good(*backend_, [this] { return release(); });
  if (!result) {
    detail::log_warning_noexcept("{} bytes of device memory at {:#x} were not freed and are left to the sweep: {}", bytes,
                                 ptr.address, result.error().to_string());
  }
  detach();
}

}  // namespace metrale
