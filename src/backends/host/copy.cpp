// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "backends/host/host_backend.h"

namespace metrale::host {

namespace {

// Staged bytes up to this size lie in the record itself.
constexpr std::uint64_t kInRecord = 4 << 10;

void append_copy(WorkBuffer& work, std::byte* dst, const std::byte* src, std::uint64_t bytes) {
  auto& copy = work.append<CopyWork>();
  copy.dst = dst;
  copy.src = src;
  copy.bytes = bytes;
  copy.owned = nullptr;
}

/// A copy that owns its source.
void append_staged_copy(WorkBuffer& work, std::byte* dst, const std::byte* src, std::uint64_t bytes) {
  if (bytes <= kInRecord) {
    auto& copy = work.append<CopyWork>(bytes);
    std::byte* staged = WorkBuffer::payload(copy);
    std::memcpy(staged, src, bytes);
    copy.dst = dst;
    copy.src = staged;
    copy.bytes = bytes;
    copy.owned = nullptr;
    return;
  }
  std::unique_ptr<std::byte[]> staged(new std::byte[bytes]);
  std::memcpy(staged.get(), src, bytes);
  auto& copy = work.append<CopyWork>();
  copy.dst = dst;
  copy.src = staged.get();
  copy.bytes = bytes;
  copy.owned = staged.release();
}

Result<> submit_copy(Stream& stream, bool may_run_now, std::byte* dst, const std::byte* src, std::uint64_t bytes) {
  METRALE_TRY(stream.submit(
      may_run_now, [&] { std::memmove(dst, src, bytes); }, [&](WorkBuffer& work) { append_copy(work, dst, src, bytes); }));
  return {};
}

}  // namespace

// ---- hooks ----

Result<> HostBackend::do_copy_h2d_async(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream stream, bool retained) {
  METRALE_TRY(device().alive());
  std::byte* to = METRALE_TRY(do_resolve(dst, bytes));
  const auto* from = static_cast<const std::byte*>(src);
  // A captured copy replays, so what it reads at each replay must not move: only a retained source is pinned memory that stays.
  if (retained) return submit_copy(stream_of(stream), bytes <= device().run_now_bytes(), to, from, bytes);
  // Staging would copy the bytes once in any case, so on an idle stream they go to where they belong, however many.
  METRALE_TRY(stream_of(stream).submit(
      true, [&] { std::memmove(to, from, bytes); }, [&](WorkBuffer& work) { append_staged_copy(work, to, from, bytes); }));
  return {};
}

Result<> HostBackend::do_copy_d2h_async(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) {
  METRALE_TRY(device().alive());
  const std::byte* from = METRALE_TRY(do_resolve(src, bytes));
  return submit_copy(stream_of(stream), bytes <= device().run_now_bytes(), static_cast<std::byte*>(dst), from, bytes);
}

Result<> HostBackend::do_copy_d2d_async(DevicePtr dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) {
  METRALE_TRY(device().alive());
  std::byte* to = METRALE_TRY(do_resolve(dst, bytes));
  const std::byte* from = METRALE_TRY(do_resolve(src, bytes));
  return submit_copy(stream_of(stream), bytes <= device().run_now_bytes(), to, from, bytes);
}

Result<> HostBackend::do_copy_d2d_2d_async(const Copy2D& r, NativeStream stream) {
  METRALE_TRY(device().alive());
  if (r.width_bytes == 0 || r.height == 0) return {};
  std::byte* to = METRALE_TRY(do_resolve(r.dst, (r.height - 1) * r.dst_pitch_bytes + r.width_bytes));
  const std::byte* from = METRALE_TRY(do_resolve(r.src, (r.height - 1) * r.src_pitch_bytes + r.width_bytes));
  const auto fill_in = [&](Copy2DWork& copy) {
    copy.dst = to;
    copy.src = from;
    copy.dst_pitch = r.dst_pitch_bytes;
    copy.src_pitch = r.src_pitch_bytes;
    copy.width = r.width_bytes;
    copy.height = r.height;
  };
  METRALE_TRY(stream_of(stream).submit(
      r.width_bytes * r.height <= device().run_now_bytes(),
      [&] {
        Copy2DWork copy{};
        fill_in(copy);
        copy.run();
      },
      [&](WorkBuffer& work) { fill_in(work.append<Copy2DWork>()); }));
  return {};
}

Result<> HostBackend::do_copy_peer_async(DevicePtr dst, GpuBackend& from, DevicePtr src, std::uint64_t bytes, NativeStream stream) {
  METRALE_TRY(device().alive());
  auto* peer = dynamic_cast<HostBackend*>(&from);
  if (peer == nullptr) {
    return Error(Errc::unsupported,
                 "copy_peer_async: the other device is no host device, whose memory the host could read; copy by way "
                 "of pinned memory");
  }
  std::byte* to = METRALE_TRY(do_resolve(dst, bytes));
  const std::byte* source = METRALE_TRY(peer->do_resolve(src, bytes));
  // The source is read during the call: its owner knows nothing of our streams, and may free it before this one comes to the copy.
  METRALE_TRY(stream_of(stream).submit(
      true, [&] { std::memmove(to, source, bytes); }, [&](WorkBuffer& work) { append_staged_copy(work, to, source, bytes); }));
  return {};
}

Result<> HostBackend::do_memset_async(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream stream) {
  METRALE_TRY(device().alive());
  std::byte* to = METRALE_TRY(do_resolve(dst, bytes));
  METRALE_TRY(stream_of(stream).submit(
      bytes <= device().run_now_bytes(), [&] { std::memset(to, value, bytes); },
      [&](WorkBuffer& work) {
        auto& fill = work.append<FillWork>();
        fill.dst = to;
        fill.bytes = bytes;
        fill.value = value;
      }));
  return {};
}

// The blocking forms wait for their stream and then work in the caller, without a way through the queue.

Result<> HostBackend::do_copy_h2d(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream default_stream) {
  METRALE_TRY(HostBackend::do_synchronize(default_stream));
  std::memmove(METRALE_TRY(do_resolve(dst, bytes)), src, bytes);
  return {};
}

Result<> HostBackend::do_copy_d2h(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream default_stream) {
  METRALE_TRY(HostBackend::do_synchronize(default_stream));
  std::memmove(dst, METRALE_TRY(do_resolve(src, bytes)), bytes);
  return {};
}

Result<> HostBackend::do_copy_d2d(DevicePtr dst, DevicePtr src, std::uint64_t bytes, NativeStream default_stream) {
  METRALE_TRY(HostBackend::do_synchronize(default_stream));
  std::memmove(METRALE_TRY(do_resolve(dst, bytes)), METRALE_TRY(do_resolve(src, bytes)), bytes);
  return {};
}

Result<> HostBackend::do_copy_d2h_on_stream(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) {
  METRALE_TRY(HostBackend::do_synchronize(stream));
  std::memmove(dst, METRALE_TRY(do_resolve(src, bytes)), bytes);
  return {};
}

Result<> HostBackend::do_memset(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream default_stream) {
  METRALE_TRY(HostBackend::do_synchronize(default_stream));
  std::memset(METRALE_TRY(do_resolve(dst, bytes)), value, bytes);
  return {};
}

}  // namespace metrale::host
