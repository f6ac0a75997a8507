// SPDX-License-Identifier: Apache-2.0
//
// GpuBackend: the one interface through which code reaches a device. Its methods are not virtual: each checks its arguments, obeys
// the rules that all backends share (ledger, red zones, capture guard, graphs that name memory, fault latch, observers), notes its
// caller, and then calls one hook of the backend. A backend owns its device objects; handles and addresses are borrowed from it and
// are refused, not followed, once it has released them.
// Every method may be called from any thread unless its comment says otherwise.
//
// For every call: null or foreign handles give invalid_argument; an absent capability gives unsupported; after a fault that lost
// the device, or in a child made by fork, device_lost with the first reason; in such a child what releases does nothing, what reads
// the ledger answers as of an empty one, and neither waits for a lock. No call that gives a Result throws: without memory for its
// own bookkeeping it answers out_of_memory and leaves nothing behind. An ok from a call that enqueues means accepted: a
// fault shows at a later call. Outputs are untouched on failure unless said.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/alloc_ledger.h"
#include "metrale/backend_hooks.h"
#include "metrale/capabilities.h"
#include "metrale/kernel_args.h"
#include "metrale/kernel_registry.h"
#include "metrale/native_work.h"
#include "metrale/observer.h"
#include "metrale/result.h"
#include "metrale/types.h"

namespace metrale {

class OpCache;
class SpanTimer;
namespace detail {
struct FaceState;
}

/// What every backend is created with. The defaults are the environment's switches (switches.h).
struct FaceOptions {
  std::optional<std::uint64_t> redzone_bytes;  ///< Guard band after each block; 0: none. Default METRALE_REDZONE.
  std::optional<bool> debug_sync_kernels;      ///< Wait after each launch. Default METRALE_DEBUG_SYNC_KERNELS.
  std::optional<bool> unchecked_copies;        ///< Skip the check of copy ends. Default METRALE_UNCHECKED.
  bool flight_recorder = true;                 ///< Keep the last operations for fault reports.
};

class GpuBackend : public BackendHooks {
 public:
  using Site = std::source_location;

  ~GpuBackend() override;

  // ---- identity and health ----

  /// The backend's short name: "cuda", "metal", "host", "mock".
  std::string_view name() const noexcept;
  /// What this backend can do; a call without its capability answers unsupported.
  const Capabilities& capabilities() const noexcept;
  /// Ok while the device works; after a fatal fault device_lost with the first reason, from every backend on that device.
  Result<> health(Site site = Site::current()) const;
  /// Whether this process is a fork of the one that made the backend: its threads and driver state are not here, touch neither.
  bool in_forked_child() const noexcept;
  /// Multiprocessors, compute units or host threads; asked of the device once.
  Result<std::uint32_t> sm_count(Site site = Site::current());
  /// Makes the device current for this thread. Never required: every call does so itself.
  Result<> bind_to_thread(Site site = Site::current());
  /// Sweeps, unloads and closes the backend. Idempotent. Afterwards every call but those that release answers device_lost, and
  /// releasing does nothing. Ordering: waits for work in flight, and discards open captures; call it from the thread that began
  /// them. The destructor calls it.
  Result<> shutdown(Site site = Site::current());

  // ---- memory ----

  /// Allocates device memory, enters it in the ledger and counts it in `live_bytes`.
  /// Units: `bytes` > 0; the address is aligned to kDeviceAlignment or more; contents unspecified.
  /// Ordering: not legal on a thread that holds a capture.
  /// Errors: invalid_argument (0 bytes), out_of_memory (pools were trimmed and the retry failed, or the budget forbids; the text
  ///   has bytes asked, free, total and the five largest sites), capture_unsafe.
  Result<DevicePtr> alloc(std::uint64_t bytes, Site site = Site::current());

  /// As `alloc`, in memory that host and device may both touch where the device has it.
  /// Errors: as `alloc`; more than the device has free: out_of_memory.
  Result<DevicePtr> alloc_managed(std::uint64_t bytes, Site site = Site::current());

  /// Allocates a long-lived region outside `live_bytes`, listed by reports under its own heading. The budget does not count it.
  /// Errors: as `alloc`.
  Result<DevicePtr> alloc_arena(std::uint64_t bytes, Site site = Site::current());

  /// Gives back what `alloc` or `alloc_managed` returned; null is a no-op.
  /// Ordering: work enqueued before may still use the block, which is handed back only after it;
  ///   may block, never on the whole device.
  /// Errors: invalid_argument (no live base: names the nearest block and its site; nothing changes), in_use (a live graph names it:
  ///   alloc, capture and free sites), capture_unsafe. A driver's refusal is returned after the block left the ledger.
  Result<> free(DevicePtr ptr, Site site = Site::current());
  /// As `free`, for `alloc_arena`.
  Result<> free_arena(DevicePtr ptr, Site site = Site::current());

  /// Allocates from the pool, ordered on `stream`: the block may be used by work enqueued on `stream` from now on.
  /// Ordering: reuses blocks of other streams only behind an event. Not legal on a thread that holds a capture.
  /// Errors: as `alloc`. Live, not reserved, bytes count in `live_bytes`.
  Result<DevicePtr> alloc_async(std::uint64_t bytes, StreamHandle stream, Site site = Site::current());
  /// Gives a pooled block back in stream order; null is a no-op. Errors: as `free`.
  Result<> free_async(DevicePtr ptr, StreamHandle stream, Site site = Site::current());
  /// Gives the pool's unused memory back to the driver, and returns how many bytes that was.
  /// Ordering: not legal on a thread that holds a capture.
  Result<std::uint64_t> trim(Site site = Site::current());
  /// Bytes the pool holds from the driver, used or not.
  std::uint64_t pool_reserved_bytes() const;

  /// Allocates host memory, page-locked where the device can, aligned to kPinnedAlignment and zeroed in full.
  /// Errors: invalid_argument (0 bytes), out_of_memory, capture_unsafe (this thread holds a capture).
  Result<std::span<std::byte>> alloc_host_pinned(std::uint64_t bytes, Site site = Site::current());
  /// Gives pinned memory back; null is a no-op; `bytes` must be the size asked for. In-flight rule and errors as `free`.
  Result<> free_host_pinned(void* ptr, std::uint64_t bytes, Site site = Site::current());
  /// Pins existing memory, which the caller keeps alive until `unregister_host`.
  /// Errors: invalid_argument (empty, or overlaps memory that is known already), capture_unsafe (this thread holds a capture).
  Result<> register_host(std::span<std::byte> memory, Site site = Site::current());
  /// Unpins the registered memory that starts at `ptr`, which its owner may free from then on; null is a no-op.
  /// Ordering: waits for all work enqueued before. Errors: as `free`.
  Result<> unregister_host(void* ptr, Site site = Site::current());
  /// Device alias of pinned or registered memory, interior pointers included. Errors: invalid_argument (others).
  Result<DevicePtr> host_ptr_to_device(const void* host, Site site = Site::current());
  /// Whether all of `memory` lies in one pinned or registered region.
  bool is_pinned(std::span<const std::byte> memory) const;

  /// Makes memory of another library known to checks and reports, outside `live_bytes`; never freed by us. The owner keeps it alive
  /// until `disown`. Errors: invalid_argument (null, empty, or overlaps a live block).
  Result<> adopt(DevicePtr ptr, std::uint64_t bytes, std::string_view label, Site site = Site::current());
  /// Forgets adopted memory, which its owner may free from then on. Ordering: waits for all work enqueued before.
  /// Errors: invalid_argument (not adopted), in_use (a live graph names it), capture_unsafe (this thread holds a capture).
  Result<> disown(DevicePtr ptr, Site site = Site::current());
  /// What is adopted now, with its labels.
  std::vector<std::pair<std::string, Allocation>> adopted_memory() const;

  /// Fills memory and returns when it is done. Ordering: after the default stream only. Not legal on a thread that holds a capture.
  /// Errors: out_of_range (not in one known block).
  Result<> memset(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, Site site = Site::current());
  /// Fills memory in stream order, on every backend. Errors: as `memset`.
  Result<> memset_async(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, StreamHandle stream, Site site = Site::current());

  /// Bytes of device memory in all.
  Result<std::uint64_t> total_memory(Site site = Site::current());
  /// Bytes an allocation could have: the driver's figure, or the host's MemAvailable if larger and the device shares host memory.
  Result<std::uint64_t> free_memory(Site site = Site::current());
  /// The driver's figure alone, for leak measurements.
  Result<std::uint64_t> device_free_memory(Site site = Site::current());
  /// Whether the device's memory is the host's (the INTEGRATED attribute); false where it cannot be known.
  bool shares_host_memory();
  /// Makes allocations that would lift `live_bytes` above `bytes` fail with out_of_memory; nullopt lifts the limit.
  void set_budget(std::optional<std::uint64_t> bytes) noexcept;

  // ---- the ledger's answers; they work on a lost device too ----

  /// Bytes of the live blocks of `alloc`, `alloc_managed` and `alloc_async`.
  std::uint64_t live_bytes() const;
  /// Highest `live_bytes` so far, as exact as `AllocLedger::peak_bytes`.
  std::uint64_t peak_bytes() const;
  /// Number of the blocks that `live_bytes` counts.
  std::uint64_t live_alloc_count() const;
  /// Every known block of every kind, lowest address first.
  std::vector<Allocation> live_allocations() const;
  /// Who holds the memory, as text (alloc_ledger.h).
  std::string alloc_report(std::size_t top_n = 20, std::uint64_t min_mb = 0) const;
  /// Bytes lost to the driver's 2 MiB chunks; nullopt where the driver does not pack so.
  std::optional<std::uint64_t> chunk_slack_bytes() const;
  /// Destroys leftover graphs, empties the op cache, frees what is still on the ledger, arenas and pinned memory included, and logs
  /// one warning with count, bytes and top sites. Returns the count; a second call returns 0. On a lost device drops the
  /// bookkeeping. Not legal on a thread that holds a capture. Errors: the first refusal to destroy a graph, after all the rest.
  Result<std::uint64_t> sweep_unreleased(Site site = Site::current());
  /// Bytes dropped without being freed because the device was lost.
  std::uint64_t abandoned_bytes() const noexcept;

  /// Waits for the device and returns how many guard bands differ from what was last written there; logs each and refills it.
  /// 0 when red zones are off. Refused while any capture is open on the device.
  Result<std::uint64_t> scan_redzones(Site site = Site::current());
  /// Fills the bands of blocks with creation index in [lo, hi) with 0xEE and all others with 0x00; layout never changes. The index
  /// counts the calls of `alloc`, `alloc_managed` and `alloc_arena` that reached the driver, from 0; `scan_redzones` logs it. It is
  /// not `Allocation::generation`. Does nothing when red zones are off. Not legal on a thread that holds a capture.
  Result<> poison_redzones(std::uint64_t lo, std::uint64_t hi, Site site = Site::current());

  // ---- copies: each device end must lie in one known block, else out_of_range; interior addresses are fine ----
  // A null host end is invalid_argument. A copy of 0 bytes does nothing, wherever its ends are, in a batch too.

  /// Copies to the device and returns when done. Ordering: after the default stream only.
  /// Not legal on a thread that holds a capture.
  Result<> copy_h2d(DevicePtr dst, std::span<const std::byte> src, Site site = Site::current());
  /// Copies to the host and returns when done. Ordering: after the default stream only; to read what another stream just wrote use
  /// `copy_d2h_on_stream`. Not legal on a thread that holds a capture.
  Result<> copy_d2h(std::span<std::byte> dst, DevicePtr src, Site site = Site::current());
  /// Copies within the device and returns when done. Ordering: as `copy_h2d`.
  Result<> copy_d2d(DevicePtr dst, DevicePtr src, std::uint64_t bytes, Site site = Site::current());
  /// Copies to the host after the work already on `stream`, and returns when done.
  /// Ordering: sees what was enqueued on `stream` before; no order against other streams.
  /// Lifetime: `dst` is complete when this returns ok, and unspecified after a failure that the device reports.
  /// Errors: out_of_range, capture_unsafe (`stream` is captured, or this thread holds a capture; the capture goes on), device_lost
  ///   (maybe from earlier work).
  Result<> copy_d2h_on_stream(std::span<std::byte> dst, DevicePtr src, StreamHandle stream, Site site = Site::current());

  /// Enqueues a copy to the device. Lifetime: `src` may be reused at return, wherever it lives;
  /// while capturing, the graph keeps the bytes.
  Result<> copy_h2d_async(DevicePtr dst, std::span<const std::byte> src, StreamHandle stream, Site site = Site::current());
  /// Enqueues a copy to the device without adding a wait. Pageable sources may block in the driver and are counted.
  /// Lifetime: the caller keeps `src` unchanged until the stream's next synchronisation; a graph reads it at each replay.
  /// Errors: out_of_range, capture_unsafe (pageable memory while `stream` is captured).
  Result<> copy_h2d_async_retained(DevicePtr dst, std::span<const std::byte> src, StreamHandle stream, Site site = Site::current());
  /// Enqueues a copy to the host without adding a wait. Pageable destinations may block, are counted and warned of once.
  /// Lifetime: `dst` is valid after the stream's next synchronisation. Errors: as `copy_h2d_async_retained`.
  Result<> copy_d2h_async(std::span<std::byte> dst, DevicePtr src, StreamHandle stream, Site site = Site::current());
  /// Enqueues a copy within the device.
  Result<> copy_d2d_async(DevicePtr dst, DevicePtr src, std::uint64_t bytes, StreamHandle stream, Site site = Site::current());
  /// Enqueues a copy of a rectangle within the device, one driver call.
  /// Errors: invalid_argument (width over a pitch), out_of_range.
  Result<> copy_d2d_2d_async(const Copy2D& rectangle, StreamHandle stream, Site site = Site::current());
  /// Enqueues many copies, one driver call where there is one.
  /// Lifetime: host ends as in `copy_h2d_async_retained` and `copy_d2h_async`.
  /// Errors: invalid_argument (both ends of one on the host), otherwise as the single copies. Nothing is enqueued when one of them
  ///   is wrong; a note names its index.
  Result<> copy_batch_async(std::span<const CopyDesc> copies, StreamHandle stream, Site site = Site::current());
  /// Enqueues a copy from another device of this process; staged where peers cannot. `stream` belongs to this backend.
  /// Errors: out_of_range (either end), invalid_argument (`from` is lost or was shut down; this device goes on), capture_unsafe
  ///   (`stream` is captured: a graph cannot name another device's memory).
  Result<> copy_peer_async(DevicePtr dst, GpuBackend& from, DevicePtr src, std::uint64_t bytes, StreamHandle stream,
                           Site site = Site::current());
  /// Copies with a pageable host end so far, which the driver may have made blocking.
  std::uint64_t num_pageable_copies() const noexcept;

  // ---- streams and events ----

  /// A real non-blocking stream owned by this backend; null where streams are unsupported.
  StreamHandle default_stream() const noexcept;
  /// Creates a stream that runs independently of all others. Higher `priority` first where the device has priorities.
  Result<StreamHandle> create_stream(int priority = 0, Site site = Site::current());
  /// Returns at once; pending work completes. The default stream: invalid_argument. Captured: capture_unsafe. Null is a no-op.
  Result<> destroy_stream(StreamHandle stream, Site site = Site::current());
  /// Takes another library's stream; destroying the handle leaves the stream alone. Handles of one stream are captured together.
  /// Lifetime: the stream's owner keeps it until the handle is destroyed, outside captures that the owner itself begins.
  /// Errors: invalid_argument (0; on CUDA also one of the driver's default streams, and a stream of another context).
  Result<StreamHandle> wrap_stream(std::uint64_t native, Site site = Site::current());
  /// The driver's own handle, for libraries that need it. Lifetime: as long as the stream.
  Result<std::uint64_t> native_stream(StreamHandle stream, Site site = Site::current()) const;
  /// Waits for all work enqueued on `stream` before. Refused on a captured stream. May report earlier faults.
  Result<> synchronize(StreamHandle stream, Site site = Site::current());
  /// As `synchronize`, at most `timeout` long. Errors: timeout (the work goes on), invalid_argument (a negative one).
  Result<> synchronize_for(StreamHandle stream, std::chrono::nanoseconds timeout, Site site = Site::current());
  /// Waits for every stream. Refused while any capture is open on the device.
  Result<> synchronize_device(Site site = Site::current());
  /// True when all work enqueued on `stream` is done; never blocks. Refused on a captured stream.
  Result<bool> query(StreamHandle stream, Site site = Site::current());
  /// Runs `fn` on a host thread in stream order, at every replay when captured. `fn` must not throw and must not call the backend.
  Result<> enqueue_host(StreamHandle stream, std::function<void()> fn, Site site = Site::current());

  /// Creates an event that orders and measures nothing.
  Result<EventHandle> create_event(Site site = Site::current());
  /// Creates an event that also measures: see `event_elapsed_ns`.
  Result<EventHandle> create_timed_event(Site site = Site::current());
  /// Null is a no-op. Last recorded in an open capture: capture_unsafe.
  Result<> destroy_event(EventHandle event, Site site = Site::current());
  /// Marks the work enqueued on `stream` so far. Recording again moves the mark. A mark made inside a capture ends with it: the
  /// event counts as never recorded then.
  Result<> record_event(EventHandle event, StreamHandle stream, Site site = Site::current());
  /// Holds `stream`, not the host, until the work marked by `event` is done; does nothing for an event never recorded. In a capture
  /// an event recorded outside it, or in another capture, is capture_unsafe; one recorded inside joins `stream` to the capture,
  /// unless that is the default stream (invalid_argument).
  Result<> stream_wait_event(StreamHandle stream, EventHandle event, Site site = Site::current());
  /// Waits for what came before the record, and for nothing else. Recorded in an open capture: capture_unsafe.
  Result<> event_synchronize(EventHandle event, Site site = Site::current());
  /// True when the marked work is done or the event was never recorded; never blocks. Recorded in an open capture: capture_unsafe.
  Result<bool> event_query(EventHandle event, Site site = Site::current());
  /// Device time between two recorded timed events, in nanoseconds.
  /// Errors: invalid_argument (not timed, never recorded), busy (not done).
  Result<std::int64_t> event_elapsed_ns(EventHandle start, EventHandle end, Site site = Site::current());

  // ---- work of other libraries ----

  /// Lets another library enqueue on `stream`. `work` is called once, on this thread, with the device current, and must neither
  /// wait nor call the backend; `what` names it in messages. An open capture names the memory in `uses`.
  /// Ordering: as a launch. Errors: out_of_range (one of `uses` does not lie in one known block: `work` was not called), otherwise
  ///   what `work` answers, with `what` as a note.
  Result<> enqueue_native(std::string_view what, StreamHandle stream, std::span<const NativeUse> uses, NativeWork work,
                          Site site = Site::current());
  /// Whether `bytes` from `ptr` lie in one known block, as each end of a copy must. Errors: out_of_range, naming `what`.
  Result<> check_memory(std::string_view what, DevicePtr ptr, std::uint64_t bytes, Site site = Site::current()) const;

  // ---- capture and graphs ----

  /// Begins to record the work enqueued on `stream` instead of running it. This thread holds the capture until it ends; other
  /// threads go on. Errors: invalid_argument (the default stream, or already capturing).
  Result<> begin_capture(StreamHandle stream, Site site = Site::current());
  /// Ends the capture begun on `stream` and makes a graph of it. Only the thread that began may end.
  /// Errors: invalid_argument (no capture here, another thread's, or joined streams not joined back: the capture is discarded),
  ///   capture_unsafe (another thread aborted it: discarded).
  Result<GraphHandle> end_capture(StreamHandle stream, Site site = Site::current());
  /// Ends and discards the capture that `stream` takes part in; a no-op otherwise. From another thread it marks the capture, and
  /// the owner's next call on it ends it.
  Result<> abort_capture_if_active(StreamHandle stream, Site site = Site::current());
  /// Whether `stream` takes part in a capture; a failed driver query counts as yes.
  bool stream_is_capturing(StreamHandle stream, Site site = Site::current());
  /// Tells an open capture that `stream`'s recorded work uses the block containing `ptr` (pointers inside tables and structs).
  /// A no-op when `stream` is not capturing. Errors: out_of_range (unknown memory).
  Result<> capture_uses(StreamHandle stream, DevicePtr ptr, Site site = Site::current());
  /// Replays a graph in stream order. Errors: capture_unsafe (`stream` is capturing).
  Result<> launch_graph(GraphHandle graph, StreamHandle stream, Site site = Site::current());
  /// Destroys a graph; replays in flight complete, and until then its memory stays named. Null is a no-op.
  Result<> destroy_graph(GraphHandle graph, Site site = Site::current());
  /// Destroys every graph, going on after failures: memory that only leftover graphs name can be freed then. Errors: the first.
  Result<> destroy_leftover_graphs(Site site = Site::current());
  /// Graphs that were made and not destroyed.
  std::uint64_t live_graph_count() const;
  /// The blocks that a graph names and that are still live, lowest address first.
  Result<std::vector<Allocation>> graph_memory(GraphHandle graph, Site site = Site::current()) const;

  // ---- kernels ----

  /// Finds a kernel, by the same handle each time until modules are unloaded; the audit records hit or miss with the caller.
  /// Errors: not_found, internal (a miss after `seal_audit`).
  Result<KernelHandle> kernel(std::string_view module, std::string_view function, Site site = Site::current());
  /// Whether the module is loaded; never recorded.
  Result<bool> has_module(std::string_view module, Site site = Site::current());
  /// Enqueues a kernel over `grid` blocks of `block` threads.
  /// Typed arguments are compared with the kernel's signature at every launch.
  /// Units: `shared_bytes` of dynamic shared memory for each block, up to what the device has: nothing is to be opted in before.
  /// Lifetime: arguments are read during the call; the memory that buffers point to must outlive the work.
  /// Errors: invalid_argument (zero dimension, of a cluster too; more threads in all than 64 bits count; wrong count or size of
  ///   arguments: names kernel, index, both sizes; over 4 KiB in all; dependent launch of a kernel that does not wait; on
  ///   CUDA also more threads, shared memory or cluster than the kernel can have), unsupported (attribute).
  Result<> launch_typed(KernelHandle kernel, Dim3 grid, Dim3 block, std::uint32_t shared_bytes, StreamHandle stream,
                        std::span<const KernelArg> args, const LaunchAttributes& attributes = {}, Site site = Site::current());
  /// The raw form: `params` holds one pointer for each parameter. Nothing about them is checked, and no memory is named.
  /// Errors: invalid_argument (zero dimension, too many threads, null `params` of a kernel that has parameters).
  Result<> launch(KernelHandle kernel, Dim3 grid, Dim3 block, std::uint32_t shared_bytes, StreamHandle stream, void** params,
                  Site site = Site::current());
  /// Makes the tensor map of a matrix in known memory (tensor_map.h). Nothing is enqueued; legal in a capture.
  /// Errors: invalid_argument (quantised type, no elements, a stride too short, alignment, an empty or too large box), out_of_range
  ///   (the matrix leaves its block).
  Result<TensorMap> tensor_map(const TensorTile& tile, Site site = Site::current());
  /// What the kernel publishes; valid until modules are unloaded.
  Result<const KernelFacts*> kernel_facts(KernelHandle kernel, Site site = Site::current()) const;
  /// "module.function" of a handle, for messages.
  std::string kernel_name(KernelHandle kernel) const;
  /// The output-column tile width the kernel publishes; callers size grids from it. Errors: not_found (none, or 0).
  Result<std::uint32_t> kernel_n_tile(KernelHandle kernel, Site site = Site::current()) const;
  /// Whether the kernel casts its bf16 A operand to E4M3 without a scale.
  Result<bool> kernel_casts_a_to_e4m3(KernelHandle kernel, Site site = Site::current()) const;
  /// Reads `n` bf16 values behind the work on `stream` and fails with out_of_range at the first beyond ±448 or not finite.
  /// Blocks, and is refused in a capture, as `copy_d2h_on_stream`.
  Result<> check_e4m3_range(DevicePtr ptr, std::uint64_t n, StreamHandle stream, Site site = Site::current());
  /// The module set; null only on the mock, where kernels are unsupported, in a forked child, and where host memory has run out.
  KernelRegistry* kernel_registry() noexcept;
  /// Unloads every module: handles of their kernels are refused afterwards, and `op_cache()` forgets them.
  /// Refused while any capture is open on the device.
  Result<> unload_modules(Site site = Site::current());
  /// Look-ups so far.
  KernelAudit kernel_audit() const;
  /// Says that a look-up may miss without harm.
  void declare_absent(std::string_view module, std::string_view function);
  /// Makes every later miss an error of code internal.
  void seal_audit();

  // ---- shared services ----

  /// Kernel handles and scratch memory by operation and stream (op_cache.h).
  OpCache& op_cache() noexcept;
  /// GPU time spans that never wait (span_timer.h).
  SpanTimer& timing() noexcept;
  /// Attaches an observer, which must stay alive until it is detached.
  void attach(Observer& observer);
  /// When this returns the observer is not called any more.
  void detach(Observer& observer);
  /// The last operations; null when the backend was created without a flight recorder.
  FlightRecorder* flight_recorder() noexcept;

 protected:
  explicit GpuBackend(FaceOptions options = {});
  /// Second half of construction: asks capabilities and makes the default stream. A factory calls it once before handing out.
  Result<> initialize(Site site = Site::current());
  /// For most-derived destructors: shuts down while the hooks still exist.
  void shutdown_from_destructor() noexcept;

 private:
  Result<> close(Site site);

  friend struct detail::FaceState;
  std::unique_ptr<detail::FaceState> face_;
};

}  // namespace metrale
