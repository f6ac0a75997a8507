// SPDX-License-Identifier: Apache-2.0
//
// HandleTable: issues the handles of one kind of object and finds the object behind one without a lock. A handle is
// [owner:16][generation:24][slot + 1:24], so a stale handle and one of another backend are told from a live one. Objects are made
// once a slot and reused; a caller that races a destroy with a use sees a reset object, never freed memory. Any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace metrale::detail {

template <class T>
class HandleTable {
 public:
  /// `owner` marks the handles of one backend.
  explicit HandleTable(std::uint16_t owner) : owner_(owner), more_(std::make_unique<Chunks>()) {}
  HandleTable(const HandleTable&) = delete;
  HandleTable& operator=(const HandleTable&) = delete;
  ~HandleTable() {
    delete first_.load(std::memory_order_relaxed);
    for (auto& chunk : *more_) delete chunk.load(std::memory_order_relaxed);
  }

  /// Makes an object with `init(object)` and returns its handle, or 0 when the table is full. Where `init` throws, nothing changed.
  template <class Init>
  std::uint64_t insert(Init&& init) {
    std::lock_guard lock(mutex_);
    const bool reused = !free_.empty();
    if (!reused && size_ == kChunks * kChunkSlots) return 0;
    const std::uint32_t index = reused ? free_.back() : size_;
    if (!reused && index % kChunkSlots == 0) {
      free_.reserve(index + kChunkSlots);  // so that `erase` needs no memory
      std::atomic<Chunk*>& chunk = chunk_of(index);
      if (chunk.load(std::memory_order_relaxed) == nullptr) chunk.store(new Chunk, std::memory_order_release);
    }
    Slot& slot = slot_at(index);
    const std::uint64_t value = handle_of(index, (slot.generation + 1) & kGenerationMask);
    init(slot.object, value);
    if (reused) {
      free_.pop_back();
    } else {
      ++size_;
    }
    slot.generation = (slot.generation + 1) & kGenerationMask;
    slot.live.store(value, std::memory_order_release);
    return value;
  }

  /// The object of a live handle, else null.
  T* find(std::uint64_t value) const noexcept {
    const std::uint64_t index = (value & kIndexMask) - 1;  // 0 wraps to a chunk that does not exist
    if (index >= kChunks * kChunkSlots) return nullptr;
    Chunk* chunk = chunk_of(index).load(std::memory_order_acquire);
    if (chunk == nullptr) return nullptr;
    Slot& slot = (*chunk)[index % kChunkSlots];
    return slot.live.load(std::memory_order_acquire) == value ? &slot.object : nullptr;
  }

  /// Makes the handle stale; true for exactly one caller. The object is reused by a later `insert`.
  bool erase(std::uint64_t value) {
    return erase(value, [](T&) {});
  }
  /// As above; that caller's `fn(object)` runs before anyone can reuse the object. Where it throws, the handle stays.
  template <class Fn>
  bool erase(std::uint64_t value, Fn&& fn) {
    std::lock_guard lock(mutex_);
    T* object = find(value);
    if (object == nullptr) return false;
    fn(*object);
    const auto index = static_cast<std::uint32_t>((value & kIndexMask) - 1);
    slot_at(index).live.store(0, std::memory_order_release);
    free_.push_back(index);
    return true;
  }

  /// Handles live at this moment.
  std::vector<std::uint64_t> handles() const {
    std::lock_guard lock(mutex_);
    std::vector<std::uint64_t> values;
    for (std::uint32_t i = 0; i < size_; ++i) {
      const std::uint64_t value = slot_at(i).live.load(std::memory_order_relaxed);
      if (value != 0) values.push_back(value);
    }
    return values;
  }

 private:
  static constexpr std::uint32_t kChunkSlots = 256;
  static constexpr std::uint32_t kChunks = 4096;
  static constexpr std::uint64_t kIndexMask = (1u << 24) - 1;
  static constexpr std::uint32_t kGenerationMask = (1u << 24) - 1;

  struct Slot {
    std::atomic<std::uint64_t> live{0};  // the handle while the object lives
    std::uint32_t generation = 0;
    T object;
  };
  using Chunk = std::array<Slot, kChunkSlots>;
  using Chunks = std::array<std::atomic<Chunk*>, kChunks - 1>;

  std::uint64_t handle_of(std::uint32_t index, std::uint32_t generation) const {
    return std::uint64_t{owner_} << 48 | std::uint64_t{generation} << 24 | (index + 1);
  }
  Slot& slot_at(std::uint32_t index) const { return (*chunk_of(index).load(std::memory_order_relaxed))[index % kChunkSlots]; }
  std::atomic<Chunk*>& chunk_of(std::uint64_t index) const {
    return index < kChunkSlots ? first_ : (*more_)[index / kChunkSlots - 1];
  }

  const std::uint16_t owner_;
  mutable std::mutex mutex_;
  std::vector<std::uint32_t> free_;
  std::uint32_t size_ = 0;
  // The first apart: nearly every handle is there, and the table stays small beside what else a look-up touches.
  mutable std::atomic<Chunk*> first_{nullptr};
  std::unique_ptr<Chunks> more_;
};

}  // namespace metrale::detail
