// SPDX-License-Identifier: Apache-2.0
#include "bridges/collective/reduce.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "metrale/dequantise.h"

namespace metrale::in_process {
namespace {

template <class T>
struct Same {
  using Stored = T;
  using Sum = T;
  static Sum widen(Stored value) noexcept { return value; }
  static Stored narrow(Sum value) noexcept { return value; }
};
struct Bf16 {
  using Stored = std::uint16_t;
  using Sum = float;
  static Sum widen(Stored bits) noexcept { return bf16_to_f32(bits); }
  static Stored narrow(Sum value) noexcept { return f32_to_bf16(value); }
};
struct F16 {
  using Stored = std::uint16_t;
  using Sum = float;
  static Sum widen(Stored bits) noexcept { return f16_to_f32(bits); }
  /// To nearest, ties to even. A float's lowest bits decide, so the rounding is done on its own bits.
  static Stored narrow(Sum value) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
    const std::uint32_t magnitude = bits & 0x7fff'ffffU;
    if (magnitude > 0x7f80'0000U) return static_cast<std::uint16_t>(sign | 0x7e00U);
    if (magnitude >= 0x4780'0000U) return static_cast<std::uint16_t>(sign | 0x7c00U);  // 2^16 and beyond
    if (magnitude < 0x3880'0000U) {                                                    // subnormal there: a whole number of 2^-24
      return static_cast<std::uint16_t>(sign | static_cast<std::uint16_t>(std::nearbyint(std::ldexp(std::fabs(value), 24))));
    }
    const std::uint32_t rounded = magnitude - 0x3800'0000U + 0xfffU + ((magnitude >> 13) & 1U);
    return static_cast<std::uint16_t>(sign | (rounded >> 13));
  }
};

template <class T>
T combine(ReduceOp op, T a, T b) noexcept {
  if constexpr (std::is_floating_point_v<T>) {
    switch (op) {
      case ReduceOp::product: return a * b;
      // Not finite stays not finite, whichever side it comes from.
      case ReduceOp::min: return std::isnan(a) || b > a ? a : b;
      case ReduceOp::max: return std::isnan(a) || b < a ? a : b;
      default: return a + b;
    }
  } else {
    // Whole numbers wrap around, as on the device.
    using U = std::make_unsigned_t<T>;
    switch (op) {
      case ReduceOp::product:
        return static_cast<T>(static_cast<std::uint64_t>(static_cast<U>(a)) * static_cast<std::uint64_t>(static_cast<U>(b)));
      case ReduceOp::min: return std::min(a, b);
      case ReduceOp::max: return std::max(a, b);
      default: return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
    }
  }
}

template <class Type>
void reduce_as(ReduceOp op, std::span<const std::byte* const> from, std::byte* to, std::uint64_t count) noexcept {
  using Stored = typename Type::Stored;
  using Sum = typename Type::Sum;
  const auto ranks = static_cast<Sum>(from.size());
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto load = [&](const std::byte* source) {
      Stored value;
      std::memcpy(&value, source + i * sizeof(value), sizeof(value));
      return Type::widen(value);
    };
    Sum total = load(from[0]);
    for (std::size_t rank = 1; rank < from.size(); ++rank) total = combine(op, total, load(from[rank]));
    if (op == ReduceOp::average) total = static_cast<Sum>(total / ranks);
    const Stored value = Type::narrow(total);
    std::memcpy(to + i * sizeof(value), &value, sizeof(value));
  }
}

}  // namespace

void reduce(ReduceOp op, DType dtype, std::span<const std::byte* const> from, std::byte* to, std::uint64_t count) noexcept {
  switch (dtype) {
    case DType::f32: return reduce_as<Same<float>>(op, from, to, count);
    case DType::f64: return reduce_as<Same<double>>(op, from, to, count);
    case DType::f16: return reduce_as<F16>(op, from, to, count);
    case DType::bf16: return reduce_as<Bf16>(op, from, to, count);
    case DType::i8: return reduce_as<Same<std::int8_t>>(op, from, to, count);
    case DType::u8: return reduce_as<Same<std::uint8_t>>(op, from, to, count);
    case DType::i32: return reduce_as<Same<std::int32_t>>(op, from, to, count);
    case DType::u32: return reduce_as<Same<std::uint32_t>>(op, from, to, count);
    case DType::i64: return reduce_as<Same<std::int64_t>>(op, from, to, count);
    case DType::u64: return reduce_as<Same<std::uint64_t>>(op, from, to, count);
    default: return;
  }
}

}  // namespace metrale::in_process
