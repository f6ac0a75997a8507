// SPDX-License-Identifier: Apache-2.0
//
// Byte layouts that the host matrix kernels share: packed weights and prepared activations. Constants and plain structs only.
//
// A packed matrix [n, k] is n / 16 groups of 16 rows in order, then the last n % 16 rows unchanged; the whole takes the bytes of the
// original. Inside a group the same bytes are permuted so that one 64-byte line holds 4 bytes (dense: 2 or 1 elements) of each of
// the 16 rows, which is the operand layout of vpdpbusd, vdpbf16ps and the AMX tile alike. "×16" means one value for each row:
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

/// What `prepare` keeps of 32 consecutive int8 activations: x ≈ d * q. ds = d * (sum of q); the sums are of elements 0–15 and 16–31.
struct Q8Scale {
  float d;
  float ds;
  std::int32_t sum_lo;
  std::int32_t sum_hi;
};
static_assert(sizeof(Q8Scale) == 16);

/// How a row of activations is stored.
///   f32   [round_up(k, 16)] floats, zero padded
///   q8    [k] int8, then [k / 32] Q8Scale
///   bf16  for 16 rows at a time: [k / 32] tiles of [16 rows][32 elements]
///   bf16x3  as bf16 with three tiles for each, whose sum is the f32 value to 24 bits: high, middle, low
enum class ActivationFormat : std::uint8_t { f32, q8, bf16, bf16x3 };

}  // namespace metrale::host::matmul
