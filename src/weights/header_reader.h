// SPDX-License-Identifier: Apache-2.0
//
// HeaderReader: reads little-endian fields from the start of a source in order, through a window, so that a header costs few reads
// and never more memory than its fields. Every length is compared with the bytes left before anything is allocated for it.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "metrale/byte_source.h"
#include "metrale/result.h"

namespace metrale::weights {

static_assert(std::endian::native == std::endian::little, "weight files are little-endian and are read without swapping");

/// What is being read, for messages: "metadata key 7 "general.name"".
struct ReadContext {
  const char* part = "header";
  std::uint64_t index = 0;
  std::uint64_t count = 0;  ///< 0: the part has no index.
  std::string_view name;    ///< Empty until it is known.
};

class HeaderReader {
 public:
  /// Reads at most the first `limit` bytes of `source`, which must outlive the reader.
  HeaderReader(const ByteSource& source, std::uint64_t limit);

  std::uint64_t position() const noexcept { return window_start_ + used_; }
  /// Bytes that may still be read.
  std::uint64_t remaining() const noexcept { return end_ - position(); }

  void set_context(ReadContext context) noexcept { context_ = context; }
  /// An error about the part being read: "<label>: <part> <index> of <count> <name>: <problem>".
  Error fail(Errc code, std::string_view problem) const;

  Result<> bytes(std::span<std::byte> dst);
  template <class T>
  Result<T> value() {
    static_assert(std::is_arithmetic_v<T> && !std::is_same_v<T, bool>);
    if (used_ + sizeof(T) <= window_.size()) [[likely]] {
      T out;
      std::memcpy(&out, window_.data() + used_, sizeof(T));
      used_ += sizeof(T);
      return out;
    }
    std::byte raw[sizeof(T)];
    METRALE_TRY(bytes(raw));
    return std::bit_cast<T>(raw);
  }
  /// A 64-bit length and that many bytes, at most `limit` of them.
  Result<std::string> string(std::uint64_t limit = UINT64_MAX);
  /// Checks that `count` items of at least `least_bytes` each can follow, so that memory for them may be reserved.
  Result<> expect(std::uint64_t count, std::uint64_t least_bytes, std::string_view what) const;

 private:
  Result<> refill();

  const ByteSource& source_;
  const std::uint64_t end_;
  std::vector<std::byte> window_;
  std::size_t used_ = 0;
  std::uint64_t window_start_ = 0;
  ReadContext context_;
};

}  // namespace metrale::weights
