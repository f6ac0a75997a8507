// SPDX-License-Identifier: Apache-2.0
//
// Communicator: a number of ranks, each with a device of its own, that move and add up memory together in stream order. One face
// for NCCL (nccl.h) and for ranks that are threads of one process (in_process.h).
//
// The rule of all collectives: every rank makes the same calls in the same order, of the same kind, type, count, operation and
// root. A communicator numbers the streams that it is given as it meets them: what one rank enqueues on its n-th stream meets what
// the others enqueue on their n-th. Ordering: as a launch on the stream. In a capture a call becomes part of the graph, which every
// rank has to replay alike. A fault of one rank ends the communicator for all: it is aborted, later calls answer with the first
// reason, and what was in flight leaves its outputs undefined. Such a fault shows at `synchronize` and `health`, not at the call.
// Lifetime: the backend outlives the communicator, and that outlives the graphs that hold its calls.
// Threads: one at a time, but for `abort` and `health`: any.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "metrale/backend.h"
#include "metrale/dtype.h"
#include "metrale/native_work.h"
#include "metrale/result.h"
#include "metrale/types.h"

namespace metrale {

enum class CollectiveKind : std::uint8_t {
  all_reduce,      ///< `to` on every rank: `from` of all ranks together.
  all_gather,      ///< `to` on every rank, [size, count]: `from` of each rank.
  reduce_scatter,  ///< `to`, [count]: this rank's part of all ranks' `from`, [size, count], together.
  broadcast,       ///< `to` on every rank: `from` of rank `peer`, which alone needs one.
  send,            ///< `from`, to rank `peer`, which receives as much.
  receive,         ///< `to`, from rank `peer`, which sends as much.
};
std::string_view to_string(CollectiveKind kind) noexcept;

enum class ReduceOp : std::uint8_t { sum, product, min, max, average };
std::string_view to_string(ReduceOp op) noexcept;

/// One call. In place: all_reduce and broadcast with `from` equal to `to`; all_gather with `from` at this rank's part of `to`;
/// reduce_scatter with `to` at this rank's part of `from`. Any other overlap is refused.
struct Collective {
  CollectiveKind kind = CollectiveKind::all_reduce;
  DevicePtr from;
  DevicePtr to;
  std::uint64_t count = 0;  ///< Elements; of one rank's part where there are parts.
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  std::uint32_t peer = 0;
};

/// Whether rank `rank` of `size` may make this call. Needs no device.
/// Errors: invalid_argument (no elements, a null or misaligned address, an overlap, a peer that is no rank, or the rank itself),
///   out_of_range (the size overflows), unsupported (a quantised type; a type that is not added up).
Result<> check(const Collective& call, std::uint32_t rank, std::uint32_t size);
/// Bytes of `from` and `to` that the call reads and writes on this rank. Only of a call that passed `check`.
struct CollectiveBytes {
  std::uint64_t from = 0;
  std::uint64_t to = 0;
};
CollectiveBytes bytes_of(const Collective& call, std::uint32_t rank, std::uint32_t size) noexcept;
/// "all_reduce of 4096 f32, sum", for messages.
std::string describe(const Collective& call);

class Communicator {
 public:
  using Site = std::source_location;
  using Milliseconds = std::chrono::milliseconds;

  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  /// Leaves: a rank that still waits for this one is told so.
  virtual ~Communicator() = default;

  /// "nccl 2.28.9", "in-process".
  std::string_view name() const noexcept { return name_; }
  std::uint32_t rank() const noexcept { return rank_; }
  std::uint32_t size() const noexcept { return size_; }
  GpuBackend& backend() const noexcept { return backend_; }
  /// How long a wait for the other ranks may last before it is an error.
  Milliseconds timeout() const noexcept { return timeout_; }

  /// Enqueues one call. Errors: as `check`; out_of_range (memory that the backend does not know), capture_unsafe (see `prepare`),
  ///   the first reason if the communicator was aborted, and those of the backend and the library. Nothing is enqueued then.
  Result<> enqueue(const Collective& call, StreamHandle stream, Site site = Site::current()) {
    return enqueue_group({&call, 1}, stream, site);
  }
  /// Enqueues calls that run together: a rank's sends and receives wait for each other's ends only as a whole.
  /// Errors: as `enqueue`, of the first call that is wrong; invalid_argument (no call).
  Result<> enqueue_group(std::span<const Collective> calls, StreamHandle stream, Site site = Site::current());

  Result<> all_reduce(DevicePtr from, DevicePtr to, std::uint64_t count, DType dtype, StreamHandle stream,
                      ReduceOp op = ReduceOp::sum, Site site = Site::current()) {
    return enqueue({CollectiveKind::all_reduce, from, to, count, dtype, op, 0}, stream, site);
  }
  Result<> all_gather(DevicePtr from, DevicePtr to, std::uint64_t count, DType dtype, StreamHandle stream,
                      Site site = Site::current()) {
    return enqueue({CollectiveKind::all_gather, from, to, count, dtype, ReduceOp::sum, 0}, stream, site);
  }
  Result<> reduce_scatter(DevicePtr from, DevicePtr to, std::uint64_t count, DType dtype, StreamHandle stream,
                          ReduceOp op = ReduceOp::sum, Site site = Site::current()) {
    return enqueue({CollectiveKind::reduce_scatter, from, to, count, dtype, op, 0}, stream, site);
  }
  Result<> broadcast(DevicePtr from, DevicePtr to, std::uint64_t count, DType dtype, std::uint32_t root, StreamHandle stream,
                     Site site = Site::current()) {
    return enqueue({CollectiveKind::broadcast, from, to, count, dtype, ReduceOp::sum, root}, stream, site);
  }
  Result<> send(DevicePtr from, std::uint64_t count, DType dtype, std::uint32_t peer, StreamHandle stream,
                Site site = Site::current()) {
    return enqueue({CollectiveKind::send, from, {}, count, dtype, ReduceOp::sum, peer}, stream, site);
  }
  Result<> receive(DevicePtr to, std::uint64_t count, DType dtype, std::uint32_t peer, StreamHandle stream,
                   Site site = Site::current()) {
    return enqueue({CollectiveKind::receive, {}, to, count, dtype, ReduceOp::sum, peer}, stream, site);
  }

  /// Makes what calls on `stream` need beyond their own memory, for calls or groups that read and write `bytes` together. A call in
  /// a capture that would need more than there is answers capture_unsafe. Not legal on a thread that holds a capture.
  Result<> prepare(StreamHandle stream, std::uint64_t bytes, Site site = Site::current());

  /// Gives back what `prepare` and calls took, once no graph needs it; later calls take it anew. Errors: as `GpuBackend::free`,
  /// in_use for one (a graph that holds calls is alive).
  Result<> trim(Site site = Site::current());

  /// Waits for the work on `stream`, as `GpuBackend::synchronize`, and for the other ranks at most `timeout`.
  /// Errors: the first reason if the communicator failed meanwhile; timeout (a rank did not come: it is aborted).
  Result<> synchronize(StreamHandle stream, Site site = Site::current());

  /// Ok while it works; after a fault the first reason. Asks the library for faults that it met since.
  Result<> health(Site site = Site::current());
  /// Ends the communicator on this rank: work in flight comes to its end with undefined outputs, and the other ranks fail as they
  /// wait for this one. Again: nothing.
  void abort(std::string_view reason) noexcept;

 protected:
  Communicator(GpuBackend& backend, std::string name, std::uint32_t rank, std::uint32_t size, Milliseconds timeout)
      : backend_(backend), name_(std::move(name)), rank_(rank), size_(size), timeout_(timeout) {}

  /// `calls` have been checked.
  virtual Result<> do_enqueue(std::span<const Collective> calls, StreamHandle stream, Site site) = 0;
  virtual Result<> do_prepare(StreamHandle stream, std::uint64_t bytes, Site site) = 0;
  virtual Result<> do_trim(Site site) = 0;
  /// A fault that the library met since, or ok.
  virtual Result<> do_poll() = 0;
  virtual void do_abort(std::string_view reason) noexcept = 0;
  virtual Result<> do_synchronize(StreamHandle stream, Site site) = 0;

  /// Keeps the first reason and aborts; gives the first reason back.
  Error fail(Error error);
  /// The first reason; ok without one.
  Result<> failure() const;

 private:
  GpuBackend& backend_;
  const std::string name_;
  const std::uint32_t rank_;
  const std::uint32_t size_;
  const Milliseconds timeout_;
  std::atomic<bool> has_failed_{false};
  mutable std::mutex mutex_;
  std::optional<Error> failure_;
};

/// Collects calls for one group. What was not ended is dropped. One thread at a time.
class CollectiveGroup {
 public:
  CollectiveGroup(Communicator& communicator, StreamHandle stream) : communicator_(communicator), stream_(stream) {}
  CollectiveGroup(const CollectiveGroup&) = delete;
  CollectiveGroup& operator=(const CollectiveGroup&) = delete;

  CollectiveGroup& add(const Collective& call) {
    calls_.push_back(call);
    return *this;
  }
  CollectiveGroup& send(DevicePtr from, std::uint64_t count, DType dtype, std::uint32_t peer) {
    return add({CollectiveKind::send, from, {}, count, dtype, ReduceOp::sum, peer});
  }
  CollectiveGroup& receive(DevicePtr to, std::uint64_t count, DType dtype, std::uint32_t peer) {
    return add({CollectiveKind::receive, {}, to, count, dtype, ReduceOp::sum, peer});
  }
  /// Enqueues the calls, and starts over. Errors: as `Communicator::enqueue_group`.
  Result<> end(std::source_location site = std::source_location::current()) {
    const std::vector<Collective> calls = std::exchange(calls_, {});
    return communicator_.enqueue_group(calls, stream_, site);
  }

 private:
  Communicator& communicator_;
  StreamHandle stream_;
  std::vector<Collective> calls_;
};

}  // namespace metrale
