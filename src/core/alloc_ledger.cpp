// SPDX-License-Identifier: Apache-2.0
//
// Two indexes keep look-ups of interior addresses short. Small blocks with the usual alignment live in pages of 64 KiB: a bitmap
// marks which of the page's 256 possible base slots are taken, so "largest base at or below" is a bit scan, and `check` needs no
// lock. Pages are found through a radix tree that only grows. Everything else, large or oddly aligned, lives in one ordered map,
// which sees few changes.
#include "metrale/alloc_ledger.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <map>
#include <mutex>
#include <shared_mutex>

#include "metrale/owner_scope.h"

namespace metrale {

namespace {
thread_local std::string_view innermost_owner;
}

OwnerScope::OwnerScope(std::string_view label) noexcept : outer_(innermost_owner) { innermost_owner = label; }
OwnerScope::~OwnerScope() { innermost_owner = outer_; }
std::string_view OwnerScope::current() noexcept { return innermost_owner; }

std::string_view to_string(MemoryKind kind) noexcept {
  switch (kind) {
    case MemoryKind::device: return "device";
    case MemoryKind::managed: return "managed";
    case MemoryKind::pooled: return "pooled";
    case MemoryKind::arena: return "arena";
    case MemoryKind::pinned: return "pinned";
    case MemoryKind::registered: return "registered";
    case MemoryKind::adopted: return "adopted";
    case MemoryKind::module_symbol: return "module_symbol";
  }
  return "unknown";
}

namespace {

constexpr std::uint64_t kPageBytes = 64 * 1024;
constexpr std::size_t kSlotsPerPage = kPageBytes / kDeviceAlignment;
constexpr std::size_t kNumStripes = 16;
// A stripe's running balance reaches the shared total once it is this large,
// which bounds the error of the concurrent peak to 1 MiB.
constexpr std::int64_t kFlushBytes = 64 * 1024;
// A stripe takes generations by the batch, so that threads do not pass one counter back and forth.
constexpr std::uint64_t kGenerationBatch = 64;

/// The blocks whose base lies in one 64 KiB page. `taken` and `bytes` may be read without the lock: a reader that races a change
/// sees the block before or after it. Everything else, and every change, is under `mutex`.
struct alignas(64) Page {
  mutable std::mutex mutex;
  std::array<std::atomic<std::uint64_t>, kSlotsPerPage / 64> taken{};
  std::array<std::atomic<std::uint32_t>, kSlotsPerPage> bytes{};
  std::array<Allocation, kSlotsPerPage> blocks;

  bool has(std::size_t slot) const { return (word_of(slot) & bit_of(slot)) != 0; }
  void put(std::size_t slot, const Allocation& block) {
    blocks[slot] = block;
    bytes[slot].store(static_cast<std::uint32_t>(block.bytes), std::memory_order_relaxed);
    mark(slot, word_of(slot) | bit_of(slot));
  }
  void clear(std::size_t slot) { mark(slot, word_of(slot) & ~bit_of(slot)); }

  // Only the holder of the lock writes, so a plain store will do.
  static std::uint64_t bit_of(std::size_t slot) { return std::uint64_t{1} << (slot % 64); }
  std::uint64_t word_of(std::size_t slot) const { return taken[slot / 64].load(std::memory_order_relaxed); }
  void mark(std::size_t slot, std::uint64_t word) { taken[slot / 64].store(word, std::memory_order_release); }

  /// Highest taken slot at or below `slot`; -1 when there is none.
  int at_or_below(std::size_t slot) const {
    std::size_t word = slot / 64;
    std::uint64_t bits = taken[word].load(std::memory_order_acquire) & (~std::uint64_t{0} >> (63 - slot % 64));
    while (bits == 0) {
      if (word == 0) return -1;
      bits = taken[--word].load(std::memory_order_acquire);
    }
    return static_cast<int>(word * 64 + 63 - static_cast<std::size_t>(std::countl_zero(bits)));
  }
};

/// Finds pages by number without a lock. Nodes are made on demand and stay until the end, so a pointer read once stays good.
class PageTree {
 public:
  PageTree() = default;
  PageTree(const PageTree&) = delete;
  PageTree& operator=(const PageTree&) = delete;
  ~PageTree() {
    for (auto& middle : root_) {
      Middle* m = middle.load(std::memory_order_relaxed);
      if (m == nullptr) continue;
      for (auto& leaf : *m) {
        Leaf* l = leaf.load(std::memory_order_relaxed);
        if (l == nullptr) continue;
        for (auto& page : *l) delete page.load(std::memory_order_relaxed);
        delete l;
      }
      delete m;
    }
  }

  /// Null when no block ever began on that page.
  Page* find(std::uint64_t number) const {
    const Middle* middle = root_[number >> (2 * kBits)].load(std::memory_order_acquire);
    if (middle == nullptr) return nullptr;
    const Leaf* leaf = (*middle)[(number >> kBits) & kMask].load(std::memory_order_acquire);
    return leaf == nullptr ? nullptr : (*leaf)[number & kMask].load(std::memory_order_acquire);
  }
  Page& get(std::uint64_t number) {
    if (Page* page = find(number)) return *page;
    std::lock_guard lock(growth_mutex_);
    return make(make(make(root_[number >> (2 * kBits)])[(number >> kBits) & kMask])[number & kMask]);
  }
  /// Calls `fn(page)` for every page, lowest first.
  template <class Fn>
  void for_each(Fn&& fn) const {
    for (const auto& middle : root_) {
      const Middle* m = middle.load(std::memory_order_acquire);
      if (m == nullptr) continue;
      for (const auto& leaf : *m) {
        const Leaf* l = leaf.load(std::memory_order_acquire);
        if (l == nullptr) continue;
        for (const auto& page : *l) {
          if (const Page* found = page.load(std::memory_order_acquire)) fn(*found);
        }
      }
    }
  }

  /// Addresses below this have a place in the tree.
  static constexpr std::uint64_t kAddressLimit = std::uint64_t{1} << 48;

 private:
  static constexpr unsigned kBits = 11;
  static constexpr std::uint64_t kMask = (1u << kBits) - 1;
  static constexpr std::size_t kRootSlots = std::size_t{kAddressLimit / kPageBytes} >> (2 * kBits);
  using Leaf = std::array<std::atomic<Page*>, 1u << kBits>;
  using Middle = std::array<std::atomic<Leaf*>, 1u << kBits>;

  template <class Node>
  static Node& make(std::atomic<Node*>& place) {
    Node* node = place.load(std::memory_order_relaxed);
    if (node == nullptr) place.store(node = new Node{}, std::memory_order_release);
    return *node;
  }

  std::mutex growth_mutex_;
  std::array<std::atomic<Middle*>, kRootSlots> root_{};
};

struct alignas(64) Stripe {
  std::atomic<std::int64_t> pending{0};       // bytes not yet in the shared total
  std::atomic<std::int64_t> pending_peak{0};  // highest `pending` since the last flush
  std::atomic<std::int64_t> count{0};
  std::atomic<std::uint64_t> next_generation{0};  // a multiple of the batch: take a new one
};

bool contains(const Allocation& block, std::uint64_t address) {
  return address >= block.base.address && address - block.base.address < block.bytes;
}

/// Whether a block may begin at `base` in the page index.
bool has_slot(DevicePtr base) { return base.address % kDeviceAlignment == 0 && base.address < PageTree::kAddressLimit; }
bool fits_page_index(DevicePtr base, std::uint64_t bytes) { return has_slot(base) && bytes < kPageBytes; }
std::size_t slot_of(std::uint64_t address) { return (address % kPageBytes) / kDeviceAlignment; }

std::size_t this_thread_stripe() {
  static std::atomic<std::size_t> next{0};
  thread_local const std::size_t mine = next.fetch_add(1, std::memory_order_relaxed) % kNumStripes;
  return mine;
}

void raise_to(std::atomic<std::int64_t>& target, std::int64_t value) {
  std::int64_t seen = target.load(std::memory_order_relaxed);
  while (seen < value && !target.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

struct AllocLedger::Impl {
  PageTree pages;
  mutable std::shared_mutex large_mutex;
  std::map<std::uint64_t, Allocation> large;  // by base
  std::atomic<std::size_t> num_large{0};
  std::atomic<std::uint64_t> next_batch{0};

  std::array<Stripe, kNumStripes> stripes;
  alignas(64) std::atomic<std::int64_t> flushed{0};
  std::atomic<std::int64_t> peak{0};

  std::uint64_t new_generation() {
    std::atomic<std::uint64_t>& next = stripes[this_thread_stripe()].next_generation;
    std::uint64_t seen = next.load(std::memory_order_relaxed);
    for (;;) {
      const bool is_spent = seen % kGenerationBatch == 0;
      const std::uint64_t mine = is_spent ? next_batch.fetch_add(kGenerationBatch, std::memory_order_relaxed) + 1 : seen;
      if (next.compare_exchange_weak(seen, mine + 1, std::memory_order_relaxed)) return mine;
    }
  }

  /// Calls `fn` with the block that contains `address` and returns true; its lock is held during the call. `LargeLock` is exclusive
  /// where `fn` changes the block.
  template <class LargeLock = std::shared_lock<std::shared_mutex>, class Fn>
  bool with_block(std::uint64_t address, Fn&& fn) {
    if (address < PageTree::kAddressLimit) {
      const std::uint64_t number = address / kPageBytes;
      if (visit_page(number, slot_of(address), address, fn)) return true;
      // A small block may begin on the page before.
      if (number > 0 && visit_page(number - 1, kSlotsPerPage - 1, address, fn)) return true;
    }
    if (num_large.load(std::memory_order_acquire) == 0) return false;
    LargeLock lock(large_mutex);
    auto after = large.upper_bound(address);
    if (after == large.begin()) return false;
    Allocation& block = std::prev(after)->second;
    if (!contains(block, address)) return false;
    fn(block);
    return true;
  }

  template <class Fn>
  bool visit_page(std::uint64_t number, std::size_t slot, std::uint64_t address, Fn& fn) {
    Page* page = pages.find(number);
    if (page == nullptr) return false;
    std::lock_guard lock(page->mutex);
    const int found = page->at_or_below(slot);
    if (found < 0) return false;
    Allocation& block = page->blocks[static_cast<std::size_t>(found)];
    if (!contains(block, address)) return false;
    fn(block);
    return true;
  }

  /// Bytes from `address` to the end of the small block it lies in, without a lock; 0 when it lies in none.
  std::uint64_t bytes_left_in_page_index(std::uint64_t address) const {
    const auto left = [&](std::uint64_t number, std::size_t slot) -> std::uint64_t {
      const Page* page = pages.find(number);
      if (page == nullptr) return 0;
      const int found = page->at_or_below(slot);
      if (found < 0) return 0;
      const auto index = static_cast<std::size_t>(found);
      const std::uint64_t end = number * kPageBytes + index * kDeviceAlignment + page->bytes[index].load(std::memory_order_relaxed);
      return end > address ? end - address : 0;
    };
    if (address >= PageTree::kAddressLimit) return 0;
    const std::uint64_t number = address / kPageBytes;
    if (const std::uint64_t bytes = left(number, slot_of(address))) return bytes;
    return number == 0 ? 0 : left(number - 1, kSlotsPerPage - 1);
  }

  void count(MemoryKind kind, std::int64_t bytes, std::int64_t blocks) {
    if (!counts_as_live(kind)) return;
    Stripe& stripe = stripes[this_thread_stripe()];
    stripe.count.fetch_add(blocks, std::memory_order_relaxed);
    const std::int64_t now = stripe.pending.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    if (now > stripe.pending_peak.load(std::memory_order_relaxed)) raise_to(stripe.pending_peak, now);
    if (now >= kFlushBytes || now <= -kFlushBytes) flush(stripe);
  }

  void flush(Stripe& stripe) {
    const std::int64_t highest = stripe.pending_peak.exchange(0, std::memory_order_relaxed);
    const std::int64_t delta = stripe.pending.exchange(0, std::memory_order_relaxed);
    const std::int64_t before = flushed.fetch_add(delta, std::memory_order_relaxed);
    raise_to(peak, before + std::max(highest, delta));
  }

  std::int64_t live() const {
    std::int64_t sum = flushed.load(std::memory_order_relaxed);
    for (const Stripe& stripe : stripes) sum += stripe.pending.load(std::memory_order_relaxed);
    return sum;
  }
};

AllocLedger::AllocLedger() : impl_(std::make_unique<Impl>()) {}
AllocLedger::~AllocLedger() = default;

std::uint64_t AllocLedger::add(DevicePtr base, std::uint64_t bytes, MemoryKind kind, std::source_location site) {
  Impl& d = *impl_;
  Allocation block{base, bytes, kind, 0, d.new_generation(), site, OwnerScope::current()};
  if (fits_page_index(base, bytes)) {
    Page& page = d.pages.get(base.address / kPageBytes);
    std::lock_guard lock(page.mutex);
    page.put(slot_of(base.address), block);
  } else {
    std::unique_lock lock(d.large_mutex);
    d.large.insert_or_assign(base.address, block);
    d.num_large.store(d.large.size(), std::memory_order_release);
  }
  d.count(kind, static_cast<std::int64_t>(bytes), 1);
  return block.generation;
}

AllocLedger::TakeResult AllocLedger::take(DevicePtr base, std::uint32_t kinds, Named named) {
  Impl& d = *impl_;
  const auto judge = [&](const Allocation& block) {
    if (!((kinds >> static_cast<unsigned>(block.kind)) & 1)) return Take::wrong_kind;
    if (block.graph_refs > 0 && named == Named::stays) return Take::named_by_graph;
    return Take::taken;
  };
  TakeResult result{Take::not_a_base, {}};
  Page* page = has_slot(base) ? d.pages.find(base.address / kPageBytes) : nullptr;
  if (page != nullptr) {
    const std::size_t slot = slot_of(base.address);
    std::lock_guard lock(page->mutex);
    if (page->has(slot)) {
      result.block = page->blocks[slot];
      result.status = judge(result.block);
      if (result.status == Take::taken) page->clear(slot);
    }
  }
  if (result.status == Take::not_a_base && d.num_large.load(std::memory_order_acquire) > 0) {
    std::unique_lock lock(d.large_mutex);
    const auto it = d.large.find(base.address);
    if (it != d.large.end()) {
      result.block = it->second;
      result.status = judge(result.block);
      if (result.status == Take::taken) d.large.erase(it);
      d.num_large.store(d.large.size(), std::memory_order_release);
    }
  }
  if (result.status == Take::taken) d.count(result.block.kind, -static_cast<std::int64_t>(result.block.bytes), -1);
  return result;
}

AllocLedger::Range AllocLedger::check(DevicePtr ptr, std::uint64_t bytes) const {
  if (const std::uint64_t left = impl_->bytes_left_in_page_index(ptr.address)) return bytes <= left ? Range::inside : Range::leaves;
  Range range = Range::unknown;
  impl_->with_block(ptr.address, [&](const Allocation& block) {
    range = bytes <= block.bytes - (ptr.address - block.base.address) ? Range::inside : Range::leaves;
  });
  return range;
}

std::optional<Allocation> AllocLedger::find(DevicePtr ptr) const {
  std::optional<Allocation> found;
  impl_->with_block(ptr.address, [&](const Allocation& block) { found = block; });
  return found;
}

std::optional<Allocation> AllocLedger::nearest(DevicePtr ptr) const {
  const auto distance = [&](const Allocation& block) {
    if (ptr < block.base) return block.base.address - ptr.address;
    const std::uint64_t past = ptr.address - block.base.address;
    return past < block.bytes ? 0 : past - block.bytes + 1;
  };
  std::optional<Allocation> best;
  for (const Allocation& block : snapshot()) {
    if (!best || distance(block) < distance(*best)) best = block;
  }
  return best;
}

std::optional<Allocation> AllocLedger::add_graph_ref(DevicePtr ptr) {
  Impl& d = *impl_;
  std::optional<Allocation> found;
  d.with_block<std::unique_lock<std::shared_mutex>>(ptr.address, [&](Allocation& block) {
    ++block.graph_refs;
    found = block;
  });
  return found;
}

void AllocLedger::drop_graph_ref(DevicePtr base, std::uint64_t generation) {
  impl_->with_block<std::unique_lock<std::shared_mutex>>(base.address, [&](Allocation& block) {
    if (block.generation == generation && block.graph_refs > 0) --block.graph_refs;
  });
}

std::uint64_t AllocLedger::live_bytes() const { return static_cast<std::uint64_t>(std::max<std::int64_t>(0, impl_->live())); }

std::uint64_t AllocLedger::live_alloc_count() const {
  std::int64_t sum = 0;
  for (const Stripe& stripe : impl_->stripes) sum += stripe.count.load(std::memory_order_relaxed);
  return static_cast<std::uint64_t>(std::max<std::int64_t>(0, sum));
}

std::uint64_t AllocLedger::peak_bytes() const {
  const Impl& d = *impl_;
  std::int64_t highest = d.flushed.load(std::memory_order_relaxed);
  for (const Stripe& stripe : d.stripes) {
    highest += std::max(stripe.pending.load(std::memory_order_relaxed), stripe.pending_peak.load(std::memory_order_relaxed));
  }
  return static_cast<std::uint64_t>(std::max({std::int64_t{0}, d.peak.load(std::memory_order_relaxed), highest}));
}

std::vector<Allocation> AllocLedger::snapshot() const {
  const Impl& d = *impl_;
  std::vector<Allocation> blocks;
  d.pages.for_each([&](const Page& page) {
    std::lock_guard lock(page.mutex);
    for (std::size_t slot = 0; slot < kSlotsPerPage; ++slot) {
      if (page.has(slot)) blocks.push_back(page.blocks[slot]);
    }
  });
  {
    std::shared_lock lock(d.large_mutex);
    for (const auto& [base, block] : d.large) blocks.push_back(block);
  }
  std::sort(blocks.begin(), blocks.end(), [](const Allocation& a, const Allocation& b) { return a.base < b.base; });
  return blocks;
}

}  // namespace metrale
