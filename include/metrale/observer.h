// SPDX-License-Identifier: Apache-2.0
//
// Observers see every operation of a backend as a small record, after it was accepted or refused. With none attached an operation
// pays one relaxed load. The flight recorder keeps the last operations for the report of a fault. Attaching and detaching is for
// any thread; `on_op` is called from the thread that made the call, from several at once, and must not call the backend.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <vector>

#include "metrale/kernel_args.h"
#include "metrale/op.h"
#include "metrale/result.h"
#include "metrale/types.h"

namespace metrale {

/// Arguments of a launch that a record keeps.
inline constexpr std::size_t kRecordedArgs = 8;

/// One operation. Fields that do not apply are 0.
struct OpRecord {
  Op op{};
  std::uint8_t outcome = 0;    ///< 0: accepted; else the Errc.
  std::uint32_t num_args = 0;  ///< Arguments of a launch, copies of a batch.
  StreamHandle stream{};
  std::uint64_t dst = 0;  ///< Address written, allocated or freed; handle made or used.
  std::uint64_t src = 0;  ///< Address read.
  std::uint64_t bytes = 0;
  std::uint64_t time_ns = 0;  ///< Steady clock, at the end of the call; some milliseconds old where no observer is attached.
  std::source_location site{};

  // ---- kernels and launches ----
  KernelHandle kernel{};
  Dim3 grid{0, 0, 0};
  Dim3 block{0, 0, 0};
  std::uint32_t shared_bytes = 0;
  std::uint32_t buffer_mask = 0;                    ///< Bit i: args[i] is a Buffer.
  std::array<std::uint64_t, kRecordedArgs> args{};  ///< First arguments of a launch: a Buffer's address, else the leading bytes.

  std::string to_string() const;
};

class Observer {
 public:
  virtual ~Observer() = default;
  virtual void on_op(const OpRecord& record) noexcept = 0;
  /// Every argument of an accepted typed launch, just before its `on_op`. Does nothing by default.
  /// Lifetime: `args` is gone at return.
  virtual void on_launch_args(const OpRecord& record, std::span<const KernelArg> args) noexcept;
};

/// Keeps the last `kCapacity` operations in a ring. Writers never wait for each other or for a reader.
class FlightRecorder final : public Observer {
 public:
  static constexpr std::size_t kCapacity = 256;

  void on_op(const OpRecord& record) noexcept override { fill(claim(), record); }
  /// The two halves of `on_op`, for the face, which calls the driver between them: takes the next place and fills it. All that is
  /// atomic and waits for other stores is in the first. Each claim is filled, soon: a place that is not keeps its slot for good.
  std::uint64_t claim() noexcept {
    const std::uint64_t index = next_.fetch_add(1, std::memory_order_relaxed);
    Slot& slot = slots_[index % kCapacity];
    // A writer still busy here, or a later one that was faster, keeps the slot: this record is left out rather than waited for.
    std::uint64_t seen = slot.sequence.load(std::memory_order_relaxed);
    if (seen % 2 == 0 && seen <= 2 * index)
      slot.sequence.compare_exchange_strong(seen, 2 * index + 1, std::memory_order_acquire, std::memory_order_relaxed);
    return index;
  }
  void fill(std::uint64_t place, const OpRecord& record) noexcept;
  /// As `fill`, of a replay or a launch that was accepted, from its parts: a record made first would be written twice.
  void fill_replay(std::uint64_t place, std::uint64_t time_ns, StreamHandle stream, const std::source_location& site,
                   GraphHandle graph) noexcept {
    Slot& slot = slots_[place % kCapacity];
    if (slot.sequence.load(std::memory_order_relaxed) != 2 * place + 1) [[unlikely]]
      return;
    put_common(slot, Op::launch_graph, 0, time_ns, stream, site, graph.value);
    slot.sequence.store(2 * place + 2, std::memory_order_release);
    bring_near(place + 1);
  }
  void fill_launch(std::uint64_t place, std::uint64_t time_ns, StreamHandle stream, const std::source_location& site,
                   KernelHandle kernel, Dim3 grid, Dim3 block, std::uint32_t shared_bytes,
                   std::span<const KernelArg> args) noexcept {
    Slot& slot = slots_[place % kCapacity];
    if (slot.sequence.load(std::memory_order_relaxed) != 2 * place + 1) [[unlikely]]
      return;
    put_common(slot, Op::launch, static_cast<std::uint32_t>(args.size()), time_ns, stream, site, 0);
    put(slot, offsetof(OpRecord, kernel), kernel.value);
    put(slot, offsetof(OpRecord, grid), pair(grid.x, grid.y));
    put(slot, offsetof(OpRecord, grid.z), pair(grid.z, block.x));
    put(slot, offsetof(OpRecord, block.y), pair(block.y, block.z));
    const std::size_t num_kept = std::min(args.size(), kRecordedArgs);
    std::atomic<std::uint64_t>* word = &slot.words[offsetof(OpRecord, args) / sizeof(std::uint64_t)] + num_kept;
    std::uint32_t buffers = 0;
    for (const KernelArg* arg = args.data() + num_kept; arg != args.data();) {
      --arg;
      buffers = 2 * buffers + static_cast<std::uint32_t>(arg->is_buffer());
      (--word)->store(arg->leading_word(), std::memory_order_release);
    }
    put(slot, offsetof(OpRecord, shared_bytes), pair(shared_bytes, buffers));
    slot.sequence.store(2 * place + 2, std::memory_order_release);
    bring_near(place + 1);
  }

  /// The operations still in the ring, oldest first. Records being written at this moment are left out.
  std::vector<OpRecord> snapshot() const;
  /// A line each, newest last.
  std::string to_string() const;
  /// Operations seen since construction.
  std::uint64_t num_seen() const noexcept { return next_.load(std::memory_order_relaxed); }

 private:
  // A sequence lock per slot; the record is kept as words so that a torn read is discarded rather than undefined. Of most
  // operations only the first words are kept, which share a line of the cache with the sequence.
  static constexpr std::size_t kWords = sizeof(OpRecord) / sizeof(std::uint64_t);
  static std::size_t num_words(const OpRecord& record) noexcept;
  struct alignas(64) Slot {
    std::atomic<std::uint64_t> sequence{0};
    std::array<std::atomic<std::uint64_t>, kWords> words{};
  };
  /// Fetches a slot that is claimed soon: the atomic instructions of `claim` let nothing pass while they wait for memory.
  void bring_near(std::uint64_t place) const noexcept { __builtin_prefetch(&slots_[place % kCapacity], 1); }
  static std::uint64_t pair(std::uint32_t first, std::uint32_t second) noexcept {
    return std::bit_cast<std::uint64_t>(std::array<std::uint32_t, 2>{first, second});
  }
  static void put(Slot& slot, std::size_t offset, std::uint64_t word) noexcept {
    slot.words[offset / sizeof(word)].store(word, std::memory_order_release);
  }
  /// The first words, of an operation that was accepted.
  static void put_common(Slot& slot, Op op, std::uint32_t num_args, std::uint64_t time_ns, StreamHandle stream,
                         const std::source_location& site, std::uint64_t dst) noexcept {
    const std::array<Op, 4> head{op, Op{}, Op{}, Op{}};  // with the outcome, and padding
    put(slot, offsetof(OpRecord, op), pair(std::bit_cast<std::uint32_t>(head), num_args));
    put(slot, offsetof(OpRecord, stream), stream.value);
    put(slot, offsetof(OpRecord, dst), dst);
    put(slot, offsetof(OpRecord, src), 0);
    put(slot, offsetof(OpRecord, bytes), 0);
    put(slot, offsetof(OpRecord, time_ns), time_ns);
    static_assert(sizeof(site) == sizeof(std::uint64_t));
    put(slot, offsetof(OpRecord, site), std::bit_cast<std::uint64_t>(site));
  }

  alignas(64) std::atomic<std::uint64_t> next_{0};
  std::array<Slot, kCapacity> slots_;
};

}  // namespace metrale
