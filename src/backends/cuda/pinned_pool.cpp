// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/pinned_pool.h"

#include <algorithm>
#include <iterator>

#include "backends/cuda/status.h"
#include "metrale/types.h"

namespace metrale::cuda {

namespace {

// Slabs double up to this, so that a program which pins little registers little.
constexpr std::uint64_t kLargestSlab = std::uint64_t{32} << 20;
// An empty slab beyond this is not kept for the next.
constexpr std::uint64_t kLargestKept = std::uint64_t{256} << 20;
constexpr std::uint64_t kPage = 4096;

}  // namespace

void* PinnedPool::take_locked(std::uint64_t bytes) {
  for (auto& [base, slab] : slabs_) {
    if (slab.bytes - slab.used_bytes < bytes) continue;
    const auto hole = std::find_if(slab.free.begin(), slab.free.end(), [&](const auto& range) { return range.second >= bytes; });
    if (hole == slab.free.end()) continue;
    const auto [offset, length] = *hole;
    slab.used.emplace(offset, bytes);
    if (length > bytes) {
      // The node is used again, so that nothing can fail from here on.
      auto node = slab.free.extract(hole);
      node.key() = offset + bytes;
      node.mapped() = length - bytes;
      slab.free.insert(std::move(node));
    } else {
      slab.free.erase(hole);
    }
    if (slab.used_bytes == 0) --num_empty_;
    slab.used_bytes += bytes;
    return slab.base + offset;
  }
  return nullptr;
}

Result<void*> PinnedPool::take(std::uint64_t bytes) {
  if (bytes > UINT64_MAX - kPage) return Error(Errc::out_of_memory, "the pinned block's size overflows");
  bytes = round_up(bytes, kPinnedAlignment);
  std::lock_guard lock(mutex_);
  if (void* part = take_locked(bytes)) return part;
  const std::uint64_t slab_bytes = bytes > next_slab_bytes_ / 2 ? round_up(bytes, kPage) : next_slab_bytes_;
  void* base = nullptr;
  const CUresult code = driver_.cuMemHostAlloc_(&base, slab_bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
  METRALE_TRY(check(driver_, size_refusal(code, slab_bytes), "cuMemHostAlloc"));
  if (slab_bytes == next_slab_bytes_) next_slab_bytes_ = std::min(2 * next_slab_bytes_, kLargestSlab);
  try {
    Slab& slab = slabs_[static_cast<const std::byte*>(base)];
    slab.base = static_cast<std::byte*>(base);
    slab.bytes = slab_bytes;
    slab.free.emplace(0, slab_bytes);
    ++num_empty_;
    return take_locked(bytes);
  } catch (...) {
    slabs_.erase(static_cast<const std::byte*>(base));
    static_cast<void>(driver_.cuMemFreeHost_(base));
    throw;
  }
}

PinnedPool::Slab* PinnedPool::slab_of(const void* part) {
  auto after = slabs_.upper_bound(static_cast<const std::byte*>(part));
  if (after == slabs_.begin()) return nullptr;
  Slab& slab = std::prev(after)->second;
  return static_cast<const std::byte*>(part) < slab.base + slab.bytes ? &slab : nullptr;
}

void PinnedPool::give(void* part) noexcept {
  std::lock_guard lock(mutex_);
  Slab* slab = slab_of(part);
  if (is_closed_ || slab == nullptr) return;
  auto used = slab->used.find(static_cast<std::uint64_t>(static_cast<std::byte*>(part) - slab->base));
  if (used == slab->used.end()) return;
  slab->used_bytes -= used->second;
  if (slab->used_bytes == 0) ++num_empty_;
  // A node moves from one map to the other, so nothing can fail.
  const auto hole = slab->free.insert(slab->used.extract(used)).position;
  if (const auto next = std::next(hole); next != slab->free.end() && hole->first + hole->second == next->first) {
    hole->second += next->second;
    slab->free.erase(next);
  }
  if (hole == slab->free.begin()) return;
  if (const auto before = std::prev(hole); before->first + before->second == hole->first) {
    before->second += hole->second;
    slab->free.erase(hole);
  }
}

Result<std::optional<std::uint64_t>> PinnedPool::alias(const void* part) {
  std::lock_guard lock(mutex_);
  Slab* slab = slab_of(part);
  if (slab == nullptr) return std::optional<std::uint64_t>();
  if (!slab->alias) {
    CUdeviceptr seen = 0;
    METRALE_TRY(check(driver_, driver_.cuMemHostGetDevicePointer_(&seen, slab->base, 0), "cuMemHostGetDevicePointer"));
    slab->alias = seen;
  }
  return std::optional<std::uint64_t>(*slab->alias + static_cast<std::uint64_t>(static_cast<const std::byte*>(part) - slab->base));
}

bool PinnedPool::has_surplus() const noexcept {
  std::lock_guard lock(mutex_);
  return num_empty_ > 1;
}

void PinnedPool::trim() noexcept {
  std::lock_guard lock(mutex_);
  // The largest that may be kept stays.
  const Slab* kept = nullptr;
  for (const auto& [base, slab] : slabs_) {
    if (slab.used_bytes == 0 && slab.bytes <= kLargestKept && (kept == nullptr || slab.bytes > kept->bytes)) kept = &slab;
  }
  for (auto it = slabs_.begin(); it != slabs_.end();) {
    const Slab& slab = it->second;
    if (slab.used_bytes != 0 || &slab == kept || driver_.cuMemFreeHost_(slab.base) != CUDA_SUCCESS) {
      ++it;
      continue;
    }
    it = slabs_.erase(it);
    --num_empty_;
  }
}

void PinnedPool::close(bool driver_works) noexcept {
  std::lock_guard lock(mutex_);
  is_closed_ = true;
  for (const auto& [base, slab] : slabs_) {
    if (driver_works) static_cast<void>(give_back_insisting([&] { return driver_.cuMemFreeHost_(slab.base); }));
  }
  slabs_.clear();
}

std::uint64_t PinnedPool::bytes_held() const {
  std::lock_guard lock(mutex_);
  std::uint64_t bytes = 0;
  for (const auto& [base, slab] : slabs_) bytes += slab.bytes;
  return bytes;
}

}  // namespace metrale::cuda
