// SPDX-License-Identifier: Apache-2.0
//
// Sixteen-lane vectors for the code of one instruction set. Included once by each ops_<isa>.cpp after METRALE_ISA is defined as the
// namespace's name; everything is always inlined, so that nothing compiled for one instruction set is shared with another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define METRALE_INLINE static inline __attribute__((always_inline))

namespace metrale::host::matmul::METRALE_ISA {

// The compiler lowers these to whatever registers the flags allow.
typedef float V16f __attribute__((vector_size(64)));
typedef std::int32_t V16i __attribute__((vector_size(64)));
typedef std::uint32_t V16u __attribute__((vector_size(64)));
typedef std::int8_t V16c __attribute__((vector_size(16)));
typedef std::uint8_t V16b __attribute__((vector_size(16)));
typedef std::uint16_t V16s __attribute__((vector_size(32)));

template <class V>
METRALE_INLINE V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
METRALE_INLINE void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}
// Minus zero, since adding it would be work: -0 + 0 is +0.
METRALE_INLINE V16f splat(float x) { return x - V16f{}; }
METRALE_INLINE V16i splat(std::int32_t x) { return V16i{} + x; }
METRALE_INLINE V16f to_float(V16i v) { return __builtin_convertvector(v, V16f); }
METRALE_INLINE V16f bits_to_float(V16i v) { return reinterpret_cast<V16f>(v); }
METRALE_INLINE V16i float_bits(V16f v) { return reinterpret_cast<V16i>(v); }
METRALE_INLINE V16f select(V16i mask, V16f yes, V16f no) {
  return bits_to_float((mask & float_bits(yes)) | (~mask & float_bits(no)));
}
METRALE_INLINE V16f min(V16f a, V16f b) { return select(a < b, a, b); }
METRALE_INLINE V16f max(V16f a, V16f b) { return select(a > b, a, b); }
METRALE_INLINE V16f abs(V16f v) { return bits_to_float(float_bits(v) & 0x7fffffff); }

typedef float V8f __attribute__((vector_size(32)));
typedef float V4f __attribute__((vector_size(16)));
/// Folds 16 lanes to 4 with `op`, pairwise by halves.
template <class Op>
METRALE_INLINE V4f fold(V16f v, Op op) {
  V8f half[2];
  std::memcpy(half, &v, sizeof v);
  V4f quarter[2];
  const V8f eight = op(half[0], half[1]);
  std::memcpy(quarter, &eight, sizeof eight);
  return op(quarter[0], quarter[1]);
}
METRALE_INLINE float reduce_sum(V16f v) {
  const V4f s = fold(v, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
  return (s[0] + s[2]) + (s[1] + s[3]);
}
METRALE_INLINE float reduce_max(V16f v) {
  const V4f s = fold(v, [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; });
  const float a = s[0] > s[2] ? s[0] : s[2], b = s[1] > s[3] ? s[1] : s[3];
  return a > b ? a : b;
}
/// To the nearest integer, ties to even, for |v| below 2^22.
METRALE_INLINE V16i round_to_int(V16f v) { return float_bits(v + 12582912.0f) - 0x4b400000; }

/// The sums of the first and the last 16 of 32 values.
struct TwoSums {
  std::int32_t lo, hi;
};
/// Stores 32 values as int8 and returns their sums.
METRALE_INLINE TwoSums store_int8(std::int8_t* q, V16i lo, V16i hi) {
  struct {
    V16c lo, hi;
  } bytes{__builtin_convertvector(lo, V16c), __builtin_convertvector(hi, V16c)};
#if defined(__AVX2__)
  const __m256i v = _mm256_set_m128i(reinterpret_cast<__m128i>(bytes.hi), reinterpret_cast<__m128i>(bytes.lo));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), v);
  const __m256i s =
      _mm256_sad_epu8(_mm256_xor_si256(v, _mm256_set1_epi8(-128)), _mm256_setzero_si256());  // of 8 values biased by 128
  const __m256i pairs = _mm256_add_epi64(s, _mm256_srli_si256(s, 8));
  return {_mm_cvtsi128_si32(_mm256_castsi256_si128(pairs)) - 2048, _mm_cvtsi128_si32(_mm256_extracti128_si256(pairs, 1)) - 2048};
#else
  std::memcpy(q, &bytes, sizeof bytes);
  TwoSums sums{};
  for (int i = 0; i < 16; ++i) sums.lo += bytes.lo[i], sums.hi += bytes.hi[i];
  return sums;
#endif
}

/// Sixteen consecutive f16 values.
METRALE_INLINE V16f load_f16(const void* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<V16f>(_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))));
#elif defined(__F16C__)
  const __m128i* h = static_cast<const __m128i*>(p);
  struct Halves {
    __m256 lo, hi;
  } halves{_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
  return load<V16f>(&halves);
#else
  // Exponent and mantissa moved into place, then rescaled by 2^112: exact for subnormals too; infinities and NaN
  // keep their exponent.
  const V16i h = __builtin_convertvector(load<V16s>(p), V16i);
  const V16i magnitude = (h & 0x7fff) << 13;
  const V16f scaled = bits_to_float(magnitude) * 0x1p112f;
  const V16i special = (magnitude >= (0x7c00 << 13));
  return bits_to_float(float_bits(scaled) | (special & 0x7f800000) | ((h & 0x8000) << 16));
#endif
}
METRALE_INLINE V16f load_bf16(const void* p) { return bits_to_float(__builtin_convertvector(load<V16s>(p), V16i) << 16); }
/// To bf16, nearest even, in the low half of each lane. NaN payloads may change; infinities stay.
METRALE_INLINE V16i to_bf16_bits(V16f v) {
  const V16u u = reinterpret_cast<V16u>(v);
  return reinterpret_cast<V16i>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

#include "exp.inl"

/// 1 / v for v in [1, 2^127].
METRALE_INLINE V16f reciprocal(V16f v) {
#if defined(__AVX512F__)
  const V16f r = reinterpret_cast<V16f>(_mm512_rcp14_ps(reinterpret_cast<__m512>(v)));
  return r * (2.0f - v * r);
#else
  return 1.0f / v;
#endif
}
METRALE_INLINE V16f silu(V16f g) { return g * reciprocal(1.0f + exp(-g)); }

/// Brings the line at `p` into the second-level cache; any address is allowed.
METRALE_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Integer dot products. A `Line` is 64 weight bytes, 4 of each row. dot_* add, for each row, the products of its 4 bytes with the 4
// activations at `x`. `Sum` may be narrower than its value in lanes until finish(): dot_nibble at most 8 times in a row.
#if defined(__AVX512VNNI__)
using Line = __m512i;
using Sum = __m512i;
METRALE_INLINE Line load_line(const void* p) { return _mm512_loadu_si512(p); }
METRALE_INLINE Line low_nibbles(Line v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
METRALE_INLINE Line high_nibbles(Line v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
/// Bits [2i, 2i+2) of every byte, as bits 4 and 5.
template <int i>
METRALE_INLINE Line high_pair(Line v) {
  if constexpr (i < 2)
    return _mm512_and_si512(_mm512_slli_epi16(v, 4 - 2 * i), _mm512_set1_epi8(0x30));
  else
    return _mm512_and_si512(_mm512_srli_epi16(v, 2 * i - 4), _mm512_set1_epi8(0x30));
}
METRALE_INLINE Line either(Line a, Line b) { return _mm512_or_si512(a, b); }
METRALE_INLINE Sum zero_sum() { return _mm512_setzero_si512(); }
METRALE_INLINE Sum dot_u8(Sum s, Line w, const std::int8_t* x) {
  std::int32_t four;
  std::memcpy(&four, x, 4);
  return _mm512_dpbusd_epi32(s, w, _mm512_set1_epi32(four));
}
METRALE_INLINE Sum dot_nibble(Sum s, Line w, const std::int8_t* x) { return dot_u8(s, w, x); }
METRALE_INLINE V16i finish_nibble(Sum s) { return reinterpret_cast<V16i>(s); }
METRALE_INLINE V16i finish(Sum s) { return reinterpret_cast<V16i>(s); }
/// Weights biased by 128. What is left of the bias in the sum, in weights: kBiasLeft times the sum of the activations.
inline constexpr float kBiasLeft = 128;
METRALE_INLINE Sum dot_biased(Sum s, Line w, const std::int8_t* x) { return dot_u8(s, w, x); }
inline constexpr int kRowTile = 8;
#elif defined(__AVX2__)
struct Line {
  __m256i lo, hi;
};
struct Sum {
  __m256i lo, hi;
};
METRALE_INLINE Line load_line(const void* p) {
  const __m256i* v = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}
METRALE_INLINE Line low_nibbles(Line v) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(v.lo, mask), _mm256_and_si256(v.hi, mask)};
}
METRALE_INLINE Line high_nibbles(Line v) { return low_nibbles({_mm256_srli_epi16(v.lo, 4), _mm256_srli_epi16(v.hi, 4)}); }
template <int i>
METRALE_INLINE Line high_pair(Line v) {
  const __m256i mask = _mm256_set1_epi8(0x30);
  if constexpr (i < 2)
    return {_mm256_and_si256(_mm256_slli_epi16(v.lo, 4 - 2 * i), mask), _mm256_and_si256(_mm256_slli_epi16(v.hi, 4 - 2 * i), mask)};
  else
    return {_mm256_and_si256(_mm256_srli_epi16(v.lo, 2 * i - 4), mask), _mm256_and_si256(_mm256_srli_epi16(v.hi, 2 * i - 4), mask)};
}
METRALE_INLINE Line either(Line a, Line b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
METRALE_INLINE Sum zero_sum() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
METRALE_INLINE __m256i splat_four(const std::int8_t* x) {
  std::int32_t four;
  std::memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}
/// Sums of 16-bit pairs: 15 * 127 * 2 * 8 steps stays below 2^15.
METRALE_INLINE Sum dot_nibble(Sum s, Line w, const std::int8_t* x) {
  const __m256i v = splat_four(x);
  return {_mm256_add_epi16(s.lo, _mm256_maddubs_epi16(w.lo, v)), _mm256_add_epi16(s.hi, _mm256_maddubs_epi16(w.hi, v))};
}
METRALE_INLINE V16i finish(Sum s) { return load<V16i>(&s); }
METRALE_INLINE V16i finish_nibble(Sum s) {
  const __m256i ones = _mm256_set1_epi16(1);
  return finish({_mm256_madd_epi16(s.lo, ones), _mm256_madd_epi16(s.hi, ones)});
}
/// Weights below 128, so that a pair cannot saturate.
METRALE_INLINE Sum dot_u8(Sum s, Line w, const std::int8_t* x) {
  const __m256i ones = _mm256_set1_epi16(1), v = splat_four(x);
  return {_mm256_add_epi32(s.lo, _mm256_madd_epi16(_mm256_maddubs_epi16(w.lo, v), ones)),
          _mm256_add_epi32(s.hi, _mm256_madd_epi16(_mm256_maddubs_epi16(w.hi, v), ones))};
}
inline constexpr float kBiasLeft = 0;
METRALE_INLINE Sum dot_biased(Sum s, Line w, const std::int8_t* x) {
  const __m256i ones = _mm256_set1_epi16(1), flip = _mm256_set1_epi8(-128), v = splat_four(x);
  const __m256i lo = _mm256_xor_si256(w.lo, flip), hi = _mm256_xor_si256(w.hi, flip);
  const __m256i a = _mm256_maddubs_epi16(_mm256_abs_epi8(lo), _mm256_sign_epi8(v, lo));
  const __m256i b = _mm256_maddubs_epi16(_mm256_abs_epi8(hi), _mm256_sign_epi8(v, hi));
  return {_mm256_add_epi32(s.lo, _mm256_madd_epi16(a, ones)), _mm256_add_epi32(s.hi, _mm256_madd_epi16(b, ones))};
}
inline constexpr int kRowTile = 2;
#else
struct Line {
  std::uint8_t v[64];
};
using Sum = V16i;
METRALE_INLINE Line load_line(const void* p) { return load<Line>(p); }
METRALE_INLINE Line low_nibbles(Line a) {
  for (auto& b : a.v) b &= 15;
  return a;
}
METRALE_INLINE Line high_nibbles(Line a) {
  for (auto& b : a.v) b = static_cast<std::uint8_t>(b >> 4);
  return a;
}
template <int i>
METRALE_INLINE Line high_pair(Line a) {
  for (auto& b : a.v) b = static_cast<std::uint8_t>(((b >> (2 * i)) & 3) << 4);
  return a;
}
METRALE_INLINE Line either(Line a, const Line& b) {
  for (int i = 0; i < 64; ++i) a.v[i] |= b.v[i];
  return a;
}
METRALE_INLINE Sum zero_sum() { return Sum{}; }
METRALE_INLINE Sum dot_u8(Sum s, const Line& w, const std::int8_t* x) {
  for (int r = 0; r < 16; ++r) s[r] += w.v[4 * r] * x[0] + w.v[4 * r + 1] * x[1] + w.v[4 * r + 2] * x[2] + w.v[4 * r + 3] * x[3];
  return s;
}
METRALE_INLINE Sum dot_nibble(Sum s, const Line& w, const std::int8_t* x) { return dot_u8(s, w, x); }
METRALE_INLINE V16i finish_nibble(Sum s) { return s; }
METRALE_INLINE V16i finish(Sum s) { return s; }
inline constexpr float kBiasLeft = 128;
METRALE_INLINE Sum dot_biased(Sum s, const Line& w, const std::int8_t* x) { return dot_u8(s, w, x); }
inline constexpr int kRowTile = 2;
#endif

}  // namespace metrale::host::matmul::METRALE_ISA
