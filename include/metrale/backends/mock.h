// SPDX-License-Identifier: Apache-2.0
//
// The mock backend, for tests without a device. Copies, fills, streams, events and graphs are real, on fake device addresses;
// kernels resolve and are recorded but compute nothing. What reached the device is recorded and counted, any call can be made to
// fail, and asynchronous work can be held back until a synchronisation, which exposes sources that were dropped or changed too
// early. `MockControl` belongs to its backend; any thread may use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/backend.h"
#include "metrale/op.h"

namespace metrale::mock {

/// First device address of a mock; allocations ascend from it and are never reused.
inline constexpr std::uint64_t kBaseAddress = 0x1000'0000;
/// What fresh device memory is filled with.
inline constexpr std::uint8_t kFillByte = 0xA5;

struct Options {
  FaceOptions face;
  bool recording = true;  ///< As MockControl::set_recording.
  std::uint32_t sm_count = 48;
  std::uint64_t total_memory_bytes = std::uint64_t{128} << 30;
  std::uint64_t free_memory_bytes = std::uint64_t{120} << 30;  ///< Before the first allocation.
  std::vector<Capability> without;                             ///< Capabilities to lack.
};

/// Makes a backend that shares its device with no other. Errors: out_of_memory, internal.
Result<std::unique_ptr<GpuBackend>> create(Options options = {});

/// One argument of a recorded launch. Owns its bytes.
struct ArgRecord {
  bool is_buffer = false;
  DevicePtr ptr;                 ///< Buffers only.
  std::vector<std::byte> bytes;  ///< The argument's bytes at their full size; 8 for a Buffer.

  /// The leading bytes as a `T`; missing ones are zero.
  template <class T>
  T as() const noexcept {
    T value{};
    std::memcpy(&value, bytes.data(), bytes.size() < sizeof(T) ? bytes.size() : sizeof(T));
    return value;
  }
};

/// One launch, when it was enqueued or, in a graph, replayed. `stream` is what `GpuBackend::native_stream` gives.
struct LaunchRecord {
  std::string module;
  std::string function;
  Dim3 grid;
  Dim3 block;
  std::uint32_t shared_bytes = 0;
  NativeStream stream;
  std::vector<ArgRecord> args;  ///< Empty for a raw launch of a kernel whose facts were not set.
  LaunchAttributes attributes;
  bool raw = false;
  bool replayed = false;  ///< By a graph; `stream` is then the one it was captured on.
};

/// One kernel look-up that reached the device.
struct LookupRecord {
  std::string module;
  std::string function;
  bool found = false;
};

/// One call of synchronize or synchronize_for, with the copies to the host enqueued before it by copy_d2h_async on any stream.
struct SyncRecord {
  NativeStream stream;
  std::uint64_t num_d2h_async = 0;
};

/// One call that reached the device. Fields that do not apply are 0.
struct CallRecord {
  Op op{};
  NativeStream stream{};
  NativeEvent event{};
  std::uint64_t dst = 0;  ///< Device address written, allocated or freed; 0 for host memory.
  std::uint64_t src = 0;  ///< Device address read; 0 for host memory.
  std::uint64_t bytes = 0;
};

/// Sums since creation or the last reset. A batch counts as its single copies.
struct Counts {
  std::uint64_t syncs = 0;         ///< synchronize, synchronize_for, synchronize_device.
  std::uint64_t d2h_blocking = 0;  ///< copy_d2h, copy_d2h_on_stream.
  std::uint64_t d2h_async = 0;
  std::uint64_t d2d = 0;        ///< Blocking and asynchronous together.
  std::uint64_t copies_2d = 0;  ///< One for a call, whatever the height.
  std::uint64_t h2d = 0;        ///< Blocking and asynchronous together.
  std::uint64_t h2d_bytes = 0;
  std::uint64_t pinned_allocs = 0;
  std::uint64_t launches = 0;    ///< Enqueued or captured; replays do not count.
  std::uint64_t hook_calls = 0;  ///< Every call that reached the device, and every step of one.
};

class MockControl {
 public:
  explicit MockControl(const Options& options);
  ~MockControl();
  MockControl(const MockControl&) = delete;
  MockControl& operator=(const MockControl&) = delete;

  // ---- what happened ----

  /// Off: calls are counted only, as cheaply as can be. Records made so far stay.
  void set_recording(bool on);
  std::vector<LaunchRecord> launches() const;
  std::vector<LookupRecord> lookups() const;
  std::vector<SyncRecord> syncs() const;
  /// Every recorded call, in order; those of a captured stream when they were captured.
  std::vector<CallRecord> calls() const;
  /// The streams of the recorded calls of `op`, in order.
  std::vector<NativeStream> streams_of(Op op) const;
  Counts counts() const;
  /// Calls of one kind that reached the device, recorded or not, failed ones included.
  std::uint64_t num_calls(Op op) const;
  /// Forgets records and counts. What was set below stays.
  void reset();

  // ---- what it claims to have ----

  /// Every look-up in `module` fails with not_found, and has_module says no.
  void mark_module_absent(std::string_view module);
  /// The look-up of one kernel fails with not_found.
  void deny_kernel(std::string_view module, std::string_view function);
  /// What the kernel publishes from its first look-up on, or the first since modules were unloaded: signature, tile width, E4M3
  /// cast, dependency wait. A kernel without facts takes any arguments.
  void set_kernel_facts(std::string_view module, std::string_view function, KernelFacts facts);
  /// Larger single allocations fail with out_of_memory; nullopt lifts the limit.
  void set_max_allocation_bytes(std::optional<std::uint64_t> bytes);
  /// Figures that memory_info reports; live allocations are subtracted from `free_bytes`.
  void set_memory(std::uint64_t total_bytes, std::uint64_t free_bytes);
  /// Makes the device one that shares the host's memory, of which `host_available_bytes` are available; nullopt: discrete.
  void set_integrated(std::optional<std::uint64_t> host_available_bytes);

  // ---- failures ----

  /// The `n`-th call of `op` from now on (1: the next) fails with `code` and does nothing; calls before and after it do not.
  /// Calls made inside one of another kind do not count: pooled allocations are `alloc` when the pool grows.
  void fail_nth(Op op, std::uint64_t n, Errc code = Errc::internal);
  /// The `n`-th call of any hook from now on fails; Counts::hook_calls bounds the loop over all of them.
  void fail_any_nth(std::uint64_t n, Errc code = Errc::internal);
  /// Failures armed and not yet reached are dropped.
  void clear_failures();
  /// Every later call fails with device_lost and `reason`.
  void lose_device(std::string_view reason);

  /// On: work enqueued from now on runs at the next synchronisation of its stream (synchronize, a blocking call, event_synchronize,
  /// or a query, which sets it going and does not wait), or when another stream that was synchronised waits for it by event. Copies
  /// that promise to take their source during the call still do.
  void defer_copies(bool on);

  /// The host memory behind a device address, interior addresses included; null when there is none.
  /// For tests that look or scribble.
  std::byte* host_view(DevicePtr ptr) const;

 private:
  friend class MockBackend;
  struct State;
  std::unique_ptr<State> state_;
};

/// The control of a backend made by `create`, and by nothing else.
MockControl& control(GpuBackend& backend) noexcept;

}  // namespace metrale::mock
