// SPDX-License-Identifier: Apache-2.0
//
// exp for vectors of floats. Included inside the namespace of one instruction set after METRALE_INLINE, splat, min and max, by the
// simd.h of each module, so that nothing compiled for one instruction set is shared with another. Hence no guard and no namespace.

/// exp(x) to a few units in the last place, x clamped to [-87, 88]; NaN gives a number. `V` is a vector of floats.
template <class V>
METRALE_INLINE V exp(V x) {
  using Int = decltype(x < x);
  x = min(max(x, splat(-87.0f)), splat(88.0f));
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  const Int n = reinterpret_cast<Int>(x * 1.44269504088896341f + 12582912.0f) - 0x4b400000;
  const V whole = __builtin_convertvector(n, V);
  // log 2 in two parts, so that the remainder is exact.
  const V r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  // Minimax polynomial for exp on half an octave: Cephes expf.
  V p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * reinterpret_cast<V>((n + 127) << 23);
}
