// SPDX-License-Identifier: Apache-2.0
//
// The matrix product for one instruction set, on 16-bit or f32 activations: one group of 16 output columns at a time against a tile
// of rows. Included by ops_<isa>.cpp after simd.h and prepare_impl.h.
#pragma once

#include "prepare_impl.h"

namespace metrale::host::matmul::METRALE_ISA {

// How far ahead of the weights in use the next ones are fetched into the second-level cache; a block reads its share as one stream.
inline constexpr std::size_t kPrefetchBytes = 8192;

/// Fetches `lines` lines that far ahead of `p`, or nothing new where the share ends at `end`.
template <int lines>
METRALE_INLINE void prefetch_lines(const std::byte* p, const std::byte* end) {
  const std::byte* ahead = p + kPrefetchBytes < end ? p + kPrefetchBytes : p;
  for (int i = 0; i < lines; ++i) prefetch(ahead + kLine * static_cast<std::size_t>(i));
}
/// The first part of a share, before anything else is done.
METRALE_INLINE void prefetch_start(const std::byte* p, const std::byte* end) {
  const std::byte* stop = p + kPrefetchBytes < end ? p + kPrefetchBytes : end;
  for (; p < stop; p += kLine) prefetch(p);
}

/// The two bytes of 32 activations of row r: h at the result, l 32 bytes on.
METRALE_INLINE const std::int8_t* row_q(const Rows& x, std::uint32_t r, std::uint32_t block) {
  return reinterpret_cast<const std::int8_t*>(x.base + r * x.stride) + std::size_t{block} * 64;
}
METRALE_INLINE const Q16Scale* row_scales(const Rows& x, std::uint32_t r) {
  return reinterpret_cast<const Q16Scale*>(x.base + r * x.stride + 2 * std::size_t{x.k});
}
METRALE_INLINE const float* row_f32(const Rows& x, std::uint32_t r) {
  return reinterpret_cast<const float*>(x.base + r * x.stride);
}

/// Products with both bytes of the activations.
struct Sum16 {
  Sum h, l;
};
METRALE_INLINE Sum16 zero_sum16() { return {zero_sum(), zero_sum()}; }
METRALE_INLINE Sum16 dot_nibble(const Sum16& s, const Line& w, const std::int8_t* q) {
  return {dot_nibble(s.h, w, q), dot_nibble(s.l, w, q + 32)};
}
METRALE_INLINE Sum16 dot_u8(const Sum16& s, const Line& w, const std::int8_t* q) {
  return {dot_u8(s.h, w, q), dot_u8(s.l, w, q + 32)};
}
METRALE_INLINE Sum16 dot_biased(const Sum16& s, const Line& w, const std::int8_t* q) {
  return {dot_biased(s.h, w, q), dot_biased(s.l, w, q + 32)};
}
METRALE_INLINE V16f finish_nibble(const Sum16& s) {
  return to_float(finish_nibble(s.h)) * float{kHigh} + to_float(finish_nibble(s.l));
}
METRALE_INLINE V16f finish(const Sum16& s) { return to_float(finish(s.h)) * float{kHigh} + to_float(finish(s.l)); }

// Each group kernel: out[r] = 16 columns of row r of x times the packed group, for M rows.

template <int M>
static void group_q4_1(const std::byte* w, const std::byte* end, const Rows& x, V16f* out) {
  V16f acc[M]{}, mins[M]{};
  for (std::uint32_t b = 0; b < x.k / 32; ++b, w += 320) {
    prefetch_lines<5>(w, end);
    const V16f d = load_f16(w), m = load_f16(w + 32);
    Sum16 sum[M];
    for (int r = 0; r < M; ++r) sum[r] = zero_sum16();
    for (int i = 0; i < 4; ++i) {
      const Line raw = load_line(w + 64 + 64 * i), lo = low_nibbles(raw), hi = high_nibbles(raw);
      for (int r = 0; r < M; ++r) {
        const std::int8_t* q = row_q(x, r, b) + 4 * i;
        sum[r] = dot_nibble(dot_nibble(sum[r], lo, q), hi, q + 16);
      }
    }
    for (int r = 0; r < M; ++r) {
      const Q16Scale& s = row_scales(x, r)[b];
      acc[r] += finish_nibble(sum[r]) * s.d * d;
      mins[r] += m * s.ds;
    }
  }
  for (int r = 0; r < M; ++r) out[r] = acc[r] + mins[r];
}

/// Where block b of a q4_0 or q8_0 group keeps its scales and lines.
template <int lines>
struct PairedBlock {
  const std::byte* d;
  const std::byte* lines_at;
  METRALE_INLINE PairedBlock at(const std::byte* w, std::uint32_t b, std::uint32_t blocks) {
    const std::byte* pair = w + std::size_t{b / 2} * (64 + 2 * lines * kLine);
    if ((b | 1) < blocks) return {pair + 32 * (b & 1), pair + 64 + (b & 1) * lines * kLine};
    return {pair, pair + 32};
  }
};

template <int M>
static void group_q4_0(const std::byte* w, const std::byte* end, const Rows& x, V16f* out) {
  V16f acc[M]{};
  const std::uint32_t blocks = x.k / 32;
  for (std::uint32_t b = 0; b < blocks; ++b) {
    const auto at = PairedBlock<4>::at(w, b, blocks);
    prefetch_lines<4>(at.lines_at, end);
    if ((b & 1) == 0) prefetch_lines<1>(at.d, end);
    const V16f d = load_f16(at.d);
    Sum16 sum[M];
    for (int r = 0; r < M; ++r) sum[r] = zero_sum16();
    for (int i = 0; i < 4; ++i) {
      const Line raw = load_line(at.lines_at + 64 * i), lo = low_nibbles(raw), hi = high_nibbles(raw);
      for (int r = 0; r < M; ++r) {
        const std::int8_t* q = row_q(x, r, b) + 4 * i;
        sum[r] = dot_nibble(dot_nibble(sum[r], lo, q), hi, q + 16);
      }
    }
    for (int r = 0; r < M; ++r) {
      const Q16Scale& s = row_scales(x, r)[b];
      acc[r] += (finish_nibble(sum[r]) * s.d - 8.0f * s.ds) * d;
    }
  }
  for (int r = 0; r < M; ++r) out[r] = acc[r];
}

template <int M>
static void group_q8_0(const std::byte* w, const std::byte* end, const Rows& x, V16f* out) {
  V16f acc[M]{};
  const std::uint32_t blocks = x.k / 32;
  for (std::uint32_t b = 0; b < blocks; ++b) {
    const auto at = PairedBlock<8>::at(w, b, blocks);
    prefetch_lines<8>(at.lines_at, end);
    if ((b & 1) == 0) prefetch_lines<1>(at.d, end);
    const V16f d = load_f16(at.d);
    Sum16 sum[M];
    for (int r = 0; r < M; ++r) sum[r] = zero_sum16();
    for (int i = 0; i < 8; ++i) {
      const Line line = load_line(at.lines_at + 64 * i);
      for (int r = 0; r < M; ++r) sum[r] = dot_biased(sum[r], line, row_q(x, r, b) + 4 * i);
    }
    for (int r = 0; r < M; ++r) {
      const Q16Scale& s = row_scales(x, r)[b];
      acc[r] += (finish(sum[r]) * s.d - kBiasLeft * s.ds) * d;
    }
  }
  for (int r = 0; r < M; ++r) out[r] = acc[r];
}

METRALE_INLINE V16i load_bytes(const std::byte* p) { return __builtin_convertvector(load<V16b>(p), V16i); }

/// The 6-bit scale and minimum of sub-block j of a q4_k block of 16 rows; `s` points at its 12 scale bytes ×16.
struct ScaleMin {
  V16i scale, min;
};
METRALE_INLINE ScaleMin q4_k_scale(const std::byte* s, int j) {
  if (j < 4) return {load_bytes(s + 16 * j) & 63, load_bytes(s + 16 * (j + 4)) & 63};
  const V16i high = load_bytes(s + 16 * (j + 4));
  return {(high & 15) | ((load_bytes(s + 16 * (j - 4)) >> 6) << 4), (high >> 4) | ((load_bytes(s + 16 * j) >> 6) << 4)};
}

template <int M>
static void group_q4_k(const std::byte* w, const std::byte* end, const Rows& x, V16f* out) {
  V16f acc[M]{};
  for (std::uint32_t b = 0; b < x.k / 256; ++b, w += 2304) {
    const V16f d = load_f16(w), dmin = load_f16(w + 32);
    prefetch_lines<4>(w, end);
    for (int c = 0; c < 4; ++c) {  // 64 elements: the low nibbles of 8 lines, then the high ones
      const std::byte* lines = w + 256 + 512 * c;
      prefetch_lines<8>(lines, end);
      Sum16 lo[M], hi[M];
      for (int r = 0; r < M; ++r) lo[r] = hi[r] = zero_sum16();
      for (int i = 0; i < 8; ++i) {
        const Line raw = load_line(lines + 64 * i), low = low_nibbles(raw), high = high_nibbles(raw);
        for (int r = 0; r < M; ++r) {
          const std::int8_t* q = row_q(x, r, 8 * b + 2 * static_cast<std::uint32_t>(c)) + 4 * i;
          lo[r] = dot_nibble(lo[r], low, q);
          hi[r] = dot_nibble(hi[r], high, q + 64);
        }
      }
      const ScaleMin s0 = q4_k_scale(w + 64, 2 * c), s1 = q4_k_scale(w + 64, 2 * c + 1);
      const V16f d0 = d * to_float(s0.scale), d1 = d * to_float(s1.scale);
      const V16f m0 = dmin * to_float(s0.min), m1 = dmin * to_float(s1.min);
      for (int r = 0; r < M; ++r) {
        const Q16Scale* s = row_scales(x, r) + 8 * b + 2 * c;
        acc[r] += finish_nibble(lo[r]) * s[0].d * d0 + finish_nibble(hi[r]) * s[1].d * d1;
        acc[r] -= m0 * s[0].ds + m1 * s[1].ds;
      }
    }
  }
  for (int r = 0; r < M; ++r) out[r] = acc[r];
}

/// Four lines of 6-bit values of a q6_k block: elements 32*part + 4i … of half h for all 16 rows.
template <int part>
METRALE_INLINE Line q6_k_line(const std::byte* low, const std::byte* high, int i) {
  const Line raw = load_line(low + 64 * ((part & 1) * 8 + i));
  return either(part < 2 ? low_nibbles(raw) : high_nibbles(raw), high_pair<part>(load_line(high + 64 * i)));
}

template <int part, int M>
METRALE_INLINE void q6_k_part(const std::byte* w, const std::byte* low, const std::byte* high, int half, V16f d, const Rows& x,
                              std::uint32_t first, V16f* acc) {
  for (int sub = 0; sub < 2; ++sub) {  // 16 elements share a scale
    Sum16 sum[M];
    for (int r = 0; r < M; ++r) sum[r] = zero_sum16();
    for (int i = 0; i < 4; ++i) {
      const Line line = q6_k_line<part>(low, high, 4 * sub + i);
      for (int r = 0; r < M; ++r) sum[r] = dot_u8(sum[r], line, row_q(x, r, first / 32 + part) + 16 * sub + 4 * i);
    }
    const V16i scale = __builtin_convertvector(load<V16c>(w + 32 + 16 * (8 * half + 2 * part + sub)), V16i);
    const V16f ds = d * to_float(scale);
    for (int r = 0; r < M; ++r) {
      const Q16Scale& s = row_scales(x, r)[first / 32 + part];
      acc[r] += (finish(sum[r]) - 32.0f * static_cast<float>(s.half_sums[sub])) * s.d * ds;
    }
  }
}

template <int M>
static void group_q6_k(const std::byte* w, const std::byte* end, const Rows& x, V16f* out) {
  V16f acc[M]{};
  for (std::uint32_t b = 0; b < x.k / 256; ++b, w += 3360) {
    const V16f d = load_f16(w);
    for (int half = 0; half < 2; ++half) {
      const std::byte *low = w + 288 + 1024 * half, *high = w + 288 + 2048 + 512 * half;
      const std::uint32_t first = 256 * b + 128 * half;
      prefetch_lines<16>(low, end);
      prefetch_lines<10>(high, end);
      q6_k_part<0, M>(w, low, high, half, d, x, first, acc);
      q6_k_part<1, M>(w, low, high, half, d, x, first, acc);
      q6_k_part<2, M>(w, low, high, half, d, x, first, acc);
      q6_k_part<3, M>(w, low, high, half, d, x, first, acc);
    }
  }
  for (int r = 0; r < M; ++r) out[r] = acc[r];
}

/// Elements 2i and 2i+1 of the 16 rows of a dense group.
struct Two {
  V16f even, odd;
};
template <DType type>
METRALE_INLINE Two load_pair(const std::byte* w, std::uint32_t pair) {
  if constexpr (type == DType::f32) {
    return {load<V16f>(w + 128 * std::size_t{pair}), load<V16f>(w + 128 * std::size_t{pair} + 64)};
  } else if constexpr (type == DType::f16) {
    return {load_f16(w + 64 * std::size_t{pair}), load_f16(w + 64 * std::size_t{pair} + 32)};
  } else {
    const V16i both = load<V16i>(w + 64 * std::size_t{pair});
    return {bits_to_float(both << 16), bits_to_float(both & static_cast<std::int32_t>(0xffff0000))};
  }
}

/// k is even. With few rows the sums are split so that the chain of additions does not set the pace.
template <DType type, int M>
static void group_dense(const std::byte* w, const std::byte* end, const Rows& x, V16f* out) {
  constexpr int kChains = M == 1 ? 4 : M == 2 ? 2 : 1;
  V16f acc[M][kChains]{};
  const std::uint32_t pairs = x.k / 2;
  std::uint32_t i = 0;
  for (; i + kChains <= pairs; i += kChains) {
    for (int c = 0; c < kChains; ++c) {
      const std::uint32_t pair = i + static_cast<std::uint32_t>(c);
      prefetch_lines<type == DType::f32 ? 2 : 1>(w + (type == DType::f32 ? 128 : 64) * std::size_t{pair}, end);
      const Two two = load_pair<type>(w, pair);
      for (int r = 0; r < M; ++r) {
        const float* v = row_f32(x, r) + 2 * pair;
        acc[r][c] += two.even * v[0];
        acc[r][c] += two.odd * v[1];
      }
    }
  }
  for (; i < pairs; ++i) {
    const Two two = load_pair<type>(w, i);
    for (int r = 0; r < M; ++r) {
      acc[r][0] += two.even * row_f32(x, r)[2 * i];
      acc[r][0] += two.odd * row_f32(x, r)[2 * i + 1];
    }
  }
  for (int r = 0; r < M; ++r) {
    V16f sum = acc[r][0];
    for (int c = 1; c < kChains; ++c) sum += acc[r][c];
    out[r] = sum;
  }
}

/// Weights, the end of this block's share of them, rows of x, sums.
using GroupKernel = void (*)(const std::byte*, const std::byte*, const Rows&, V16f*);

template <int M>
static GroupKernel quantised_kernel(DType type) {
  switch (type) {
    case DType::q4_0: return group_q4_0<M>;
    case DType::q4_1: return group_q4_1<M>;
    case DType::q8_0: return group_q8_0<M>;
    case DType::q4_k: return group_q4_k<M>;
    case DType::q6_k: return group_q6_k<M>;
    default: return nullptr;
  }
}
template <int M>
static GroupKernel dense_kernel(DType type) {
  switch (type) {
    case DType::f32: return group_dense<DType::f32, M>;
    case DType::f16: return group_dense<DType::f16, M>;
    case DType::bf16: return group_dense<DType::bf16, M>;
    default: return nullptr;
  }
}

/// The kernels of one weight type for 1, 2, 4 and 8 rows.
struct GroupKernels {
  GroupKernel by_rows[4];
};
static GroupKernels kernels_for(DType type, ActivationFormat format) {
  if (format == ActivationFormat::q16) {
    GroupKernels k{{quantised_kernel<1>(type), quantised_kernel<2>(type), nullptr, nullptr}};
    if constexpr (kRowTile >= 8) k.by_rows[2] = quantised_kernel<4>(type);  // eight would not fit the registers
    return k;
  }
  GroupKernels k{{dense_kernel<1>(type), dense_kernel<2>(type), dense_kernel<4>(type), nullptr}};
  if constexpr (kRowTile >= 8) k.by_rows[3] = dense_kernel<8>(type);
  return k;
}

/// Rows [0, m) of x, m <= 8, against one group, in the fewest passes.
METRALE_INLINE void run_group(const GroupKernels& kernels, const std::byte* w, const std::byte* end, Rows x, std::uint32_t m,
                              V16f* out) {
  for (int step = 3; step >= 0; --step) {
    const std::uint32_t rows = 1u << step;
    if (kernels.by_rows[step] == nullptr) continue;
    for (; m >= rows; m -= rows, out += rows, x.base += rows * x.stride) kernels.by_rows[step](w, end, x, out);
  }
}

METRALE_INLINE void store_some(float* p, V16f v, std::uint32_t count) {
  if (count >= 16)
    store(p, v);
  else
    std::memcpy(p, &v, count * sizeof(float));
}

/// Adds bias and residual to the 16 columns from `column` of row r and stores those below n.
METRALE_INLINE void finish_columns(const Call& c, std::uint32_t matrix, std::uint32_t column, std::uint32_t r, V16f v) {
  const Matrix& w = c.p.w[matrix];
  const std::uint32_t count = w.n - column;
  const std::size_t at = std::size_t{r} * w.ld_y + column;
  if (c.bias[matrix] != nullptr) v += load_some(c.bias[matrix] + column, count);
  if (c.residual != nullptr) v += load_some(c.residual + at, count);
  store_some(c.y[matrix] + at, v, count);
}

/// One group of a matrix, packed: in place where it is, else staged at `stage`.
METRALE_INLINE const std::byte* group_at(const Call& c, std::uint32_t matrix, std::uint32_t group, std::byte* stage) {
  const Matrix& w = c.p.w[matrix];
  const auto type = static_cast<DType>(w.dtype);
  const std::uint32_t first = group * kGroupRows, rows = w.n - first;
  const std::size_t bytes = static_cast<std::size_t>(row_bytes(type, c.p.k));
  if (w.packed && rows >= kGroupRows) return c.w[matrix] + first * bytes;
  pack_group(type, c.w[matrix], first, rows < kGroupRows ? rows : kGroupRows, c.p.k, stage);
  return stage;
}
METRALE_INLINE std::size_t stage_bytes(const Call& c, std::uint32_t matrix) {
  const std::uint32_t k = padded(c.p.k, 32);
  return padded(static_cast<std::uint32_t>(kGroupRows * row_bytes(static_cast<DType>(c.p.w[matrix].dtype), k)), 64);
}

/// A group as f32 [k][16], for `exact`.
static void unpack_group(DType type, const std::byte* group, std::uint32_t k, float* out, float* row) {
  for (std::uint32_t r = 0; r < kGroupRows; ++r) {
    unpack_row(type, group, r, k, false, row);
    for (std::uint32_t i = 0; i < k; ++i) out[std::size_t{i} * 16 + r] = row[i];
  }
}

METRALE_INLINE std::uint32_t groups_of(const Matrix& w) { return (w.n + kGroupRows - 1) / kGroupRows; }

/// The groups of one matrix that belong to this block, where the groups of all matrices (of gate and up: each pair) are one
/// sequence. `before`: groups of the matrices in front. Shares begin at multiples of `unit` groups.
METRALE_INLINE Share groups_here(const Call& c, std::uint32_t matrix, std::uint32_t before, std::uint32_t unit = 1) {
  std::uint32_t all = 0;
  for (std::uint32_t i = 0; i < (c.swiglu ? 1 : c.matrices); ++i) all += groups_of(c.p.w[i]);
  const Share units = share_of((all + unit - 1) / unit, c.block, c.blocks), share{units.begin * unit, units.end * unit};
  const std::uint32_t own = groups_of(c.p.w[matrix]);
  const auto within = [&](std::uint32_t g) { return g < before ? 0 : g - before > own ? own : g - before; };
  return {within(share.begin), within(share.end)};
}

/// One matrix as a block reads it.
struct Source {
  GroupKernels kernels;
  const std::byte* end;  ///< Of this block's share; nothing behind it is fetched ahead.
  bool unpacks;          ///< exact: through a panel of f32.
};
METRALE_INLINE std::size_t group_bytes(const Call& c, std::uint32_t matrix) {
  return static_cast<std::size_t>(kGroupRows * row_bytes(static_cast<DType>(c.p.w[matrix].dtype), c.p.k));
}
METRALE_INLINE Source source_of(const Call& c, std::uint32_t matrix, ActivationFormat format, const Share& groups) {
  const auto type = static_cast<DType>(c.p.w[matrix].dtype);
  const bool dense = type == DType::f32 || type == DType::f16 || type == DType::bf16;
  const bool unpacks = format == ActivationFormat::f32 && !dense;
  return {kernels_for(unpacks ? DType::f32 : type, format), c.w[matrix] + groups.end * group_bytes(c, matrix), unpacks};
}
METRALE_INLINE void prefetch_share(const Call& c, std::uint32_t matrix, const Share& groups) {
  const std::size_t bytes = group_bytes(c, matrix);
  prefetch_start(c.w[matrix] + groups.begin * bytes, c.w[matrix] + groups.end * bytes);
}

/// A group in the form that its kernels read; what has to be rearranged is kept at `stage`, which moves on.
static const std::byte* stage_group(const Call& c, std::uint32_t matrix, std::uint32_t group, const Source& source,
                                    std::byte*& stage) {
  const std::byte* w = group_at(c, matrix, group, stage);
  stage += stage_bytes(c, matrix);
  if (!source.unpacks) return w;
  auto* panel = reinterpret_cast<float*>(stage);
  unpack_group(static_cast<DType>(c.p.w[matrix].dtype), w, c.p.k, panel, panel + std::size_t{c.p.k} * 16);
  stage += std::size_t{c.p.k} * 17 * sizeof(float);
  return reinterpret_cast<const std::byte*>(panel);
}

/// linear and linear4 on rows in q16 or f32 form.
static void linear_rows(const Call& c, ActivationFormat format, const Rows& x, std::byte* stage) {
  for (std::uint32_t matrix = 0, before = 0; matrix < c.matrices; before += groups_of(c.p.w[matrix++])) {
    const Share groups = groups_here(c, matrix, before);
    if (groups.begin == groups.end) continue;
    const Source source = source_of(c, matrix, format, groups);
    for (std::uint32_t g = groups.begin; g < groups.end; ++g) {
      std::byte* at = stage;
      const std::byte* w = stage_group(c, matrix, g, source, at);
      for (std::uint32_t r = 0; r < c.p.m; r += 8) {
        const std::uint32_t rows = c.p.m - r < 8 ? c.p.m - r : 8;
        V16f out[8];
        run_group(source.kernels, w, source.end, {x.base + r * x.stride, x.stride, x.k}, rows, out);
        for (std::uint32_t i = 0; i < rows; ++i) finish_columns(c, matrix, g * kGroupRows, r + i, out[i]);
      }
    }
  }
}

static void swiglu_rows(const Call& c, ActivationFormat format, const Rows& x, std::byte* stage) {
  const Share groups = groups_here(c, 0, 0);
  const Source gate = source_of(c, 0, format, groups), up = source_of(c, 1, format, groups);
  for (std::uint32_t g = groups.begin; g < groups.end; ++g) {
    std::byte* at = stage;
    const std::byte* gate_group = stage_group(c, 0, g, gate, at);
    const std::byte* up_group = stage_group(c, 1, g, up, at);
    for (std::uint32_t r = 0; r < c.p.m; r += 8) {
      const std::uint32_t rows = c.p.m - r < 8 ? c.p.m - r : 8;
      const Rows tile{x.base + r * x.stride, x.stride, x.k};
      V16f a[8], b[8];
      run_group(gate.kernels, gate_group, gate.end, tile, rows, a);
      run_group(up.kernels, up_group, up.end, tile, rows, b);
      for (std::uint32_t i = 0; i < rows; ++i) {
        const std::size_t column = std::size_t{g} * kGroupRows;
        store_some(c.y[0] + std::size_t{r + i} * c.p.w[0].ld_y + column, silu(a[i]) * b[i],
                   static_cast<std::uint32_t>(c.p.w[0].n - column));
      }
    }
  }
}

/// The form in which x meets weights of this call without AMX.
METRALE_INLINE ActivationFormat row_format(const Call& c) {
  const auto cls = activation_class(static_cast<DType>(c.p.w[0].dtype), static_cast<Precision>(c.p.precision));
  return cls == ActivationClass::quantised ? ActivationFormat::q16 : ActivationFormat::f32;
}

static void prepare_as_rows(const Call& c) {
  const Share share = share_of((c.p.m + 15) / 16, c.block, c.blocks);
  const std::uint32_t end = share.end * 16 < c.p.m ? share.end * 16 : c.p.m, begin = share.begin * 16;
  const ActivationFormat format = row_format(c);
  if (begin < end) {
    prepare_rows(c, format, begin, end - begin, static_cast<std::byte*>(c.prepared_out) + begin * row_stride(format, c.p.k),
                 reinterpret_cast<float*>(c.shared));
  }
}

static void linear_on_rows(const Call& c) {
  const ActivationFormat format = row_format(c);
  const std::size_t stride = row_stride(format, c.p.k);
  Rows x{static_cast<const std::byte*>(c.x), stride, padded(c.p.k, 2)};  // dense pairs: both sides are zero behind k
  std::byte* stage = c.shared;
  if (!c.p.prepared) {
    // The weights are on their way while x is made ready.
    for (std::uint32_t matrix = 0, before = 0; matrix < c.matrices; before += c.swiglu ? 0 : groups_of(c.p.w[matrix]), ++matrix)
      prefetch_share(c, matrix, groups_here(c, c.swiglu ? 0 : matrix, before));
    stage += padded(static_cast<std::uint32_t>(c.p.m * stride), 64);
    prepare_rows(c, format, 0, c.p.m, c.shared, reinterpret_cast<float*>(stage));
    x.base = c.shared;
  }
  if (c.swiglu)
    swiglu_rows(c, format, x, stage);
  else
    linear_rows(c, format, x, stage);
}

}  // namespace metrale::host::matmul::METRALE_ISA
