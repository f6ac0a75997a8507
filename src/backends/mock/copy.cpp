// SPDX-License-Identifier: Apache-2.0
#include "backends/mock/mock_backend.h"

namespace metrale::mock {

Result<> MockBackend::do_copy_h2d_async(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream stream, bool retained) {
  METRALE_TRY(enter(
      {.op = retained ? Op::copy_h2d_async_retained : Op::copy_h2d_async, .stream = stream, .dst = dst.address, .bytes = bytes}));
  count_h2d(bytes);
  return HostBackend::do_copy_h2d_async(dst, src, bytes, stream, retained);
}

Result<> MockBackend::do_copy_d2h_async(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) {
  METRALE_TRY(enter({.op = Op::copy_d2h_async, .stream = stream, .src = src.address, .bytes = bytes}));
  return HostBackend::do_copy_d2h_async(dst, src, bytes, stream);
}

Result<> MockBackend::do_copy_d2d_async(DevicePtr dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) {
  METRALE_TRY(enter({.op = Op::copy_d2d_async, .stream = stream, .dst = dst.address, .src = src.address, .bytes = bytes}));
  return HostBackend::do_copy_d2d_async(dst, src, bytes, stream);
}

Result<> MockBackend::do_copy_d2d_2d_async(const Copy2D& rectangle, NativeStream stream) {
  METRALE_TRY(enter({.op = Op::copy_d2d_2d_async,
                     .stream = stream,
                     .dst = rectangle.dst.address,
                     .src = rectangle.src.address,
                     .bytes = rectangle.width_bytes * rectangle.height}));
  return HostBackend::do_copy_d2d_2d_async(rectangle, stream);
}

Result<> MockBackend::do_copy_batch_async(std::span<const CopyDesc> copies, NativeStream stream, bool capturing) {
  METRALE_TRY(enter({.op = Op::copy_batch_async, .stream = stream}));
  return HostBackend::do_copy_batch_async(copies, stream, capturing);
}

Result<> MockBackend::do_copy_peer_async(DevicePtr dst, GpuBackend& from, DevicePtr src, std::uint64_t bytes, NativeStream stream) {
  METRALE_TRY(enter({.op = Op::copy_peer_async, .stream = stream, .dst = dst.address, .src = src.address, .bytes = bytes}));
  return HostBackend::do_copy_peer_async(dst, from, src, bytes, stream);
}

Result<> MockBackend::do_memset_async(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream stream) {
  METRALE_TRY(enter({.op = Op::memset_async, .stream = stream, .dst = dst.address, .bytes = bytes}));
  return HostBackend::do_memset_async(dst, value, bytes, stream);
}

Result<> MockBackend::do_copy_h2d(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream default_stream) {
  METRALE_TRY(enter({.op = Op::copy_h2d, .stream = default_stream, .dst = dst.address, .bytes = bytes}));
  count_h2d(bytes);
  return HostBackend::do_copy_h2d(dst, src, bytes, default_stream);
}

Result<> MockBackend::do_copy_d2h(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream default_stream) {
  METRALE_TRY(enter({.op = Op::copy_d2h, .stream = default_stream, .src = src.address, .bytes = bytes}));
  return HostBackend::do_copy_d2h(dst, src, bytes, default_stream);
}

Result<> MockBackend::do_copy_d2d(DevicePtr dst, DevicePtr src, std::uint64_t bytes, NativeStream default_stream) {
  METRALE_TRY(enter({.op = Op::copy_d2d, .stream = default_stream, .dst = dst.address, .src = src.address, .bytes = bytes}));
  return HostBackend::do_copy_d2d(dst, src, bytes, default_stream);
}

Result<> MockBackend::do_copy_d2h_on_stream(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) {
  METRALE_TRY(enter({.op = Op::copy_d2h_on_stream, .stream = stream, .src = src.address, .bytes = bytes}));
  return HostBackend::do_copy_d2h_on_stream(dst, src, bytes, stream);
}

Result<> MockBackend::do_memset(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream default_stream) {
  METRALE_TRY(enter({.op = Op::memset, .stream = default_stream, .dst = dst.address, .bytes = bytes}));
  return HostBackend::do_memset(dst, value, bytes, default_stream);
}

}  // namespace metrale::mock
