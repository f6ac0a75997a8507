// SPDX-License-Identifier: Apache-2.0
//
// What is in flight in one context: its streams, what was enqueued last on each and up to where it is known to be done, and marks
// behind work. Nothing here waits for the device except `Mark::wait`. Several backends of a device share one, because the driver's
// cuMemFree waits for all streams of the context, whoever made them. Any thread; the context is current in the caller.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/cuda/driver.h"
#include "backends/cuda/outside_capture.h"
#include "backends/cuda/staging.h"
#include "metrale/result.h"

namespace metrale::cuda {

/// Events without time, made once and used again.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(const Driver& driver) : driver_(driver) {}

  Result<CUevent> take();
  void give(CUevent event) noexcept;
  /// Destroys what is here; events that come later are dropped, their context is gone.
  void close() noexcept;
  const Driver& driver() const noexcept { return driver_; }

 private:
  const Driver& driver_;
  std::mutex mutex_;
  std::vector<CUevent> free_;
  std::size_t num_made_ = 0;
  bool is_closed_ = false;
};

/// A point in the work of one stream. Any thread.
class Mark {
 public:
  explicit Mark(std::shared_ptr<EventPool> events) : events_(std::move(events)) {}
  ~Mark() { events_->give(event_); }
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;

  /// Puts it behind the work on `stream` so far. Once.
  Result<> record(CUstream stream);
  /// Whether the work before it is done. A driver that cannot tell will not tell later: yes.
  bool is_done() noexcept;
  /// Waits for that.
  CUresult wait() noexcept;
  CUevent event() const noexcept { return event_; }

 private:
  const std::shared_ptr<EventPool> events_;
  CUevent event_ = nullptr;
  std::atomic<bool> done_{false};
};
using MarkPtr = std::shared_ptr<Mark>;  // shared: one mark stands for all that was freed behind the same work

/// Never the same twice in the process, and never 0.
inline std::uint64_t new_stamp() noexcept {
  constexpr std::uint64_t kBatch = std::uint64_t{1} << 20;
  static std::atomic<std::uint64_t> next_batch{0};
  thread_local std::uint64_t next = 0;
  if (next % kBatch == 0) [[unlikely]]
    next = next_batch.fetch_add(kBatch, std::memory_order_relaxed);
  return ++next;
}

/// One stream as one backend uses it. Records are used again and not freed before the context, so that a caller who races a destroy
/// reads a record.
struct alignas(64) StreamRecord {
  std::atomic<CUstream> stream{nullptr};
  std::atomic<std::uint64_t> enqueued{0};                ///< Stamp of the last enqueue, written behind it.
  std::atomic<std::uint64_t> done{0};                    ///< All up to the enqueue with this stamp is known to be done.
  std::atomic<const std::string*> last_kernel{nullptr};  ///< Lives as long as the process.
  std::atomic<const void*> owner{nullptr};               ///< The backend.

  /// Something was enqueued. A stamp of its own rather than a count: of two threads that enqueue at once either may write last, and
  /// a plain write, unlike an atomic addition, does not wait for the driver's own write to the device.
  void note() noexcept { enqueued.store(new_stamp(), std::memory_order_release); }
  /// What was there when `enqueued` read `stamp` is done.
  void note_done(std::uint64_t stamp) noexcept { done.store(stamp, std::memory_order_release); }
  bool looks_idle() const noexcept { return done.load(std::memory_order_acquire) == enqueued.load(std::memory_order_acquire); }

  // ---- guarded by Work's mutex ----
  bool is_foreign = false;  ///< Others enqueue on it, so the stamps say nothing.
  bool is_shared = false;   ///< Ours, and others have its handle: they may enqueue on it.
  bool is_gone = false;     ///< Its maker destroyed it; wraps of it are left.
  std::uint32_t num_wraps = 0;
  MarkPtr mark;  ///< Behind the enqueue with the stamp `mark_at`.
  std::uint64_t mark_at = 0;
  std::size_t slot = 0;       ///< Its own in the table; others may still show it.
  std::uint64_t capture = 0;  ///< The open capture that we took it into. Of others nobody can tell what was in flight before.
  MarkPtr before_capture;     ///< Behind what was enqueued before that capture; null: nothing in flight then.

  StagingCursor staging;  ///< Has a mutex of its own, taken before Work's.
};

class Work {
 public:
  explicit Work(const Driver& driver) : driver_(driver), events_(std::make_shared<EventPool>(driver)) {
    table_.store(&tables_.emplace_back(kTableBits), std::memory_order_release);
  }

  EventPool& events() noexcept { return *events_; }

  /// Enters a stream for `owner`; one that it knows already counts one more wrap. Backends that use the same stream have a record
  /// each, so that none depends on how long another keeps it. Never fails to answer.
  StreamRecord& add(CUstream stream, const void* owner, bool is_foreign);
  /// Takes a stream out that is about to be destroyed; the end of its work stays known.
  /// Errors: the end cannot be marked; nothing has changed then, unless `anyway`.
  Result<> remove(CUstream stream, const void* owner, bool anyway);
  /// A wrapped handle was given back: the last one of a foreign stream takes it out. Errors: as of `remove`.
  Result<> unwrap(CUstream stream, const void* owner, bool anyway);
  /// Others have the stream's handle from now on, and may enqueue on it.
  void share(CUstream stream, const void* owner) noexcept;
  /// Forgets all of `owner`, whose work is done.
  void forget(const void* owner);
  /// Lock-free. Null: unknown.
  StreamRecord* find(CUstream stream, const void* owner) const noexcept {
    const Table& table = *table_.load(std::memory_order_acquire);
    std::size_t i = slot_of(stream, table);
    for (std::size_t probed = 0; probed <= table.mask; ++probed, i = (i + 1) & table.mask) {
      StreamRecord* record = table.slots[i].load(std::memory_order_acquire);
      if (record == nullptr) return nullptr;
      if (record->stream.load(std::memory_order_relaxed) == stream && record->owner.load(std::memory_order_relaxed) == owner)
        return record;
    }
    return nullptr;
  }
  /// `owner` enqueued something on `stream`.
  void note(CUstream stream, const void* owner) const noexcept {
    if (StreamRecord* record = find(stream, owner)) record->note();
  }

  /// Whether nothing can be in flight, by the stamps alone.
  bool looks_idle();
  /// Whether nothing is in flight, of what libraries enqueued on our streams either; false where that would take asking the driver
  /// after more than `most_queries` streams.
  bool is_idle_after(std::size_t most_queries);
  /// Whether nothing is in flight; asks the driver where the stamps do not tell.
  bool is_idle();
  /// Marks behind all that is in flight on the streams of `owner`, destroyed ones too; null: on every stream. Asks the driver,
  /// since libraries enqueue on our streams as well.
  /// Errors: a stream could not be marked; capture_unsafe: a library captures one, which hides what runs on it from before.
  Result<std::vector<MarkPtr>> marks(const void* owner);
  /// A mark behind what was noted on this stream; null: nothing of it is in flight. Errors: as of `marks`.
  Result<MarkPtr> mark(StreamRecord& record);
  /// Work of another context that uses what `owner` has.
  void add_mark(const void* owner, MarkPtr mark);
  /// Whether a stream takes part in a capture; asks nothing that would break one. Errors: those of the driver.
  Result<bool> is_captured(CUstream stream) const;
  /// The capture that a stream takes part in; 0: none, or one that was broken. The driver falls over a capture that another thread
  /// ends while it is asked after, so this and `end_capture` take turns. Errors: those of the driver.
  Result<std::uint64_t> capture_of(CUstream stream);
  /// The same, in what `capturing` runs.
  Result<std::uint64_t> capture_of_locked(CUstream stream) const;
  /// The driver's cuStreamEndCapture.
  CUresult end_capture(CUstream stream, CUgraph* graph);

  /// Runs `change`, which may capture `record`, and keeps where its earlier work ends.
  template <class Fn>
  auto capturing(StreamRecord& record, Fn&& change) -> decltype(change()) {
    std::lock_guard lock(mutex_);
    const CUstream stream = record.stream.load(std::memory_order_relaxed);
    if (METRALE_TRY(is_captured(stream))) return change();
    MarkPtr before;
    {
      // The driver breaks this thread's capture when it is asked after a stream outside it.
      const OutsideCapture outside(driver_);
      before = METRALE_TRY(mark_locked(record, Stamps::ignored));
    }
    auto changed = change();
    const std::uint64_t capture = capture_of_locked(stream).value_or(0);
    for (StreamRecord* other : live_) {
      if (other->stream.load(std::memory_order_relaxed) != stream || other->is_gone) continue;
      other->capture = capture;
      other->before_capture = before;
    }
    return changed;
  }

  /// The kernels last launched on streams whose work is not known to be done, for messages.
  std::string kernels_in_flight();

 private:
  struct Table {
    explicit Table(unsigned bits_in) : bits(bits_in), mask((std::size_t{1} << bits_in) - 1), slots(mask + 1) {}
    unsigned bits;
    std::size_t mask;
    std::vector<std::atomic<StreamRecord*>> slots;
  };
  struct Orphan {
    const void* owner;
    MarkPtr mark;
  };

  static constexpr unsigned kTableBits = 6;

  static std::size_t slot_of(CUstream stream, const Table& table) noexcept {
    return (reinterpret_cast<std::uintptr_t>(stream) * 0x9E3779B97F4A7C15ull) >> (64 - table.bits);
  }
  enum class Stamps : std::uint8_t { trusted, ignored };
  /// The end of what ran on a stream that is captured now from before; null: all of it is done.
  static Result<MarkPtr> before_capture(const StreamRecord& record);
  bool is_idle_locked(StreamRecord& record, Stamps stamps);
  Result<MarkPtr> mark_locked(StreamRecord& record, Stamps stamps);
  static void insert(Table& table, StreamRecord& record);
  void remove_locked(StreamRecord& record);
  /// Keeps the end of what runs on a stream that goes.
  Result<> keep_end(StreamRecord& record);
  void drop_done_orphans();

  const Driver& driver_;
  const std::shared_ptr<EventPool> events_;
  std::mutex mutex_;
  std::deque<StreamRecord> records_;
  std::vector<StreamRecord*> live_;
  std::vector<StreamRecord*> spare_;
  std::vector<Orphan> orphans_;  ///< Ends of the work of destroyed streams, and of other contexts.
  std::atomic<const Table*> table_{nullptr};
  std::deque<Table> tables_;  ///< The last is in use; readers may still be in those before.
};

}  // namespace metrale::cuda
