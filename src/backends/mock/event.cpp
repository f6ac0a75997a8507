// SPDX-License-Identifier: Apache-2.0
#include "backends/mock/mock_backend.h"

namespace metrale::mock {

Result<NativeEvent> MockBackend::do_create_event(bool timed) {
  METRALE_TRY(enter(Op::create_event));
  const NativeEvent event = METRALE_TRY(HostBackend::do_create_event(timed));
  record({.op = Op::create_event, .event = event});
  return event;
}

Result<> MockBackend::do_destroy_event(NativeEvent event) {
  METRALE_TRY(enter({.op = Op::destroy_event, .event = event}));
  return HostBackend::do_destroy_event(event);
}

Result<> MockBackend::do_record_event(NativeEvent event, NativeStream stream) {
  METRALE_TRY(enter({.op = Op::record_event, .stream = stream, .event = event}));
  return HostBackend::do_record_event(event, stream);
}

Result<> MockBackend::do_stream_wait_event(NativeStream stream, NativeEvent event) {
  METRALE_TRY(enter({.op = Op::stream_wait_event, .stream = stream, .event = event}));
  return HostBackend::do_stream_wait_event(stream, event);
}

Result<> MockBackend::do_event_synchronize(NativeEvent event) {
  METRALE_TRY(enter({.op = Op::event_synchronize, .event = event}));
  return HostBackend::do_event_synchronize(event);
}

Result<bool> MockBackend::do_event_query(NativeEvent event) {
  METRALE_TRY(enter({.op = Op::event_query, .event = event}));
  return HostBackend::do_event_query(event);
}

Result<std::int64_t> MockBackend::do_event_elapsed_ns(NativeEvent start, NativeEvent end) {
  METRALE_TRY(enter({.op = Op::event_elapsed_ns, .event = end}));
  return HostBackend::do_event_elapsed_ns(start, end);
}

}  // namespace metrale::mock
