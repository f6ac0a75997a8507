// SPDX-License-Identifier: Apache-2.0
#include "backends/mock/mock_backend.h"

namespace metrale::mock {

Result<NativeStream> MockBackend::do_create_stream(int priority) {
  METRALE_TRY(enter(Op::create_stream));
  const NativeStream stream = METRALE_TRY(HostBackend::do_create_stream(priority));
  record({.op = Op::create_stream, .stream = stream});
  return stream;
}

Result<> MockBackend::do_destroy_stream(NativeStream stream) {
  METRALE_TRY(enter({.op = Op::destroy_stream, .stream = stream}));
  return HostBackend::do_destroy_stream(stream);
}

Result<NativeStream> MockBackend::do_wrap_stream(std::uint64_t value) {
  METRALE_TRY(enter({.op = Op::wrap_stream, .stream = {value}}));
  return HostBackend::do_wrap_stream(value);
}

Result<> MockBackend::do_synchronize(NativeStream stream) {
  METRALE_TRY(enter({.op = Op::synchronize, .stream = stream}));
  record_sync(stream);
  return HostBackend::do_synchronize(stream);
}

Result<> MockBackend::do_synchronize_for(NativeStream stream, std::chrono::nanoseconds timeout) {
  METRALE_TRY(enter({.op = Op::synchronize_for, .stream = stream}));
  record_sync(stream);
  return HostBackend::do_synchronize_for(stream, timeout);
}

Result<> MockBackend::do_synchronize_device() {
  METRALE_TRY(enter({.op = Op::synchronize_device}));
  return HostBackend::do_synchronize_device();
}

Result<bool> MockBackend::do_query(NativeStream stream) {
  METRALE_TRY(enter({.op = Op::query, .stream = stream}));
  return HostBackend::do_query(stream);
}

Result<> MockBackend::do_enqueue_host(NativeStream stream, std::function<void()> fn) {
  METRALE_TRY(enter({.op = Op::enqueue_host, .stream = stream}));
  return HostBackend::do_enqueue_host(stream, std::move(fn));
}

Result<> MockBackend::do_enqueue_native(NativeStream stream, NativeWork work) {
  METRALE_TRY(enter({.op = Op::enqueue_native, .stream = stream}));
  return work(stream.value);
}

}  // namespace metrale::mock
