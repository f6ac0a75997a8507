// SPDX-License-Identifier: Apache-2.0
//
// GpuBackend: capture and graphs.
#include <algorithm>

#include <fmt/format.h>

#include "core/face_state.h"

namespace metrale {

using detail::at;
using detail::Capture;
using detail::FaceState;
using detail::GraphRecord;
using detail::NamedBlock;
using detail::StreamRecord;
using detail::Undo;

Result<> GpuBackend::begin_capture(StreamHandle stream, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::begin_capture, .stream = stream, .site = site};
  return f.run(op, [&]() -> Result<> {
    StreamRecord* record = METRALE_TRY(f.stream(stream, site));
    if (record->is_default) {
      return Error(Errc::invalid_argument, "begin_capture: the default stream serves blocking copies; capture a stream of your own",
                   site);
    }
    if (const auto open = f.captures.summary(record->capture.load(std::memory_order_acquire)); open) {
      if (!open->abort_requested || !open->mine) {
        return Error(Errc::invalid_argument,
                     fmt::format("begin_capture: the stream takes part in a capture begun at {}", at(open->site)), site);
      }
      METRALE_TRY(f.discard_capture(open->id, open->origin));
    }
    f.mark_replays_on(*record);
    METRALE_TRY(do_begin_capture(record->native));
    Undo abort([&] { static_cast<void>(do_abort_capture(record->native).has_value()); });
    record->capture.store(f.captures.open(stream, site), std::memory_order_release);
    abort.keep();
    return {};
  });
}

Result<GraphHandle> GpuBackend::end_capture(StreamHandle stream, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::end_capture, .stream = stream, .site = site};
  return f.run(op, [&]() -> Result<GraphHandle> {
    StreamRecord* record = METRALE_TRY(f.stream(stream, site));
    const auto open = f.captures.summary(record->capture.load(std::memory_order_acquire));
    if (!open) return Error(Errc::invalid_argument, "end_capture: the stream is not capturing", site);
    const StreamRecord* origin = f.streams.find(open->origin.value);
    if (origin == nullptr || origin->native != record->native) {
      return Error(Errc::invalid_argument,
                   fmt::format("end_capture: the stream only joined the capture begun at {}; end it on the stream it began on",
                               at(open->site)),
                   site);
    }
    if (!open->mine) {
      return Error(Errc::invalid_argument,
                   fmt::format("end_capture: another thread began this capture at {} and must end it", at(open->site)), site);
    }
    METRALE_TRY(f.guard_enqueue(op.op, *record, site));

    auto native = FaceState::caught(op.op, site, [&] { return do_end_capture(record->native); });
    std::optional<Capture> capture = f.close_capture(open->id);
    Undo drop_names([&] { f.drop_names(*capture); });
    if (!native) return Error(std::move(native).error());
    Undo destroy([&] { static_cast<void>(do_destroy_graph(*native).has_value()); });
    // Memory that only the driver's view of the graph shows: library launches.
    if (const auto addresses = do_graph_addresses(*native)) {
      for (const DevicePtr address : *addresses) {
        const auto block = f.device.find(address);
        if (!block) continue;
        // Entered before it is counted, so that the count is undone with the entry.
        const auto [entry, is_new] = capture->names.try_emplace(block->base.address);
        if (!is_new) continue;
        const auto named = f.device.add_graph_ref(block->base);
        if (named) {
          entry->second = {false, named->base, named->generation};
        } else {
          capture->names.erase(entry);
        }
      }
    }
    std::vector<NamedBlock> names;
    names.reserve(capture->names.size());
    for (const auto& [key, name] : capture->names) names.push_back(name);
    const std::uint64_t value = f.graphs.insert([&](GraphRecord& graph, std::uint64_t) {
      std::lock_guard lock(graph.mutex);
      graph.native = *native;
      graph.capture_site = open->site;
      graph.names = std::move(names);
      graph.launched_on.clear();
      graph.last_launched_on.store(0, std::memory_order_relaxed);
      graph.pending_replays.clear();
    });
    if (value == 0) {
      Error error(Errc::internal, "no graph handle is left", site);
      destroy.keep();
      return f.after_undoing(std::move(error), "the graph", do_destroy_graph(*native), op);
    }
    destroy.keep();
    drop_names.keep();
    op.dst = value;
    return GraphHandle{value};
  });
}

Result<> GpuBackend::abort_capture_if_active(StreamHandle stream, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::abort_capture, .stream = stream, .site = site};
  return f.run_always(op, [&]() -> Result<> {
    StreamRecord* record = f.streams.find(stream.value);
    if (record == nullptr) {
      if (!f.usable() || !stream) return {};
      return METRALE_TRY(f.stream(stream, site)), Result<>();
    }
    const auto open = f.captures.summary(record->capture.load(std::memory_order_acquire));
    if (!open) return {};
    if (open->mine || !f.usable()) return f.discard_capture(open->id, open->origin);
    f.captures.with(open->id, [&](Capture& capture) {
      if (capture.abort_requested) return;
      capture.abort_requested = true;
      capture.abort_site = site;
    });
    return {};
  });
}

bool GpuBackend::stream_is_capturing(StreamHandle stream, Site site) {
  FaceState& f = *face_;
  if (!f.capabilities.has(Capability::graphs)) return false;
  OpRecord op{.op = Op::stream_is_capturing, .stream = stream, .site = site};
  const Result<bool> capturing = f.run(op, [&]() -> Result<bool> {
    StreamRecord* record = METRALE_TRY(f.stream(stream, site));
    if (record->capture.load(std::memory_order_acquire) != 0) return true;
    return do_stream_is_capturing(record->native);
  });
  return capturing.value_or(true);
}

Result<> GpuBackend::capture_uses(StreamHandle stream, DevicePtr ptr, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::capture_uses, .stream = stream, .src = ptr.address, .site = site};
  return f.run(op, [&]() -> Result<> {
    StreamRecord* record = METRALE_TRY(f.stream_for_work(op.op, stream, site));
    if (f.device.check(ptr, 1) != AllocLedger::Range::inside) return f.explain_range("capture_uses", ptr, 1, site);
    f.name_device(*record, ptr);
    return {};
  });
}

// As launch_typed: nearly every replay takes the short way.
Result<> GpuBackend::launch_graph(GraphHandle graph, StreamHandle stream, Site site) {
  FaceState& f = *face_;
  FlightRecorder* const recorder = f.recorder.get();
  const GraphRecord* g = f.graphs.find(graph.value);
  const StreamRecord* s = f.streams.find(stream.value);
  if (!f.usable() || g == nullptr || s == nullptr || s->capture.load(std::memory_order_acquire) != 0 ||
      g->last_launched_on.load(std::memory_order_acquire) != stream.value) [[unlikely]]
    return f.replay_checked(graph, stream, site);
  return [&] {
    const std::uint64_t place = recorder == nullptr ? 0 : recorder->claim();
    Result<> launched = FaceState::caught(Op::launch_graph, site, [&] { return do_launch_graph(g->native, s->native); });
    if (!launched || f.has_observers.load(std::memory_order_relaxed)) [[unlikely]] {
      launched = f.finish_replay(graph, stream, site, std::move(launched), detail::Recording::of(recorder, place));
    } else if (recorder != nullptr) [[likely]] {
      recorder->fill_replay(place, FaceState::cheap_now(), stream, site, graph);
    }
    return launched;
  }();
}

Result<> FaceState::replay_checked(GraphHandle handle, StreamHandle on, const Site& site) {
  if (!usable()) return hooks.health(site);
  if (refused_ops[static_cast<std::size_t>(Op::launch_graph)]) {
    return caught(Op::launch_graph, site, [&]() -> Result<> { return unsupported(Op::launch_graph, site); });
  }
  Recording recording;
  const auto replay = [&]() -> Result<> {
    GraphRecord* g = METRALE_TRY(graph(handle, site));
    StreamRecord* s = METRALE_TRY(stream_for_work(Op::launch_graph, on, site));
    METRALE_TRY(guard_not_captured(Op::launch_graph, s->capture.load(std::memory_order_acquire), site));
    if (g->last_launched_on.load(std::memory_order_acquire) != on.value) {
      // Before the launch, which cannot be taken back: a stream without a replay does no harm here.
      std::lock_guard lock(g->mutex);
      if (std::find(g->launched_on.begin(), g->launched_on.end(), on) == g->launched_on.end()) g->launched_on.push_back(on);
      g->last_launched_on.store(on.value, std::memory_order_release);
    }
    recording = claim_place();
    return hooks.do_launch_graph(g->native, s->native);
  };
  Result<> launched = caught(Op::launch_graph, site, replay);
  return finish_replay(handle, on, site, std::move(launched), recording);
}

Result<> FaceState::finish_replay(GraphHandle handle, StreamHandle on, const Site& site, Result<> launched, Recording recording) {
  OpRecord op{.op = Op::launch_graph, .stream = on, .dst = handle.value, .site = site};
  fill_place(recording, op, launched);
  return conclude(std::move(launched), op, recording);
}

Result<> GpuBackend::destroy_graph(GraphHandle graph, Site site) {
  if (!graph) return {};
  FaceState& f = *face_;
  OpRecord op{.op = Op::destroy_graph, .dst = graph.value, .site = site};
  return f.run_always(op, [&]() -> Result<> {
    if (f.usable()) METRALE_TRY(f.graph(graph, site));
    if (!METRALE_TRY(f.retire_graph(graph.value)) && f.usable()) {
      return Error(Errc::invalid_argument, "the graph was destroyed by another thread", site);
    }
    return {};
  });
}

Result<> GpuBackend::destroy_leftover_graphs(Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::destroy_graph, .site = site};
  return f.run_always(op, [&] { return f.retire_all_graphs(); });
}

std::uint64_t GpuBackend::live_graph_count() const { return in_forked_child() ? 0 : face_->graphs.handles().size(); }

Result<std::vector<Allocation>> GpuBackend::graph_memory(GraphHandle graph, Site site) const {
  if (in_forked_child()) METRALE_TRY(health(site));
  return FaceState::caught("graph_memory", site, [&]() -> Result<std::vector<Allocation>> {
    GraphRecord* record = METRALE_TRY(face_->graph(graph, site));
    std::vector<Allocation> blocks;
    std::lock_guard lock(record->mutex);
    for (const NamedBlock& name : record->names) {
      const auto block = (name.in_host_table ? face_->host : face_->device).find(name.base);
      if (block && block->generation == name.generation) blocks.push_back(*block);
    }
    std::sort(blocks.begin(), blocks.end(), [](const Allocation& a, const Allocation& b) { return a.base < b.base; });
    return blocks;
  });
}

}  // namespace metrale
