// SPDX-License-Identifier: Apache-2.0
#include "backends/mock/address_space.h"

#include <fmt/format.h>

#include <mutex>

#include "metrale/backends/mock.h"

namespace metrale::mock {

namespace {
// Keeps the end of a block from being the beginning of the next.
constexpr std::uint64_t kGap = kDeviceAlignment;
}  // namespace

AddressSpace::AddressSpace() : next_(kBaseAddress) {}

DevicePtr AddressSpace::add(std::byte* memory, std::uint64_t bytes, bool counts) {
  std::lock_guard lock(mutex_);
  const DevicePtr base{next_};
  blocks_[base.address] = {memory, bytes, counts};
  next_ += round_up(bytes, kDeviceAlignment) + kGap;
  if (counts) live_bytes_ += bytes;
  return base;
}

std::byte* AddressSpace::remove(DevicePtr base) {
  std::lock_guard lock(mutex_);
  const auto it = blocks_.find(base.address);
  if (it == blocks_.end()) return nullptr;
  std::byte* memory = it->second.memory;
  forget(it->second);
  blocks_.erase(it);
  return memory;
}

void AddressSpace::remove_all_of(const void* memory) {
  std::lock_guard lock(mutex_);
  for (auto it = blocks_.begin(); it != blocks_.end();) {
    if (it->second.memory == memory) {
      forget(it->second);
      it = blocks_.erase(it);
    } else {
      ++it;
    }
  }
}

Result<std::byte*> AddressSpace::resolve(DevicePtr ptr, std::uint64_t bytes) const {
  std::shared_lock lock(mutex_);
  if (ptr.address < kBaseAddress || ptr.address >= next_)
    return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(ptr.address));
  auto it = blocks_.upper_bound(ptr.address);
  if (it != blocks_.begin()) {
    --it;
    const std::uint64_t offset = ptr.address - it->first;
    if (offset <= it->second.bytes && bytes <= it->second.bytes - offset) return it->second.memory + offset;
  }
  return Error(Errc::out_of_range, fmt::format("the mock has no live block that holds {} bytes at {:#x}", bytes, ptr.address));
}

std::uint64_t AddressSpace::live_bytes() const {
  std::shared_lock lock(mutex_);
  return live_bytes_;
}

}  // namespace metrale::mock
