// SPDX-License-Identifier: Apache-2.0
//
// The matrix product for many rows on AMX bf16 tiles: 32 rows by 32 columns at a time, sums in f32 inside the tiles. A bf16 value
// has 8 bits, too few for the logits that come out at the end, so operands are split into parts that add up: quantised weights and
// their activations in two each, of which three products are taken; f32 activations of bf16 weights in three, which is all of them.
// Quantised weights become a panel of tiles in cache once for each panel of columns; bf16 weights are used where they lie. Included
// by ops_amx.cpp alone.
#pragma once

#include "linear_impl.h"

namespace metrale::host::matmul::METRALE_ISA {

// The compilers' own intrinsics do not tell GCC 12 what memory they read (it drops the stores that fill a tile configuration), so
// these say it with a clobber.
METRALE_INLINE void tiles_begin() {
  struct alignas(64) Config {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}
METRALE_INLINE void tiles_end() { asm volatile("tilerelease" ::: "memory"); }

// Tiles 0–3 are sums (row tile, column tile), 4–5 activations, 6–7 weights.
#define METRALE_TILE_LOAD(tile, at, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(at), "r"(static_cast<std::ptrdiff_t>(stride)) : "memory")
#define METRALE_TILE_STORE(tile, at, stride) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(at), "r"(static_cast<std::ptrdiff_t>(stride)) : "memory")
#define METRALE_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::: "memory")
#define METRALE_TILE_DOT(sum, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::: "memory")

inline constexpr std::size_t kTile = 1024;

/// Where the sums of two column tiles start and end: row 0 of each, rows `stride` bytes apart. `from` null: at zero.
struct Sums {
  const std::byte* from[2];
  std::byte* to[2];
  std::size_t stride[2];
};

/// What two row tiles and two column tiles are multiplied from. `a`: activations, all parts of a step together. `b`: weights,
/// `b_step` bytes from one step of 32 elements to the next. Split weights have two parts, the low one kLowPart behind the high one.
struct Operands {
  const std::byte* a[2];
  const std::byte* b[2];
  std::size_t b_step;
  std::uint32_t steps;
  bool split;
};
inline constexpr std::size_t kLowPart = 2 * kTile;

/// Parts of an activation: with split weights two, and the product of the low parts is left out (2^-16 of the whole); with bf16
/// weights three, which is all of a float.
METRALE_INLINE constexpr int parts_for(bool split) { return split ? 2 : 3; }

template <int row_tiles, int column_tiles, bool split>
static void multiply(const Operands& in, const Sums& sums) {
  const std::byte *a0 = in.a[0], *a1 = in.a[1], *b0 = in.b[0], *b1 = in.b[1];
  if (sums.from[0] == nullptr) {
    METRALE_TILE_ZERO(0);
    METRALE_TILE_ZERO(1);
    METRALE_TILE_ZERO(2);
    METRALE_TILE_ZERO(3);
  } else {
    METRALE_TILE_LOAD(0, sums.from[0], sums.stride[0]);
    if constexpr (column_tiles > 1) METRALE_TILE_LOAD(1, sums.from[1], sums.stride[1]);
    if constexpr (row_tiles > 1) METRALE_TILE_LOAD(2, sums.from[0] + 16 * sums.stride[0], sums.stride[0]);
    if constexpr (row_tiles > 1 && column_tiles > 1) METRALE_TILE_LOAD(3, sums.from[1] + 16 * sums.stride[1], sums.stride[1]);
  }
  constexpr int kParts = parts_for(split);
  for (std::uint32_t s = 0; s < in.steps; ++s, b0 += in.b_step, b1 += in.b_step, a0 += kParts * kTile, a1 += kParts * kTile) {
    METRALE_TILE_LOAD(6, b0, 64);
    if constexpr (column_tiles > 1) METRALE_TILE_LOAD(7, b1, 64);
    for (std::size_t part = kParts; part-- > 0;) {  // the high part last: it stays for the low weights
      METRALE_TILE_LOAD(4, a0 + part * kTile, 64);
      METRALE_TILE_DOT(0, 4, 6);
      if constexpr (column_tiles > 1) METRALE_TILE_DOT(1, 4, 7);
      if constexpr (row_tiles > 1) {
        METRALE_TILE_LOAD(5, a1 + part * kTile, 64);
        METRALE_TILE_DOT(2, 5, 6);
        if constexpr (column_tiles > 1) METRALE_TILE_DOT(3, 5, 7);
      }
    }
    if constexpr (split) {
      METRALE_TILE_LOAD(6, b0 + kLowPart, 64);
      METRALE_TILE_DOT(0, 4, 6);
      if constexpr (row_tiles > 1) METRALE_TILE_DOT(2, 5, 6);
      if constexpr (column_tiles > 1) {
        METRALE_TILE_LOAD(7, b1 + kLowPart, 64);
        METRALE_TILE_DOT(1, 4, 7);
        if constexpr (row_tiles > 1) METRALE_TILE_DOT(3, 5, 7);
      }
    }
  }
  METRALE_TILE_STORE(0, sums.to[0], sums.stride[0]);
  if constexpr (column_tiles > 1) METRALE_TILE_STORE(1, sums.to[1], sums.stride[1]);
  if constexpr (row_tiles > 1) METRALE_TILE_STORE(2, sums.to[0] + 16 * sums.stride[0], sums.stride[0]);
  if constexpr (row_tiles > 1 && column_tiles > 1) METRALE_TILE_STORE(3, sums.to[1] + 16 * sums.stride[1], sums.stride[1]);
}

/// Lanes of `even` and `odd` as neighbouring bf16 values, cut off: a tile row holds elements 2i, 2i+1 of column 0, then of
/// column 1, …
METRALE_INLINE V16i interleave_bf16(V16i even, V16i odd) {
  return reinterpret_cast<V16i>(
      _mm512_mask_blend_epi16(0xaaaaaaaau, reinterpret_cast<__m512i>(even >> 16), reinterpret_cast<__m512i>(odd)));
}
/// Two columns' worth of lanes as a high and a low tile row. The high part is rounded, so that the low part is as small as
/// can be.
METRALE_INLINE void emit_pair(V16f even, V16f odd, std::byte* out) {
  const V16i half = splat(0x8000), keep = splat(static_cast<std::int32_t>(0xffff0000));
  const V16i e = float_bits(even) + half, o = float_bits(odd) + half;
  store(out, interleave_bf16(e, o));
  const V16i el = float_bits(even - bits_to_float(e & keep)) + half, ol = float_bits(odd - bits_to_float(o & keep)) + half;
  store(out + kLowPart, interleave_bf16(el, ol));
}

/// Four bytes of every row, lane by lane, as scale * byte + add, into two tile rows at `out`.
METRALE_INLINE void emit_line(Line bytes, V16f scale, V16f add, std::byte* out) {
  const V16u v = reinterpret_cast<V16u>(bytes);
  V16f f[4];
  f[0] = to_float(reinterpret_cast<V16i>(v & 255u));
  f[1] = to_float(reinterpret_cast<V16i>((v >> 8) & 255u));
  f[2] = to_float(reinterpret_cast<V16i>((v >> 16) & 255u));
  f[3] = to_float(reinterpret_cast<V16i>(v >> 24));
  for (auto& value : f) value = value * scale + add;
  emit_pair(f[0], f[1], out);
  emit_pair(f[2], f[3], out + 64);
}

/// Elements [first, first + count) of a packed quantised group as tiles, 1 KiB for every 32 elements, `step` bytes apart. `first`
/// and `count` are whole blocks of the type.
static void dequantise_group(DType type, const std::byte* w, std::uint32_t k, std::uint32_t first, std::uint32_t count,
                             std::byte* out, std::size_t step) {
  const std::uint32_t blocks = k / 32;
  for (std::uint32_t b = first / 32; b < (first + count) / 32;) {
    if (type == DType::q4_1 || type == DType::q4_0) {
      const std::byte *d_at, *lines;
      V16f d, add;
      if (type == DType::q4_1) {
        d_at = w + std::size_t{b} * 320, lines = d_at + 64;
        d = load_f16(d_at), add = load_f16(d_at + 32);
      } else {
        const auto at = PairedBlock<4>::at(w, b, blocks);
        d_at = at.d, lines = at.lines_at;
        d = load_f16(d_at), add = d * -8.0f;
      }
      for (int i = 0; i < 4; ++i) {
        const Line raw = load_line(lines + 64 * i);
        emit_line(low_nibbles(raw), d, add, out + 128 * i);
        emit_line(high_nibbles(raw), d, add, out + 512 + 128 * i);
      }
      ++b, out += step;
    } else if (type == DType::q8_0) {
      const auto at = PairedBlock<8>::at(w, b, blocks);
      const V16f d = load_f16(at.d), add = d * -128.0f;
      for (int i = 0; i < 8; ++i) emit_line(load_line(at.lines_at + 64 * i), d, add, out + 128 * i);
      ++b, out += step;
    } else if (type == DType::q4_k) {
      const std::byte* block = w + std::size_t{b / 8} * 2304;
      const V16f d = load_f16(block), dmin = load_f16(block + 32);
      for (int c = 0; c < 4; ++c, out += 2 * step) {
        const ScaleMin s0 = q4_k_scale(block + 64, 2 * c), s1 = q4_k_scale(block + 64, 2 * c + 1);
        const V16f d0 = d * to_float(s0.scale), d1 = d * to_float(s1.scale);
        const V16f m0 = -dmin * to_float(s0.min), m1 = -dmin * to_float(s1.min);
        for (int i = 0; i < 8; ++i) {
          const Line raw = load_line(block + 256 + 512 * c + 64 * i);
          emit_line(low_nibbles(raw), d0, m0, out + 128 * i);
          emit_line(high_nibbles(raw), d1, m1, out + step + 128 * i);
        }
      }
      b += 8;
    } else {
      const std::byte* block = w + std::size_t{b / 8} * 3360;
      const V16f d = load_f16(block);
      for (int half = 0; half < 2; ++half) {
        const std::byte *low = block + 288 + 1024 * half, *high = block + 288 + 2048 + 512 * half;
        for (int part = 0; part < 4; ++part, out += step) {
          for (int i = 0; i < 8; ++i) {
            const V16i scale = __builtin_convertvector(load<V16c>(block + 32 + 16 * (8 * half + 2 * part + i / 4)), V16i);
            const V16f ds = d * to_float(scale), add = ds * -32.0f;
            const Line line = part == 0   ? q6_k_line<0>(low, high, i)
                              : part == 1 ? q6_k_line<1>(low, high, i)
                              : part == 2 ? q6_k_line<2>(low, high, i)
                                          : q6_k_line<3>(low, high, i);
            emit_line(line, ds, add, out + 128 * i);
          }
        }
      }
      b += 8;
    }
  }
}

METRALE_INLINE void store_bf16(std::byte* p, V16f lo, V16f hi) {
  store(p, __builtin_convertvector(to_bf16_bits(lo), V16s));
  store(p + 32, __builtin_convertvector(to_bf16_bits(hi), V16s));
}
METRALE_INLINE V16f without_bf16(V16f v) { return v - bits_to_float(to_bf16_bits(v) << 16); }

/// Writes 16 rows of x as bf16 tiles; rows beyond `rows` are zero. `row` holds round_up(k, 32) floats.
template <int parts>
static void prepare_tiles(const Call& c, std::uint32_t first, std::uint32_t rows, std::byte* out, float* row) {
  const std::uint32_t k = c.p.k, steps = (k + 31) / 32;
  for (std::uint32_t r = 0; r < 16; ++r) {
    std::memset(row + k / 32 * 32, 0, (steps - k / 32) * 32 * sizeof(float));
    if (r < rows)
      normalise_row(c, static_cast<const float*>(c.x) + std::size_t{first + r} * c.p.ld_x, row);
    else
      std::memset(row, 0, steps * 32 * sizeof(float));
    std::byte* at = out + r * 64;
    for (std::uint32_t s = 0; s < steps; ++s, at += parts * kTile) {
      V16f lo = load<V16f>(row + 32 * s), hi = load<V16f>(row + 32 * s + 16);
      store_bf16(at, lo, hi);
      for (int part = 1; part < parts; ++part) {
        lo = without_bf16(lo), hi = without_bf16(hi);
        store_bf16(at + static_cast<std::size_t>(part) * kTile, lo, hi);
      }
    }
  }
}

METRALE_INLINE bool is_split(const Call& c) { return static_cast<DType>(c.p.w[0].dtype) != DType::bf16; }
METRALE_INLINE std::size_t parts_of(const Call& c) { return static_cast<std::size_t>(parts_for(is_split(c))); }
METRALE_INLINE std::size_t row_tile_bytes(const Call& c) { return std::size_t{(c.p.k + 31) / 32} * parts_of(c) * kTile; }

// Rows whose sums are kept at once: 512 rows by 32 columns of f32 are 64 KiB, and 512 rows of activations of usual width
// stay in L2.
inline constexpr std::uint32_t kRowBlock = 512;
// Most elements of k in a panel: 32 columns of bf16 take 40 KiB, about the first-level cache.
inline constexpr std::uint32_t kPanelK = 640;

struct ColumnTiles {
  std::uint32_t matrix[2], group[2];
  int count;
};

template <bool split>
METRALE_INLINE void multiply_some(const Operands& in, const Sums& sums, bool tall, bool wide) {
  if (tall && wide)
    multiply<2, 2, split>(in, sums);
  else if (tall)
    multiply<2, 1, split>(in, sums);
  else if (wide)
    multiply<1, 2, split>(in, sums);
  else
    multiply<1, 1, split>(in, sums);
}
METRALE_INLINE void multiply_some(const Operands& in, const Sums& sums, bool tall, bool wide) {
  if (in.split)
    multiply_some<true>(in, sums, tall, wide);
  else
    multiply_some<false>(in, sums, tall, wide);
}

/// Sums kept at `scratch`, [column tile][32 rows][16].
METRALE_INLINE Sums sums_in(std::byte* scratch, bool fresh) {
  Sums sums{{scratch, scratch + 2 * kTile}, {scratch, scratch + 2 * kTile}, {64, 64}};
  if (fresh) sums.from[0] = sums.from[1] = nullptr;
  return sums;
}

/// Whether whole row tiles of these columns can start from the residual and end in y as they are.
METRALE_INLINE bool fits_y(const Call& c, const ColumnTiles& columns) {
  for (int j = 0; j < columns.count; ++j) {
    const std::uint32_t matrix = columns.matrix[j];
    if (c.bias[matrix] != nullptr || (columns.group[j] + 1) * kGroupRows > c.p.w[matrix].n) return false;
  }
  return true;
}
METRALE_INLINE Sums sums_in_y(const Call& c, const ColumnTiles& columns, std::uint32_t row, bool fresh) {
  Sums sums{};
  for (int j = 0; j < columns.count; ++j) {
    const std::uint32_t matrix = columns.matrix[j];
    const std::size_t at = std::size_t{row} * c.p.w[matrix].ld_y + columns.group[j] * kGroupRows;
    const float* from = fresh ? c.residual : c.y[matrix];
    sums.from[j] = from == nullptr ? nullptr : reinterpret_cast<const std::byte*>(from + at);
    sums.to[j] = reinterpret_cast<std::byte*>(c.y[matrix] + at);
    sums.stride[j] = c.p.w[matrix].ld_y * sizeof(float);
  }
  return sums;
}

/// Sums of up to 32 rows, from y, or from bias and residual when `fresh`, to `scratch`; or from there to y.
enum class Move : std::uint8_t { in, in_fresh, out };
static void move_rows(const Call& c, const ColumnTiles& columns, std::uint32_t row, std::uint32_t rows, std::byte* scratch,
                      Move move) {
  for (int j = 0; j < columns.count; ++j) {
    const std::uint32_t matrix = columns.matrix[j], column = columns.group[j] * kGroupRows, count = c.p.w[matrix].n - column;
    for (std::uint32_t i = 0; i < rows; ++i) {
      const std::size_t at = std::size_t{row + i} * c.p.w[matrix].ld_y + column;
      std::byte* sums = scratch + static_cast<std::size_t>(j) * 2 * kTile + i * 64;
      if (move == Move::out) {
        store_some(c.y[matrix] + at, load<V16f>(sums), count);
      } else if (move == Move::in) {
        store(sums, load_some(c.y[matrix] + at, count));
      } else {
        V16f v{};
        if (c.bias[matrix] != nullptr) v += load_some(c.bias[matrix] + column, count);
        if (c.residual != nullptr) v += load_some(c.residual + at, count);
        store(sums, v);
      }
    }
  }
}

static void finish_swiglu(const Call& c, std::uint32_t group, std::uint32_t row, std::uint32_t rows, const std::byte* scratch) {
  const std::uint32_t column = group * kGroupRows;
  for (std::uint32_t i = 0; i < rows; ++i, scratch += 64) {
    store_some(c.y[0] + std::size_t{row + i} * c.p.w[0].ld_y + column, silu(load<V16f>(scratch)) * load<V16f>(scratch + 2 * kTile),
               c.p.w[0].n - column);
  }
}

/// Steps of 32 elements of k in one slice: equal slices, of whole 256-element blocks where a type has them. bf16 groups are tiles
/// already and need none.
METRALE_INLINE std::uint32_t slice_steps(const Call& c) {
  const std::uint32_t steps = (c.p.k + 31) / 32, slices = (c.p.k + kPanelK - 1) / kPanelK;
  if (static_cast<DType>(c.p.w[0].dtype) == DType::bf16) return steps;
  for (std::uint32_t i = 0; i < c.matrices; ++i) {
    if (static_cast<DType>(c.p.w[i].dtype) == DType::q4_k || static_cast<DType>(c.p.w[i].dtype) == DType::q6_k) return 16;
  }
  return (steps + slices - 1) / slices;
}

/// Adds the products of one slice of k for rows [row, row_end), whose first is a multiple of 32 and of the first of its block.
static void multiply_slice(const Call& c, const ColumnTiles& columns, std::uint32_t row, std::uint32_t row_end, std::uint32_t step,
                           std::uint32_t num_steps) {
  const std::uint32_t k = c.p.k;
  std::byte* panel = c.shared;
  std::byte* scratch = panel + kPanelK / 32 * 2 * kLowPart;
  std::byte* stage = scratch + std::size_t{kRowBlock} * 32 * sizeof(float);
  Operands in{};
  in.steps = num_steps;
  in.split = is_split(c);
  for (int i = 0; i < columns.count; ++i) {
    const std::uint32_t matrix = columns.matrix[i];
    const auto type = static_cast<DType>(c.p.w[matrix].dtype);
    const std::byte* group = group_at(c, matrix, columns.group[i], stage);
    stage += stage_bytes(c, matrix);
    if (type == DType::bf16) {
      in.b[i] = group + step * kTile;
      in.b_step = kTile;
    } else {
      std::byte* tiles = panel + static_cast<std::size_t>(i) * kTile;
      dequantise_group(type, group, k, 32 * step, 32 * num_steps, tiles, 2 * kLowPart);
      in.b[i] = tiles;
      in.b_step = 2 * kLowPart;
    }
  }
  if (columns.count == 1) in.b[1] = in.b[0];  // stepped through though never read
  const bool fresh = step == 0, last = step + num_steps == (k + 31) / 32;
  const bool wide = columns.count > 1, in_y = !c.swiglu && fits_y(c, columns);
  const std::size_t row_tile = row_tile_bytes(c);
  const std::byte* a = static_cast<const std::byte*>(c.x) + row / 16 * row_tile + std::size_t{step} * parts_of(c) * kTile;
  for (; row < row_end; row += 32, a += 2 * row_tile) {
    const std::uint32_t rows = row_end - row < 32 ? row_end - row : 32;
    in.a[0] = a, in.a[1] = a + row_tile;
    if (c.swiglu) {
      multiply_some(in, sums_in(scratch, fresh), rows > 16, wide);
      if (last) finish_swiglu(c, columns.group[0], row, rows, scratch);
      scratch += 4 * kTile;
    } else if (in_y && rows == 32) {
      multiply_some(in, sums_in_y(c, columns, row, fresh), true, wide);
    } else {
      move_rows(c, columns, row, rows, scratch, fresh ? Move::in_fresh : Move::in);
      multiply_some(in, sums_in(scratch, false), rows > 16, wide);
      move_rows(c, columns, row, rows, scratch, Move::out);
    }
  }
}

/// Visits the column tiles of this block's share, two at a time; gate and up of a group are two.
template <class Visit>
METRALE_INLINE void each_column_tiles(const Call& c, Visit visit) {
  ColumnTiles columns{};
  for (std::uint32_t matrix = 0, before = 0; matrix < (c.swiglu ? 1 : c.matrices); before += groups_of(c.p.w[matrix++])) {
    const Share groups = groups_here(c, matrix, before, c.swiglu ? 1 : 2);
    for (std::uint32_t g = groups.begin; g < groups.end; ++g) {
      if (c.swiglu) {
        visit(ColumnTiles{{0, 1}, {g, g}, 2});
        continue;
      }
      columns.matrix[columns.count] = matrix;
      columns.group[columns.count++] = g;
      if (columns.count < 2) continue;
      visit(columns);
      columns.count = 0;
    }
  }
  if (columns.count > 0) visit(columns);
}

METRALE_INLINE bool on_tiles(const Call& c) {
  return activation_class(static_cast<DType>(c.p.w[0].dtype), static_cast<Precision>(c.p.precision)) != ActivationClass::f32;
}

static void prepare(const Call& c) {
  if (!on_tiles(c)) return prepare_as_rows(c);
  const Share share = share_of((c.p.m + 15) / 16, c.block, c.blocks);
  for (std::uint32_t t = share.begin; t < share.end; ++t) {
    const std::uint32_t rows = c.p.m - 16 * t < 16 ? c.p.m - 16 * t : 16;
    std::byte* out = static_cast<std::byte*>(c.prepared_out) + t * row_tile_bytes(c);
    auto* row = reinterpret_cast<float*>(c.shared);
    if (is_split(c))
      prepare_tiles<parts_for(true)>(c, 16 * t, rows, out, row);
    else
      prepare_tiles<parts_for(false)>(c, 16 * t, rows, out, row);
  }
}

static void linear(const Call& c) {
  if (!c.p.prepared || !on_tiles(c)) return linear_on_rows(c);
  const std::uint32_t steps = (c.p.k + 31) / 32, slice = slice_steps(c);
  const auto steps_from = [&](std::uint32_t s) { return steps - s < slice ? steps - s : slice; };
  tiles_begin();
  for (std::uint32_t row = 0; row < c.p.m; row += kRowBlock) {
    const std::uint32_t end = c.p.m - row < kRowBlock ? c.p.m : row + kRowBlock;
    if (c.swiglu) {  // the sums of both factors stay in scratch until the last slice
      each_column_tiles(c, [&](const ColumnTiles& columns) {
        for (std::uint32_t s = 0; s < steps; s += slice) multiply_slice(c, columns, row, end, s, steps_from(s));
      });
      continue;
    }
    // A slice of the activations of these rows stays in the second-level cache while all columns pass.
    for (std::uint32_t s = 0; s < steps; s += slice) {
      each_column_tiles(c, [&](const ColumnTiles& columns) { multiply_slice(c, columns, row, end, s, steps_from(s)); });
    }
  }
  tiles_end();
}

}  // namespace metrale::host::matmul::METRALE_ISA
