// SPDX-License-Identifier: Apache-2.0
//
// Packing of 16 rows into the layouts of formats.h, and the way back to floats. Plain code for every machine; runs once for each
// weight, and in `exact` products and embedding look-ups.
#include <bit>
#include <cstring>

#include "formats.h"
#include "ops.h"

namespace metrale::host::matmul {
namespace {

/// A run of bytes inside a block, kept together for each row: `bytes` from `row_at` in the row's block go to `out_at` in the
/// group's, in pieces of `piece` bytes that alternate between rows.
struct Run {
  std::uint32_t row_at, out_at, bytes, piece;
};

struct Layout {
  std::uint32_t elements, bytes;  ///< Of one row's block.
  std::uint32_t num_runs;
  Run runs[4];
};

/// Blocks as the file has them; q4_0 and q8_0 are placed pairwise by the callers.
Layout layout_of(DType type) noexcept {
  switch (type) {
    case DType::f32: return {32, 128, 1, {{0, 0, 128, 4}}};
    case DType::f16: return {32, 64, 1, {{0, 0, 64, 2}}};
    case DType::bf16: return {32, 64, 1, {{0, 0, 64, 4}}};
    case DType::q4_0: return {32, 18, 2, {{0, 0, 2, 2}, {2, 0, 16, 4}}};
    case DType::q4_1: return {32, 20, 3, {{0, 0, 2, 2}, {2, 32, 2, 2}, {4, 64, 16, 4}}};
    case DType::q8_0: return {32, 34, 2, {{0, 0, 2, 2}, {2, 0, 32, 4}}};
    case DType::q4_k: return {256, 144, 4, {{0, 0, 2, 2}, {2, 32, 2, 2}, {4, 64, 12, 1}, {16, 256, 128, 4}}};
    case DType::q6_k: return {256, 210, 4, {{208, 0, 2, 2}, {192, 32, 16, 1}, {0, 288, 128, 4}, {128, 2336, 64, 4}}};
    default: return {};
  }
}

/// Offset in the group of run `i` of block `b`.
std::size_t run_offset(DType type, const Layout& layout, std::uint32_t b, std::uint32_t blocks, std::uint32_t i) noexcept {
  if (type == DType::q4_0 || type == DType::q8_0) {
    const std::size_t lines = layout.runs[1].bytes * kGroupRows;
    const std::size_t pair = std::size_t{b / 2} * 2 * layout.bytes * kGroupRows;
    const bool paired = (b | 1) < blocks;
    if (i == 0) return pair + (paired ? 32 * (b & 1) : 0);
    return pair + (paired ? 64 + (b & 1) * lines : 32);
  }
  return std::size_t{b} * layout.bytes * kGroupRows + layout.runs[i].out_at;
}

/// Copies `count` pieces between a row, where they follow each other, and a group, where those of 16 rows alternate.
template <std::size_t piece>
void spread(const std::byte* row, std::byte* group, std::uint32_t count) noexcept {
  for (std::uint32_t p = 0; p < count; ++p) std::memcpy(group + p * piece * kGroupRows, row + p * piece, piece);
}
template <std::size_t piece>
void collect(const std::byte* group, std::byte* row, std::uint32_t count) noexcept {
  for (std::uint32_t p = 0; p < count; ++p) std::memcpy(row + p * piece, group + p * piece * kGroupRows, piece);
}

/// Block b of row `row`, as the file has it, into its group.
void pack_block(DType type, const Layout& layout, std::uint32_t b, std::uint32_t blocks, std::uint32_t row, const std::byte* block,
                std::byte* group) noexcept {
  for (std::uint32_t i = 0; i < layout.num_runs; ++i) {
    const Run& run = layout.runs[i];
    std::byte* to = group + run_offset(type, layout, b, blocks, i) + std::size_t{row} * run.piece;
    const std::uint32_t count = run.bytes / run.piece;
    if (run.piece == 4)
      spread<4>(block + run.row_at, to, count);
    else if (run.piece == 2)
      spread<2>(block + run.row_at, to, count);
    else
      spread<1>(block + run.row_at, to, count);
  }
}
/// And back.
void unpack_block(DType type, const Layout& layout, std::uint32_t b, std::uint32_t blocks, std::uint32_t row,
                  const std::byte* group, std::byte* block) noexcept {
  for (std::uint32_t i = 0; i < layout.num_runs; ++i) {
    const Run& run = layout.runs[i];
    const std::byte* from = group + run_offset(type, layout, b, blocks, i) + std::size_t{row} * run.piece;
    const std::uint32_t count = run.bytes / run.piece;
    if (run.piece == 4)
      collect<4>(from, block + run.row_at, count);
    else if (run.piece == 2)
      collect<2>(from, block + run.row_at, count);
    else
      collect<1>(from, block + run.row_at, count);
  }
}

void flip_signs(std::byte* p, std::size_t bytes) noexcept {
  for (std::size_t i = 0; i < bytes; ++i) p[i] ^= std::byte{0x80};
}

float half_to_float(const std::byte* p) noexcept {
  std::uint16_t h;
  std::memcpy(&h, p, 2);
  const std::uint32_t magnitude = (h & 0x7fffu) << 13, sign = (h & 0x8000u) << 16;
  if (magnitude >= (0x7c00u << 13)) return std::bit_cast<float>(magnitude | 0x7f800000u | sign);
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f) | sign);
}

/// One block of a row, as the file has it, as floats.
void decode_block(DType type, const std::byte* block, std::uint32_t elements, float* out) noexcept {
  const auto* u = reinterpret_cast<const std::uint8_t*>(block);
  switch (type) {
    case DType::f32: std::memcpy(out, block, elements * sizeof(float)); return;
    case DType::f16:
      for (std::uint32_t i = 0; i < elements; ++i) out[i] = half_to_float(block + 2 * i);
      return;
    case DType::bf16:
      for (std::uint32_t i = 0; i < elements; ++i)
        out[i] = std::bit_cast<float>(std::uint32_t{u[2 * i]} << 16 | std::uint32_t{u[2 * i + 1]} << 24);
      return;
    case DType::q4_0: {
      const float d = half_to_float(block);
      for (int i = 0; i < 16; ++i)
        out[i] = d * static_cast<float>((u[2 + i] & 15) - 8), out[i + 16] = d * static_cast<float>((u[2 + i] >> 4) - 8);
      return;
    }
    case DType::q4_1: {
      const float d = half_to_float(block), m = half_to_float(block + 2);
      for (int i = 0; i < 16; ++i)
        out[i] = d * static_cast<float>(u[4 + i] & 15) + m, out[i + 16] = d * static_cast<float>(u[4 + i] >> 4) + m;
      return;
    }
    case DType::q8_0: {
      const float d = half_to_float(block);
      for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(static_cast<std::int8_t>(u[2 + i]));
      return;
    }
    case DType::q4_k: {
      const float d = half_to_float(block), dmin = half_to_float(block + 2);
      const std::uint8_t *s = u + 4, *q = u + 16;
      for (int j = 0; j < 8; ++j) {
        const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
        const int min = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
        for (int i = 0; i < 32; ++i) {
          const int value = q[32 * (j / 2) + i] >> (j % 2 * 4) & 15;
          out[32 * j + i] = d * static_cast<float>(scale) * static_cast<float>(value) - dmin * static_cast<float>(min);
        }
      }
      return;
    }
    case DType::q6_k: {
      const float d = half_to_float(block + 208);
      for (int i = 0; i < 256; ++i) {
        const int half = i / 128, part = i % 128 / 32, l = i % 32;
        const int low = u[64 * half + 32 * (part & 1) + l] >> (part < 2 ? 0 : 4) & 15;
        const int high = u[128 + 32 * half + l] >> (2 * part) & 3;
        const auto scale = static_cast<std::int8_t>(u[192 + i / 16]);
        out[i] = d * static_cast<float>(scale) * static_cast<float>((low | high << 4) - 32);
      }
      return;
    }
    default: return;
  }
}

}  // namespace

void pack_group(DType type, const std::byte* w, std::uint32_t first, std::uint32_t rows, std::uint32_t k, std::byte* out) noexcept {
  const Layout layout = layout_of(type);
  const auto bytes = static_cast<std::size_t>(row_bytes(type, k));
  const std::uint32_t blocks = static_cast<std::uint32_t>(div_ceil(k, layout.elements));
  if (rows < kGroupRows || k % layout.elements != 0) std::memset(out, 0, std::size_t{blocks} * layout.bytes * kGroupRows);
  for (std::uint32_t r = 0; r < rows; ++r) {
    const std::byte* row = w + (first + r) * bytes;
    for (std::uint32_t b = 0; b < blocks; ++b, row += layout.bytes) {
      const std::size_t left = bytes - std::size_t{b} * layout.bytes;
      if (left < layout.bytes) {  // dense rows may end inside a block
        std::byte last[128] = {};
        std::memcpy(last, row, left);
        pack_block(type, layout, b, blocks, r, last, out);
      } else {
        pack_block(type, layout, b, blocks, r, row, out);
      }
    }
  }
  if (type == DType::q8_0) {
    for (std::uint32_t b = 0; b < blocks; ++b) flip_signs(out + run_offset(type, layout, b, blocks, 1), 32 * kGroupRows);
  }
}

void unpack_row(DType type, const std::byte* group, std::uint32_t row, std::uint32_t k, bool row_major, float* out) noexcept {
  const Layout layout = layout_of(type);
  const std::uint32_t blocks = static_cast<std::uint32_t>(div_ceil(k, layout.elements));
  std::byte block[256];
  for (std::uint32_t b = 0; b < blocks; ++b, out += layout.elements) {
    const std::uint32_t elements = k - b * layout.elements < layout.elements ? k - b * layout.elements : layout.elements;
    if (row_major) {
      decode_block(type, group + row_bytes(type, k) * row + std::size_t{b} * layout.bytes, elements, out);
      continue;
    }
    unpack_block(type, layout, b, blocks, row, group, block);
    if (type == DType::q8_0) flip_signs(block + 2, 32);
    decode_block(type, block, elements, out);
  }
}

}  // namespace metrale::host::matmul
