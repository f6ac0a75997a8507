// SPDX-License-Identifier: Apache-2.0
//
// Activations for one instruction set: RMS norm and the forms of formats.h. Included by ops_<isa>.cpp after simd.h.
#pragma once

#include <cmath>

#include "formats.h"
#include "ops.h"

namespace metrale::host::matmul::METRALE_ISA {

METRALE_INLINE std::uint32_t padded(std::uint32_t k, std::uint32_t to) { return (k + to - 1) / to * to; }

/// Up to 16 floats, zeros behind them.
METRALE_INLINE V16f load_some(const float* p, std::uint32_t count) {
  if (count >= 16) return load<V16f>(p);
  float some[16] = {};
  std::memcpy(some, p, count * sizeof(float));
  return load<V16f>(some);
}

METRALE_INLINE V16f load_norm(const void* norm, DType type, std::uint32_t i, std::uint32_t count) {
  if (type != DType::bf16) return load_some(static_cast<const float*>(norm) + i, count);
  std::uint16_t some[16] = {};
  std::memcpy(some, static_cast<const std::uint16_t*>(norm) + i, (count < 16 ? count : 16) * sizeof(std::uint16_t));
  return load_bf16(some);
}

/// One row of x, normalised when the call has a norm, as round_up(k, 16) floats.
static void normalise_row(const Call& c, const float* x, float* out) {
  const std::uint32_t k = c.p.k;
  if (c.norm == nullptr) {
    for (std::uint32_t i = 0; i < k; i += 16) store(out + i, load_some(x + i, k - i));
    return;
  }
  V16f squares{}, more{};
  std::uint32_t i = 0;
  for (; i + 32 <= k; i += 32) {
    const V16f a = load<V16f>(x + i), b = load<V16f>(x + i + 16);
    squares += a * a;
    more += b * b;
  }
  for (; i < k; i += 16) {
    const V16f a = load_some(x + i, k - i);
    squares += a * a;
  }
  const float scale = 1.0f / std::sqrt(reduce_sum(squares + more) / static_cast<float>(k) + c.p.norm_eps);
  const auto type = static_cast<DType>(c.p.norm_dtype);
  for (i = 0; i < k; i += 16) store(out + i, load_some(x + i, k - i) * scale * (load_norm(c.norm, type, i, k - i) + c.p.norm_add));
}

/// A row of floats as 16-bit blocks; k is a multiple of 32.
static void quantise_row(const float* x, std::uint32_t k, std::int8_t* q, Q16Scale* scales) {
  constexpr float kLargest = 127.0f * kHigh;
  for (std::uint32_t b = 0; b < k / 32; ++b, x += 32, q += 64) {
    const V16f lo = load<V16f>(x), hi = load<V16f>(x + 16);
    const float top = reduce_max(max(abs(lo), abs(hi)));
    const float d = top * (1.0f / kLargest), inverse = top > 0 ? kLargest / top : 0.0f;
    const V16f qlo = lo * inverse, qhi = hi * inverse;
    const V16i hlo = round_to_int(qlo * (1.0f / kHigh)), hhi = round_to_int(qhi * (1.0f / kHigh));
    const TwoSums high = store_int8(q, hlo, hhi);
    const TwoSums low = store_int8(q + 32, round_to_int(qlo - to_float(hlo) * kHigh), round_to_int(qhi - to_float(hhi) * kHigh));
    const std::int32_t first = kHigh * high.lo + low.lo, second = kHigh * high.hi + low.hi;
    scales[b] = {d, d * static_cast<float>(first + second), {first, second}};
  }
}

/// Rows of prepared activations in memory. `stride` is in bytes.
struct Rows {
  const std::byte* base;
  std::size_t stride;
  std::uint32_t k;
};

METRALE_INLINE std::size_t row_stride(ActivationFormat format, std::uint32_t k) {
  return format == ActivationFormat::q16 ? padded(2 * k + k / 32 * static_cast<std::uint32_t>(sizeof(Q16Scale)), 64)
                                         : padded(k, 16) * sizeof(float);
}

/// Rows [first, first + count) of x as `format` at `out`; `scratch` holds round_up(k, 16) floats.
static void prepare_rows(const Call& c, ActivationFormat format, std::uint32_t first, std::uint32_t count, std::byte* out,
                         float* scratch) {
  const std::size_t stride = row_stride(format, c.p.k);
  for (std::uint32_t r = 0; r < count; ++r, out += stride) {
    const float* x = static_cast<const float*>(c.x) + std::size_t{first + r} * c.p.ld_x;
    if (format == ActivationFormat::f32) {
      normalise_row(c, x, reinterpret_cast<float*>(out));
      continue;
    }
    normalise_row(c, x, scratch);
    quantise_row(scratch, c.p.k, reinterpret_cast<std::int8_t*>(out), reinterpret_cast<Q16Scale*>(out + 2 * c.p.k));
  }
}

/// This block's rows when a grid shares m of them in steps of 16.
struct Share {
  std::uint32_t begin, end;
};
METRALE_INLINE Share share_of(std::uint32_t items, std::uint32_t block, std::uint32_t blocks) {
  return {static_cast<std::uint32_t>(std::uint64_t{items} * block / blocks),
          static_cast<std::uint32_t>(std::uint64_t{items} * (block + 1) / blocks)};
}

}  // namespace metrale::host::matmul::METRALE_ISA
