// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "backends/host/host_backend.h"
#include "core/host_memory.h"

namespace metrale::host {

namespace {

// Fresh memory is not zero, so that code which relies on zeros fails. The fill is bounded: it must not make a large block resident.
constexpr unsigned char kFillByte = 0xA5;
constexpr std::uint64_t kFillHead = 1 << 20;
constexpr std::uint64_t kFillTail = 4 << 10;

// Blocks from this size on are mapped in huge pages, which the bandwidth of large weights depends on, and unmapped when freed.
constexpr std::uint64_t kHugePage = 2 << 20;
constexpr std::uint64_t kMappedFrom = 2 * kHugePage;
// Memory is committed when touched, so for a block that matters the kernel is asked what it has before it is promised.
constexpr std::uint64_t kAskFrom = 64 << 20;
constexpr std::uint64_t kLargest = std::uint64_t{1} << 46;

/// Maps `bytes`, a multiple of the huge page, at a multiple of it; null on failure.
void* map_huge(std::uint64_t bytes) {
  void* raw = ::mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const auto begin = reinterpret_cast<std::uintptr_t>(raw);
  const std::uintptr_t base = round_up(begin, kHugePage);
  if (base != begin) ::munmap(raw, base - begin);
  if (base - begin != kHugePage) ::munmap(reinterpret_cast<void*>(base + bytes), kHugePage - (base - begin));
  ::madvise(reinterpret_cast<void*>(base), bytes, MADV_HUGEPAGE);
  return reinterpret_cast<void*>(base);
}

constexpr std::chrono::seconds kReleasePatience{30};

constexpr std::align_val_t kHeapAlignment{kDeviceAlignment};
static_assert(kDeviceAlignment % kPinnedAlignment == 0, "pinned blocks are made like device blocks");

}  // namespace

Result<std::byte*> HostBackend::do_resolve(DevicePtr ptr, std::uint64_t) const {
  return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(ptr.address));
}

Result<std::byte*> HostBackend::take_memory(std::string_view what, std::uint64_t bytes, std::uint64_t fill_head,
                                            std::uint64_t fill_tail) {
  METRALE_TRY(device().alive());
  device().reap();
  if (bytes > kLargest) return guarded(what, [&]() -> Result<std::byte*> { return memory_error(what, bytes); });
  return guarded(what, [&]() -> Result<std::byte*> {
    Result<std::byte*> taken = take_free_memory(what, bytes);
    if (!taken) [[unlikely]]
      taken = take_once_freed(what, bytes, std::move(taken).error());
    if (!taken) return taken;
    std::byte* const base = *taken;
    std::memset(base, kFillByte, std::min(bytes, fill_head));
    if (bytes > fill_head) {
      const std::uint64_t tail = std::min(bytes - fill_head, fill_tail);
      std::memset(base + bytes - tail, kFillByte, tail);
    }
    return base;
  });
}

// Not for ever, since the work may wait for this thread.
Result<std::byte*> HostBackend::take_once_freed(std::string_view what, std::uint64_t bytes, Error refusal) {
  Result<std::byte*> taken = std::move(refusal);
  const auto deadline = std::chrono::steady_clock::now() + kReleasePatience;
  for (bool again = true; !taken && taken.error().code() == Errc::out_of_memory && again && could_fit(bytes);) {
    again = device().waiting_bytes() != 0 && std::chrono::steady_clock::now() < deadline;
    if (!METRALE_TRY(device().wait_for_release(deadline))) std::this_thread::yield();  // another thread is giving it back
    taken = take_free_memory(what, bytes);
  }
  return taken;
}

bool HostBackend::could_fit(std::uint64_t bytes) {
  const std::uint64_t waiting = device().waiting_bytes();  // first: what comes back meanwhile counts twice rather than not at all
  const Result<DeviceMemoryInfo> info = memory_now();
  return info && bytes <= info->device_free + waiting;
}

Result<std::byte*> HostBackend::take_free_memory(std::string_view what, std::uint64_t bytes) {
  if (bytes >= kAskFrom) {
    const DeviceMemoryInfo info = METRALE_TRY(memory_now());
    if (bytes > info.device_free) return memory_error(what, bytes);
  }
  std::lock_guard lock(memory_mutex_);
  if (memory_limit_ != 0 && (bytes > memory_limit_ || used_bytes_ > memory_limit_ - bytes)) {
    return Error(Errc::out_of_memory, fmt::format("{}: {} bytes do not fit, {} of the {} that the host backend may take are in use",
                                                  what, bytes, used_bytes_, memory_limit_));
  }
  Block block{bytes, bytes < kMappedFrom ? 0 : round_up(bytes, kHugePage)};
  void* base = block.mapped_bytes == 0 ? ::operator new(bytes, kHeapAlignment, std::nothrow) : map_huge(block.mapped_bytes);
  if (base == nullptr) return memory_error(what, bytes);
  try {
    blocks_.emplace(base, block);
  } catch (...) {
    unmap(base, block);
    throw;
  }
  used_bytes_ += bytes;
  return static_cast<std::byte*>(base);
}

Result<> HostBackend::give_memory(std::string_view what, void* base, std::uint64_t bytes) {
  return guarded(what, [&]() -> Result<> {
    const auto unmap_now = [this, base] {
      Block block;
      {
        std::lock_guard lock(memory_mutex_);
        const auto it = blocks_.find(base);
        if (it == blocks_.end()) return;
        block = it->second;
        blocks_.erase(it);
        used_bytes_ -= block.bytes;
      }
      unmap(base, block);
    };
    device().after_current_work(unmap_now, bytes);
    return {};
  });
}

void HostBackend::unmap(void* base, const Block& block) noexcept {
  if (block.mapped_bytes != 0) {
    ::munmap(base, block.mapped_bytes);
  } else {
    ::operator delete(base, kHeapAlignment);
  }
}

// ---- hooks ----

Result<DevicePtr> HostBackend::do_alloc(std::uint64_t bytes, MemoryKind kind) {
  // Of an arena only the first page is touched: what is written next is the arena's own contents.
  const bool is_large_arena = kind == MemoryKind::arena && bytes > kFillHead;
  std::byte* base =
      METRALE_TRY(take_memory("allocate", bytes, is_large_arena ? kFillTail : kFillHead, is_large_arena ? 0 : kFillTail));
  return DevicePtr{reinterpret_cast<std::uintptr_t>(base)};
}

Result<> HostBackend::do_free(DevicePtr base, std::uint64_t bytes, MemoryKind) {
  return give_memory("free", reinterpret_cast<void*>(static_cast<std::uintptr_t>(base.address)), bytes);
}

Result<void*> HostBackend::do_alloc_pinned(std::uint64_t bytes) {
  return METRALE_TRY(take_memory("allocate pinned memory", bytes, 0, 0));
}

Result<> HostBackend::do_free_pinned(void* ptr, std::uint64_t bytes) { return give_memory("free pinned memory", ptr, bytes); }

// The device reads host memory as it is, page-locked or not.
Result<> HostBackend::do_register_host(void*, std::uint64_t) { return device().alive(); }
Result<> HostBackend::do_unregister_host(void*, std::uint64_t) { return {}; }

Result<DevicePtr> HostBackend::do_host_alias(void* base) {
  METRALE_TRY(device().alive());
  return DevicePtr{reinterpret_cast<std::uintptr_t>(base)};
}

Result<DeviceMemoryInfo> HostBackend::do_memory_info() {
  METRALE_TRY(device().alive());
  device().reap();
  return memory_now();
}

Result<DeviceMemoryInfo> HostBackend::memory_now() {
  const HostMemory host = METRALE_TRY(guarded("read /proc/meminfo", [] { return read_host_memory(); }));
  DeviceMemoryInfo info{.total = host.total, .device_free = host.available, .integrated = true, .host_available = host.available};
  if (memory_limit_ != 0) {
    std::lock_guard lock(memory_mutex_);
    info.total = std::min(info.total, memory_limit_);
    info.device_free = std::min(info.device_free, memory_limit_ - used_bytes_);
    info.host_available = info.device_free;
  }
  return info;
}

}  // namespace metrale::host
