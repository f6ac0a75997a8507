// SPDX-License-Identifier: Apache-2.0
//
// The open captures of one backend: who holds them, which streams and events take part, what memory they name. The guard's
// questions are answered from here; with no capture open each costs one load. Any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <source_location>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "metrale/types.h"

namespace metrale::detail {

/// A block that a graph or an open capture names.
struct NamedBlock {
  bool in_host_table = false;  ///< Pinned memory by its host address.
  DevicePtr base;
  std::uint64_t generation = 0;
};

/// The open capture that a stream takes part in, 0 for none. Handles of one native stream are bound to one word; a mark that was
/// never bound has a word of its own.
class CaptureMark {
 public:
  void bind(std::atomic<std::uint32_t>& word) noexcept { word_.store(&word, std::memory_order_release); }

  std::uint32_t load(std::memory_order order) const noexcept { return word_.load(std::memory_order_acquire)->load(order); }
  void store(std::uint32_t id, std::memory_order order) noexcept { word_.load(std::memory_order_acquire)->store(id, order); }
  bool compare_exchange_strong(std::uint32_t& expected, std::uint32_t id) noexcept {
    return word_.load(std::memory_order_acquire)->compare_exchange_strong(expected, id);
  }

 private:
  std::atomic<std::uint32_t> own_{0};
  std::atomic<std::atomic<std::uint32_t>*> word_{&own_};
};

/// The words of capture marks by native stream. A word is used again and never freed, so that a caller that races a destroy reads
/// a word, not freed memory.
class CaptureWords {
 public:
  /// The word of a native stream, for one more handle.
  std::atomic<std::uint32_t>& acquire(std::uint64_t native) {
    std::lock_guard lock(mutex_);
    Entry& entry = entries_[native];
    if (entry.num_handles++ == 0) {
      if (spare_.empty()) spare_.push_back(&words_.emplace_back(0u));
      entry.word = spare_.back();
      spare_.pop_back();
      entry.word->store(0);
    }
    return *entry.word;
  }
  /// One handle less.
  void release(std::uint64_t native) {
    std::lock_guard lock(mutex_);
    const auto it = entries_.find(native);
    if (it == entries_.end() || --it->second.num_handles != 0) return;
    spare_.push_back(it->second.word);
    entries_.erase(it);
  }

 private:
  struct Entry {
    std::atomic<std::uint32_t>* word = nullptr;
    std::uint32_t num_handles = 0;
  };
  std::mutex mutex_;
  std::deque<std::atomic<std::uint32_t>> words_;
  std::vector<std::atomic<std::uint32_t>*> spare_;
  std::unordered_map<std::uint64_t, Entry> entries_;
};

/// One open capture. Guarded by the table's mutex.
struct Capture {
  std::uint32_t id = 0;
  std::thread::id owner;
  StreamHandle origin;
  std::source_location site;
  std::vector<StreamHandle> streams;                    ///< The origin and those joined.
  std::vector<EventHandle> events;                      ///< Last recorded inside.
  std::unordered_map<std::uint64_t, NamedBlock> names;  ///< By base, host addresses with bit 63 set.
  bool abort_requested = false;
  std::source_location abort_site;
};

class CaptureTable {
 public:
  bool any_open() const noexcept { return num_open_.load(std::memory_order_acquire) != 0; }

  /// Enters a capture held by this thread and returns its id.
  std::uint32_t open(StreamHandle origin, std::source_location site) {
    std::lock_guard lock(mutex_);
    const std::uint32_t id = next_id_++;
    Capture capture;
    capture.id = id;
    capture.owner = std::this_thread::get_id();
    capture.origin = origin;
    capture.site = site;
    capture.streams.push_back(origin);
    captures_.emplace(id, std::move(capture));
    num_open_.store(captures_.size(), std::memory_order_release);
    return id;
  }

  /// Removes and returns a capture.
  std::optional<Capture> close(std::uint32_t id) {
    std::lock_guard lock(mutex_);
    const auto it = captures_.find(id);
    if (it == captures_.end()) return std::nullopt;
    Capture capture = std::move(it->second);
    captures_.erase(it);
    num_open_.store(captures_.size(), std::memory_order_release);
    return capture;
  }

  /// Calls `fn(Capture&)` under the lock; false when the capture has gone.
  template <class Fn>
  bool with(std::uint32_t id, Fn&& fn) {
    std::lock_guard lock(mutex_);
    const auto it = captures_.find(id);
    if (it == captures_.end()) return false;
    fn(it->second);
    return true;
  }

  /// What a guard needs to know of a capture.
  struct Summary {
    std::uint32_t id = 0;
    bool mine = false;
    bool abort_requested = false;
    StreamHandle origin;
    std::source_location site;
    std::source_location abort_site;
  };
  std::optional<Summary> summary(std::uint32_t id) const {
    std::lock_guard lock(mutex_);
    const auto it = captures_.find(id);
    if (it == captures_.end()) return std::nullopt;
    return summarise(it->second);
  }
  /// The captures this thread holds.
  std::vector<Summary> held_by_this_thread() const {
    std::vector<Summary> held;
    std::lock_guard lock(mutex_);
    for (const auto& [id, capture] : captures_) {
      if (capture.owner == std::this_thread::get_id()) held.push_back(summarise(capture));
    }
    return held;
  }
  std::vector<Summary> all() const {
    std::vector<Summary> open;
    std::lock_guard lock(mutex_);
    for (const auto& [id, capture] : captures_) open.push_back(summarise(capture));
    return open;
  }

 private:
  static Summary summarise(const Capture& c) {
    return {c.id, c.owner == std::this_thread::get_id(), c.abort_requested, c.origin, c.site, c.abort_site};
  }

  std::atomic<std::size_t> num_open_{0};
  mutable std::mutex mutex_;
  std::unordered_map<std::uint32_t, Capture> captures_;
  std::uint32_t next_id_ = 1;
};

}  // namespace metrale::detail
