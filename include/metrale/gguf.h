// SPDX-License-Identifier: Apache-2.0
//
// GGUF: metadata and tensor table of a .gguf file, versions 2 and 3, little-endian. The parser reads the header only, never tensor
// data, and treats every count and length in it as a claim to be checked against the bytes that are left. What it returns is plain
// data that owns its memory; after parsing any number of threads may read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "metrale/byte_source.h"
#include "metrale/result.h"
#include "metrale/tensor_info.h"

namespace metrale {

/// Largest header (metadata and tensor table) that is read; vocabularies of 256k tokens take a tenth of it. Memory for a header is
/// at most about four times its size.
inline constexpr std::uint64_t kMaxGgufHeaderBytes = std::uint64_t{128} << 20;
/// Alignment of tensor data when the file does not give `general.alignment`.
inline constexpr std::uint32_t kGgufDefaultAlignment = 32;

/// A metadata value with the type that the file gave it. Arrays of arrays do not occur: the parser refuses them.
using GgufValue =
    std::variant<std::uint8_t, std::int8_t, std::uint16_t, std::int16_t, std::uint32_t, std::int32_t, float, bool, std::string,
                 std::uint64_t, std::int64_t, double, std::vector<std::uint8_t>, std::vector<std::int8_t>,
                 std::vector<std::uint16_t>, std::vector<std::int16_t>, std::vector<std::uint32_t>, std::vector<std::int32_t>,
                 std::vector<float>, std::vector<bool>, std::vector<std::string>, std::vector<std::uint64_t>,
                 std::vector<std::int64_t>, std::vector<double>>;

/// The name of the value's type, e.g. "u32", "array of string".
std::string gguf_type_name(const GgufValue& value);

/// The key-value part of a GGUF file. Keys are valid UTF-8 and unique; string values are the file's bytes, unchecked.
class GgufMetadata {
 public:
  using Map = std::map<std::string, GgufValue, std::less<>>;

  GgufMetadata() = default;
  /// `label` names the file in messages.
  GgufMetadata(Map values, std::string label) : values_(std::move(values)), label_(std::move(label)) {}

  /// Every key, sorted.
  const Map& values() const noexcept { return values_; }
  bool contains(std::string_view key) const noexcept { return values_.find(key) != values_.end(); }
  /// The value as the file has it, or null.
  const GgufValue* find(std::string_view key) const noexcept;

  /// A scalar as `T`, one of bool, std::int32_t, std::uint32_t, std::int64_t, std::uint64_t, float, double, std::string. Any
  /// integer type of the file converts to any integer `T` that can hold the value, and any number to float or double; nothing
  /// else converts.
  /// Errors: not_found (no such key), bad_format (the value is of another kind or does not fit).
  template <class T>
  Result<T> get(std::string_view key) const;

  /// As `get`, and `fallback` where the key is absent. A value of the wrong kind stays an error.
  template <class T>
  Result<T> get_or(std::string_view key, T fallback) const {
    if (!contains(key)) return fallback;
    return get<T>(key);
  }

  /// An array of strings, viewed: valid while this object lives.
  /// Errors: not_found, bad_format (the value is something else).
  Result<std::span<const std::string>> strings(std::string_view key) const;
  /// An array of any integer type, widened.
  /// Errors: not_found, bad_format (the value is something else, or an element is 2^63 or more).
  Result<std::vector<std::int64_t>> ints(std::string_view key) const;
  /// An array of any number type, as floats.
  /// Errors: not_found, bad_format (the value is something else).
  Result<std::vector<float>> floats(std::string_view key) const;

 private:
  Result<const GgufValue*> require(std::string_view key) const;

  Map values_;
  std::string label_;
};

extern template Result<bool> GgufMetadata::get<bool>(std::string_view) const;
extern template Result<std::int32_t> GgufMetadata::get<std::int32_t>(std::string_view) const;
extern template Result<std::uint32_t> GgufMetadata::get<std::uint32_t>(std::string_view) const;
extern template Result<std::int64_t> GgufMetadata::get<std::int64_t>(std::string_view) const;
extern template Result<std::uint64_t> GgufMetadata::get<std::uint64_t>(std::string_view) const;
extern template Result<float> GgufMetadata::get<float>(std::string_view) const;
extern template Result<double> GgufMetadata::get<double>(std::string_view) const;
extern template Result<std::string> GgufMetadata::get<std::string>(std::string_view) const;

/// Everything that a GGUF header says.
struct GgufHeader {
  std::uint32_t version = 0;
  std::uint32_t alignment = kGgufDefaultAlignment;
  std::uint64_t data_offset = 0;  ///< Where tensor data starts, from the start of the file.
  GgufMetadata metadata;
  TensorTable tensors;  ///< Shapes reversed into row-major order. Types metrale cannot load are listed without a dtype.
};

/// Reads and checks the header at the start of `source`.
/// Errors: bad_format (truncated, lying or hostile: the message names the file and the key or tensor), unsupported (version 1 or
/// big-endian), io, out_of_memory. Nothing is kept of a refused file.
/// Threads: any.
/// Source: the GGUF specification in the ggml repository, docs/gguf.md.
Result<GgufHeader> parse_gguf(const ByteSource& source);

/// Whether `source` starts with the four bytes of GGUF; false also when it cannot be read.
bool is_gguf(const ByteSource& source) noexcept;

}  // namespace metrale
