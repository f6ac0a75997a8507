// SPDX-License-Identifier: Apache-2.0
//
// What `one_row` does with 16 bytes of elements or quants of a row: how they come into registers with what belongs to them, and
// their product with the elements of x that they meet. Unlike in matmul_types.cuh a block's scale is left to the end.
//
// Each OneChunk<type> has
//   kElements, kQuads    of a chunk
//   kPacked              0: rows lie one after the other; else rows of a group of `repack`
//   Raw                  the registers of a chunk
//   Sums, sums(x)        of x, for types with minima
//   Source::seek         points at some rows of one matrix, for packed ones of one group
//   load(raw, source, r, chunk, valid)   chunk of row r; where `valid` is 0 nothing is read and `raw` stays
//   dot(raw, chunk, x, sums, sum)        sum + the product
//   position(chunk, q)   the quad of the row that quad q of a chunk is
#pragma once

#include "matmul_types.cuh"

namespace metrale::cuda::matmul {

/// 16 bytes that are read once.
__device__ __forceinline__ void load_once(uint4& to, const std::byte* from, u32 valid) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %5, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
      : "l"(from), "r"(valid));
}
__device__ __forceinline__ void load_once(uint2& to, const std::byte* from, u32 valid) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %3, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2]; }"
      : "+r"(to.x), "+r"(to.y)
      : "l"(from), "r"(valid));
}
__device__ __forceinline__ void load_once(u32& to, const std::byte* from, u32 valid) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %2, 0;\n"
      "@p ld.global.nc.L1::no_allocate.b32 %0, [%1]; }"
      : "+r"(to)
      : "l"(from), "r"(valid));
}
/// 2 bytes, into the low half.
__device__ __forceinline__ void load_half_once(u32& to, const std::byte* from, u32 valid) {
  asm volatile(
      "{ .reg .pred p; .reg .b16 h; setp.ne.u32 p, %2, 0;\n"
      "@p ld.global.nc.L1::no_allocate.b16 h, [%1];\n"
      "@p cvt.u32.u16 %0, h; }"
      : "+r"(to)
      : "l"(from), "r"(valid));
}

__device__ __forceinline__ float dot4(const float4& a, const float4& b, float sum) {
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}
__device__ __forceinline__ float sum4(const float4& a) { return (a.x + a.y) + (a.z + a.w); }

struct NoSums {};

template <u32 bytes>
struct OneDense {
  static constexpr u32 kElements = 16 / bytes, kQuads = kElements / 4;
  static constexpr bool kPacked = false;
  using Raw = uint4;
  using Sums = NoSums;
  struct Source {
    const std::byte* at;
    u32 stride;
    __device__ __forceinline__ void seek(const std::byte* w, u32, u32 k, u32 row) {
      stride = k * bytes;
      at = w + u64{row} * stride;
    }
  };
  static __device__ __forceinline__ Sums sums(const float4 (&)[kQuads]) { return {}; }
  static __device__ __forceinline__ void load(Raw& to, const Source& s, u32 r, u32 chunk, u32 valid) {
    load_once(to, s.at + (chunk * 16 + r * s.stride), valid);
  }
  static __device__ __forceinline__ u32 position(u32 chunk, u32 q) { return chunk * kQuads + q; }
};

template <DType type>
struct OneChunk;
template <>
struct OneChunk<DType::bf16> : OneDense<2> {
  static __device__ __forceinline__ float dot(const Raw& w, u32, const float4 (&x)[kQuads], Sums, float sum) {
    sum = dot4({bf16_low(w.x), bf16_high(w.x), bf16_low(w.y), bf16_high(w.y)}, x[0], sum);
    return dot4({bf16_low(w.z), bf16_high(w.z), bf16_low(w.w), bf16_high(w.w)}, x[1], sum);
  }
};
template <>
struct OneChunk<DType::f16> : OneDense<2> {
  static __device__ __forceinline__ float dot(const Raw& w, u32, const float4 (&x)[kQuads], Sums, float sum) {
    const auto two = [](u32 pair) METRALE_INLINE { return __half22float2(*reinterpret_cast<const __half2*>(&pair)); };
    const float2 a = two(w.x), b = two(w.y), c = two(w.z), d = two(w.w);
    return dot4({c.x, c.y, d.x, d.y}, x[1], dot4({a.x, a.y, b.x, b.y}, x[0], sum));
  }
};
template <>
struct OneChunk<DType::f32> : OneDense<4> {
  static __device__ __forceinline__ float dot(const Raw& w, u32, const float4 (&x)[kQuads], Sums, float sum) {
    return dot4({__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w)}, x[0], sum);
  }
};

/// Rows of one group: the first of them, and what follows the group's quants.
template <DType type, u32 block, u32 quant_bytes>
struct OneSource {
  const std::byte* quants;
  const std::byte* extra;
  u32 blocks, index, total;  ///< A row's, up to the first row, the group's.
  __device__ __forceinline__ void seek(const std::byte* w, u32 n, u32 k, u32 row) {
    const u32 group = row / kGroupRows, within = row % kGroupRows;
    const u32 behind = n - group * kGroupRows, rows = behind < kGroupRows ? behind : kGroupRows;
    blocks = k / block, index = within * blocks, total = rows * blocks;
    const std::byte* base = w + u64{group} * (kGroupRows * static_cast<u32>(row_bytes(type, k)));
    quants = base + index * quant_bytes;
    extra = base + total * quant_bytes;
  }
};

/// What `dot_offset` adds to each byte.
inline constexpr float kByteOffset = 128.0F;
/// Bytes below 128, plus kByteOffset, times x: one instruction makes a float of a byte, and sums of x take the offset off again.
__device__ __forceinline__ float dot_offset(u32 bytes, const float4& x, float sum) {
  const auto at = [&](u32 select) METRALE_INLINE { return __uint_as_float(__byte_perm(bytes, 0x43000000U, select)); };
  return dot4({at(0x7044), at(0x7144), at(0x7244), at(0x7344)}, x, sum);
}
/// Those of the low or the high nibbles of a chunk with four quads of x. Chains of products are short: few warps hide them.
template <u32 half>
__device__ __forceinline__ float dot_nibbles(const uint4& w, const float4 (&x)[8]) {
  const auto nibbles = [](u32 word) METRALE_INLINE { return (word >> (4 * half)) & 0x0F0F0F0FU; };
  const float a = dot_offset(nibbles(w.x), x[4 * half], 0.0F), b = dot_offset(nibbles(w.y), x[4 * half + 1], 0.0F);
  return (a + b) + dot_offset(nibbles(w.z), x[4 * half + 2], dot_offset(nibbles(w.w), x[4 * half + 3], 0.0F));
}
/// Sums of the quads of x that meet the low and the high halves of a chunk.
struct HalfSums {
  float low, high;
};
__device__ __forceinline__ HalfSums half_sums(const float4 (&x)[8]) {
  return {(sum4(x[0]) + sum4(x[1])) + (sum4(x[2]) + sum4(x[3])), (sum4(x[4]) + sum4(x[5])) + (sum4(x[6]) + sum4(x[7]))};
}

/// Of q4_0 and q4_1: half a byte an element, and what a block has besides.
template <DType type>
struct OneNibbles {
  using W = Weights<type>;
  static constexpr u32 kElements = W::kElements, kQuads = W::kQuads;
  static constexpr bool kPacked = true;
  struct Raw {
    uint4 quants;
    u32 scale;  ///< f16, for q4_1 with the minimum above it.
  };
  using Sums = HalfSums;
  using Source = OneSource<type, 32, 16>;
  static __device__ __forceinline__ Sums sums(const float4 (&x)[kQuads]) { return half_sums(x); }
  static __device__ __forceinline__ u32 position(u32 chunk, u32 q) { return W::position(chunk, q); }
  static __device__ __forceinline__ float product(const Raw& w, const float4 (&x)[kQuads]) {
    return dot_nibbles<0>(w.quants, x) + dot_nibbles<1>(w.quants, x);
  }
};

template <>
struct OneChunk<DType::q4_0> : OneNibbles<DType::q4_0> {
  static __device__ __forceinline__ void load(Raw& to, const Source& s, u32 r, u32 chunk, u32 valid) {
    load_once(to.quants, s.quants + (r * s.blocks + chunk) * 16, valid);
    load_half_once(to.scale, s.extra + (s.index + r * s.blocks + chunk) * 2, valid);
  }
  static __device__ __forceinline__ float dot(const Raw& w, u32, const float4 (&x)[kQuads], const Sums& sums, float sum) {
    return fmaf(f16_bits(w.scale), fmaf(-(kByteOffset + 8.0F), sums.low + sums.high, product(w, x)), sum);
  }
};

template <>
struct OneChunk<DType::q4_1> : OneNibbles<DType::q4_1> {
  static __device__ __forceinline__ void load(Raw& to, const Source& s, u32 r, u32 chunk, u32 valid) {
    load_once(to.quants, s.quants + (r * s.blocks + chunk) * 16, valid);
    load_once(to.scale, s.extra + (s.index + r * s.blocks + chunk) * 4, valid);
  }
  static __device__ __forceinline__ float dot(const Raw& w, u32, const float4 (&x)[kQuads], const Sums& sums, float sum) {
    const float all = sums.low + sums.high;
    return fmaf(f16_bits(w.scale & 0xFFFFU), fmaf(-kByteOffset, all, product(w, x)), fmaf(f16_bits(w.scale >> 16), all, sum));
  }
};

template <>
struct OneChunk<DType::q8_0> {
  static constexpr u32 kElements = 16, kQuads = 4;
  static constexpr bool kPacked = true;
  struct Raw {
    uint4 quants;
    u32 d;
  };
  using Sums = NoSums;
  using Source = OneSource<DType::q8_0, 32, 32>;
  static __device__ __forceinline__ Sums sums(const float4 (&)[kQuads]) { return {}; }
  static __device__ __forceinline__ void load(Raw& to, const Source& s, u32 r, u32 chunk, u32 valid) {
    load_once(to.quants, s.quants + (r * s.blocks * 2 + chunk) * 16, valid);
    load_half_once(to.d, s.extra + (s.index + r * s.blocks + chunk / 2) * 2, valid);
  }
  static __device__ __forceinline__ float dot(const Raw& w, u32, const float4 (&x)[kQuads], Sums, float sum) {
    const auto quad = [](u32 word) METRALE_INLINE { return bytes_to_quad(word ^ 0x80808080U, 128.0F); };
    const float a = dot4(quad(w.quants.x), x[0], 0.0F), b = dot4(quad(w.quants.y), x[1], 0.0F);
    const float c = dot4(quad(w.quants.z), x[2], 0.0F), d = dot4(quad(w.quants.w), x[3], 0.0F);
    return fmaf(f16_bits(w.d), (a + b) + (c + d), sum);
  }
  static __device__ __forceinline__ u32 position(u32 chunk, u32 q) { return chunk * 4 + q; }
};

template <>
struct OneChunk<DType::q4_k> {
  using W = Weights<DType::q4_k>;
  static constexpr u32 kElements = 32, kQuads = 8;
  static constexpr bool kPacked = true;
  struct Raw {
    uint4 quants, header;
  };
  using Sums = HalfSums;
  using Source = OneSource<DType::q4_k, 256, 128>;
  static __device__ __forceinline__ Sums sums(const float4 (&x)[kQuads]) { return half_sums(x); }
  static __device__ __forceinline__ void load(Raw& to, const Source& s, u32 r, u32 chunk, u32 valid) {
    load_once(to.quants, s.quants + (r * s.blocks * 8 + chunk) * 16, valid);
    load_once(to.header, s.extra + (s.index + r * s.blocks + chunk / 8) * 16, valid);
  }
  static __device__ __forceinline__ float dot(const Raw& w, u32 chunk, const float4 (&x)[kQuads], const Sums& sums, float sum) {
    const W::Chunk c = W::decode(w.quants, w.header, chunk);
    const float low = fmaf(-kByteOffset, sums.low, dot_nibbles<0>(w.quants, x));
    const float high = fmaf(-kByteOffset, sums.high, dot_nibbles<1>(w.quants, x));
    return fmaf(c.d1, high, fmaf(c.m1, sums.high, fmaf(c.d0, low, fmaf(c.m0, sums.low, sum))));
  }
  static __device__ __forceinline__ u32 position(u32 chunk, u32 q) { return W::position(chunk, q); }
};

template <>
struct OneChunk<DType::q6_k> {
  using W = Weights<DType::q6_k>;
  static constexpr u32 kElements = 32, kQuads = 8;
  static constexpr bool kPacked = true;
  struct Raw {
    uint4 quants;
    uint2 top;
    u32 scales, d;
  };
  using Sums = HalfSums;
  using Source = OneSource<DType::q6_k, 256, 128>;
  static __device__ __forceinline__ Sums sums(const float4 (&x)[kQuads]) { return half_sums(x); }
  static __device__ __forceinline__ void load(Raw& to, const Source& s, u32 r, u32 chunk, u32 valid) {
    const u32 block = s.index + r * s.blocks + chunk / 8, index = block * 8 + chunk % 8;
    load_once(to.quants, s.quants + (r * s.blocks * 8 + chunk) * 16, valid);
    load_once(to.top, s.extra + index * 8, valid);
    load_half_once(to.scales, s.extra + (s.total * 64 + index * 2), valid);
    load_half_once(to.d, s.extra + (s.total * 80 + block * 2), valid);
  }
  static __device__ __forceinline__ float dot(const Raw& w, u32, const float4 (&x)[kQuads], const Sums& sums, float sum) {
    const auto six = [](u32 low, u32 top) METRALE_INLINE { return (low & 0x0F0F0F0FU) | ((top & 0x03030303U) << 4); };
    const W::Chunk c = W::decode(w.quants, w.top, w.scales, w.d);
    const float a = dot_offset(six(w.quants.x, w.top.x), x[0], 0.0F), b = dot_offset(six(w.quants.y, w.top.x >> 4), x[1], 0.0F);
    const float low = (a + b) + dot_offset(six(w.quants.z, w.top.y), x[2], dot_offset(six(w.quants.w, w.top.y >> 4), x[3], 0.0F));
    const float e = dot_offset(six(w.quants.x >> 4, w.top.x >> 2), x[4], 0.0F),
                f = dot_offset(six(w.quants.y >> 4, w.top.x >> 6), x[5], 0.0F);
    const float high =
        (e + f) + dot_offset(six(w.quants.z >> 4, w.top.y >> 2), x[6], dot_offset(six(w.quants.w >> 4, w.top.y >> 6), x[7], 0.0F));
    sum = fmaf(c.d0, fmaf(-(kByteOffset + 32.0F), sums.low, low), sum);
    return fmaf(c.d1, fmaf(-(kByteOffset + 32.0F), sums.high, high), sum);
  }
  static __device__ __forceinline__ u32 position(u32 chunk, u32 q) { return W::position(chunk, q); }
};

}  // namespace metrale::cuda::matmul
