// SPDX-License-Identifier: Apache-2.0
//
// How each type of weights lies in memory and becomes floats. A row is read in chunks of 16 bytes of elements or quants, one a
// lane.
//
// Packed quantised matrices: groups of kGroupRows rows (the last of those that are left), each as many bytes as its rows had. In a
// group first the quants of its rows, one row after the other, so that all are 16-byte aligned and lanes read neighbours; then what
// belongs to them in the same order of rows and chunks:
//   q4_0 f16 scales; q4_1 pairs of f16 scale and minimum; q8_0 f16 scales; q4_k headers of 16 bytes as in the file;
//   q6_k 8 bytes of top bits a chunk, 2 signed scales a chunk, then f16 scales, one a block.
// q6_k's top bits: byte b of word x holds four pairs of bits, those of bytes b of words 2x and 2x+1 of the chunk, low and high.
#pragma once

#include "matmul_memory.cuh"

namespace metrale::cuda::matmul {

/// W as an argument: where, its shape, whether `repack` was here.
struct MatrixView {
  const std::byte* at;
  u32 n, k;
  bool packed;
};

/// Where the parts of one row are. `index` counts chunks (or blocks) of the group up to this row, `total` all those of the group.
struct RowSource {
  const std::byte* quants;
  const std::byte* extra;
  u32 index, total;
};

/// One row of a packed matrix: `blocks` a row, each `quant_bytes` of quants.
__device__ __forceinline__ RowSource packed_row(const MatrixView& w, u32 row, u64 bytes, u32 blocks, u32 quant_bytes) {
  const u32 group = row / kGroupRows, within = row % kGroupRows;
  const u32 left = w.n - group * kGroupRows, rows = left < kGroupRows ? left : kGroupRows;
  const std::byte* base = w.at + u64{group} * kGroupRows * bytes;
  return {base + u64{within} * blocks * quant_bytes, base + u64{rows} * blocks * quant_bytes, within * blocks, rows * blocks};
}

/// A 2-byte value of the group and the 4 bytes around it, which are read in its stead.
__device__ __forceinline__ void copy_half_async(u32 to, const std::byte* halves, u32 index, u32 total) {
  copy4_async(to, halves + (index / 2) * 4, index + 1 == total && index % 2 == 0 ? 2 : 4);
}
__device__ __forceinline__ u32 load_half(const std::byte* halves, u32 index) {
  return __ldg(reinterpret_cast<const unsigned short*>(halves) + index);
}
__device__ __forceinline__ u32 pick_half(u32 word, u32 index) { return index % 2 ? word >> 16 : word & 0xFFFFU; }

/// Byte `i` of `word`, below 256, as 2^23 + byte.
template <u32 i>
__device__ __forceinline__ float offset_byte(u32 word) {
  return __uint_as_float(__byte_perm(word, 0x4B000000U, 0x7650U + i));
}
/// The four low (part 0) or high (part 1) halves of the bytes of `word`, minus `zero`: exact, one logical operation and one
/// addition each, since a half that lies in the mantissa of 2^p at 2^(p-23) adds just itself.
template <u32 part>
__device__ __forceinline__ float4 nibbles(u32 word, float zero) {
  const auto at = [](u32 bits, u32 mask, u32 power)
                      METRALE_INLINE { return __uint_as_float((bits & mask) | ((127U + power) << 23)); };
  if constexpr (part == 0) {
    return {at(word, 0xFU, 23) - (8388608.0F + zero), at(word, 0xF00U, 15) - (32768.0F + zero),
            at(word, 0xF0000U, 7) - (128.0F + zero), at(word >> 8, 0xF0000U, 7) - (128.0F + zero)};
  } else {
    return {at(word, 0xF0U, 19) - (524288.0F + zero), at(word, 0xF000U, 11) - (2048.0F + zero),
            at(word >> 8, 0xF000U, 11) - (2048.0F + zero), at(word >> 16, 0xF000U, 11) - (2048.0F + zero)};
  }
}
__device__ __forceinline__ float4 bytes_to_quad(u32 word, float zero) {
  const float base = 8388608.0F + zero;
  return {offset_byte<0>(word) - base, offset_byte<1>(word) - base, offset_byte<2>(word) - base, offset_byte<3>(word) - base};
}
__device__ __forceinline__ float4 scaled(const float4& v, float d) { return {v.x * d, v.y * d, v.z * d, v.w * d}; }
__device__ __forceinline__ float4 scaled(const float4& v, float d, float m) {
  return {fmaf(v.x, d, m), fmaf(v.y, d, m), fmaf(v.z, d, m), fmaf(v.w, d, m)};
}
template <u32 i>
__device__ __forceinline__ u32 word_of(const uint4& v) {
  if constexpr (i == 0) return v.x;
  if constexpr (i == 1) return v.y;
  if constexpr (i == 2) return v.z;
  return v.w;
}

// Each Weights<type> has
//   kElements          of a chunk, kQuads = kElements / 4
//   kParts             chunks that a lane takes in one step, kWarp apart: chunks with little work come several at a time
//   kSlotBytes         of shared memory for one lane's chunk
//   row(w, r)          -> RowSource
//   fetch(slot, lane, source, chunk, part)   starts the copies of chunk + part * kWarp; `slot` holds a warp's chunks
//   read(slot, lane, index, chunk)     -> Chunk, from there; `index` as in the source
//   load(source, chunk)                -> Chunk, straight from memory
//   quad<q>(chunk)     -> four weights
//   position(chunk, q) the quad of the row that they belong to
//   locate(s, chunk, first)            segment s of 16 elements: quads first to first + 3 of a chunk, or of several from there on

template <DType type>
struct Weights;

template <u32 bytes>
struct DenseWeights {
  static constexpr u32 kElements = 16 / bytes, kQuads = kElements / 4, kParts = 4, kSlotBytes = 16;
  using Chunk = uint4;
  static __device__ __forceinline__ RowSource row(const MatrixView& w, u32 r) {
    return {w.at + u64{r} * w.k * bytes, nullptr, 0, 0};
  }
  static __device__ __forceinline__ void fetch(u32 slot, u32 lane, const RowSource& s, u32 chunk, u32 part) {
    copy16_async(slot + lane * 16, s.quants + u64{chunk} * 16 + part * (kWarp * 16));
  }
  static __device__ __forceinline__ Chunk read(u32 slot, u32 lane, u32, u32) { return load_shared16(slot + lane * 16); }
  static __device__ __forceinline__ Chunk load(const RowSource& s, u32 chunk) {
    return __ldg(reinterpret_cast<const uint4*>(s.quants) + chunk);
  }
  static __device__ __forceinline__ u32 position(u32 chunk, u32 q) { return chunk * kQuads + q; }
  static __device__ __forceinline__ void locate(u32 s, u32& chunk, u32& first) { chunk = s * (16 / kElements), first = 0; }
};

template <>
struct Weights<DType::f32> : DenseWeights<4> {
  template <u32 q>
  static __device__ __forceinline__ float4 quad(const Chunk& c) {
    return {__uint_as_float(c.x), __uint_as_float(c.y), __uint_as_float(c.z), __uint_as_float(c.w)};
  }
};
template <>
struct Weights<DType::bf16> : DenseWeights<2> {
  template <u32 q>
  static __device__ __forceinline__ float4 quad(const Chunk& c) {
    const u32 a = word_of<2 * q>(c), b = word_of<2 * q + 1>(c);
    return {bf16_low(a), bf16_high(a), bf16_low(b), bf16_high(b)};
  }
};
template <>
struct Weights<DType::f16> : DenseWeights<2> {
  template <u32 q>
  static __device__ __forceinline__ float4 quad(const Chunk& c) {
    const u32 a = word_of<2 * q>(c), b = word_of<2 * q + 1>(c);
    return {f16_bits(a & 0xFFFFU), f16_bits(a >> 16), f16_bits(b & 0xFFFFU), f16_bits(b >> 16)};
  }
};

/// Of q4_0 and q4_1: half a byte an element, a chunk a block.
template <DType type>
struct NibbleWeights {
  static constexpr u32 kElements = 32, kQuads = 8, kParts = 1, kSlotBytes = 20;
  static __device__ __forceinline__ RowSource row(const MatrixView& w, u32 r) {
    return packed_row(w, r, row_bytes(type, w.k), w.k / 32, 16);
  }
  static __device__ __forceinline__ u32 position(u32 chunk, u32 q) { return chunk * 8 + q; }
  static __device__ __forceinline__ void locate(u32 s, u32& chunk, u32& first) { chunk = s / 2, first = s % 2 * 4; }
};

template <>
struct Weights<DType::q4_0> : NibbleWeights<DType::q4_0> {
  struct Chunk {
    uint4 quants;
    float d;
  };
  static __device__ __forceinline__ void fetch(u32 slot, u32 lane, const RowSource& s, u32 chunk, u32) {
    copy16_async(slot + lane * 16, s.quants + u64{chunk} * 16);
    copy_half_async(slot + kWarp * 16 + lane * 4, s.extra, s.index + chunk, s.total);
  }
  static __device__ __forceinline__ Chunk read(u32 slot, u32 lane, u32 index, u32 chunk) {
    return {load_shared16(slot + lane * 16), f16_bits(pick_half(load_shared(slot + kWarp * 16 + lane * 4), index + chunk))};
  }
  static __device__ __forceinline__ Chunk load(const RowSource& s, u32 chunk) {
    return {__ldg(reinterpret_cast<const uint4*>(s.quants) + chunk), f16_bits(load_half(s.extra, s.index + chunk))};
  }
  template <u32 q>
  static __device__ __forceinline__ float4 quad(const Chunk& c) {
    return scaled(nibbles<q / 4>(word_of<q % 4>(c.quants), 8.0F), c.d);
  }
};

template <>
struct Weights<DType::q4_1> : NibbleWeights<DType::q4_1> {
  struct Chunk {
    uint4 quants;
    u32 scale;
  };
  static __device__ __forceinline__ void fetch(u32 slot, u32 lane, const RowSource& s, u32 chunk, u32) {
    copy16_async(slot + lane * 16, s.quants + u64{chunk} * 16);
    copy4_async(slot + kWarp * 16 + lane * 4, s.extra + u64{s.index + chunk} * 4, 4);
  }
  static __device__ __forceinline__ Chunk read(u32 slot, u32 lane, u32, u32) {
    return {load_shared16(slot + lane * 16), load_shared(slot + kWarp * 16 + lane * 4)};
  }
  static __device__ __forceinline__ Chunk load(const RowSource& s, u32 chunk) {
    return {__ldg(reinterpret_cast<const uint4*>(s.quants) + chunk),
            __ldg(reinterpret_cast<const u32*>(s.extra) + s.index + chunk)};
  }
  template <u32 q>
  static __device__ __forceinline__ float4 quad(const Chunk& c) {
    return scaled(nibbles<q / 4>(word_of<q % 4>(c.quants), 0.0F), f16_bits(c.scale & 0xFFFFU), f16_bits(c.scale >> 16));
  }
};

// Two chunks a block.
template <>
struct Weights<DType::q8_0> {
  static constexpr u32 kElements = 16, kQuads = 4, kParts = 1, kSlotBytes = 20;
  struct Chunk {
    uint4 quants;
    float d;
  };
  static __device__ __forceinline__ RowSource row(const MatrixView& w, u32 r) {
    return packed_row(w, r, row_bytes(DType::q8_0, w.k), w.k / 32, 32);
  }
  static __device__ __forceinline__ void fetch(u32 slot, u32 lane, const RowSource& s, u32 chunk, u32) {
    copy16_async(slot + lane * 16, s.quants + u64{chunk} * 16);
    copy_half_async(slot + kWarp * 16 + lane * 4, s.extra, s.index + chunk / 2, s.total);
  }
  static __device__ __forceinline__ Chunk read(u32 slot, u32 lane, u32 index, u32 chunk) {
    return {load_shared16(slot + lane * 16), f16_bits(pick_half(load_shared(slot + kWarp * 16 + lane * 4), index + chunk / 2))};
  }
  static __device__ __forceinline__ Chunk load(const RowSource& s, u32 chunk) {
    return {__ldg(reinterpret_cast<const uint4*>(s.quants) + chunk), f16_bits(load_half(s.extra, s.index + chunk / 2))};
  }
  template <u32 q>
  static __device__ __forceinline__ float4 quad(const Chunk& c) {
    return scaled(bytes_to_quad(word_of<q>(c.quants) ^ 0x80808080U, 128.0F), c.d);
  }
  static __device__ __forceinline__ u32 position(u32 chunk, u32 q) { return chunk * 4 + q; }
  static __device__ __forceinline__ void locate(u32 s, u32& chunk, u32& first) { chunk = s, first = 0; }
};

// Eight chunks a block. Chunk 2t + h: half h of sub-blocks 2t (low halves) and 2t + 1 (high halves).
template <>
struct Weights<DType::q4_k> {
  static constexpr u32 kElements = 32, kQuads = 8, kParts = 1, kSlotBytes = 32;
  struct Chunk {
    uint4 quants;
    float d0, m0, d1, m1;
  };
  static __device__ __forceinline__ Chunk decode(const uint4& quants, const uint4& header, u32 chunk) {
    const u32 pair = chunk / 2 % 4, shift = pair % 2 * 16;
    const u32 first = header.y >> shift, second = header.z >> shift, third = header.w >> shift;
    u32 scales = first & 0x3F3FU, minima = second & 0x3F3FU;
    if (pair >= 2) {
      scales = (third & 0x0F0FU) | ((first & 0xC0C0U) >> 2);
      minima = (third >> 4 & 0x0F0FU) | ((second & 0xC0C0U) >> 2);
    }
    const float d = f16_bits(header.x & 0xFFFFU), m = -f16_bits(header.x >> 16);
    return {quants, d * static_cast<float>(scales & 0xFFU), m * static_cast<float>(minima & 0xFFU),
            d * static_cast<float>(scales >> 8), m * static_cast<float>(minima >> 8)};
  }
  static __device__ __forceinline__ RowSource row(const MatrixView& w, u32 r) {
    return packed_row(w, r, row_bytes(DType::q4_k, w.k), w.k / 256, 128);
  }
  static __device__ __forceinline__ void fetch(u32 slot, u32 lane, const RowSource& s, u32 chunk, u32) {
    copy16_async(slot + lane * 16, s.quants + u64{chunk} * 16);
    copy16_async(slot + kWarp * 16 + lane * 16, s.extra + u64{s.index + chunk / 8} * 16);
  }
  static __device__ __forceinline__ Chunk read(u32 slot, u32 lane, u32, u32 chunk) {
    return decode(load_shared16(slot + lane * 16), load_shared16(slot + kWarp * 16 + lane * 16), chunk);
  }
  static __device__ __forceinline__ Chunk load(const RowSource& s, u32 chunk) {
    return decode(__ldg(reinterpret_cast<const uint4*>(s.quants) + chunk),
                  __ldg(reinterpret_cast<const uint4*>(s.extra) + s.index + chunk / 8), chunk);
  }
  template <u32 q>
  static __device__ __forceinline__ float4 quad(const Chunk& c) {
    return scaled(nibbles<q / 4>(word_of<q % 4>(c.quants), 0.0F), q < 4 ? c.d0 : c.d1, q < 4 ? c.m0 : c.m1);
  }
  static __device__ __forceinline__ u32 position(u32 chunk, u32 q) { return chunk / 2 * 16 + chunk % 2 * 4 + q % 4 + q / 4 * 8; }
  static __device__ __forceinline__ void locate(u32 s, u32& chunk, u32& first) { chunk = s / 4 * 2 + s % 2, first = s % 4 / 2 * 4; }
};

// Eight chunks a block. Chunk 4·half + c: runs of 16 elements from 128·half + 16·c (low halves) and 64 further (high halves).
template <>
struct Weights<DType::q6_k> {
  static constexpr u32 kElements = 32, kQuads = 8, kParts = 1, kSlotBytes = 32;
  struct Chunk {
    uint4 quants;
    uint2 top;
    float d0, d1;
  };
  static __device__ __forceinline__ Chunk decode(const uint4& quants, const uint2& top, u32 scales, u32 d_bits) {
    const float d = f16_bits(d_bits);
    return {quants, top, d * static_cast<float>(static_cast<signed char>(scales & 0xFFU)),
            d * static_cast<float>(static_cast<signed char>(scales >> 8 & 0xFFU))};
  }
  static __device__ __forceinline__ RowSource row(const MatrixView& w, u32 r) {
    return packed_row(w, r, row_bytes(DType::q6_k, w.k), w.k / 256, 128);
  }
  static __device__ __forceinline__ const std::byte* scales_of(const RowSource& s) { return s.extra + u64{s.total} * 64; }
  static __device__ __forceinline__ const std::byte* d_of(const RowSource& s) { return s.extra + u64{s.total} * 80; }
  static __device__ __forceinline__ void fetch(u32 slot, u32 lane, const RowSource& s, u32 chunk, u32) {
    const u32 index = s.index * 8 + chunk;
    copy16_async(slot + lane * 16, s.quants + u64{chunk} * 16);
    copy8_async(slot + kWarp * 16 + lane * 8, s.extra + u64{index} * 8);
    copy4_async(slot + kWarp * 24 + lane * 4, scales_of(s) + (index / 2) * 4, 4);
    copy_half_async(slot + kWarp * 28 + lane * 4, d_of(s), s.index + chunk / 8, s.total);
  }
  static __device__ __forceinline__ Chunk read(u32 slot, u32 lane, u32 index, u32 chunk) {
    return decode(load_shared16(slot + lane * 16), load_shared8(slot + kWarp * 16 + lane * 8),
                  pick_half(load_shared(slot + kWarp * 24 + lane * 4), chunk),
                  pick_half(load_shared(slot + kWarp * 28 + lane * 4), index + chunk / 8));
  }
  static __device__ __forceinline__ Chunk load(const RowSource& s, u32 chunk) {
    const u32 index = s.index * 8 + chunk;
    return decode(__ldg(reinterpret_cast<const uint4*>(s.quants) + chunk), __ldg(reinterpret_cast<const uint2*>(s.extra) + index),
                  load_half(scales_of(s), index), load_half(d_of(s), s.index + chunk / 8));
  }
  template <u32 q>
  static __device__ __forceinline__ float4 quad(const Chunk& c) {
    constexpr u32 word = q % 4, high = q / 4;
    const u32 low_bits = (word_of<word>(c.quants) >> (4 * high)) & 0x0F0F0F0FU;
    const u32 top_bits = ((word < 2 ? c.top.x : c.top.y) >> (4 * (word % 2) + 2 * high)) & 0x03030303U;
    return scaled(bytes_to_quad(low_bits | (top_bits << 4), 32.0F), high ? c.d1 : c.d0);
  }
  static __device__ __forceinline__ u32 position(u32 chunk, u32 q) { return chunk / 4 * 32 + chunk % 4 * 4 + q % 4 + q / 4 * 16; }
  static __device__ __forceinline__ void locate(u32 s, u32& chunk, u32& first) { chunk = s / 8 * 4 + s % 4, first = s % 8 / 4 * 4; }
};

/// Whether Weights<type> can read the matrix: rows of whole 16-byte chunks.
__device__ __forceinline__ bool is_chunked(DType type, const MatrixView& w) {
  if ((reinterpret_cast<u64>(w.at) & 15) != 0) return false;
  return block_elements(type) > 1 ? w.packed : row_bytes(type, w.k) % 16 == 0;
}

inline constexpr u32 kAllTypes = 0xFFFFFFFFU;
/// Runs `f.template operator()<type>()` for a supported type whose bit is set in `types`.
template <u32 types = kAllTypes, class F>
__device__ __forceinline__ void with_type(u32 type, F&& f) {
  const auto run = [&]<DType t>() METRALE_INLINE {
    if constexpr ((types >> static_cast<u32>(t) & 1) != 0) f.template operator()<t>();
  };
  switch (static_cast<DType>(type)) {
    case DType::f32: return run.template operator()<DType::f32>();
    case DType::f16: return run.template operator()<DType::f16>();
    case DType::bf16: return run.template operator()<DType::bf16>();
    case DType::q4_0: return run.template operator()<DType::q4_0>();
    case DType::q4_1: return run.template operator()<DType::q4_1>();
    case DType::q8_0: return run.template operator()<DType::q8_0>();
    case DType::q4_k: return run.template operator()<DType::q4_k>();
    case DType::q6_k: return run.template operator()<DType::q6_k>();
    default: return;
  }
}

}  // namespace metrale::cuda::matmul
