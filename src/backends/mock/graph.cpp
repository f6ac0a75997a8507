// SPDX-License-Identifier: Apache-2.0
#include "backends/mock/mock_backend.h"

namespace metrale::mock {

Result<> MockBackend::do_begin_capture(NativeStream stream) {
  METRALE_TRY(enter({.op = Op::begin_capture, .stream = stream}));
  return HostBackend::do_begin_capture(stream);
}

// A failed end still ends the capture, as every backend does.
Result<NativeGraph> MockBackend::do_end_capture(NativeStream stream) {
  if (Result<> entered = enter({.op = Op::end_capture, .stream = stream}); !entered) {
    METRALE_TRY(HostBackend::do_abort_capture(stream));
    return Error(std::move(entered).error());
  }
  return HostBackend::do_end_capture(stream);
}

// A failed abort too: nobody could end the capture afterwards.
Result<> MockBackend::do_abort_capture(NativeStream stream) {
  Result<> entered = enter({.op = Op::abort_capture, .stream = stream});
  METRALE_TRY(HostBackend::do_abort_capture(stream));
  return entered;
}

Result<bool> MockBackend::do_stream_is_capturing(NativeStream stream) {
  METRALE_TRY(enter({.op = Op::stream_is_capturing, .stream = stream}));
  return HostBackend::do_stream_is_capturing(stream);
}

Result<> MockBackend::do_launch_graph(NativeGraph graph, NativeStream stream) {
  METRALE_TRY(enter({.op = Op::launch_graph, .stream = stream, .dst = graph.value}));
  return HostBackend::do_launch_graph(graph, stream);
}

Result<> MockBackend::do_destroy_graph(NativeGraph graph) {
  METRALE_TRY(enter({.op = Op::destroy_graph, .dst = graph.value}));
  return HostBackend::do_destroy_graph(graph);
}

}  // namespace metrale::mock
