// SPDX-License-Identifier: Apache-2.0
#include "metrale/pinned_buffer.h"

#include <utility>

#include "core/release_log.h"
#include "metrale/handle_owner.h"

namespace metrale {

PinnedBuffer::PinnedBuffer(PinnedBuffer&& other) noexcept
    : backend_(std::exchange(other.backend_, nullptr)), bytes_(std::exchange(other.bytes_, {})) {}

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& other) noexcept {
  if (this != &other) {
    release_and_log();
    backend_ = std::exchange(other.backend_, nullptr);
    bytes_ = std::exchange(other.bytes_, {});
  }
  return *this;
}

PinnedBuffer::~PinnedBuffer() { release_and_log(); }

Result<PinnedBuffer> PinnedBuffer::create(GpuBackend& backend, std::uint64_t bytes, std::source_location site) {
  return PinnedBuffer(backend, METRALE_TRY(backend.alloc_host_pinned(bytes, site)));
}

Result<> PinnedBuffer::release(std::source_location site) {
  if (bytes_.empty()) return {};
  Result<> result = backend_->free_host_pinned(bytes_.data(), bytes_.size(), site);
  if (result || !detail::left_untouched(result.error().code())) {
    bytes_ = {};
    backend_ = nullptr;
  }
  return result;
}

void PinnedBuffer::release_and_log() noexcept {
  if (bytes_.empty()) return;
  const std::span<std::byte> bytes = bytes_;
  const Result<> result = detail::release_for_good(*backend_, [this] { return release(); });
  if (!result) {
    detail::log_warning_noexcept("{} bytes of pinned memory at {} were not freed and are left to the sweep: {}", bytes.size(),
                                 fmt::ptr(bytes.data()), result.error().to_string());
  }
  bytes_ = {};
  backend_ = nullptr;
}

}  // namespace metrale
