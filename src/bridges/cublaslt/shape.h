// SPDX-License-Identifier: Apache-2.0
//
// What follows from a call: strides with their defaults, and how many bytes each operand spans. Plain arithmetic on calls that
// passed `check_shape`; any thread.
#pragma once

#include <cstdint>
#include <source_location>

#include "metrale/bridges/cublaslt.h"

namespace metrale::cublaslt {

/// `check` without what it says of addresses.
Result<> check_shape(const Call& call, std::source_location site);

constexpr std::uint64_t element_bytes(Precision precision) noexcept { return precision == Precision::bf16 ? 2 : 1; }
constexpr std::uint64_t out_bytes(const Call& call) noexcept { return call.out_type == DType::f32 ? 4 : 2; }

struct Strides {
  std::uint64_t act;
  std::uint64_t out;
  std::uint64_t residual;
};
constexpr Strides strides_of(const Call& c) noexcept {
  const std::uint64_t out = c.out_stride != 0 ? c.out_stride : c.n;
  return {.act = c.act_stride != 0 ? c.act_stride : c.k, .out = out, .residual = c.residual_stride != 0 ? c.residual_stride : out};
}

/// Rows that the library computes.
constexpr std::uint32_t library_rows(const Call& c) noexcept {
  return c.precision == Precision::fp8_block ? static_cast<std::uint32_t>(round_up(c.m, kBlockRows)) : c.m;
}
constexpr bool has_odd_rows(const Call& c) noexcept { return c.precision == Precision::fp8_block && c.m % kBlockRows != 0; }

/// Bytes from the first to the last element; 0 for an operand that the call lacks.
struct Extents {
  std::uint64_t act = 0;
  std::uint64_t weight = 0;
  std::uint64_t out = 0;
  std::uint64_t bias = 0;
  std::uint64_t residual = 0;
  std::uint64_t act_scales = 0;
  std::uint64_t weight_scales = 0;
};
constexpr Extents extents_of(const Call& c) noexcept {
  const Strides s = strides_of(c);
  const std::uint64_t in = element_bytes(c.precision);
  const std::uint64_t out = out_bytes(c);
  const std::uint64_t rows = (c.rows_padded ? library_rows(c) : c.m) - std::uint64_t{1};
  const std::uint64_t more = c.batch - std::uint64_t{1};
  Extents e{.act = (rows * s.act + c.k + more * c.act_batch_stride) * in,
            .weight = (std::uint64_t{c.n} * c.k + more * c.weight_batch_stride) * in,
            .out = (rows * s.out + c.n + more * c.out_batch_stride) * out};
  if (c.bias) e.bias = c.n * out;
  if (c.residual) e.residual = (rows * s.residual + c.n + more * c.residual_batch_stride) * out;
  if (c.precision == Precision::fp8_row) {
    e.act_scales = std::uint64_t{c.m} * sizeof(float);
    e.weight_scales = std::uint64_t{c.n} * sizeof(float);
  } else if (c.precision == Precision::fp8_block) {
    const std::uint64_t blocks = div_ceil(c.k, kScaleBlock);
    e.act_scales = (c.scales_transposed ? library_rows(c) : c.m) * blocks * sizeof(float);
    e.weight_scales = div_ceil(c.n, kScaleBlock) * blocks * sizeof(float);
  }
  return e;
}

}  // namespace metrale::cublaslt
