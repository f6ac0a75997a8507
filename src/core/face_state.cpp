// SPDX-License-Identifier: Apache-2.0
#include "core/face_state.h"

#include <algorithm>
#include <ctime>
#include <exception>
#include <new>
#include <utility>

#include <fmt/format.h>

#include "core/op_needs.h"
#include "metrale/log.h"
#include "metrale/switches.h"

namespace metrale::detail {
namespace {

std::uint16_t next_owner_id() {
  static std::atomic<std::uint32_t> next{1};
  return static_cast<std::uint16_t>(next.fetch_add(1, std::memory_order_relaxed) % 0xFFFF + 1);
}

// The clock that steady_clock reads, as of the last timer tick: a fraction of the price, and every recorded call pays it.
#ifdef CLOCK_MONOTONIC_COARSE
constexpr clockid_t kCheapClock = CLOCK_MONOTONIC_COARSE;
#else
constexpr clockid_t kCheapClock = CLOCK_MONOTONIC;
#endif

std::uint64_t clock_ns(clockid_t clock) noexcept {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(now.tv_nsec);
}

}  // namespace

std::string at(const Site& site) { return fmt::format("{}:{}", site.file_name(), site.line()); }

FaceState::FaceState(GpuBackend& owner, FaceOptions options)
    : hooks(owner),
      created_at_fork(fork_count()),
      owner_id(next_owner_id()),
      debug_sync_kernels(options.debug_sync_kernels.value_or(switches().debug_sync_kernels)),
      latch(std::make_shared<FaultLatch>()),
      unchecked_copies(options.unchecked_copies.value_or(switches().unchecked)),
      red_zones(options.redzone_bytes.value_or(switches().redzone_bytes)),
      streams(owner_id),
      events(owner_id),
      graphs(owner_id),
      kernels(owner_id) {
  if (options.flight_recorder) recorder = std::make_unique<FlightRecorder>();
  observed.store(recorder != nullptr, std::memory_order_relaxed);
}

std::uint64_t FaceState::cheap_now() noexcept { return clock_ns(kCheapClock); }

Error FaceState::lost(const Site& site) const {
  if (in_forked_child()) {
    return Error(Errc::device_lost, "this process was forked after the backend was made; make a new backend after fork", site);
  }
  if (latch->tripped()) return Error(Errc::device_lost, latch->reason(), site);
  return Error(Errc::device_lost, fmt::format("the {} backend was shut down", hooks.name()), site);
}

std::string FaceState::describe_address(DevicePtr ptr) const {
  const auto block = device.find(ptr);
  if (!block) return fmt::format("{:#x} (in no known memory)", ptr.address);
  return fmt::format("{:#x} (+{} of {} bytes from {})", ptr.address, ptr.address - block->base.address, block->bytes,
                     at(block->site));
}

std::string FaceState::describe_last_operations() const {
  std::string text;
  for (const OpRecord& record : recorder->snapshot()) {
    text += record.to_string();
    if (const KernelRecord* launched = kernels.find(record.kernel.value)) {
      text += fmt::format(" {}.{}", launched->module, launched->function);
    }
    for (std::size_t i = 0; record.op == Op::launch && i < std::min<std::size_t>(record.num_args, kRecordedArgs); ++i) {
      const bool is_buffer = (record.buffer_mask >> i) & 1;
      text += fmt::format(", argument {}: {}", i,
                          is_buffer ? describe_address({record.args[i]}) : fmt::format("{:#x}", record.args[i]));
    }
    text += '\n';
  }
  return text;
}

Error FaceState::thrown(std::string_view what, const Site& site) noexcept {
  try {
    try {
      throw;
    } catch (const std::bad_alloc&) {
      return Error(Errc::out_of_memory, fmt::format("{}: the host has no memory left", what), site);
    } catch (const std::exception& error) {
      return Error(Errc::internal, fmt::format("{}: {}", what, error.what()), site);
    } catch (...) {
      return Error(Errc::internal, fmt::format("{}: an exception that is none of the standard library's", what), site);
    }
  } catch (...) {
    return Error::no_memory();
  }
}

Error FaceState::settle(Error error, const OpRecord& record) noexcept {
  error = std::move(error).with_site(record.site);
  if (error.code() != Errc::device_lost || !usable()) return error;
  try {
    latch_fault(error, record);
  } catch (...) {
    // No memory for the reason. The device is lost all the same, and the next call finds it so.
  }
  return error;
}

void FaceState::latch_fault(const Error& error, const OpRecord& record) {
  std::string reason = fmt::format("{}: {}", metrale::to_string(record.op), error.message());
  if (error.native_code() != 0) reason += fmt::format(" [driver {}: {}]", error.native_code(), error.native_text());
  for (const std::string& note : error.notes()) reason += "; " + note;
  if (latch->trip(reason)) {
    log(LogLevel::error, fmt::format("device {} is lost: {}; called from {}", device_key, reason, at(record.site)));
    if (recorder) log(LogLevel::error, fmt::format("last operations, newest last:\n{}", describe_last_operations()));
  }
}

Error FaceState::after_undoing(Error first, std::string_view what, Result<> undone, const OpRecord& record) {
  if (undone) return first;
  const Error second = settle(std::move(undone).error(), record);
  return std::move(first).with_note(fmt::format("giving back {} failed too: {}", what, second.to_string()));
}

void FaceState::notify(OpRecord& record, std::uint8_t outcome, Recording recording, std::span<const KernelArg> args) noexcept {
  record.outcome = outcome;
  const bool watched = has_observers.load(std::memory_order_relaxed);
  if (recorder && recording.stage != Recording::Stage::filled) {
    record.time_ns = clock_ns(watched ? CLOCK_MONOTONIC : kCheapClock);
    recorder->fill(recording.stage == Recording::Stage::claimed ? recording.place : recorder->claim(), record);
  }
  if (!watched) [[likely]]
    return;
  record.time_ns = clock_ns(CLOCK_MONOTONIC);
  std::shared_lock lock(observers_mutex);
  // Both under one lock, so that who comes or goes meanwhile sees both or neither.
  const bool shows_args = outcome == 0 && record.op == Op::launch;
  for (Observer* observer : observers) {
    if (shows_args) observer->on_launch_args(record, args);
    observer->on_op(record);
  }
}

void FaceState::fill_place(Recording& recording, OpRecord& record, const Result<>& result) noexcept {
  if (recording.stage != Recording::Stage::claimed) return;
  record.outcome = result ? 0 : static_cast<std::uint8_t>(result.error().code());
  record.time_ns = clock_ns(has_observers.load(std::memory_order_relaxed) ? CLOCK_MONOTONIC : kCheapClock);
  recorder->fill(recording.place, record);
  recording.stage = Recording::Stage::filled;
}

std::vector<Allocation> FaceState::known_blocks() const {
  std::vector<Allocation> blocks = device.snapshot();
  if (!capabilities.has(Capability::host_alias)) {
    // Pinned memory has no device address then, and is in the host's table alone.
    const std::vector<Allocation> on_host = host.snapshot();
    blocks.insert(blocks.end(), on_host.begin(), on_host.end());
    std::sort(blocks.begin(), blocks.end(), [](const Allocation& a, const Allocation& b) { return a.base < b.base; });
  }
  return blocks;
}

// ---- guards ----

Error FaceState::unsupported(Op op, const Site& site) const {
  for (const Capability c : needs(op)) {
    if (!capabilities.has(c))
      return Error(Errc::unsupported, fmt::format("{}: {}", metrale::to_string(op), capabilities.why_not(c)), site);
  }
  return Error(Errc::unsupported, fmt::format("{} is not supported", metrale::to_string(op)), site);
}

Result<> FaceState::require(Capability capability, const Site& site) const {
  if (capabilities.has(capability)) [[likely]]
    return {};
  return Error(Errc::unsupported, std::string(capabilities.why_not(capability)), site);
}

Result<> FaceState::guard_thread(Op op, const Site& site) {
  if (!captures.any_open()) [[likely]]
    return {};
  for (const CaptureTable::Summary& held : captures.held_by_this_thread()) {
    if (!held.abort_requested) {
      return Error(Errc::capture_unsafe,
                   fmt::format("{}: this thread holds a capture begun at {}; call it before begin_capture or after end_capture",
                               metrale::to_string(op), at(held.site)),
                   site);
    }
    METRALE_TRY(discard_capture(held.id, held.origin));
  }
  return {};
}

Result<> FaceState::guard_device(Op op, const Site& site) {
  for (const CaptureTable::Summary& open : captures.all()) {
    if (open.abort_requested && open.mine) {
      METRALE_TRY(discard_capture(open.id, open.origin));
      continue;
    }
    return Error(
        Errc::capture_unsafe,
        fmt::format("{}: a capture begun at {} is open on this device; end it first", metrale::to_string(op), at(open.site)), site);
  }
  return {};
}

Result<> FaceState::guard_not_captured(Op op, std::uint32_t capture, const Site& site) {
  if (capture == 0) [[likely]]
    return {};
  const auto summary = captures.summary(capture);
  if (!summary) return {};  // ended meanwhile
  if (summary->abort_requested && summary->mine) return discard_capture(summary->id, summary->origin);
  return Error(Errc::capture_unsafe,
               fmt::format("{}: the stream or event takes part in a capture begun at {}; end the capture first",
                           metrale::to_string(op), at(summary->site)),
               site);
}

Result<> FaceState::guard_enqueue(Op op, StreamRecord& stream, const Site& site) {
  const std::uint32_t id = stream.capture.load(std::memory_order_acquire);
  if (id == 0) return {};
  const auto summary = captures.summary(id);
  if (!summary || !summary->abort_requested) return {};
  if (summary->mine) METRALE_TRY(discard_capture(summary->id, summary->origin));
  return Error(Errc::capture_unsafe,
               fmt::format("{}: the capture begun at {} was aborted by another thread at {}; its work was discarded",
                           metrale::to_string(op), at(summary->site), at(summary->abort_site)),
               site);
}

// ---- handles ----

Error FaceState::not_live(std::string_view noun, std::uint64_t handle, const Site& site) {
  if (handle == 0) return Error(Errc::invalid_argument, fmt::format("the {} handle is null", noun), site);
  return Error(Errc::invalid_argument,
               fmt::format("{} handle {:#x} is not live here: it was destroyed, or belongs to another backend", noun, handle),
               site);
}

// ---- captures and the memory that graphs name ----

std::optional<Capture> FaceState::close_capture(std::uint32_t id) {
  std::optional<Capture> capture = captures.close(id);
  if (!capture) return std::nullopt;
  for (const StreamHandle handle : capture->streams) {
    if (StreamRecord* record = streams.find(handle.value)) {
      std::uint32_t expected = id;
      record->capture.compare_exchange_strong(expected, 0);
    }
  }
  for (const EventHandle handle : capture->events) {
    EventRecord* record = events.find(handle.value);
    std::uint32_t expected = id;
    // What was recorded inside marks no work outside: such an event counts as never recorded.
    if (record != nullptr && record->capture.compare_exchange_strong(expected, 0)) record->recorded.store(false);
  }
  return capture;
}

Result<> FaceState::discard_capture(std::uint32_t id, StreamHandle origin) {
  StreamRecord* record = streams.find(origin.value);
  Result<> ended;
  if (record != nullptr && usable()) ended = hooks.do_abort_capture(record->native);
  if (const auto capture = close_capture(id)) drop_names(*capture);
  return ended;
}

void FaceState::name_device(StreamRecord& stream, DevicePtr ptr) {
  const std::uint32_t id = stream.capture.load(std::memory_order_acquire);
  if (id == 0 || !ptr) return;
  captures.with(id, [&](Capture& capture) {
    const auto block = device.find(ptr);
    if (!block || capture.names.contains(block->base.address)) return;
    if (const auto named = device.add_graph_ref(block->base)) {
      capture.names[named->base.address] = {false, named->base, named->generation};
    }
  });
}

void FaceState::name_host(StreamRecord& stream, const void* ptr) {
  const std::uint32_t id = stream.capture.load(std::memory_order_acquire);
  if (id == 0) return;
  const DevicePtr address{reinterpret_cast<std::uintptr_t>(ptr)};
  captures.with(id, [&](Capture& capture) {
    const auto block = host.find(address);
    if (!block) return;
    const std::uint64_t key = block->base.address | std::uint64_t{1} << 63;
    if (capture.names.contains(key)) return;
    if (const auto named = host.add_graph_ref(block->base)) capture.names[key] = {true, named->base, named->generation};
  });
}

void FaceState::drop_names(const std::vector<NamedBlock>& names) {
  for (const NamedBlock& name : names) (name.in_host_table ? host : device).drop_graph_ref(name.base, name.generation);
}

void FaceState::drop_names(const Capture& capture) {
  for (const auto& [key, name] : capture.names) (name.in_host_table ? host : device).drop_graph_ref(name.base, name.generation);
}

Result<std::optional<NativeEvent>> FaceState::mark_work(NativeStream stream) {
  if (auto event = hooks.do_create_event(false)) {
    if (hooks.do_record_event(*event, stream)) return *event;
    static_cast<void>(hooks.do_destroy_event(*event).has_value());
  }
  METRALE_TRY(hooks.do_synchronize(stream));
  return std::nullopt;
}

void FaceState::drop_done(std::vector<NativeEvent>& marks) {
  std::erase_if(marks, [&](NativeEvent event) {
    // A driver that cannot tell will not tell later.
    if (usable() && !hooks.do_event_query(event).value_or(true)) return false;
    if (usable()) static_cast<void>(hooks.do_destroy_event(event).has_value());
    return true;
  });
}

void FaceState::mark_replays_on(StreamRecord& stream) {
  for (const std::uint64_t handle : graphs.handles()) {
    GraphRecord* record = graphs.find(handle);
    if (record == nullptr) continue;
    std::lock_guard lock(record->mutex);
    const auto is_here = [&](StreamHandle launched) {
      const StreamRecord* other = streams.find(launched.value);
      return other != nullptr && other->native == stream.native;
    };
    if (std::none_of(record->launched_on.begin(), record->launched_on.end(), is_here)) continue;
    drop_done(record->pending_replays);
    record->pending_replays.reserve(record->pending_replays.size() + 1);
    // Where neither a mark nor a wait can be had, the free of a named block still waits for the work.
    if (const auto mark = mark_work(stream.native); mark && *mark) record->pending_replays.push_back(**mark);
    std::erase_if(record->launched_on, is_here);
    record->last_launched_on.store(0, std::memory_order_release);
  }
}

void FaceState::reap_retired_graphs() {
  std::list<RetiredGraph> done;
  {
    std::lock_guard lock(retired_mutex);
    for (auto it = retired_graphs.begin(); it != retired_graphs.end();) {
      const auto graph = it++;
      drop_done(graph->replays);
      if (graph->replays.empty()) done.splice(done.end(), retired_graphs, graph);
    }
  }
  for (const RetiredGraph& graph : done) drop_names(graph.names);
}

Result<bool> FaceState::retire_graph(std::uint64_t handle) {
  std::list<RetiredGraph> retired(1);
  RetiredGraph& graph = retired.front();
  NativeGraph native;
  std::vector<StreamHandle> launched_on;
  // Of two callers the one that erases has the names too.
  const bool mine = graphs.erase(handle, [&](GraphRecord& record) {
    std::lock_guard lock(record.mutex);
    record.pending_replays.reserve(record.pending_replays.size() + record.launched_on.size());
    native = record.native;
    launched_on = std::exchange(record.launched_on, {});
    record.last_launched_on.store(0, std::memory_order_release);
    graph.replays = std::exchange(record.pending_replays, {});
    graph.names = std::exchange(record.names, {});
    graph.capture_site = record.capture_site;
  });
  if (!mine) return false;
  Result<> destroyed;
  if (usable()) {
    for (const StreamHandle launched : launched_on) {
      const StreamRecord* stream = streams.find(launched.value);
      if (stream == nullptr) continue;
      if (const auto mark = mark_work(stream->native); mark && *mark) graph.replays.push_back(**mark);
    }
  }
  {
    std::lock_guard lock(retired_mutex);
    retired_graphs.splice(retired_graphs.end(), retired);
  }
  if (usable()) destroyed = hooks.do_destroy_graph(native);
  reap_retired_graphs();
  METRALE_TRY(std::move(destroyed));
  return true;
}

Result<> FaceState::retire_all_graphs() {
  Result<> first;
  for (const std::uint64_t handle : graphs.handles()) {
    if (auto retired = retire_graph(handle); !retired && first) first = std::move(retired).error();
  }
  // Also of those that were destroyed before, while their replays ran.
  reap_retired_graphs();
  return first;
}

PoolDriver FaceState::pool_driver() {
  return {
      .alloc_slab = [this](std::uint64_t bytes) { return hooks.do_alloc(bytes, MemoryKind::device); },
      .free_slab = [this](DevicePtr base, std::uint64_t bytes) { return hooks.do_free(base, bytes, MemoryKind::device); },
      .other_streams =
          [this](PoolLists* self, const std::function<bool(NativeStream, PoolLists&)>& visit) {
            for (const std::uint64_t handle : streams.handles()) {
              StreamRecord* record = streams.find(handle);
              if (record == nullptr || &record->pool == self) continue;
              // Nothing may be asked of a captured stream; `trim` (self is null) only reads its lists.
              if (self != nullptr && record->capture.load(std::memory_order_acquire) != 0) continue;
              if (visit(record->native, record->pool)) return;
            }
          },
      .is_idle = [this](NativeStream stream) { return hooks.do_query(stream).value_or(false); },
      .order_after = [this](NativeStream waiter, NativeStream first) -> Result<> {
        const NativeEvent event = METRALE_TRY(hooks.do_create_event(false));
        Result<> ordered = hooks.do_record_event(event, first);
        if (ordered) ordered = hooks.do_stream_wait_event(waiter, event);
        Result<> destroyed = hooks.do_destroy_event(event);
        if (ordered) return destroyed;
        return after_undoing(std::move(ordered).error(), "the event", std::move(destroyed),
                             {.op = Op::alloc_async, .site = Site::current()});
      },
      .mark_work = [this](NativeStream stream) { return mark_work(stream); },
      .event_done = [this](NativeEvent event) { return hooks.do_event_query(event).value_or(false); },
      .drop_event = [this](NativeEvent event) { static_cast<void>(hooks.do_destroy_event(event).has_value()); },
  };
}

Error FaceState::in_use(const Allocation& block, const Site& site) {
  Site capture_site = site;
  std::string_view state = "a live graph";
  bool found = false;
  const auto names_it = [&](const NamedBlock& name) { return name.base == block.base && name.generation == block.generation; };
  for (const std::uint64_t handle : graphs.handles()) {
    GraphRecord* record = graphs.find(handle);
    if (record == nullptr) continue;
    std::lock_guard lock(record->mutex);
    if (std::any_of(record->names.begin(), record->names.end(), names_it)) capture_site = record->capture_site, found = true;
  }
  if (!found) {
    std::lock_guard lock(retired_mutex);
    for (const RetiredGraph& graph : retired_graphs) {
      if (!std::any_of(graph.names.begin(), graph.names.end(), names_it)) continue;
      capture_site = graph.capture_site;
      state = "a destroyed graph whose last replay still runs";
      found = true;
    }
  }
  if (!found) {
    for (const CaptureTable::Summary& open : captures.all()) {
      captures.with(open.id, [&](Capture& capture) {
        for (const auto& [key, name] : capture.names) {
          if (names_it(name)) capture_site = capture.site, state = "an open capture";
        }
      });
    }
  }
  return Error(Errc::in_use,
               fmt::format("{} bytes at {:#x} allocated at {} are named by {} captured at {}; freed at {}; destroy the graph first",
                           block.bytes, block.base.address, at(block.site), state, at(capture_site), at(site)),
               site);
}

}  // namespace metrale::detail
