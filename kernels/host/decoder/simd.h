// SPDX-License-Identifier: Apache-2.0
//
// Vectors of one machine register for the code of one instruction set. Included once by each ops_<isa>.cpp after METRALE_ISA is
// defined as the namespace's name; everything is always inlined, so that nothing compiled for one instruction set is shared with
// another. Vectors are as wide as a register and no wider: compilers split longer ones through memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define METRALE_INLINE static inline __attribute__((always_inline))

namespace metrale::host::decoder::METRALE_ISA {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef std::uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));
typedef float V8 __attribute__((vector_size(32)));
typedef float V4 __attribute__((vector_size(16)));

template <class V = Vec>
METRALE_INLINE V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
METRALE_INLINE void store(void* p, Vec v) { std::memcpy(p, &v, sizeof v); }
/// Minus zero, since adding it would be work: -0 + 0 is +0.
METRALE_INLINE Vec splat(float x) { return x - Vec{}; }
METRALE_INLINE Vec to_float(IntVec v) { return __builtin_convertvector(v, Vec); }
METRALE_INLINE Vec as_float(IntVec v) { return reinterpret_cast<Vec>(v); }
METRALE_INLINE IntVec as_int(Vec v) { return reinterpret_cast<IntVec>(v); }
METRALE_INLINE Vec select(IntVec mask, Vec yes, Vec no) { return as_float((mask & as_int(yes)) | (~mask & as_int(no))); }
METRALE_INLINE Vec min(Vec a, Vec b) { return select(a < b, a, b); }
METRALE_INLINE Vec max(Vec a, Vec b) { return select(a > b, a, b); }
METRALE_INLINE Vec load_bf16(const void* p) { return as_float(__builtin_convertvector(load<HalfVec>(p), IntVec) << 16); }

/// 0, 1, 2, …
METRALE_INLINE IntVec iota() {
  IntVec v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

METRALE_INLINE float sum4(V4 v) { return (v[0] + v[2]) + (v[1] + v[3]); }
METRALE_INLINE float sum_lanes(Vec v) {
#if defined(__AVX512F__)
  const V8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  return sum4(__builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7));
#elif defined(__AVX2__)
  return sum4(__builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7));
#else
  return sum4(v);
#endif
}
METRALE_INLINE float max_lanes(Vec v) {
  float top = v[0];
  for (int i = 1; i < kLanes; ++i) top = v[i] > top ? v[i] : top;
  return top;
}
/// Whether any lane of a comparison holds.
METRALE_INLINE bool any(IntVec mask) {
  std::int32_t all = 0;
  for (int i = 0; i < kLanes; ++i) all |= mask[i];
  return all != 0;
}

#include "exp.inl"

METRALE_INLINE Vec silu(Vec x) { return x / (1.0f + exp(-x)); }

}  // namespace metrale::host::decoder::METRALE_ISA
