// SPDX-License-Identifier: Apache-2.0
//
// Byte layouts that the host matrix kernels share: packed weights and prepared activations. Constants and plain structs only.
//
// A packed matrix [n, k] is n / 16 groups of 16 rows in order, then the last n % 16 rows unchanged; the whole takes the bytes of
// the original. Inside a group the same bytes are permuted so that one 64-byte line holds 4 bytes (dense: 2 or 1 elements) of each
// of the 16 rows, which is the operand layout of vpdpbusd, vdpbf16ps and the AMX tile alike. "×16" means one value for each row:
//   f32    [k][16 rows]
//   f16    [k / 2][2][16 rows]                    a line holds element 2i of all rows, then element 2i+1
//   bf16   [k / 2][16 rows][2]                    a line holds elements 2i, 2i+1 of row 0, then of row 1, …
//   q4_1   [k / 32]{ d×16, m×16, 4 lines }        line i: bytes 4i … 4i+3 of each row's nibbles
//   q4_0   [k / 64]{ d×16, d×16, 4 lines, 4 lines }, an odd last block {d×16, 4 lines}
//   q8_0   as q4_0 with 8 lines a block, and every value biased to unsigned (xor 0x80)
//   q4_k   [k / 256]{ d×16, dmin×16, 12 scale bytes ×16 each, 32 lines }
//   q6_k   [k / 256]{ d×16, 16 scales ×16 each, 32 lines of low nibbles, 16 lines of high bits }
#pragma once

#include <cstddef>
#include <cstdint>

namespace metrale::host::matmul {

inline constexpr std::size_t kLine = 64;

/// The weight of the high byte of an activation: x ≈ d * (kHigh * h + l) with h and l in [-127, 127], so 16 bits that 8-bit
/// instructions can multiply. Not 256: then l could be -128, which has no negative.
inline constexpr int kHigh = 254;

/// What `prepare` keeps of 32 consecutive activations. q = kHigh * h + l; ds = d * (sum of q).
struct Q16Scale {
  float d;
  float ds;
  std::int32_t half_sums[2];  ///< Of q over elements 0–15 and 16–31.
};
static_assert(sizeof(Q16Scale) == 16);

/// How a row of activations is stored.
///   f32   [round_up(k, 16)] floats, zero padded
///   q16   [k / 32] lines of { 32 h, 32 l }, then [k / 32] Q16Scale
///   bf16  for 16 rows at a time: [k / 32] steps of 2 or 3 tiles of [16 rows][32 elements], whose sum is the f32 value to 16 or 24
///         bits, the highest part first
enum class ActivationFormat : std::uint8_t { f32, q16 };

}  // namespace metrale::host::matmul
