// SPDX-License-Identifier: Apache-2.0
#include "metrale/graph.h"

#include "core/release_log.h"

namespace metrale {

Result<> Graph::launch(StreamHandle stream, std::source_location site) const {
  if (backend() == nullptr) return Error(Errc::invalid_argument, "this Graph owns nothing; end a capture first", site);
  return backend()->launch_graph(handle(), stream, site);
}

Result<CaptureScope> CaptureScope::begin(GpuBackend& backend, StreamHandle stream, std::source_location site) {
  METRALE_TRY(backend.begin_capture(stream, site));
  return CaptureScope(backend, stream);
}

CaptureScope::CaptureScope(CaptureScope&& other) noexcept
    : backend_(std::exchange(other.backend_, nullptr)), stream_(std::exchange(other.stream_, {})) {}

CaptureScope::~CaptureScope() {
  const StreamHandle stream = stream_;
  if (const Result<> result = abort(); !result) {
    detail::log_warning_noexcept("the capture on stream {:#x} was not aborted: {}", stream.value, result.error().to_string());
  }
}

Result<> CaptureScope::uses(DevicePtr ptr, std::source_location site) const {
  if (backend_ == nullptr) return Error(Errc::invalid_argument, "this capture has ended; name memory before end()", site);
  return backend_->capture_uses(stream_, ptr, site);
}

Result<Graph> CaptureScope::end(std::source_location site) {
  if (backend_ == nullptr) return Error(Errc::invalid_argument, "this capture has ended already", site);
  Result<GraphHandle> graph = backend_->end_capture(stream_, site);
  if (graph) return Graph(*std::exchange(backend_, nullptr), *graph);
  // Whatever went wrong, the stream must run work again; a no-op where the failed end already discarded the capture.
  if (const Result<> aborted = abort(site); !aborted) {
    return std::move(graph).error().with_note("and the abort failed: " + aborted.error().to_string());
  }
  return std::move(graph).error();
}

Result<> CaptureScope::abort(std::source_location site) {
  if (backend_ == nullptr) return {};
  return std::exchange(backend_, nullptr)->abort_capture_if_active(stream_, site);
}

}  // namespace metrale
