// SPDX-License-Identifier: Apache-2.0
//
// What the face of every backend keeps, and the rules it applies before a hook runs. The public methods are in backend_*.cpp, one
// file a section of backend.h; each wraps its body in `run`, which refuses a lost device,
// notes the outcome for observers and latches faults.
#pragma once

#include <atomic>
#include <bitset>
#include <chrono>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/capture_table.h"
#include "core/fault_latch.h"
#include "core/handle_table.h"
#include "core/red_zones.h"
#include "core/stream_pool.h"
#include "metrale/backend.h"
#include "metrale/op_cache.h"
#include "metrale/span_timer.h"

namespace metrale::detail {

using Site = std::source_location;

struct StreamRecord {
  StreamHandle handle;
  NativeStream native;
  CaptureMark capture;      ///< Shared with the other handles of the native stream.
  bool is_default = false;  ///< The default stream, or another handle of it.
  bool is_foreign = false;
  PoolLists pool;
};

struct EventRecord {
  EventHandle handle;
  NativeEvent native;
  std::atomic<std::uint32_t> capture{0};  ///< The open capture it was last recorded in; 0: none.
  std::atomic<bool> recorded{false};
  bool timed = false;
};

struct KernelRecord {
  NativeKernel native;
  /// SIZE_MAX where a launch takes more than comparing the arguments with the signature and one call of a hook.
  std::size_t num_plain_params = SIZE_MAX;
  KernelFacts facts;
  bool may_depend = false;  ///< May be launched dependently on this backend.
  std::uint64_t param_bytes_total = 0;
  std::string module;
  std::string function;
};

struct GraphRecord {
  NativeGraph native;
  /// One that is in `launched_on`; 0: none. Written under `mutex`; lets replays on one stream do without it.
  std::atomic<std::uint64_t> last_launched_on{0};
  Site capture_site;
  std::mutex mutex;
  std::vector<NamedBlock> names;
  std::vector<StreamHandle> launched_on;     ///< Streams whose last replay may be in flight.
  std::vector<NativeEvent> pending_replays;  ///< Recorded behind replays on streams that were captured or destroyed since.
};

/// A destroyed graph whose last replays may still run: its memory stays named until these events are done.
struct RetiredGraph {
  std::vector<NativeEvent> replays;
  std::vector<NamedBlock> names;
  Site capture_site;
};

/// How far a call that calls the driver is with the flight recorder.
struct Recording {
  enum class Stage : std::uint8_t { none, claimed, filled };
  std::uint64_t place = 0;
  Stage stage = Stage::none;

  /// A place that was claimed; none without a recorder.
  static Recording of(const FlightRecorder* recorder, std::uint64_t place) noexcept {
    return recorder == nullptr ? Recording() : Recording{place, Stage::claimed};
  }
};

/// Undoes a step when the scope is left before `keep()`, also by an exception. What `undo` throws is dropped.
template <class Fn>
class Undo {
 public:
  explicit Undo(Fn undo) noexcept : undo_(std::move(undo)) {}
  Undo(const Undo&) = delete;
  Undo& operator=(const Undo&) = delete;
  ~Undo() {
    if (kept_) return;
    try {
      undo_();
    } catch (...) {  // NOLINT(bugprone-empty-catch): out of memory twice; nobody is left to tell
    }
  }
  void keep() noexcept { kept_ = true; }

 private:
  Fn undo_;
  bool kept_ = false;
};

/// Until when the caller keeps the source of a copy to the device.
enum class SourceKept : std::uint8_t { until_return, until_synchronised };

/// What `launch_typed` was called with.
struct LaunchCall {
  KernelHandle kernel;
  Dim3 grid;
  Dim3 block;
  std::uint32_t shared_bytes;
  StreamHandle stream;
  std::span<const KernelArg> args;
  const LaunchAttributes& attributes;
  const Site& site;
};

/// The sentence that names a call site in messages.
std::string at(const Site& site);

struct alignas(64) FaceState {
  FaceState(GpuBackend& owner, FaceOptions options);

  // ---- what every launch reads, in one line of the cache ----
  GpuBackend& hooks;  ///< Its do_… methods are reached from here.
  const unsigned created_at_fork;
  const std::uint16_t owner_id;
  std::atomic<bool> shut_down{false};
  bool debug_sync_kernels = false;
  std::shared_ptr<FaultLatch> latch;
  std::bitset<kNumOps> refused_ops;  ///< Operations whose capability is absent (op_needs.h).
  std::unique_ptr<FlightRecorder> recorder;
  std::atomic<bool> observed{false};  ///< The recorder or an observer listens.
  std::atomic<bool> has_observers{false};

  std::string device_key;
  std::mutex shutdown_mutex;
  Capabilities capabilities;

  bool unchecked_copies = false;
  std::atomic<std::uint64_t> budget_bytes{UINT64_MAX};
  std::mutex budget_mutex;

  AllocLedger device;  ///< Device addresses.
  AllocLedger host;    ///< The pinned table: host addresses.
  std::mutex alias_mutex;
  std::unordered_map<std::uint64_t, DevicePtr> aliases;           ///< Host base of pinned memory → device alias.
  std::unordered_map<std::uint64_t, std::string> adopted_labels;  ///< Adopted base → label. Guarded by alias_mutex.
  RedZones red_zones;
  StreamPool pool;
  std::atomic<std::uint64_t> abandoned_bytes{0};
  std::atomic<std::uint64_t> num_pageable_copies{0};
  std::atomic<bool> warned_pageable{false};

  HandleTable<StreamRecord> streams;
  HandleTable<EventRecord> events;
  HandleTable<GraphRecord> graphs;
  HandleTable<KernelRecord> kernels;
  std::mutex kernels_mutex;
  /// Module → function → handle: each kernel has one record until modules are unloaded.
  std::map<std::string, std::map<std::string, KernelHandle, std::less<>>, std::less<>> kernels_by_name;
  StreamHandle default_stream;
  CaptureTable captures;
  CaptureWords capture_words;
  std::mutex retired_mutex;
  std::list<RetiredGraph> retired_graphs;  ///< A list: moving its nodes needs no memory.

  std::mutex audit_mutex;
  KernelAudit audit;
  std::vector<std::pair<std::string, std::string>> declared_absent;
  std::mutex sm_count_mutex;
  std::optional<std::uint32_t> sm_count;
  std::unique_ptr<KernelRegistry> registry;  ///< Wraps the backend's, so that globals become known to copies.

  std::shared_mutex observers_mutex;
  std::vector<Observer*> observers;

  std::unique_ptr<OpCache> op_cache;
  std::unique_ptr<SpanTimer> timer;

  // ---- outcome of a call ----

  bool in_forked_child() const noexcept { return fork_count() != created_at_fork; }
  bool usable() const noexcept { return !latch->tripped() && !shut_down.load(std::memory_order_acquire) && !in_forked_child(); }
  /// The error every call gets when not `usable`.
  Error lost(const Site& site) const;

  /// The error of an operation whose capability is absent.
  Error unsupported(Op op, const Site& site) const;

  /// Runs the body of a public method unless the device is lost or lacks what it needs, and notes its outcome. In `recording` the
  /// body says how far it is with the recorder.
  template <class Body>
  auto run(OpRecord record, Body&& body, const Recording* recording = nullptr) -> decltype(body()) {
    if (!usable()) [[unlikely]]
      return caught(record.op, record.site, [&]() -> decltype(body()) { return lost(record.site); });
    if (refused_ops[static_cast<std::size_t>(record.op)]) [[unlikely]]
      return caught(record.op, record.site, [&]() -> decltype(body()) { return unsupported(record.op, record.site); });
    auto result = caught(record.op, record.site, std::forward<Body>(body));
    return conclude(std::move(result), record, recording == nullptr ? Recording() : *recording);
  }
  /// As `run`, for calls that release: they go on without the device. In a forked child they do nothing, and take no lock: the
  /// thread that held it at the fork is not there to let go.
  template <class Body>
  auto run_always(OpRecord& record, Body&& body) -> decltype(body()) {
    if (in_forked_child()) [[unlikely]]
      return {};
    return conclude(caught(record.op, record.site, std::forward<Body>(body)), record);
  }
  /// Runs `body`, which returns a Result, and makes an error of what it throws. `what`: the operation, or its name.
  template <class What, class Body>
  static auto caught(What what, const Site& site, Body&& body) noexcept -> decltype(body()) {
    try {
      return body();
    } catch (...) {
      return thrown(what, site);
    }
  }
  /// The error for the exception in flight. Needs no memory.
  static Error thrown(std::string_view what, const Site& site) noexcept;
  static Error thrown(Op op, const Site& site) noexcept { return thrown(metrale::to_string(op), site); }
  /// Settles a failure and tells the recorder and observers.
  template <class T>
  Result<T> conclude(Result<T> result, OpRecord& record, Recording recording = {}, std::span<const KernelArg> args = {}) {
    if (!result) [[unlikely]]
      result = settle(std::move(result).error(), record);
    if (observed.load(std::memory_order_relaxed)) [[likely]]
      notify(record, result ? 0 : static_cast<std::uint8_t>(result.error().code()), recording, args);
    return result;
  }
  /// Every block that is known, lowest address first.
  std::vector<Allocation> known_blocks() const;
  /// An address with the block it falls in, for messages.
  std::string describe_address(DevicePtr ptr) const;
  /// The last operations, launches with their kernel's name and arguments; newest last.
  std::string describe_last_operations() const;
  /// Gives a failure its caller's site and latches a lost device.
  Error settle(Error error, const OpRecord& record) noexcept;
  /// Keeps the loss of the device and logs it.
  void latch_fault(const Error& error, const OpRecord& record);
  /// The failure of a call that then gave `what` back: `first`, and how that failed, if it did, as a note.
  /// Latches a device lost there.
  Error after_undoing(Error first, std::string_view what, Result<> undone, const OpRecord& record);
  /// `args`: those of a typed launch, which observers see just before the record; none of what was refused.
  void notify(OpRecord& record, std::uint8_t outcome, Recording recording, std::span<const KernelArg> args) noexcept;
  /// Claims a place in the flight recorder just before the driver is called. Behind a call that rang the device's doorbell, an
  /// atomic instruction waits until that write has left the processor; the plain stores of `fill` do not.
  Recording claim_place() noexcept { return Recording::of(recorder.get(), recorder == nullptr ? 0 : recorder->claim()); }
  /// The steady clock, some milliseconds old.
  static std::uint64_t cheap_now() noexcept;
  /// Behind the driver: fills the place, if one was claimed.
  void fill_place(Recording& recording, OpRecord& record, const Result<>& result) noexcept;

  // ---- launches (backend_kernel.cpp) ----

  /// Checks a launch, with words for what is wrong, and makes it.
  [[gnu::cold]] Result<> launch_checked(const LaunchCall& call);
  /// Behind the backend's answer, or the check that refused: `stream` is null then. The record, what a failure notes, the blocks
  /// that a capture names.
  [[gnu::cold]] Result<> finish_launch(const LaunchCall& call, const KernelRecord* kernel, StreamRecord* stream, Result<> launched,
                                       Recording recording);

  /// The same for a replay (backend_graph.cpp).
  [[gnu::cold]] Result<> replay_checked(GraphHandle handle, StreamHandle on, const Site& site);
  [[gnu::cold]] Result<> finish_replay(GraphHandle handle, StreamHandle on, const Site& site, Result<> launched,
                                       Recording recording);

  // ---- guards: each answers ok or the error to return ----

  /// Refuses what the backend said it cannot do.
  Result<> require(Capability capability, const Site& site) const;

  /// Refuses on a thread that holds a capture; ends its captures that another thread aborted.
  Result<> guard_thread(Op op, const Site& site);
  /// Refuses while any capture is open on the device.
  Result<> guard_device(Op op, const Site& site);
  /// Refuses on a captured stream or event, from any thread.
  Result<> guard_not_captured(Op op, std::uint32_t capture, const Site& site);
  /// For work enqueued on a captured stream: refuses, and ends if it is this thread's, a capture that was aborted.
  Result<> guard_enqueue(Op op, StreamRecord& stream, const Site& site);

  Result<StreamRecord*> stream(StreamHandle handle, const Site& site) const { return find(streams, handle, "stream", site); }
  Result<EventRecord*> event(EventHandle handle, const Site& site) const { return find(events, handle, "event", site); }
  Result<GraphRecord*> graph(GraphHandle handle, const Site& site) const { return find(graphs, handle, "graph", site); }
  Result<KernelRecord*> kernel(KernelHandle handle, const Site& site) const { return find(kernels, handle, "kernel", site); }
  /// The stream ready for work: known, and its capture, if any, not aborted.
  Result<StreamRecord*> stream_for_work(Op op, StreamHandle handle, const Site& site) {
    StreamRecord* record = METRALE_TRY(stream(handle, site));
    if (record->capture.load(std::memory_order_acquire) != 0) [[unlikely]]
      METRALE_TRY(guard_enqueue(op, *record, site));
    return record;
  }
  template <class Record, class HandleType>
  static Result<Record*> find(const HandleTable<Record>& table, HandleType handle, std::string_view noun, const Site& site) {
    if (Record* record = table.find(handle.value)) [[likely]]
      return record;
    return not_live(noun, handle.value, site);
  }
  /// The error for a handle that names nothing.
  static Error not_live(std::string_view noun, std::uint64_t handle, const Site& site);

  // ---- captures and graphs ----

  /// Takes a capture out of the table and undoes its marks on streams and events; the names stay referenced.
  std::optional<Capture> close_capture(std::uint32_t id);
  /// Ends a capture without a graph.
  Result<> discard_capture(std::uint32_t id, StreamHandle origin);
  /// Remembers that a captured stream's work uses the block at `ptr`; unknown memory is ignored.
  void name_device(StreamRecord& stream, DevicePtr ptr);
  void name_host(StreamRecord& stream, const void* ptr);
  void drop_names(const std::vector<NamedBlock>& names);
  void drop_names(const Capture& capture);
  /// Marks the work on `stream` so far. None when that work is done: where it could not be marked, it was waited for.
  /// Errors: neither could be had.
  Result<std::optional<NativeEvent>> mark_work(NativeStream stream);
  /// Destroys those of `marks` whose work is done.
  void drop_done(std::vector<NativeEvent>& marks);
  /// Records an event behind the replays that are in flight on `stream`, before it is captured or destroyed.
  void mark_replays_on(StreamRecord& stream);
  /// Lets go of the memory of destroyed graphs whose replays are done.
  void reap_retired_graphs();
  /// Destroys a graph; its memory stays named until the replays in flight are done. False when it is gone already.
  Result<bool> retire_graph(std::uint64_t handle);
  /// Destroys every graph, going on after failures. Errors: the first.
  Result<> retire_all_graphs();
  /// "in_use" with the three sites.
  Error in_use(const Allocation& block, const Site& site);

  // ---- memory ----

  /// What the pool asks of the backend.
  PoolDriver pool_driver();
  /// Refuses what would lift live_bytes above the budget. The caller keeps the lock until the block is on the ledger, so that
  /// allocations made at once do not pass together where one alone may; without a budget it holds nothing.
  Result<std::unique_lock<std::mutex>> check_budget(Op op, std::uint64_t bytes, const Site& site);
  /// Takes a block off the ledger: in_use when a graph names it, invalid_argument when it is no live base of these kinds; nullopt
  /// on a lost device that was swept already. On a lost device the bytes count as abandoned.
  Result<std::optional<Allocation>> take_block(Op op, DevicePtr ptr, std::uint32_t kinds, const Site& site);
  Result<DevicePtr> allocate(Op op, std::uint64_t bytes, MemoryKind kind, const Site& site);
  /// Asks the driver for `bytes` and the guard band behind them; where it is out of memory, trims the pool and asks once more.
  Result<DevicePtr> alloc_with_retry(Op op, std::uint64_t bytes, std::uint64_t band, MemoryKind kind, const Site& site);
  Error out_of_memory(Op op, std::uint64_t bytes, const Site& site, std::string_view why);
  Result<> release(Op op, DevicePtr ptr, std::uint32_t kinds, const Site& site);
  /// Waits for work that may use memory which goes back to its owner.
  Result<> wait_for_earlier_work();
  /// Unpins registered memory after the work that may use it.
  Result<> unregister(void* ptr, std::uint64_t bytes);
  /// Explains an address that is no live base.
  Error not_a_base(std::string_view what, DevicePtr ptr, const Site& site) const;

  /// Refuses a device range that does not lie in one known block.
  Result<> check_device(std::string_view what, DevicePtr ptr, std::uint64_t bytes, const Site& site) const {
    if (unchecked_copies || device.check(ptr, bytes) == AllocLedger::Range::inside) return {};
    return explain_range(what, ptr, bytes, site);
  }
  Error explain_range(std::string_view what, DevicePtr ptr, std::uint64_t bytes, const Site& site) const;
  Result<> check_host(const void* ptr, std::uint64_t bytes, const Site& site) const;
  /// copy_h2d_async and its retained form.
  Result<> enqueue_h2d(SourceKept kept, DevicePtr dst, std::span<const std::byte> src, StreamHandle handle, const Site& site);
  /// While capturing takes pinned memory only and names it; otherwise counts pageable memory.
  Result<> note_host_end(Op op, StreamRecord& stream, const void* ptr, std::uint64_t bytes, const Site& site);
};

}  // namespace metrale::detail
