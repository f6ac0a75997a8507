// SPDX-License-Identifier: Apache-2.0
//
// What a kernel is on the host backend: a C++ function that runs one block of a grid. The backend calls it once for every block,
// from several worker threads at a time and in no order; the function loops over the block's threads itself, so there is no barrier
// inside a block. Kernels know raw pointers and sizes only. A `HostKernel` is a plain description;
// a registered one is never changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>

#include "metrale/types.h"

namespace metrale::host {

/// One block of a running grid, as its function sees it. Valid during the call.
struct BlockContext {
  Dim3 grid;                    ///< Blocks in the launch.
  Dim3 block;                   ///< Threads in each block.
  Dim3 index;                   ///< This block, each coordinate below `grid`.
  std::span<std::byte> shared;  ///< Dynamic shared memory of this block, 64-byte aligned, contents unspecified.
  const void* const* params;    ///< Address of each argument, in order; a Buffer argument is a 64-bit device address.
  const char** fault;           ///< Set to a static text to report a fault: the device is lost, as after an illegal access.

  /// The `i`-th argument as a `T`; unaligned storage is fine.
  template <class T>
  T arg(std::size_t i) const noexcept {
    T value;
    std::memcpy(&value, params[i], sizeof(T));
    return value;
  }
  /// The `i`-th argument, a Buffer, as a pointer.
  template <class T>
  T* ptr(std::size_t i) const noexcept {
    return reinterpret_cast<T*>(static_cast<std::uintptr_t>(arg<std::uint64_t>(i)));
  }
};

using KernelFn = void (*)(const BlockContext&);

/// A kernel with the facts it publishes. All texts and spans must outlive the backend: kernels are static tables.
struct HostKernel {
  std::string_view module;
  std::string_view function;
  KernelFn fn = nullptr;
  std::span<const std::uint32_t> param_bytes{};  ///< Size of each argument; 8 for a Buffer.
  std::optional<std::uint32_t> n_tile{};         ///< Output-column tile width, as `<function>_n_tile` on a GPU.
  bool casts_a_to_e4m3 = false;                  ///< As `<function>_a_e4m3` on a GPU.
  bool waits_for_dependency = false;             ///< Allows dependent launch, which is an ordinary launch here.
};

/// A global of a module, as `KernelRegistry::device_symbol` finds it. Texts and memory must outlive the backend.
struct HostSymbol {
  std::string_view module;
  std::string_view name;
  void* address = nullptr;
  std::uint64_t bytes = 0;
};

}  // namespace metrale::host
