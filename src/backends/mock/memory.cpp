// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "backends/mock/mock_backend.h"

namespace metrale::mock {

namespace {

Op alloc_op(MemoryKind kind) {
  return kind == MemoryKind::arena ? Op::alloc_arena : kind == MemoryKind::managed ? Op::alloc_managed : Op::alloc;
}

}  // namespace

Result<std::byte*> MockBackend::do_resolve(DevicePtr ptr, std::uint64_t bytes) const { return state().memory.resolve(ptr, bytes); }

Result<DeviceMemoryInfo> MockBackend::memory_now() {
  const std::uint64_t live = state().memory.live_bytes();
  std::lock_guard lock(state().mutex);
  return DeviceMemoryInfo{.total = state().total_bytes,
                          .device_free = state().free_bytes - std::min(live, state().free_bytes),
                          .integrated = state().host_available.has_value(),
                          .host_available = state().host_available.value_or(0)};
}

Result<DevicePtr> MockBackend::do_alloc(std::uint64_t bytes, MemoryKind kind) {
  METRALE_TRY(enter({.op = alloc_op(kind), .bytes = bytes}));
  const DeviceMemoryInfo info = METRALE_TRY(memory_now());
  if (bytes > info.device_free) {
    return Error(Errc::out_of_memory, fmt::format("the mock has {} bytes left, not {}", info.device_free, bytes));
  }
  {
    std::lock_guard lock(state().mutex);
    if (state().max_allocation_bytes && bytes > *state().max_allocation_bytes) {
      return Error(Errc::out_of_memory, fmt::format("the mock was told to allocate {} bytes at most at a time, not {}",
                                                    *state().max_allocation_bytes, bytes));
    }
  }
  const DevicePtr memory = METRALE_TRY(HostBackend::do_alloc(bytes, kind));
  Result<DevicePtr> added = host::guarded("allocate", [&]() -> Result<DevicePtr> {
    return state().memory.add(reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(memory.address)), bytes);
  });
  if (!added) static_cast<void>(HostBackend::do_free(memory, bytes, kind).has_value());
  return added;
}

Result<> MockBackend::do_free(DevicePtr base, std::uint64_t bytes, MemoryKind kind) {
  METRALE_TRY(enter({.op = kind == MemoryKind::arena ? Op::free_arena : Op::free, .dst = base.address, .bytes = bytes}));
  std::byte* memory = state().memory.remove(base);
  if (memory == nullptr) return Error(Errc::invalid_argument, fmt::format("the mock has no block at {:#x}", base.address));
  return HostBackend::do_free({reinterpret_cast<std::uintptr_t>(memory)}, bytes, kind);
}

Result<void*> MockBackend::do_alloc_pinned(std::uint64_t bytes) {
  METRALE_TRY(enter({.op = Op::alloc_host_pinned, .bytes = bytes}));
  void* memory = METRALE_TRY(HostBackend::do_alloc_pinned(bytes));
  Result<void*> added = host::guarded("allocate pinned memory", [&]() -> Result<void*> {
    std::lock_guard lock(state().mutex);
    state().host_regions[memory] = bytes;
    return memory;
  });
  if (!added) static_cast<void>(HostBackend::do_free_pinned(memory, bytes).has_value());
  return added;
}

Result<> MockBackend::do_free_pinned(void* ptr, std::uint64_t bytes) {
  METRALE_TRY(enter({.op = Op::free_host_pinned, .bytes = bytes}));
  state().memory.remove_all_of(ptr);
  {
    std::lock_guard lock(state().mutex);
    state().host_regions.erase(ptr);
  }
  return HostBackend::do_free_pinned(ptr, bytes);
}

Result<> MockBackend::do_register_host(void* ptr, std::uint64_t bytes) {
  METRALE_TRY(enter({.op = Op::register_host, .bytes = bytes}));
  return host::guarded("register host memory", [&]() -> Result<> {
    std::lock_guard lock(state().mutex);
    state().host_regions[ptr] = bytes;
    return {};
  });
}

Result<> MockBackend::do_unregister_host(void* ptr, std::uint64_t bytes) {
  METRALE_TRY(enter({.op = Op::unregister_host, .bytes = bytes}));
  state().memory.remove_all_of(ptr);
  std::lock_guard lock(state().mutex);
  state().host_regions.erase(ptr);
  return {};
}

// The alias is an address of its own, so that host and device addresses taken for each other are found out.
Result<DevicePtr> MockBackend::do_host_alias(void* base) {
  METRALE_TRY(enter({.op = Op::host_ptr_to_device}));
  return host::guarded("make an alias", [&]() -> Result<DevicePtr> {
    std::uint64_t bytes = 0;
    {
      std::lock_guard lock(state().mutex);
      const auto it = state().host_regions.find(base);
      if (it == state().host_regions.end())
        return Error(Errc::invalid_argument, "the mock knows no pinned or registered memory there");
      bytes = it->second;
    }
    return state().memory.add_alias(static_cast<std::byte*>(base), bytes);
  });
}

Result<DeviceMemoryInfo> MockBackend::do_memory_info() {
  METRALE_TRY(enter({.op = Op::memory_info}));
  METRALE_TRY(device().alive());
  return memory_now();
}

}  // namespace metrale::mock
