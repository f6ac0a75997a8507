// SPDX-License-Identifier: Apache-2.0
//
// The stream-ordered pool behind alloc_async and free_async. Memory comes from the driver in slabs of one size class and goes round
// in free lists, one set for each stream: a block freed on a stream is reused there at once, since stream order protects it, and on
// another stream only when the first has passed, or behind an event if the device is full. Any thread;
// streams do not contend with each other.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <vector>

#include "metrale/backend_hooks.h"

namespace metrale::detail {

inline constexpr std::size_t kNumPoolClasses = 256;

/// The free blocks of one stream, by size class.
struct PoolLists {
  std::mutex mutex;
  std::array<std::vector<DevicePtr>, kNumPoolClasses> free;
};

/// What the pool asks of the face. Set once, before use.
struct PoolDriver {
  std::function<Result<DevicePtr>(std::uint64_t bytes)> alloc_slab;
  std::function<Result<>(DevicePtr base, std::uint64_t bytes)> free_slab;
  /// Live streams other than `self`, by their lists; the pointers stay valid.
  std::function<void(PoolLists* self, const std::function<bool(NativeStream, PoolLists&)>& visit)> other_streams;
  std::function<bool(NativeStream)> is_idle;
  /// Makes `waiter` wait for everything enqueued on `first` so far.
  std::function<Result<>(NativeStream waiter, NativeStream first)> order_after;
  /// Marks the stream's work so far; none: that work is done. An error: nobody can tell when it is.
  std::function<Result<std::optional<NativeEvent>>(NativeStream)> mark_work;
  std::function<bool(NativeEvent)> event_done;
  std::function<void(NativeEvent)> drop_event;
};

class StreamPool {
 public:
  void set_driver(PoolDriver driver) { driver_ = std::move(driver); }

  /// A block of at least `bytes` for work on `stream`.
  Result<DevicePtr> take(std::uint64_t bytes, NativeStream stream, PoolLists& lists);
  /// Gives back a block that `take(bytes)` returned, in the order of the stream that `lists` belongs to.
  void give(DevicePtr ptr, std::uint64_t bytes, PoolLists& lists);
  /// Keeps the blocks of a stream that is about to be destroyed until its work is done.
  void retire(NativeStream stream, PoolLists& lists);
  /// Returns slabs without a live block to the driver. Returns their bytes.
  std::uint64_t trim();
  /// Returns every slab to the driver. For the end: no block is used any more. Errors: the first.
  Result<> free_all();
  /// Forgets every slab without a driver call: for a lost device.
  void forget();
  std::uint64_t reserved_bytes() const;

  /// The size class of `bytes`, and the bytes of a block of that class: eight steps a doubling, so at most an eighth is lost.
  static std::size_t class_of(std::uint64_t bytes) noexcept;
  static std::uint64_t class_bytes(std::size_t index) noexcept;

 private:
  struct Slab {
    DevicePtr base;
    std::uint64_t bytes = 0;
    std::size_t size_class = 0;
    std::uint64_t carved = 0;  ///< Bytes handed out at least once.
  };
  struct Orphans {
    std::optional<NativeEvent> event;  ///< None: the work is done.
    std::array<std::vector<DevicePtr>, kNumPoolClasses> free;
  };

  std::optional<DevicePtr> take_shared(std::size_t size_class);
  std::optional<DevicePtr> take_from_others(std::size_t size_class, NativeStream stream, PoolLists& lists, bool wait);
  Result<DevicePtr> grow(std::size_t size_class);
  void reap_orphans();
  /// Empties every list, with `mutex_` held.
  void drop_lists();

  PoolDriver driver_;
  mutable std::mutex mutex_;
  std::vector<Slab> slabs_;
  std::array<std::size_t, kNumPoolClasses> open_slab_{};       ///< Index + 1 of the slab being carved; 0: none.
  std::array<std::vector<DevicePtr>, kNumPoolClasses> ready_;  ///< Free for any stream.
  std::list<Orphans> orphans_;
};

}  // namespace metrale::detail
