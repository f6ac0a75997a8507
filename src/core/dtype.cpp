// SPDX-License-Identifier: Apache-2.0
#include "metrale/dtype.h"

#include <array>
#include <limits>

namespace metrale {
namespace {
// Indexed by DType.
constexpr std::array<DTypeFacts, 20> kFacts{{
    {"f32", 1, 4},  {"f16", 1, 2},    {"bf16", 1, 2},   {"f8_e4m3", 1, 1}, {"f8_e5m2", 1, 1},  {"i8", 1, 1},       {"u8", 1, 1},
    {"i16", 1, 2},  {"i32", 1, 4},    {"i64", 1, 8},    {"u16", 1, 2},     {"u32", 1, 4},      {"u64", 1, 8},      {"f64", 1, 8},
    {"bool", 1, 1}, {"q4_0", 32, 18}, {"q4_1", 32, 20}, {"q8_0", 32, 34},  {"q4_k", 256, 144}, {"q6_k", 256, 210},
}};
static_assert(static_cast<std::size_t>(DType::q6_k) + 1 == kFacts.size());
}  // namespace

const DTypeFacts& dtype_facts(DType type) noexcept { return kFacts[static_cast<std::size_t>(type)]; }

std::optional<std::uint64_t> size_bytes(DType type, std::uint64_t elements) noexcept {
  const DTypeFacts& f = dtype_facts(type);
  if (elements % f.block_elements != 0) return std::nullopt;
  const std::uint64_t blocks = elements / f.block_elements;
  if (blocks > std::numeric_limits<std::uint64_t>::max() / f.block_bytes) return std::nullopt;
  return blocks * f.block_bytes;
}

}  // namespace metrale
