// SPDX-License-Identifier: Apache-2.0
//
// Launch: builds one kernel launch on the stack. Arguments are copied into the builder, tensor maps and structs included, so
// temporaries are fine and nothing touches the heap; it is therefore some 7 KiB large and is neither copied nor moved. One thread
// at a time.
//
//   METRALE_TRY(Launch(backend, kernel).grid({blocks}).block({256}).arg_ptr(x).arg_u32(n).launch(stream));
//
// With METRALE_DEBUG_SYNC_KERNELS the backend waits after the launch, so nothing here does.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <source_location>
#include <span>
#include <type_traits>

#include "metrale/backend.h"
#include "metrale/kernel_args.h"
#include "metrale/result.h"
#include "metrale/tensor_map.h"
#include "metrale/types.h"

namespace metrale {

class Launch {
 public:
  /// Grid and block are 1 x 1 x 1, shared memory 0, no arguments.
  Launch(GpuBackend& backend, KernelHandle kernel) noexcept : backend_(backend), kernel_(kernel) {}  // NOLINT: storage stays raw
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  Launch& grid(Dim3 blocks) noexcept { return grid_ = blocks, *this; }
  Launch& block(Dim3 threads) noexcept { return block_ = threads, *this; }
  /// Dynamic shared memory, in bytes.
  Launch& shared(std::uint32_t bytes) noexcept { return shared_bytes_ = bytes, *this; }
  Launch& cluster(Dim3 blocks) noexcept { return attributes_.cluster = blocks, *this; }
  Launch& cooperative() noexcept { return attributes_.cooperative = true, *this; }
  Launch& dependent() noexcept { return attributes_.dependent_launch = true, *this; }

  /// Each adds one argument, in order, at its true width. A tensor map may also be another library's CUtensorMap.
  Launch& arg_ptr(DevicePtr ptr) noexcept { return push(KernelArg::buffer(ptr)); }
  Launch& arg_u32(std::uint32_t v) noexcept { return push(KernelArg::value(v)); }
  Launch& arg_i32(std::int32_t v) noexcept { return push(KernelArg::value(v)); }
  Launch& arg_u64(std::uint64_t v) noexcept { return push(KernelArg::value(v)); }
  Launch& arg_f32(float v) noexcept { return push(KernelArg::value(v)); }
  Launch& arg_tensormap(std::span<const std::byte, kTensorMapBytes> map) noexcept { return arg_bytes(map); }
  /// A by-value argument of any size, copied.
  Launch& arg_bytes(std::span<const std::byte> value) noexcept;
  /// A by-value struct, copied at its full size, padding included.
  template <class T>
    requires(std::is_trivially_copyable_v<T> && !std::is_pointer_v<T> && !std::is_same_v<T, DevicePtr>)
  Launch& arg_struct(const T& value) noexcept {
    return arg_bytes(std::as_bytes(std::span<const T, 1>(&value, 1)));
  }
  /// Forgets the arguments and keeps the rest, for the next launch of the same kernel.
  Launch& clear_args() noexcept;

  std::span<const KernelArg> args() const noexcept { return {reinterpret_cast<const KernelArg*>(args_), num_args_}; }

  /// Enqueues the kernel. The builder may launch again.
  /// Errors: as `GpuBackend::launch_typed`, and invalid_argument when more than kMaxKernelArgs arguments or kMaxKernelArgBytes
  ///   came.
  Result<> launch(StreamHandle stream, std::source_location site = std::source_location::current()) const;

 private:
  // Room for the largest legal launch with each argument rounded up to 8 bytes.
  static constexpr std::size_t kStoreBytes = kMaxKernelArgBytes + 8 * kMaxKernelArgs;
  static_assert(std::is_trivially_copyable_v<KernelArg> && std::is_trivially_destructible_v<KernelArg>);

  Launch& push(const KernelArg& arg) noexcept {
    if (num_args_ == kMaxKernelArgs) {
      overflowed_ = true;
    } else {
      new (args_ + sizeof(KernelArg) * num_args_++) KernelArg(arg);
    }
    return *this;
  }

  GpuBackend& backend_;
  KernelHandle kernel_;
  Dim3 grid_;
  Dim3 block_;
  std::uint32_t shared_bytes_ = 0;
  bool overflowed_ = false;
  std::size_t num_args_ = 0;
  std::size_t store_used_ = 0;
  LaunchAttributes attributes_;
  // Raw on purpose: clearing 7 KiB would cost more than a launch.
  alignas(KernelArg) std::byte args_[sizeof(KernelArg) * kMaxKernelArgs];
  alignas(64) std::byte store_[kStoreBytes];
};

}  // namespace metrale
