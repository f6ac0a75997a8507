// SPDX-License-Identifier: Apache-2.0
//
// The vocabulary that every other header uses: handles, device addresses, launch geometry, alignments. All are plain values
// without ownership, free to copy and to share between threads. Handles are distinct types so that a stream cannot be passed where
// an event belongs, and 0 is null in each of them.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

namespace metrale {

/// A 64-bit name for an object of one backend. It carries a generation, so a handle that outlives its object is refused with
/// `invalid_argument` instead of reaching a stranger's object.
template <class Tag>
struct Handle {
  std::uint64_t value = 0;
  constexpr explicit operator bool() const noexcept { return value != 0; }
  friend constexpr auto operator<=>(Handle, Handle) = default;
};

using StreamHandle = Handle<struct StreamTag>;
using EventHandle = Handle<struct EventTag>;
using KernelHandle = Handle<struct KernelTag>;
using GraphHandle = Handle<struct GraphTag>;

/// An address in device memory, as the device sees it. Interior addresses are ordinary values.
struct DevicePtr {
  std::uint64_t address = 0;
  constexpr explicit operator bool() const noexcept { return address != 0; }
  /// The address `bytes` further on; no check is made.
  constexpr DevicePtr offset(std::uint64_t bytes) const noexcept { return {address + bytes}; }
  friend constexpr auto operator<=>(DevicePtr, DevicePtr) = default;
};

/// Launch geometry, in blocks (grid) or threads (block).
struct Dim3 {
  std::uint32_t x = 1;
  std::uint32_t y = 1;
  std::uint32_t z = 1;
  /// The product; a launch refuses geometry whose product does not fit.
  constexpr std::uint64_t count() const noexcept { return std::uint64_t{x} * y * z; }
  friend constexpr bool operator==(Dim3, Dim3) = default;
};

/// Alignment that every device allocation has at least, in bytes.
inline constexpr std::size_t kDeviceAlignment = 256;
/// Alignment that pinned host memory has at least, in bytes.
inline constexpr std::size_t kPinnedAlignment = 64;

constexpr std::uint64_t div_ceil(std::uint64_t a, std::uint64_t b) noexcept { return a / b + (a % b != 0); }
constexpr std::uint64_t round_up(std::uint64_t a, std::uint64_t b) noexcept { return div_ceil(a, b) * b; }

}  // namespace metrale

template <class Tag>
struct std::hash<metrale::Handle<Tag>> {
  std::size_t operator()(metrale::Handle<Tag> h) const noexcept { return std::hash<std::uint64_t>{}(h.value); }
};
template <>
struct std::hash<metrale::DevicePtr> {
  std::size_t operator()(metrale::DevicePtr p) const noexcept { return std::hash<std::uint64_t>{}(p.address); }
};
