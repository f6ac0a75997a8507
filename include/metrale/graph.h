// SPDX-License-Identifier: Apache-2.0
//
// Graph: recorded work with an owner; the memory it names cannot be freed while it lives. CaptureScope: the recording itself, which
// is aborted when an error leaves the scope, so that the stream runs work again. Both hold their backend by reference, so the
// backend outlives them, and are move-only. A Graph is for one thread at a time; a CaptureScope stays on the thread that began it.
#pragma once

#include <source_location>

#include "metrale/handle_owner.h"

namespace metrale {

namespace detail {
struct GraphTraits {
  using Handle = GraphHandle;
  static constexpr std::string_view kNoun = "graph";
  static Result<> destroy(GpuBackend& backend, GraphHandle graph, std::source_location site) {
    return backend.destroy_graph(graph, site);
  }
};
}  // namespace detail

class Graph : public detail::HandleOwner<detail::GraphTraits> {
 public:
  Graph() noexcept = default;
  /// Takes a graph that `GpuBackend::end_capture` made.
  Graph(GpuBackend& backend, GraphHandle graph) noexcept : HandleOwner(backend, graph) {}

  /// Replays in stream order. Errors: as `GpuBackend::launch_graph`, and invalid_argument when the owner is empty.
  Result<> launch(StreamHandle stream, std::source_location site = std::source_location::current()) const;
};

class CaptureScope {
 public:
  /// Begins to record the work enqueued on `stream`. Errors: as `GpuBackend::begin_capture`.
  static Result<CaptureScope> begin(GpuBackend& backend, StreamHandle stream,
                                    std::source_location site = std::source_location::current());

  CaptureScope(CaptureScope&& other) noexcept;
  CaptureScope& operator=(CaptureScope&&) = delete;
  CaptureScope(const CaptureScope&) = delete;
  CaptureScope& operator=(const CaptureScope&) = delete;
  /// Aborts the capture unless it was ended. A failure is logged.
  ~CaptureScope();

  bool active() const noexcept { return backend_ != nullptr; }
  StreamHandle stream() const noexcept { return stream_; }

  /// Tells the capture that its work uses the block containing `ptr`. Errors: as `GpuBackend::capture_uses`; invalid_argument when
  /// ended.
  Result<> uses(DevicePtr ptr, std::source_location site = std::source_location::current()) const;

  /// Ends the capture and makes a graph of it. The scope is over afterwards, whatever the result.
  /// Errors: as `GpuBackend::end_capture` (the capture is discarded), and invalid_argument when it has already ended.
  Result<Graph> end(std::source_location site = std::source_location::current());
  /// Ends and discards the capture; again, or after `end`: a no-op. Errors: as `GpuBackend::abort_capture_if_active`.
  Result<> abort(std::source_location site = std::source_location::current());

 private:
  CaptureScope(GpuBackend& backend, StreamHandle stream) noexcept : backend_(&backend), stream_(stream) {}

  GpuBackend* backend_ = nullptr;
  StreamHandle stream_;
};

}  // namespace metrale
