// SPDX-License-Identifier: Apache-2.0
#include "backends/host/graph.h"

#include <algorithm>

#include "backends/host/host_backend.h"
#include "backends/host/status.h"

namespace metrale::host {

void Capture::step(std::size_t part) {
  Part& p = parts[part];
  if (p.seen.size() <= part) p.seen.resize(part + 1);
  p.seen[part] = ++p.num_recorded;
}

void Capture::merge(std::size_t part, const CaptureClock& clock) {
  CaptureClock& seen = parts[part].seen;
  if (seen.size() < clock.size()) seen.resize(clock.size());
  for (std::size_t i = 0; i < clock.size(); ++i) seen[i] = std::max(seen[i], clock[i]);
}

bool Capture::is_joined() const {
  const CaptureClock& seen = parts.front().seen;
  for (std::size_t i = 1; i < parts.size(); ++i) {
    if (i >= seen.size() || seen[i] < parts[i].num_recorded) return false;
  }
  return true;
}

Capture* Captures::find(std::uint64_t id) {
  for (const auto& capture : open_) {
    if (capture->id == id) return capture.get();
  }
  return nullptr;
}

Result<> Captures::begin(Stream& origin) {
  if (origin.is_capturing()) return Error(Errc::invalid_argument, "begin_capture: the stream is capturing already");
  auto capture = std::make_unique<Capture>();
  capture->id = next_id_++;
  open_.push_back(std::move(capture));
  join(*open_.back(), origin);
  return {};
}

void Captures::join(Capture& capture, Stream& stream) {
  capture.parts.push_back({&stream, 0, {}});
  stream.capture_part_ = capture.parts.size() - 1;
  capture.step(stream.capture_part_);  // joining is the first step, so that a stream without work must be joined back too
  stream.capture_.store(&capture, std::memory_order_release);
}

std::unique_ptr<Capture> Captures::close(const Stream& stream) {
  const auto it = std::find_if(open_.begin(), open_.end(),
                               [&](const auto& c) { return c.get() == stream.capture_.load(std::memory_order_relaxed); });
  if (it == open_.end()) return nullptr;
  std::unique_ptr<Capture> capture = std::move(*it);
  open_.erase(it);
  for (const Capture::Part& part : capture->parts) part.stream->capture_.store(nullptr, std::memory_order_release);
  return capture;
}

// ---- hooks ----

Result<> HostBackend::do_begin_capture(NativeStream stream) {
  METRALE_TRY(device().alive());
  return guarded("begin a capture", [&]() -> Result<> {
    std::lock_guard lock(device().captures.mutex);
    return device().captures.begin(stream_of(stream));
  });
}

Result<NativeGraph> HostBackend::do_end_capture(NativeStream stream) {
  return guarded("end a capture", [&]() -> Result<NativeGraph> {
    std::unique_ptr<Capture> capture;
    {
      std::lock_guard lock(device().captures.mutex);
      capture = device().captures.close(stream_of(stream));
    }
    if (capture == nullptr) return Error(Errc::invalid_argument, "end_capture: the stream is not capturing");
    METRALE_TRY(device().alive());
    if (capture->parts.front().stream != &stream_of(stream)) {
      return Error(Errc::invalid_argument, "end_capture: the capture began on another stream; end it there");
    }
    if (!capture->is_joined()) {
      return Error(
          Errc::invalid_argument,
          "end_capture: a stream that joined the capture was not joined back; let the first stream wait for an event recorded "
          "after the last work of the other");
    }
    return native(device().keep(std::make_unique<Graph>(std::move(capture->work))));
  });
}

Result<> HostBackend::do_abort_capture(NativeStream stream) {
  std::unique_ptr<Capture> capture;
  {
    std::lock_guard lock(device().captures.mutex);
    capture = device().captures.close(stream_of(stream));
  }
  return {};
}

Result<bool> HostBackend::do_stream_is_capturing(NativeStream stream) {
  METRALE_TRY(device().alive());
  return stream_of(stream).is_capturing();
}

Result<> HostBackend::do_launch_graph(NativeGraph graph, NativeStream stream) {
  METRALE_TRY(device().alive());
  Graph& g = graph_of(graph);
  Stream& s = stream_of(stream);
  std::lock_guard lock(g.mutex_);
  if (g.last_stream_ != nullptr && g.last_stream_ != &s && !g.last_stream_->is_done(g.last_ticket_)) {
    METRALE_TRY(s.submit([&](WorkBuffer& work) {
      auto& wait = work.append<WaitWork>();
      wait.stream = g.last_stream_;
      wait.ticket = g.last_ticket_;
    }));
  }
  g.last_ticket_ = METRALE_TRY(s.submit([&](WorkBuffer& work) { work.append<ReplayWork>().graph = &g; }));
  g.last_stream_ = &s;
  return {};
}

Result<> HostBackend::do_destroy_graph(NativeGraph graph) {
  return guarded("destroy a graph", [&]() -> Result<> {
    device().drop_graph(graph_of(graph));
    return {};
  });
}

}  // namespace metrale::host
