// SPDX-License-Identifier: Apache-2.0
//
// GgufWriter: makes small GGUF files in memory. What the format derives (counts, offsets, version) can be overridden, so that tests
// can lie about exactly one thing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/byte_writer.h"

namespace metrale::test {

class GgufWriter {
 public:
  // Numbers of the format.
  enum ValueType : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };
  enum TensorType : std::uint32_t {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q8_0 = 8,
    Q4_K = 12,
    Q6_K = 14,
    I32 = 26,
    BF16 = 30
  };

  struct Tensor {
    std::string name;
    std::uint32_t type = F32;
    std::vector<std::uint64_t> dims;  ///< As in the file: innermost first.
    std::vector<std::byte> data;
    std::optional<std::uint64_t> offset;  ///< Overrides the offset that the table gives.
  };

  std::string magic = "GGUF";
  std::uint32_t version = 3;
  std::uint32_t alignment = 32;  ///< Used for layout; written only by `key("general.alignment", …)`.
  std::optional<std::uint64_t> num_tensors;
  std::optional<std::uint64_t> num_keys;
  std::vector<Tensor> tensors;
  bool pad_end = false;

  template <class T>
  GgufWriter& key(std::string_view name, T value) {
    begin_key(name);
    if constexpr (std::is_convertible_v<T, std::string_view>) {
      keys_.put(std::uint32_t{string});
      put_string(keys_, value);
    } else {
      keys_.put(std::uint32_t{type_of<T>()});
      put_element(value);
    }
    return *this;
  }

  template <class T>
  GgufWriter& key_array(std::string_view name, const std::vector<T>& values) {
    begin_key(name);
    keys_.put(std::uint32_t{array}).put(std::uint32_t{type_of<T>()}).put(std::uint64_t{values.size()});
    for (const T& value : values) put_element(value);
    return *this;
  }

  /// A key whose bytes after the name are given: type, value.
  GgufWriter& key_raw(std::string_view name, std::vector<std::byte> bytes) {
    begin_key(name);
    keys_.put_bytes(bytes);
    return *this;
  }

  GgufWriter& tensor(std::string name, std::uint32_t type, std::vector<std::uint64_t> dims, std::vector<std::byte> data,
                     std::optional<std::uint64_t> offset = std::nullopt) {
    tensors.push_back({std::move(name), type, std::move(dims), std::move(data), offset});
    return *this;
  }

  std::vector<std::byte> bytes() const {
    ByteWriter out;
    out.put_text(magic).put(version);
    out.put(num_tensors.value_or(tensors.size())).put(num_keys.value_or(num_keys_));
    ByteWriter keys = keys_;
    out.put_bytes(keys.take());
    std::uint64_t offset = 0;
    for (const Tensor& t : tensors) {
      put_string(out, t.name);
      out.put(static_cast<std::uint32_t>(t.dims.size()));
      for (const std::uint64_t dim : t.dims) out.put(dim);
      out.put(t.type).put(t.offset.value_or(offset));
      offset += (t.data.size() + alignment - 1) / alignment * alignment;
    }
    for (const Tensor& t : tensors) out.pad_to(alignment).put_bytes(t.data);
    if (pad_end) out.pad_to(alignment);
    return out.take();
  }

 private:
  template <class T>
  static constexpr ValueType type_of() {
    if constexpr (std::is_same_v<T, std::uint8_t>) return u8;
    if constexpr (std::is_same_v<T, std::int8_t>) return i8;
    if constexpr (std::is_same_v<T, std::uint16_t>) return u16;
    if constexpr (std::is_same_v<T, std::int16_t>) return i16;
    if constexpr (std::is_same_v<T, std::uint32_t>) return u32;
    if constexpr (std::is_same_v<T, std::int32_t>) return i32;
    if constexpr (std::is_same_v<T, float>) return f32;
    if constexpr (std::is_same_v<T, bool>) return boolean;
    if constexpr (std::is_same_v<T, std::uint64_t>) return u64;
    if constexpr (std::is_same_v<T, std::int64_t>) return i64;
    if constexpr (std::is_same_v<T, double>) return f64;
    if constexpr (std::is_same_v<T, std::string>) return string;
  }
  static void put_string(ByteWriter& out, std::string_view text) { out.put(std::uint64_t{text.size()}).put_text(text); }
  template <class T>
  void put_element(const T& value) {
    if constexpr (std::is_same_v<T, std::string>) {
      put_string(keys_, value);
    } else {
      keys_.put(value);
    }
  }
  void begin_key(std::string_view name) {
    put_string(keys_, name);
    ++num_keys_;
  }

  ByteWriter keys_;
  std::uint64_t num_keys_ = 0;
};

}  // namespace metrale::test
