// SPDX-License-Identifier: Apache-2.0
//
// Observers see every operation of a backend as a small record, after it was accepted or refused. With none attached an operation
// pays one relaxed load. The flight recorder keeps the last operations for the report of a fault. Attaching and detaching is for
// any thread; `on_op` is called from the thread that made the call, from several at once, and must not call the backend.
#pragma once

#include <array>
#include <atomic>
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
  std::array<Slot, kCapacity> slots_;
  std::atomic<std::uint64_t> next_{0};
};

}  // namespace metrale
