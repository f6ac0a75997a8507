// SPDX-License-Identifier: Apache-2.0
//
// Element types of tensors, dense and block-quantised, with the facts that size them. Quantised types use the block layouts of the
// GGUF format. Plain values, any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace metrale {

enum class DType : std::uint8_t {
  f32,
  f16,
  bf16,
  f8_e4m3,
  f8_e5m2,
  i8,
  u8,
  i16,
  i32,
  i64,
  u16,
  u32,
  u64,
  f64,
  boolean,
  q4_0,
  q4_1,
  q8_0,
  q4_k,
  q6_k
};

/// How a type is stored: `block_elements` consecutive elements of a row take `block_bytes`.
struct DTypeFacts {
  std::string_view name;         ///< As written in messages, e.g. "bf16", "q4_1".
  std::uint32_t block_elements;  ///< 1 for dense types.
  std::uint32_t block_bytes;
};

const DTypeFacts& dtype_facts(DType type) noexcept;
inline std::string_view to_string(DType type) noexcept { return dtype_facts(type).name; }
inline bool is_quantised(DType type) noexcept { return dtype_facts(type).block_elements > 1; }

/// Bytes of `elements` consecutive elements, or nullopt when they are no whole number of blocks or the product overflows.
std::optional<std::uint64_t> size_bytes(DType type, std::uint64_t elements) noexcept;

}  // namespace metrale
