// SPDX-License-Identifier: Apache-2.0
//
// Arguments of a kernel launch. A `KernelArg` is 16 bytes, owns nothing and never touches the heap: device addresses and scalars of
// up to eight bytes lie inside it, larger structs are referred to. It is read during the launch call only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "metrale/types.h"

namespace metrale {

/// Largest number of arguments of one kernel.
inline constexpr std::size_t kMaxKernelArgs = 128;
/// Largest total size of the arguments of one launch, in bytes.
inline constexpr std::size_t kMaxKernelArgBytes = 4096;

class KernelArg {
 public:
  /// A device address; it lies in memory the launch may use, and a capture remembers it as named.
  static KernelArg buffer(DevicePtr ptr) noexcept {
    KernelArg arg;
    arg.word_ = ptr.address;
    arg.size_bytes_ = sizeof(ptr.address);
    arg.kind_ = Kind::buffer;
    return arg;
  }

  /// A by-value argument at its full size. Of more than eight bytes only the address is kept:
  /// `value` must live until the launch call returns.
  static KernelArg bytes(std::span<const std::byte> value) noexcept {
    KernelArg arg;
    arg.size_bytes_ = static_cast<std::uint32_t>(value.size());
    if (value.size() <= sizeof(arg.word_)) {
      if (!value.empty()) std::memcpy(&arg.word_, value.data(), value.size());
      arg.kind_ = Kind::inline_bytes;
    } else {
      arg.word_ = reinterpret_cast<std::uintptr_t>(value.data());
      arg.kind_ = Kind::external_bytes;
    }
    return arg;
  }

  /// A scalar or small struct at its true width.
  template <class T>
    requires(std::is_trivially_copyable_v<T> && sizeof(T) <= 8 && !std::is_pointer_v<T> && !std::is_same_v<T, DevicePtr>)
  static KernelArg value(const T& v) noexcept {
    return bytes(std::as_bytes(std::span<const T, 1>(&v, 1)));
  }

  bool is_buffer() const noexcept { return kind_ == Kind::buffer; }
  /// The address of a buffer argument.
  DevicePtr ptr() const noexcept { return {word_}; }
  std::uint32_t size_bytes() const noexcept { return size_bytes_; }
  /// Where the argument's bytes are, inside this object or at the caller's.
  const void* data() const noexcept { return kind_ == Kind::external_bytes ? reinterpret_cast<const void*>(word_) : &word_; }

  /// The first eight bytes, zeros behind fewer.
  std::uint64_t leading_word() const noexcept {
    std::uint64_t word = 0;
    std::memcpy(&word, data(), sizeof(word));  // bytes of the caller's are more than a word
    return word;
  }

 private:
  enum class Kind : std::uint32_t { buffer, inline_bytes, external_bytes };
  KernelArg() = default;

  std::uint64_t word_ = 0;
  std::uint32_t size_bytes_ = 0;
  Kind kind_ = Kind::inline_bytes;
};
static_assert(sizeof(KernelArg) == 16, "arguments are passed by the dozen");

/// What a launch asks beyond its geometry.
struct LaunchAttributes {
  Dim3 cluster{0, 0, 0};          ///< Blocks in a cluster; all zero: none.
  bool cooperative = false;       ///< All blocks resident at once.
  bool dependent_launch = false;  ///< May start before its predecessor ends; only for kernels that publish that they wait.
  constexpr bool any() const noexcept { return cluster != Dim3{0, 0, 0} || cooperative || dependent_launch; }
};

}  // namespace metrale
