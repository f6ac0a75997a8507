// SPDX-License-Identifier: Apache-2.0
//
// What a backend implements: mechanism, and nothing else. `GpuBackend` has checked the arguments, the capture rules, the ledger and
// the health of the device before a hook runs; a hook does the work and reports what its driver said. Each default answers
// `unsupported`, so a new backend compiles at once and grows hook by hook (docs/adding-a-backend.md). Hooks are called from any
// thread, several at a time, unless a line says otherwise. A hook that returns `device_lost` latches the fault: no further hook
// runs but those that release.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "metrale/alloc_ledger.h"
#include "metrale/capabilities.h"
#include "metrale/kernel_args.h"
#include "metrale/kernel_registry.h"
#include "metrale/native_work.h"
#include "metrale/result.h"
#include "metrale/tensor_map.h"
#include "metrale/types.h"

namespace metrale {

class GpuBackend;

/// A driver's own handle, as 64 bits. The face maps its handles to these and never looks inside.
template <class Tag>
struct Native {
  std::uint64_t value = 0;
  friend constexpr auto operator<=>(Native, Native) = default;
};
using NativeStream = Native<StreamTag>;
using NativeEvent = Native<EventTag>;
using NativeKernel = Native<KernelTag>;
using NativeGraph = Native<GraphTag>;

/// Memory of the device, as its driver and host see it now. All in bytes.
struct DeviceMemoryInfo {
  std::uint64_t total = 0;
  std::uint64_t device_free = 0;
  bool integrated = false;           ///< The INTEGRATED attribute: the device shares the host's memory.
  std::uint64_t host_available = 0;  ///< MemAvailable; used only where `integrated`.
};

/// One copy of a batch. Exactly one of the host pointers is set, or neither for a device copy.
struct CopyDesc {
  DevicePtr dst{};
  DevicePtr src{};
  void* host_dst = nullptr;
  const void* host_src = nullptr;
  std::uint64_t bytes = 0;
};

/// A rectangle of `height` rows of `width_bytes`, rows `*_pitch_bytes` apart.
struct Copy2D {
  DevicePtr dst{};
  DevicePtr src{};
  std::uint64_t dst_pitch_bytes = 0;
  std::uint64_t src_pitch_bytes = 0;
  std::uint64_t width_bytes = 0;
  std::uint64_t height = 0;
};

/// A checked launch. Every pointer is valid during the hook only: a backend that runs later copies the parameters first.
struct LaunchDesc {
  NativeKernel kernel;
  Dim3 grid;
  Dim3 block;
  std::uint32_t shared_bytes = 0;
  NativeStream stream;
  std::span<const KernelArg> args;    ///< Typed launches; empty for raw ones.
  void* const* raw_params = nullptr;  ///< Raw launches only; laid out as the kernel's facts say.
  const LaunchAttributes* attributes = nullptr;
};

class BackendHooks {
 public:
  virtual ~BackendHooks() = default;
  BackendHooks(const BackendHooks&) = delete;
  BackendHooks& operator=(const BackendHooks&) = delete;

 protected:
  BackendHooks() = default;

  // ---- identity ----
  /// The backend's short name, e.g. "host".
  virtual std::string_view do_name() const noexcept = 0;
  /// Names the device within the process: backends with the same key share one fault latch.
  virtual std::string do_device_key() const = 0;
  /// What is there; asked once, at creation.
  virtual Capabilities do_capabilities() const = 0;
  /// Multiprocessors, compute units or host threads. Capability::processor_count.
  virtual Result<std::uint32_t> do_sm_count();
  /// Makes the device current for the calling thread; nothing to do by default.
  virtual Result<> do_bind_to_thread();
  /// Last call: everything was released. Unloads what remains. Must not fail.
  virtual void do_shutdown() noexcept {}

  // ---- memory ----
  /// `kind` is device, managed or arena. Aligned to kDeviceAlignment; contents unspecified, and not zero where that is cheap.
  virtual Result<DevicePtr> do_alloc(std::uint64_t bytes, MemoryKind kind);
  /// The block leaves the device only after all work enqueued before this call;
  /// waits by event or defers, never for the whole context.
  virtual Result<> do_free(DevicePtr base, std::uint64_t bytes, MemoryKind kind);
  /// Page-locked where the device can, aligned to kPinnedAlignment; the face zeroes it.
  virtual Result<void*> do_alloc_pinned(std::uint64_t bytes);
  /// In-flight rule as for `do_free`.
  virtual Result<> do_free_pinned(void* ptr, std::uint64_t bytes);
  /// Pins memory of the caller; it overlaps nothing that is pinned. Capability::host_registration.
  virtual Result<> do_register_host(void* ptr, std::uint64_t bytes);
  virtual Result<> do_unregister_host(void* ptr, std::uint64_t bytes);
  /// Device address of the first byte of a pinned or registered region. Capability::host_alias.
  virtual Result<DevicePtr> do_host_alias(void* base);
  virtual Result<DeviceMemoryInfo> do_memory_info();
  /// Whether the driver packs blocks under 2 MiB into 2 MiB chunks, as CUDA does.
  virtual bool do_packs_small_allocations() const noexcept { return false; }

  // ---- copies and fills; the blocking forms have correct defaults made of the others ----
  /// Enqueues. `retained`: the caller keeps `src` unchanged until the stream's next synchronisation. Otherwise `src` may be reused
  /// at return, so a backend whose copy runs later stages it; on a capturing stream the graph keeps the bytes.
  virtual Result<> do_copy_h2d_async(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream stream, bool retained);
  virtual Result<> do_copy_d2h_async(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream stream);
  virtual Result<> do_copy_d2d_async(DevicePtr dst, DevicePtr src, std::uint64_t bytes, NativeStream stream);
  /// One driver call. Default: unsupported.
  virtual Result<> do_copy_d2d_2d_async(const Copy2D& rectangle, NativeStream stream);
  /// Default: one call of the fitting async copy each. `capturing`: batch forms have no graph node, lower to single copies.
  virtual Result<> do_copy_batch_async(std::span<const CopyDesc> copies, NativeStream stream, bool capturing);
  /// `src` belongs to `from`, another device of the process. Capability::peer_copies.
  virtual Result<> do_copy_peer_async(DevicePtr dst, GpuBackend& from, DevicePtr src, std::uint64_t bytes, NativeStream stream);
  virtual Result<> do_memset_async(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream stream);
  virtual Result<> do_copy_h2d(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream default_stream);
  virtual Result<> do_copy_d2h(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream default_stream);
  virtual Result<> do_copy_d2d(DevicePtr dst, DevicePtr src, std::uint64_t bytes, NativeStream default_stream);
  virtual Result<> do_copy_d2h_on_stream(void* dst, DevicePtr src, std::uint64_t bytes, NativeStream stream);
  virtual Result<> do_memset(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream default_stream);

  // ---- streams and events ----
  /// Independent of every other stream. Higher `priority` runs first where the device has priorities.
  virtual Result<NativeStream> do_create_stream(int priority);
  /// Returns at once; pending work completes.
  virtual Result<> do_destroy_stream(NativeStream stream);
  /// Takes a driver's stream that this backend does not own. Capability::foreign_streams.
  virtual Result<NativeStream> do_wrap_stream(std::uint64_t native);
  /// A handle of `do_wrap_stream` was given back; the stream's owner may destroy it from then on.
  virtual void do_unwrap_stream(NativeStream) noexcept {}
  /// The stream's own handle was asked for: others may enqueue on it from now on.
  virtual void do_share_stream(NativeStream) noexcept {}
  virtual Result<> do_synchronize(NativeStream stream);
  /// Waits at most `timeout`; `timeout` error when work remains.
  virtual Result<> do_synchronize_for(NativeStream stream, std::chrono::nanoseconds timeout);
  virtual Result<> do_synchronize_device();
  /// Waits for all work enqueued before, that of destroyed streams too, and leaves open captures alone: memory that other work has
  /// used goes back to its owner then. Default: do_synchronize_device.
  virtual Result<> do_wait_for_earlier_work();
  /// True when all work enqueued so far is done; never blocks.
  virtual Result<bool> do_query(NativeStream stream);
  /// Runs `fn` on a host thread in stream order; captured on a capturing stream, then run at every replay.
  virtual Result<> do_enqueue_host(NativeStream stream, std::function<void()> fn);
  /// Runs `work` with the device current, and counts what it enqueued. Capability::native_work.
  virtual Result<> do_enqueue_native(NativeStream stream, NativeWork work);
  virtual Result<NativeEvent> do_create_event(bool timed);
  virtual Result<> do_destroy_event(NativeEvent event);
  virtual Result<> do_record_event(NativeEvent event, NativeStream stream);
  /// The event was recorded at least once. On a capturing stream this may join `stream` to the capture.
  virtual Result<> do_stream_wait_event(NativeStream stream, NativeEvent event);
  virtual Result<> do_event_synchronize(NativeEvent event);
  virtual Result<bool> do_event_query(NativeEvent event);
  /// Both are timed and were recorded.
  virtual Result<std::int64_t> do_event_elapsed_ns(NativeEvent start, NativeEvent end);

  // ---- capture and graphs ----
  virtual Result<> do_begin_capture(NativeStream stream);
  /// Ends the capture that began on `stream` in every case. invalid_argument when a joined stream was not joined back.
  virtual Result<NativeGraph> do_end_capture(NativeStream stream);
  /// Ends and discards; the streams run work again.
  virtual Result<> do_abort_capture(NativeStream stream);
  virtual Result<bool> do_stream_is_capturing(NativeStream stream);
  virtual Result<> do_launch_graph(NativeGraph graph, NativeStream stream);
  /// A replay in flight completes first; may defer.
  virtual Result<> do_destroy_graph(NativeGraph graph);
  /// Addresses found in the parameters of the graph's kernel nodes that the face cannot see (library launches). Default: none.
  virtual Result<std::vector<DevicePtr>> do_graph_addresses(NativeGraph graph);

  // ---- kernels ----
  virtual Result<NativeKernel> do_find_kernel(std::string_view module, std::string_view function);
  virtual Result<bool> do_has_module(std::string_view module);
  virtual Result<KernelFacts> do_kernel_facts(NativeKernel kernel);
  /// The signature, sizes and attributes were checked.
  virtual Result<> do_launch(const LaunchDesc& launch);
  /// The tile was checked. Capability::tensor_maps.
  virtual Result<TensorMap> do_tensor_map(const TensorTile& tile);
  /// Null where there is no module set.
  virtual KernelRegistry* do_kernel_registry() noexcept { return nullptr; }
  virtual Result<> do_unload_modules();
};

}  // namespace metrale
