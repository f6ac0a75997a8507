// SPDX-License-Identifier: Apache-2.0
#include "core/stream_pool.h"

#include <algorithm>
#include <bit>
#include <unordered_map>

namespace metrale::detail {
namespace {

constexpr std::uint64_t kSmallestBlock = kDeviceAlignment;
constexpr std::uint64_t kSlabBytes = std::uint64_t{2} << 20;
// Blocks up to this size share slabs; larger ones have one each.
constexpr std::uint64_t kLargestShared = kSlabBytes / 4;
constexpr unsigned kStepsLog2 = 3;

std::optional<DevicePtr> pop(std::vector<DevicePtr>& list) {
  if (list.empty()) return std::nullopt;
  const DevicePtr ptr = list.back();
  list.pop_back();
  return ptr;
}

}  // namespace

std::size_t StreamPool::class_of(std::uint64_t bytes) noexcept {
  const std::uint64_t units = div_ceil(std::max(bytes, std::uint64_t{1}), kSmallestBlock);
  if (units <= (1u << kStepsLog2)) return units - 1;
  // `units` lies in (2^e, 2^(e+1)]; each such range is cut into 2^kStepsLog2 steps.
  const unsigned e = static_cast<unsigned>(std::bit_width(units - 1)) - 1;
  const std::uint64_t step = std::uint64_t{1} << (e - kStepsLog2);
  return (std::size_t{e - kStepsLog2 + 1} << kStepsLog2) + div_ceil(units - (std::uint64_t{1} << e), step) - 1;
}

std::uint64_t StreamPool::class_bytes(std::size_t index) noexcept {
  constexpr std::size_t steps = 1u << kStepsLog2;
  if (index < steps) return (index + 1) * kSmallestBlock;
  const std::size_t doubling = index / steps - 1;
  return ((std::uint64_t{steps} << doubling) + (std::uint64_t{index % steps + 1} << doubling)) * kSmallestBlock;
}

Result<DevicePtr> StreamPool::take(std::uint64_t bytes, NativeStream stream, PoolLists& lists) {
  const std::size_t size_class = class_of(bytes);
  if (size_class >= kNumPoolClasses) return Error(Errc::out_of_memory, "the pool has no blocks of that size");
  {
    std::lock_guard lock(lists.mutex);
    if (const auto ptr = pop(lists.free[size_class])) return *ptr;
  }
  if (const auto ptr = take_shared(size_class)) return *ptr;
  if (const auto ptr = take_from_others(size_class, stream, lists, false)) return *ptr;
  Result<DevicePtr> grown = grow(size_class);
  if (grown || grown.error().code() != Errc::out_of_memory) return grown;
  // The device is full. Another stream's block, behind its work, before trim:
  // what trim gives back is not there until that work is done.
  if (const auto ptr = take_from_others(size_class, stream, lists, true)) return *ptr;
  trim();
  return grow(size_class);
}

void StreamPool::give(DevicePtr ptr, std::uint64_t bytes, PoolLists& lists) {
  std::lock_guard lock(lists.mutex);
  lists.free[class_of(bytes)].push_back(ptr);
}

void StreamPool::retire(NativeStream stream, PoolLists& lists) {
  std::list<Orphans> made;  // a list: moving its node needs no memory
  {
    std::lock_guard lock(lists.mutex);
    if (std::all_of(lists.free.begin(), lists.free.end(), [](const auto& blocks) { return blocks.empty(); })) return;
    made.emplace_back().free.swap(lists.free);
  }
  const auto mark = driver_.mark_work(stream);
  std::lock_guard lock(mutex_);
  // Without a mark or an end nobody can tell when the blocks are free: they stay with their slabs, never empty to `trim`.
  if (!mark) return;
  made.front().event = *mark;
  orphans_.splice(orphans_.end(), made);
}

void StreamPool::reap_orphans() {
  for (auto it = orphans_.begin(); it != orphans_.end();) {
    if (it->event && !driver_.event_done(*it->event)) {
      ++it;
      continue;
    }
    if (it->event) driver_.drop_event(*it->event);
    it->event.reset();
    for (std::size_t c = 0; c < kNumPoolClasses; ++c) {
      ready_[c].insert(ready_[c].end(), it->free[c].begin(), it->free[c].end());
      it->free[c].clear();
    }
    it = orphans_.erase(it);
  }
}

std::optional<DevicePtr> StreamPool::take_shared(std::size_t size_class) {
  std::lock_guard lock(mutex_);
  if (!orphans_.empty()) reap_orphans();
  if (const auto ptr = pop(ready_[size_class])) return ptr;
  if (open_slab_[size_class] == 0) return std::nullopt;
  Slab& slab = slabs_[open_slab_[size_class] - 1];
  const DevicePtr ptr = slab.base.offset(slab.carved);
  slab.carved += class_bytes(size_class);
  if (slab.carved + class_bytes(size_class) > slab.bytes) open_slab_[size_class] = 0;
  return ptr;
}

std::optional<DevicePtr> StreamPool::take_from_others(std::size_t size_class, NativeStream stream, PoolLists& lists, bool wait) {
  std::optional<DevicePtr> found;
  driver_.other_streams(&lists, [&](NativeStream other, PoolLists& theirs) {
    {
      std::lock_guard lock(theirs.mutex);
      if (theirs.free[size_class].empty()) return false;
    }
    // Ask, or order, after the block was seen free: everything enqueued before its release is then covered.
    std::optional<DevicePtr> ptr;
    if (!wait && !driver_.is_idle(other)) return false;
    {
      std::lock_guard lock(theirs.mutex);
      ptr = pop(theirs.free[size_class]);
    }
    if (!ptr) return false;
    // A block released between the question and the pop may still be in use: an event behind it settles that in both cases.
    if (!driver_.order_after(stream, other)) {
      std::lock_guard lock(theirs.mutex);
      theirs.free[size_class].push_back(*ptr);
      return false;
    }
    found = ptr;
    return true;
  });
  return found;
}

Result<DevicePtr> StreamPool::grow(std::size_t size_class) {
  const std::uint64_t block = class_bytes(size_class);
  const std::uint64_t bytes = block <= kLargestShared ? kSlabBytes : block;
  const DevicePtr base = METRALE_TRY(driver_.alloc_slab(bytes));
  std::lock_guard lock(mutex_);
  try {
    slabs_.push_back({base, bytes, size_class, block});
  } catch (...) {
    static_cast<void>(driver_.free_slab(base, bytes).has_value());
    throw;
  }
  if (2 * block <= bytes) open_slab_[size_class] = slabs_.size();
  return base;
}

void StreamPool::drop_lists() {
  driver_.other_streams(nullptr, [](NativeStream, PoolLists& theirs) {
    std::lock_guard lock(theirs.mutex);
    for (auto& blocks : theirs.free) blocks.clear();
    return false;
  });
  for (auto& blocks : ready_) blocks.clear();
  open_slab_.fill(0);
}

Result<> StreamPool::free_all() {
  std::lock_guard lock(mutex_);
  drop_lists();
  for (const Orphans& orphans : orphans_) {
    if (orphans.event) driver_.drop_event(*orphans.event);
  }
  orphans_.clear();
  Result<> first;
  for (const Slab& slab : slabs_) {
    Result<> freed = driver_.free_slab(slab.base, slab.bytes);
    if (!freed && first) first = std::move(freed);
  }
  slabs_.clear();
  return first;
}

void StreamPool::forget() {
  std::lock_guard lock(mutex_);
  drop_lists();
  orphans_.clear();
  slabs_.clear();
}

std::uint64_t StreamPool::trim() {
  std::lock_guard lock(mutex_);
  reap_orphans();
  // Count each slab's free blocks over every list; a slab is empty when all it ever handed out is back.
  std::vector<std::uint64_t> free_bytes(slabs_.size(), 0);
  std::vector<std::size_t> by_base(slabs_.size());
  for (std::size_t i = 0; i < by_base.size(); ++i) by_base[i] = i;
  std::sort(by_base.begin(), by_base.end(), [&](std::size_t a, std::size_t b) { return slabs_[a].base < slabs_[b].base; });
  const auto slab_of = [&](DevicePtr ptr) {
    const auto after =
        std::upper_bound(by_base.begin(), by_base.end(), ptr, [&](DevicePtr p, std::size_t i) { return p < slabs_[i].base; });
    return *std::prev(after);
  };
  std::vector<std::unique_lock<std::mutex>> held;
  std::vector<std::array<std::vector<DevicePtr>, kNumPoolClasses>*> lists{&ready_};
  driver_.other_streams(nullptr, [&](NativeStream, PoolLists& theirs) {
    held.emplace_back(theirs.mutex);
    lists.push_back(&theirs.free);
    return false;
  });
  for (const auto* list : lists) {
    for (std::size_t c = 0; c < kNumPoolClasses; ++c) {
      for (const DevicePtr ptr : (*list)[c]) free_bytes[slab_of(ptr)] += class_bytes(c);
    }
  }
  std::vector<bool> empty(slabs_.size());
  for (std::size_t i = 0; i < slabs_.size(); ++i) empty[i] = free_bytes[i] == slabs_[i].carved;
  std::vector<Slab> kept;
  kept.reserve(slabs_.size());  // from here on nothing may fail half-way
  for (auto* list : lists) {
    for (auto& blocks : *list) std::erase_if(blocks, [&](DevicePtr ptr) { return empty[slab_of(ptr)]; });
  }
  std::uint64_t returned = 0;
  open_slab_.fill(0);
  for (std::size_t i = 0; i < slabs_.size(); ++i) {
    const Slab& slab = slabs_[i];
    if (empty[i]) {
      // A driver that refuses keeps the memory: there is nothing left to do with it here.
      if (driver_.free_slab(slab.base, slab.bytes)) returned += slab.bytes;
      continue;
    }
    kept.push_back(slab);
    if (slab.carved + class_bytes(slab.size_class) <= slab.bytes) open_slab_[slab.size_class] = kept.size();
  }
  slabs_.swap(kept);
  return returned;
}

std::uint64_t StreamPool::reserved_bytes() const {
  std::lock_guard lock(mutex_);
  std::uint64_t bytes = 0;
  for (const Slab& slab : slabs_) bytes += slab.bytes;
  return bytes;
}

}  // namespace metrale::detail
