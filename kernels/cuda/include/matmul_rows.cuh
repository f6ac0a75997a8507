// SPDX-License-Identifier: Apache-2.0
//
// Weights in other ways than by the chunk: single elements of rows that lie as in the file, segments of 16 for whoever fills tiles.
#pragma once

#include "matmul_types.cuh"

namespace metrale::cuda::matmul {

/// Element `e` of a row that was not packed, whatever its alignment to more than 2 bytes.
__device__ __forceinline__ float element(DType type, const std::byte* row, u32 e) {
  const auto byte = [](const std::byte* at) { return static_cast<u32>(*reinterpret_cast<const unsigned char*>(at)); };
  const auto half = [](const std::byte* at) { return f16_bits(*reinterpret_cast<const unsigned short*>(at)); };
  switch (type) {
    case DType::f32: return reinterpret_cast<const float*>(row)[e];
    case DType::f16: return half(row + u64{e} * 2);
    case DType::bf16: return bf16_low(reinterpret_cast<const unsigned short*>(row)[e]);
    case DType::q4_0: {
      const std::byte* b = row + u64{e / 32} * 18;
      const u32 i = e % 32, both = byte(b + 2 + i % 16);
      return (static_cast<float>(i < 16 ? both & 15 : both >> 4) - 8.0F) * half(b);
    }
    case DType::q4_1: {
      const std::byte* b = row + u64{e / 32} * 20;
      const u32 i = e % 32, both = byte(b + 4 + i % 16);
      return fmaf(static_cast<float>(i < 16 ? both & 15 : both >> 4), half(b), half(b + 2));
    }
    case DType::q8_0: {
      const std::byte* b = row + u64{e / 32} * 34;
      return static_cast<float>(static_cast<signed char>(byte(b + 2 + e % 32))) * half(b);
    }
    case DType::q4_k: {
      const std::byte* b = row + u64{e / 256} * 144;
      const u32 i = e % 256, sub = i / 32, both = byte(b + 16 + 32 * (sub / 2) + i % 32);
      const std::byte* s = b + 4;
      u32 scale, minimum;
      if (sub < 4) {
        scale = byte(s + sub) & 63, minimum = byte(s + sub + 4) & 63;
      } else {
        scale = (byte(s + sub + 4) & 15) | (byte(s + sub - 4) >> 6 << 4);
        minimum = byte(s + sub + 4) >> 4 | (byte(s + sub) >> 6 << 4);
      }
      return half(b) * static_cast<float>(scale) * static_cast<float>(sub % 2 ? both >> 4 : both & 15) -
             half(b + 2) * static_cast<float>(minimum);
    }
    case DType::q6_k: {
      const std::byte* b = row + u64{e / 256} * 210;
      const u32 h = e % 256 / 128, run = e % 128 / 32, i = e % 32;
      const u32 low = byte(b + 64 * h + 32 * (run % 2) + i), top = byte(b + 128 + 32 * h + i) >> (2 * run) & 3;
      const float scale = static_cast<float>(static_cast<signed char>(byte(b + 192 + 8 * h + 2 * run + i / 16)));
      return half(b + 208) * scale * (static_cast<float>((run < 2 ? low & 15 : low >> 4) | top << 4) - 32.0F);
    }
    default: return 0;
  }
}

/// What `load_segment` reads; `unpack_segment` makes floats of it, so that memory and arithmetic may be apart.
template <DType type>
struct Segment {
  static constexpr u32 kChunks = Weights<type>::kElements >= 16 ? 1 : 16 / Weights<type>::kElements;
  typename Weights<type>::Chunk chunk[kChunks];
  u32 first;  ///< Quad of the chunk, where that is longer than a segment.
};

/// Elements 16·s to 16·s + 15 of a row that `is_chunked`; zeros beyond k.
template <DType type>
__device__ __forceinline__ void load_segment(const MatrixView& w, u32 row, u32 s, Segment<type>& to) {
  using W = Weights<type>;
  const RowSource source = W::row(w, row);
  u32 chunk;
  W::locate(s, chunk, to.first);
#pragma unroll
  for (u32 i = 0; i < Segment<type>::kChunks; ++i) {
    to.chunk[i] = {};
    if ((chunk + i) * W::kElements < w.k) to.chunk[i] = W::load(source, chunk + i);
  }
}

template <DType type>
__device__ __forceinline__ void unpack_segment(const Segment<type>& from, float4 (&to)[4]) {
  using W = Weights<type>;
  if constexpr (W::kQuads == 1) {
    for (u32 i = 0; i < 4; ++i) to[i] = W::template quad<0>(from.chunk[i]);
  } else if constexpr (W::kQuads == 2) {
    for (u32 i = 0; i < 2; ++i) to[2 * i] = W::template quad<0>(from.chunk[i]), to[2 * i + 1] = W::template quad<1>(from.chunk[i]);
  } else {
    const typename W::Chunk& c = from.chunk[0];
    if (W::kQuads == 4 || from.first == 0) {
      to[0] = W::template quad<0>(c), to[1] = W::template quad<1>(c), to[2] = W::template quad<2>(c),
      to[3] = W::template quad<3>(c);
    } else if constexpr (W::kQuads == 8) {
      to[0] = W::template quad<4>(c), to[1] = W::template quad<5>(c), to[2] = W::template quad<6>(c),
      to[3] = W::template quad<7>(c);
    }
  }
}

/// A segment of a matrix of a type that is known only now, element by element where it must be. Not inlined: it would be in every
/// kernel eight times.
__device__ __noinline__ void read_segment(u32 type, const MatrixView w, u32 row, u32 s, float4* to) {
  with_type(type, [&]<DType t>() {
    if (is_chunked(t, w)) {
      Segment<t> segment;
      float4 v[4];
      load_segment<t>(w, row, s, segment);
      unpack_segment<t>(segment, v);
      for (u32 i = 0; i < 4; ++i) to[i] = v[i];
      return;
    }
    const std::byte* at = w.at + row * row_bytes(t, w.k);
    const auto one = [&](u32 e) { return e < w.k ? element(t, at, e) : 0.0F; };
    for (u32 i = 0; i < 4; ++i) {
      const u32 e = 16 * s + 4 * i;
      to[i] = {one(e), one(e + 1), one(e + 2), one(e + 3)};
    }
  });
}

}  // namespace metrale::cuda::matmul
