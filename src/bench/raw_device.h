// SPDX-License-Identifier: Apache-2.0
//
// RawDevice: the other side of a comparison, which is the driver called directly, without face, ledger or checks, on the device and
// in the context of the backend it is compared with. Calls take counts and lists, so that what is timed is a loop of the driver's
// own calls. Objects are named by numbers and released with it. One thread at a time, but for `pool_ring`.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "metrale/backend.h"
#include "metrale/result.h"

namespace metrale::bench {

/// One copy between host and device.
struct RawCopy {
  void* host = nullptr;
  std::uint64_t device = 0;
  std::uint64_t bytes = 0;
};

/// A matrix product for one row: y = W·x with W [n, k] bf16.
struct PeerProduct {
  std::uint32_t n = 0;
  std::uint32_t k = 0;
  std::span<const DevicePtr> weights;  ///< Used in turn.
  std::uint32_t count = 0;             ///< Products in a graph.
};

class RawDevice {
 public:
  virtual ~RawDevice() = default;

  /// "NVIDIA H200"
  virtual std::string device_name() const = 0;
  /// "GPU-…"
  virtual std::string uuid() const = 0;
  virtual int driver_version() const = 0;

  /// Waits for the stream that everything below goes to.
  virtual Result<> synchronize() = 0;

  // ---- launches of bench.nop8 and, `dependent`, of bench.nop_waits with programmatic dependent launch ----
  virtual Result<> launch_nops(std::uint32_t count) = 0;
  virtual Result<> launch_dependent(std::uint32_t count) = 0;
  virtual Result<> launch_and_wait(std::uint32_t count) = 0;

  // ---- memory ----
  virtual Result<> alloc_free(std::uint64_t bytes, std::uint32_t count) = 0;
  /// `group` blocks, then freed in the same order, `count` times.
  virtual Result<> alloc_free_groups(std::uint64_t bytes, std::uint32_t group, std::uint32_t count) = 0;
  virtual bool has_pool() const noexcept = 0;
  /// Makes streams for `pool_ring`, and lets the driver's pool keep its memory until the end.
  virtual Result<> open_pool(std::uint32_t streams) = 0;
  /// Holds `live` blocks on stream `stream`, replaces the oldest `sizes.size()` times, frees all and, outside the time that
  /// matters, waits. Threads: one for each stream. Returns the nanoseconds of a pair of allocating and freeing.
  virtual Result<double> pool_ring(std::uint32_t stream, std::span<const std::uint64_t> sizes, std::uint32_t live) = 0;
  virtual Result<> pinned_alloc_free(std::uint64_t bytes) = 0;

  // ---- copies ----
  /// Pinned host memory, until the end.
  virtual Result<std::span<std::byte>> pinned(std::uint64_t bytes) = 0;
  /// Enqueued one after another; waits once.
  virtual Result<> to_host(std::span<const RawCopy> copies) = 0;
  virtual Result<> to_device(std::span<const RawCopy> copies) = 0;
  /// Each is waited for.
  virtual Result<> to_host_blocking(std::span<const RawCopy> copies) = 0;
  /// Device time in seconds of a copy within the device, by events.
  virtual Result<double> device_copy_seconds(std::uint64_t dst, std::uint64_t src, std::uint64_t bytes) = 0;

  // ---- graphs ----
  /// A chain of `nodes` launches of bench.nop_waits over `blocks` blocks; returns its number.
  virtual Result<std::uint32_t> make_chain(std::uint32_t nodes, std::uint32_t blocks, bool dependent) = 0;
  /// A graph of the products through the vendor's library, or nullopt with the reason in `why_not`.
  virtual Result<std::optional<std::uint32_t>> make_peer(const PeerProduct& product, std::string& why_not) = 0;
  virtual Result<> launch_graph(std::uint32_t graph, std::uint32_t count) = 0;
  /// Device time in seconds of one replay, by events.
  virtual Result<double> graph_seconds(std::uint32_t graph) = 0;

  // ---- marks: events on a stream of the backend, for the profile of a decode step ----
  /// Forgets the marks so far and makes room for `capacity`.
  virtual Result<> reset_marks(std::uint32_t capacity) = 0;
  /// Keeps `native` busy for about `nanoseconds`, so that what follows queues up behind it.
  virtual Result<> hold(std::uint64_t native, std::uint64_t nanoseconds) = 0;
  virtual Result<> mark(std::uint64_t native) = 0;
  /// Device time in seconds from each mark to the next. Waits for the last.
  virtual Result<std::vector<double>> mark_seconds() = 0;
};

}  // namespace metrale::bench
