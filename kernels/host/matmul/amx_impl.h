// SPDX-License-Identifier: Apache-2.0
//
// The matrix product for many rows on AMX bf16 tiles: 32 rows by 32 columns at a time, sums in f32 inside the tiles. Quantised
// weights become a bf16 panel in cache, once for each panel of columns; bf16 weights are used where they lie, and their f32
// activations are split in three bf16 parts so that nothing is rounded. Included by ops_amx.cpp alone.
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

/// Adds rows × columns products over `steps` tiles of 32 elements to the sums at `c` (4 tiles of [16][16] f32). `a0`, `a1`: the two
/// row tiles' activations, `parts` tiles a step. `b0`, `b1`: the two column tiles' weights, `b_step` bytes from one step to the next.
template <int row_tiles, int column_tiles>
static void multiply(const std::byte* a0, const std::byte* a1, int parts, const std::byte* b0, const std::byte* b1,
                     std::size_t b_step, std::uint32_t steps, std::byte* c, bool fresh) {
  if (fresh) {
    METRALE_TILE_ZERO(0);
    METRALE_TILE_ZERO(1);
    METRALE_TILE_ZERO(2);
    METRALE_TILE_ZERO(3);
  } else {
    METRALE_TILE_LOAD(0, c, 64);
    if constexpr (column_tiles > 1) METRALE_TILE_LOAD(1, c + kTile, 64);
    if constexpr (row_tiles > 1) METRALE_TILE_LOAD(2, c + 2 * kTile, 64);
    if constexpr (row_tiles > 1 && column_tiles > 1) METRALE_TILE_LOAD(3, c + 3 * kTile, 64);
  }
  for (std::uint32_t s = 0; s < steps; ++s, b0 += b_step, b1 += b_step) {
    METRALE_TILE_LOAD(6, b0, 64);
    if constexpr (column_tiles > 1) METRALE_TILE_LOAD(7, b1, 64);
    for (int part = 0; part < parts; ++part, a0 += kTile, a1 += kTile) {
      METRALE_TILE_LOAD(4, a0, 64);
      METRALE_TILE_DOT(0, 4, 6);
      if constexpr (column_tiles > 1) METRALE_TILE_DOT(1, 4, 7);
      if constexpr (row_tiles > 1) {
        METRALE_TILE_LOAD(5, a1, 64);
        METRALE_TILE_DOT(2, 5, 6);
        if constexpr (column_tiles > 1) METRALE_TILE_DOT(3, 5, 7);
      }
    }
  }
  METRALE_TILE_STORE(0, c, 64);
  if constexpr (column_tiles > 1) METRALE_TILE_STORE(1, c + kTile, 64);
  if constexpr (row_tiles > 1) METRALE_TILE_STORE(2, c + 2 * kTile, 64);
  if constexpr (row_tiles > 1 && column_tiles > 1) METRALE_TILE_STORE(3, c + 3 * kTile, 64);
}

/// Lanes of `even` and `odd` as neighbouring bf16 values: a tile row holds elements 2i, 2i+1 of column 0, then of column 1, …
METRALE_INLINE V16i interleave_bf16(V16f even, V16f odd) {
  const V16i half = splat(0x8000);  // to nearest, ties away: sums of exact products notice no difference
  const __m512i lo = reinterpret_cast<__m512i>((float_bits(even) + half) >> 16);
  const __m512i hi = reinterpret_cast<__m512i>(float_bits(odd) + half);
  return reinterpret_cast<V16i>(_mm512_mask_blend_epi16(0xaaaaaaaau, lo, hi));
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
  store(out, interleave_bf16(f[0], f[1]));
  store(out + 64, interleave_bf16(f[2], f[3]));
}

/// Elements [first, first + count) of a packed quantised group as tiles, 1 KiB for every 32 elements, `step` bytes apart. `first` and
/// `count` are whole blocks of the type.
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

/// Writes 16 rows of x as bf16 tiles (parts 1 or 3); rows beyond `rows` are zero. `row` holds round_up(k, 32) floats.
static void prepare_tiles(const Call& c, std::uint32_t first, std::uint32_t rows, int parts, std::byte* out, float* row) {
  const std::uint32_t k = c.p.k, steps = (k + 31) / 32;
  for (std::uint32_t r = 0; r < 16; ++r) {
    std::memset(row, 0, steps * 32 * sizeof(float));
    if (r < rows) normalise_row(c, static_cast<const float*>(c.x) + std::size_t{first + r} * c.p.ld_x, row);
    for (std::uint32_t s = 0; s < steps; ++s) {
      V16f lo = load<V16f>(row + 32 * s), hi = load<V16f>(row + 32 * s + 16);
      std::byte* at = out + std::size_t{s} * static_cast<std::uint32_t>(parts) * kTile + r * 64;
      for (int part = 0; part < parts; ++part, at += kTile) {
        const V16i a = to_bf16_bits(lo), b = to_bf16_bits(hi);
        store(at, __builtin_convertvector(a, V16s));
        store(at + 32, __builtin_convertvector(b, V16s));
        lo -= bits_to_float(a << 16);
        hi -= bits_to_float(b << 16);
      }
    }
  }
}

METRALE_INLINE int parts_of(const Call& c) {
  return activation_class(static_cast<DType>(c.p.w[0].dtype), static_cast<Precision>(c.p.precision)) == ActivationClass::bf16 ? 3
                                                                                                                              : 1;
}
METRALE_INLINE std::size_t row_tile_bytes(const Call& c) {
  return std::size_t{(c.p.k + 31) / 32} * static_cast<std::size_t>(parts_of(c)) * kTile;
}

// Rows whose sums are kept at once: 512 rows by 32 columns of f32 are 64 KiB, and 512 rows of activations of usual width stay in L2.
inline constexpr std::uint32_t kRowBlock = 512;
// Most elements of k in a panel: 32 columns of bf16 take 40 KiB, about the first-level cache.
inline constexpr std::uint32_t kPanelK = 640;

struct ColumnTiles {
  std::uint32_t matrix[2], group[2];
  int count;
};

/// One pair of column tiles against all rows.
static void linear_tiles(const Call& c, const ColumnTiles& columns) {
  const int parts = parts_of(c);
  const std::uint32_t k = c.p.k, steps = (k + 31) / 32;
  std::byte* panel = c.shared;
  std::byte* sums = panel + 2 * std::size_t{kPanelK} * 32;
  std::byte* stage = sums + std::size_t{kRowBlock} * 32 * sizeof(float);
  const std::byte* group[2] = {};
  DType type[2] = {};
  for (int i = 0; i < columns.count; ++i) {
    type[i] = static_cast<DType>(c.p.w[columns.matrix[i]].dtype);
    group[i] = group_at(c, columns.matrix[i], columns.group[i], stage);
    stage += stage_bytes(c, columns.matrix[i]);
  }
  const bool direct = type[0] == DType::bf16;  // bf16 groups are tiles already
  // Slices of k: equal, and whole 256-element blocks where a type has them.
  std::uint32_t slice = steps;
  if (!direct) {
    const bool large_blocks = type[0] == DType::q4_k || type[0] == DType::q6_k ||
                              (columns.count > 1 && (type[1] == DType::q4_k || type[1] == DType::q6_k));
    const std::uint32_t slices = (k + kPanelK - 1) / kPanelK;
    slice = large_blocks ? 16 : (steps + slices - 1) / slices;
  }
  const auto* x = static_cast<const std::byte*>(c.x);
  const std::size_t row_tile = row_tile_bytes(c);
  for (std::uint32_t row = 0; row < c.p.m; row += kRowBlock) {
    const std::uint32_t rows = c.p.m - row < kRowBlock ? c.p.m - row : kRowBlock;
    for (std::uint32_t s = 0; s < steps; s += slice) {
      const std::uint32_t n = steps - s < slice ? steps - s : slice;
      const std::byte *b0, *b1;
      std::size_t b_step;
      if (direct) {
        b0 = group[0] + s * kTile, b1 = columns.count > 1 ? group[1] + s * kTile : b0, b_step = kTile;
      } else {
        b0 = panel, b1 = panel + kTile, b_step = 2 * kTile;
        for (int i = 0; i < columns.count; ++i)
          dequantise_group(type[i], group[i], k, 32 * s, 32 * n, panel + static_cast<std::size_t>(i) * kTile, b_step);
      }
      for (std::uint32_t r = 0; r < rows; r += 32) {
        const std::byte* a0 = x + (row + r) / 16 * row_tile + std::size_t{s} * static_cast<std::size_t>(parts) * kTile;
        const std::byte* a1 = a0 + row_tile;
        std::byte* at = sums + std::size_t{r} / 32 * 4 * kTile;
        const bool tall = rows - r > 16;
        if (tall && columns.count > 1)
          multiply<2, 2>(a0, a1, parts, b0, b1, b_step, n, at, s == 0);
        else if (tall)
          multiply<2, 1>(a0, a1, parts, b0, b1, b_step, n, at, s == 0);
        else if (columns.count > 1)
          multiply<1, 2>(a0, a1, parts, b0, b1, b_step, n, at, s == 0);
        else
          multiply<1, 1>(a0, a1, parts, b0, b1, b_step, n, at, s == 0);
        if (s + n < steps) continue;
        const std::uint32_t live = rows - r < 32 ? rows - r : 32;
        for (std::uint32_t i = 0; i < live; ++i) {
          const std::byte* v = at + (i / 16) * 2 * kTile + (i % 16) * 64;
          const std::uint32_t out_row = row + r + i;
          if (c.swiglu) {
            const std::uint32_t column = columns.group[0] * kGroupRows;
            store_some(c.y[0] + std::size_t{out_row} * c.p.w[0].ld_y + column, silu(load<V16f>(v)) * load<V16f>(v + kTile),
                       c.p.w[0].n - column);
            continue;
          }
          for (int j = 0; j < columns.count; ++j)
            finish_columns(c, columns.matrix[j], columns.group[j] * kGroupRows, out_row,
                           load<V16f>(v + static_cast<std::size_t>(j) * kTile));
        }
      }
    }
  }
}

METRALE_INLINE bool on_tiles(const Call& c) {
  return activation_class(static_cast<DType>(c.p.w[0].dtype), static_cast<Precision>(c.p.precision)) != ActivationClass::f32;
}

static void prepare(const Call& c) {
  if (!on_tiles(c)) return prepare_as_rows(c);
  const Share share = share_of((c.p.m + 15) / 16, c.block, c.blocks);
  for (std::uint32_t t = share.begin; t < share.end; ++t) {
    const std::uint32_t rows = c.p.m - 16 * t < 16 ? c.p.m - 16 * t : 16;
    prepare_tiles(c, 16 * t, rows, parts_of(c), static_cast<std::byte*>(c.prepared_out) + t * row_tile_bytes(c),
                  reinterpret_cast<float*>(c.shared));
  }
}

static void linear(const Call& c) {
  if (!c.p.prepared || !on_tiles(c)) return linear_on_rows(c);
  ColumnTiles columns{};
  tiles_begin();
  for (std::uint32_t matrix = 0, before = 0; matrix < (c.swiglu ? 1 : c.matrices); before += groups_of(c.p.w[matrix++])) {
    const Share groups = groups_here(c, matrix, before);
    for (std::uint32_t g = groups.begin; g < groups.end; ++g) {
      if (c.swiglu) {
        columns = {{0, 1}, {g, g}, 2};
      } else {
        columns.matrix[columns.count] = matrix;
        columns.group[columns.count++] = g;
      }
      if (columns.count < 2) continue;
      linear_tiles(c, columns);
      columns.count = 0;
    }
  }
  if (columns.count > 0) linear_tiles(c, columns);
  tiles_end();
}

}  // namespace metrale::host::matmul::METRALE_ISA
