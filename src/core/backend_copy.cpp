// SPDX-License-Identifier: Apache-2.0
//
// GpuBackend: copies.
#include <algorithm>

#include <fmt/format.h>

#include "core/face_state.h"
#include "metrale/log.h"

namespace metrale {

using detail::FaceState;
using detail::StreamRecord;

namespace {
std::uint64_t address_of(const void* ptr) { return reinterpret_cast<std::uintptr_t>(ptr); }
}  // namespace

namespace detail {

Error FaceState::explain_range(std::string_view what, DevicePtr ptr, std::uint64_t bytes, const Site& site) const {
  if (const auto block = device.find(ptr)) {
    return Error(Errc::out_of_range,
                 fmt::format("{}: {} bytes at offset {} leave the {} bytes allocated at {}", what, bytes,
                             ptr.address - block->base.address, block->bytes, at(block->site)),
                 site);
  }
  std::string nearest = "no block is live";
  if (const auto block = device.nearest(ptr)) {
    nearest = fmt::format("the nearest is [{:#x}, +{}) allocated at {}", block->base.address, block->bytes, at(block->site));
  }
  return Error(Errc::out_of_range, fmt::format("{}: {:#x} lies in no known memory; {}", what, ptr.address, nearest), site);
}

Result<> FaceState::check_host(const void* ptr, std::uint64_t bytes, const Site& site) const {
  if (ptr != nullptr || bytes == 0) return {};
  return Error(Errc::invalid_argument, fmt::format("a host end of {} bytes is null", bytes), site);
}

Result<> FaceState::note_host_end(Op op, StreamRecord& stream, const void* ptr, std::uint64_t bytes, const Site& site) {
  if (host.check({address_of(ptr)}, bytes) == AllocLedger::Range::inside) {
    name_host(stream, ptr);
    return {};
  }
  if (stream.capture.load(std::memory_order_acquire) != 0) {
    return Error(
        Errc::capture_unsafe,
        fmt::format("{}: while capturing, the host end must be pinned memory, which the graph can keep; {} bytes at {} are not",
                    metrale::to_string(op), bytes, ptr),
        site);
  }
  num_pageable_copies.fetch_add(1, std::memory_order_relaxed);
  if (op == Op::copy_d2h_async && !warned_pageable.exchange(true, std::memory_order_relaxed)) {
    log(LogLevel::warning, fmt::format("copy_d2h_async into pageable memory may block in the driver; first seen at {}", at(site)));
  }
  return {};
}

Result<> FaceState::enqueue_h2d(SourceKept kept, DevicePtr dst, std::span<const std::byte> src, StreamHandle handle,
                                const Site& site) {
  const bool retained = kept == SourceKept::until_synchronised;
  OpRecord op{.op = retained ? Op::copy_h2d_async_retained : Op::copy_h2d_async,
              .stream = handle,
              .dst = dst.address,
              .src = address_of(src.data()),
              .bytes = src.size(),
              .site = site};
  return run(op, [&]() -> Result<> {
    StreamRecord* record = METRALE_TRY(stream_for_work(op.op, handle, site));
    if (src.empty()) return {};
    METRALE_TRY(check_host(src.data(), src.size(), site));
    METRALE_TRY(
        check_device(retained ? "copy_h2d_async_retained destination" : "copy_h2d_async destination", dst, src.size(), site));
    if (retained) METRALE_TRY(note_host_end(op.op, *record, src.data(), src.size(), site));
    METRALE_TRY(hooks.do_copy_h2d_async(dst, src.data(), src.size(), record->native, retained));
    name_device(*record, dst);
    return {};
  });
}

}  // namespace detail

std::uint64_t GpuBackend::num_pageable_copies() const noexcept {
  return face_->num_pageable_copies.load(std::memory_order_relaxed);
}

Result<> GpuBackend::copy_h2d(DevicePtr dst, std::span<const std::byte> src, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::copy_h2d,
              .stream = f.default_stream,
              .dst = dst.address,
              .src = address_of(src.data()),
              .bytes = src.size(),
              .site = site};
  return f.run(op, [&]() -> Result<> {
    METRALE_TRY(f.guard_thread(op.op, site));
    if (src.empty()) return {};
    METRALE_TRY(f.check_host(src.data(), src.size(), site));
    METRALE_TRY(f.check_device("copy_h2d destination", dst, src.size(), site));
    StreamRecord* stream = METRALE_TRY(f.stream(f.default_stream, site));
    return do_copy_h2d(dst, src.data(), src.size(), stream->native);
  });
}

Result<> GpuBackend::copy_d2h(std::span<std::byte> dst, DevicePtr src, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::copy_d2h,
              .stream = f.default_stream,
              .dst = address_of(dst.data()),
              .src = src.address,
              .bytes = dst.size(),
              .site = site};
  return f.run(op, [&]() -> Result<> {
    METRALE_TRY(f.guard_thread(op.op, site));
    if (dst.empty()) return {};
    METRALE_TRY(f.check_host(dst.data(), dst.size(), site));
    METRALE_TRY(f.check_device("copy_d2h source", src, dst.size(), site));
    StreamRecord* stream = METRALE_TRY(f.stream(f.default_stream, site));
    return do_copy_d2h(dst.data(), src, dst.size(), stream->native);
  });
}

Result<> GpuBackend::copy_d2d(DevicePtr dst, DevicePtr src, std::uint64_t bytes, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::copy_d2d, .stream = f.default_stream, .dst = dst.address, .src = src.address, .bytes = bytes, .site = site};
  return f.run(op, [&]() -> Result<> {
    METRALE_TRY(f.guard_thread(op.op, site));
    if (bytes == 0) return {};
    METRALE_TRY(f.check_device("copy_d2d destination", dst, bytes, site));
    METRALE_TRY(f.check_device("copy_d2d source", src, bytes, site));
    StreamRecord* stream = METRALE_TRY(f.stream(f.default_stream, site));
    return do_copy_d2d(dst, src, bytes, stream->native);
  });
}

Result<> GpuBackend::copy_d2h_on_stream(std::span<std::byte> dst, DevicePtr src, StreamHandle stream, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::copy_d2h_on_stream,
              .stream = stream,
              .dst = address_of(dst.data()),
              .src = src.address,
              .bytes = dst.size(),
              .site = site};
  return f.run(op, [&]() -> Result<> {
    METRALE_TRY(f.guard_thread(op.op, site));
    StreamRecord* record = METRALE_TRY(f.stream(stream, site));
    METRALE_TRY(f.guard_not_captured(op.op, record->capture.load(std::memory_order_acquire), site));
    if (dst.empty()) return {};
    METRALE_TRY(f.check_host(dst.data(), dst.size(), site));
    METRALE_TRY(f.check_device("copy_d2h_on_stream source", src, dst.size(), site));
    return do_copy_d2h_on_stream(dst.data(), src, dst.size(), record->native);
  });
}

Result<> GpuBackend::copy_h2d_async(DevicePtr dst, std::span<const std::byte> src, StreamHandle stream, Site site) {
  return face_->enqueue_h2d(detail::SourceKept::until_return, dst, src, stream, site);
}

Result<> GpuBackend::copy_h2d_async_retained(DevicePtr dst, std::span<const std::byte> src, StreamHandle stream, Site site) {
  return face_->enqueue_h2d(detail::SourceKept::until_synchronised, dst, src, stream, site);
}

Result<> GpuBackend::copy_d2h_async(std::span<std::byte> dst, DevicePtr src, StreamHandle stream, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::copy_d2h_async,
              .stream = stream,
              .dst = address_of(dst.data()),
              .src = src.address,
              .bytes = dst.size(),
              .site = site};
  return f.run(op, [&]() -> Result<> {
    StreamRecord* record = METRALE_TRY(f.stream_for_work(op.op, stream, site));
    if (dst.empty()) return {};
    METRALE_TRY(f.check_host(dst.data(), dst.size(), site));
    METRALE_TRY(f.check_device("copy_d2h_async source", src, dst.size(), site));
    METRALE_TRY(f.note_host_end(op.op, *record, dst.data(), dst.size(), site));
    METRALE_TRY(do_copy_d2h_async(dst.data(), src, dst.size(), record->native));
    f.name_device(*record, src);
    return {};
  });
}

Result<> GpuBackend::copy_d2d_async(DevicePtr dst, DevicePtr src, std::uint64_t bytes, StreamHandle stream, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::copy_d2d_async, .stream = stream, .dst = dst.address, .src = src.address, .bytes = bytes, .site = site};
  return f.run(op, [&]() -> Result<> {
    StreamRecord* record = METRALE_TRY(f.stream_for_work(op.op, stream, site));
    if (bytes == 0) return {};
    METRALE_TRY(f.check_device("copy_d2d_async destination", dst, bytes, site));
    METRALE_TRY(f.check_device("copy_d2d_async source", src, bytes, site));
    METRALE_TRY(do_copy_d2d_async(dst, src, bytes, record->native));
    f.name_device(*record, dst);
    f.name_device(*record, src);
    return {};
  });
}

Result<> GpuBackend::copy_d2d_2d_async(const Copy2D& r, StreamHandle stream, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::copy_d2d_2d_async,
              .stream = stream,
              .dst = r.dst.address,
              .src = r.src.address,
              .bytes = r.width_bytes * r.height,
              .site = site};
  return f.run(op, [&]() -> Result<> {
    StreamRecord* record = METRALE_TRY(f.stream_for_work(op.op, stream, site));
    if (r.width_bytes > r.dst_pitch_bytes || r.width_bytes > r.src_pitch_bytes) {
      return Error(Errc::invalid_argument,
                   fmt::format("copy_d2d_2d_async: a width of {} bytes exceeds the pitch of {} (destination) or {} (source)",
                               r.width_bytes, r.dst_pitch_bytes, r.src_pitch_bytes),
                   site);
    }
    if (r.width_bytes == 0 || r.height == 0) return {};
    const auto extent = [&](std::uint64_t pitch) -> std::optional<std::uint64_t> {
      std::uint64_t rows = 0;
      std::uint64_t bytes = 0;
      if (__builtin_mul_overflow(r.height - 1, pitch, &rows) || __builtin_add_overflow(rows, r.width_bytes, &bytes))
        return std::nullopt;
      return bytes;
    };
    const auto dst_extent = extent(r.dst_pitch_bytes);
    const auto src_extent = extent(r.src_pitch_bytes);
    if (!dst_extent || !src_extent) return Error(Errc::out_of_range, "copy_d2d_2d_async: the rectangle's size overflows", site);
    METRALE_TRY(f.check_device("copy_d2d_2d_async destination", r.dst, *dst_extent, site));
    METRALE_TRY(f.check_device("copy_d2d_2d_async source", r.src, *src_extent, site));
    METRALE_TRY(do_copy_d2d_2d_async(r, record->native));
    f.name_device(*record, r.dst);
    f.name_device(*record, r.src);
    return {};
  });
}

Result<> GpuBackend::copy_batch_async(std::span<const CopyDesc> copies, StreamHandle stream, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::copy_batch_async, .num_args = static_cast<std::uint32_t>(copies.size()), .stream = stream, .site = site};
  for (const CopyDesc& copy : copies) op.bytes += copy.bytes;
  return f.run(op, [&]() -> Result<> {
    StreamRecord* record = METRALE_TRY(f.stream_for_work(op.op, stream, site));
    std::vector<CopyDesc> real;
    real.reserve(copies.size());
    // Everything is checked before anything is enqueued or named.
    for (std::size_t i = 0; i < copies.size(); ++i) {
      const CopyDesc& c = copies[i];
      if (c.bytes == 0) continue;
      Result<> ok;
      if (c.host_src != nullptr && c.host_dst != nullptr) {
        ok = Error(Errc::invalid_argument, "both ends are on the host", site);
      } else {
        if (c.host_dst == nullptr) ok = f.check_device("destination", c.dst, c.bytes, site);
        if (ok && c.host_src == nullptr) ok = f.check_device("source", c.src, c.bytes, site);
      }
      const void* host_end = c.host_src != nullptr ? c.host_src : c.host_dst;
      if (ok && host_end != nullptr && record->capture.load(std::memory_order_acquire) != 0 &&
          f.host.check({address_of(host_end)}, c.bytes) != AllocLedger::Range::inside) {
        ok = Error(Errc::capture_unsafe, "while capturing, the host end must be pinned memory", site);
      }
      if (!ok) return Error(std::move(ok).error()).with_note(fmt::format("copy {} of {} in copy_batch_async", i, copies.size()));
      real.push_back(c);
    }
    if (real.empty()) return {};
    for (const CopyDesc& c : real) {
      const void* host_end = c.host_src != nullptr ? c.host_src : c.host_dst;
      if (host_end != nullptr) METRALE_TRY(f.note_host_end(op.op, *record, host_end, c.bytes, site));
    }
    // Before they are recorded: where the driver refuses one, those before it are in the graph.
    for (const CopyDesc& c : real) {
      if (c.host_dst == nullptr) f.name_device(*record, c.dst);
      if (c.host_src == nullptr) f.name_device(*record, c.src);
    }
    return do_copy_batch_async(real, record->native, record->capture.load(std::memory_order_acquire) != 0);
  });
}

Result<> GpuBackend::copy_peer_async(DevicePtr dst, GpuBackend& from, DevicePtr src, std::uint64_t bytes, StreamHandle stream,
                                     Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::copy_peer_async, .stream = stream, .dst = dst.address, .src = src.address, .bytes = bytes, .site = site};
  return f.run(op, [&]() -> Result<> {
    StreamRecord* record = METRALE_TRY(f.stream_for_work(op.op, stream, site));
    if (record->capture.load(std::memory_order_acquire) != 0) {
      return Error(Errc::capture_unsafe, "copy_peer_async: a graph cannot name another device's memory", site);
    }
    if (bytes == 0) return {};
    // Not device_lost: that would be this device.
    if (const Result<> healthy = from.health(site); !healthy) {
      return Error(Errc::invalid_argument,
                   fmt::format("copy_peer_async: the source's device is gone: {}", healthy.error().message()), site);
    }
    METRALE_TRY(f.check_device("copy_peer_async destination", dst, bytes, site));
    METRALE_TRY(from.face_->check_device("copy_peer_async source", src, bytes, site));
    return do_copy_peer_async(dst, from, src, bytes, record->native);
  });
}

}  // namespace metrale
