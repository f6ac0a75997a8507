// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "backends/cuda/cuda_backend.h"
#include "core/host_memory.h"

namespace metrale::cuda {

namespace {

// Asking after so many streams costs less than the driver's free and the allocation that follows it.
constexpr std::size_t kQueriesBySpares = 4;

}  // namespace

Result<DevicePtr> CudaBackend::do_alloc(std::uint64_t bytes, MemoryKind kind) {
  const bool is_managed = kind == MemoryKind::managed && capabilities().has(Capability::managed_memory);
  if (!is_managed) {
    if (const auto spare = context_->spares().take(bytes)) {
      device_bytes_.fetch_add(bytes, std::memory_order_relaxed);
      return *spare;
    }
  }
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  if (num_partings_.load(std::memory_order_acquire) != 0) [[unlikely]] {
    if (const auto again = take_put_off(bytes, is_managed ? kind : MemoryKind::device)) {
      (is_managed ? managed_bytes_ : device_bytes_).fetch_add(bytes, std::memory_order_relaxed);
      return *again;
    }
    reap();
  }
  if (is_managed) METRALE_TRY(check_managed(bytes));
  CUdeviceptr ptr = 0;
  const auto ask = [&] {
    return is_managed ? driver_.cuMemAllocManaged_(&ptr, bytes, CU_MEM_ATTACH_GLOBAL) : driver_.cuMemAlloc_(&ptr, bytes);
  };
  CUresult code = ask();
  if (code == CUDA_ERROR_OUT_OF_MEMORY) [[unlikely]]
    part_with_spares();
  if (code == CUDA_ERROR_OUT_OF_MEMORY && num_partings_.load(std::memory_order_acquire) != 0 && reap_waiting(bytes)) code = ask();
  if (code != CUDA_SUCCESS) [[unlikely]] {
    return context_->error(size_refusal(code, bytes), is_managed ? "cuMemAllocManaged" : "cuMemAlloc");
  }
  (is_managed ? managed_bytes_ : device_bytes_).fetch_add(bytes, std::memory_order_relaxed);
  return DevicePtr{ptr};
}

// Pages of managed memory are taken when they are touched, so the driver's figure of what is free does not hold what was promised
// already. What else is in use is at least what was allocated here, and at most all that is in use.
Result<> CudaBackend::check_managed(std::uint64_t bytes) {
  part_with_spares();
  reap();
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  METRALE_TRY(check(driver_.cuMemGetInfo_(&free_bytes, &total_bytes), "cuMemGetInfo"));
  const std::uint64_t promised = managed_bytes_.load(std::memory_order_relaxed);
  const std::uint64_t used = total_bytes - std::min(total_bytes, free_bytes);
  const std::uint64_t others = std::max(used - std::min(used, promised), device_bytes_.load(std::memory_order_relaxed));
  if (bytes <= free_bytes && promised + others <= total_bytes && bytes <= total_bytes - promised - others) return {};
  return Error(Errc::out_of_memory,
               fmt::format("managed memory of {} bytes: {} of {} bytes are free, and {} of managed memory are promised already",
                           bytes, free_bytes, total_bytes, promised));
}

Result<> CudaBackend::do_free(DevicePtr base, std::uint64_t bytes, MemoryKind kind) {
  const bool is_managed = kind == MemoryKind::managed && capabilities().has(Capability::managed_memory);
  (is_managed ? managed_bytes_ : device_bytes_).fetch_sub(bytes, std::memory_order_relaxed);
  return part_in_context(
      {.kind = is_managed ? Parting::Kind::managed : Parting::Kind::memory, .value = base.address, .bytes = bytes},
      [&](Parting parting) {
        if (num_partings_.load(std::memory_order_acquire) == 0) [[likely]] {
          const bool is_small = bytes <= SpareBlocks::kLargest && !is_managed;
          if (is_small && work().is_idle_after(kQueriesBySpares) && context_->spares().put(base, bytes)) return Result<>();
          if (work().looks_idle()) return give_back(parting);
        }
        return part_with(std::move(parting));
      });
}

Result<void*> CudaBackend::do_alloc_pinned(std::uint64_t bytes) {
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  reap();
  return noted(pinned_->take(bytes));
}

Result<> CudaBackend::do_free_pinned(void* ptr, std::uint64_t bytes) {
  return part_in_context({.kind = Parting::Kind::pinned, .value = reinterpret_cast<std::uintptr_t>(ptr), .bytes = bytes},
                         [&](Parting parting) {
                           Result<> parted = part_with(std::move(parting));
                           if (parted && pinned_->has_surplus() && work().looks_idle()) pinned_->trim();
                           return parted;
                         });
}

Result<> CudaBackend::do_register_host(void* ptr, std::uint64_t bytes) {
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  Result<> registered = check(driver_.cuMemHostRegister_(ptr, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
                              "cuMemHostRegister");
  if (registered) return registered;
  return std::move(registered).error().with_note(fmt::format("in register_host of {} bytes at {}", bytes, ptr));
}

Result<> CudaBackend::do_unregister_host(void* ptr, std::uint64_t) {
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  // Its owner frees the memory now, whatever is said, and pages that stay locked are lost to the host.
  return context_->check_release(give_back_insisting([&] { return driver_.cuMemHostUnregister_(ptr); }), "cuMemHostUnregister");
}

Result<DevicePtr> CudaBackend::do_host_alias(void* base) {
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  if (const auto alias = METRALE_TRY(noted(pinned_->alias(base)))) return DevicePtr{*alias};
  CUdeviceptr alias = 0;
  METRALE_TRY(check(driver_.cuMemHostGetDevicePointer_(&alias, base, 0), "cuMemHostGetDevicePointer"));
  return DevicePtr{alias};
}

Result<DeviceMemoryInfo> CudaBackend::do_memory_info() {
  METRALE_TRY(context_->make_current());
  const OutsideCapture outside(driver_);
  part_with_spares();
  reap();
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  METRALE_TRY(check(driver_.cuMemGetInfo_(&free_bytes, &total_bytes), "cuMemGetInfo"));
  DeviceMemoryInfo info{.total = total_bytes, .device_free = free_bytes, .integrated = is_integrated_};
  if (is_integrated_) info.host_available = METRALE_TRY(read_host_memory()).available;
  return info;
}

}  // namespace metrale::cuda
