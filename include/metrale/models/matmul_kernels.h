// SPDX-License-Identifier: Apache-2.0
//
// The matrix kernels that the reference decoders launch, y = x · Wᵀ with W dense or block-quantised: names, argument lists and
// by-value structs. With decoder_kernels.h this is all that a backend serves to run them. Plain values; any thread.
//
// Module kMatmulModule (B = Buffer, P = by-value struct; a Buffer marked `?` may be null):
//   repack   B w, P RepackParams                                            W in place, from rows to the layout kernels like best
//   gather   B ids, B w, B y, P GatherParams                                y[i,:] = W[ids[i],:], f32
//   prepare  B x, B norm?, B out, P LinearParams                            many rows of x, normed, in the form that `linear` wants
//   linear   B x, B norm?, B w, B bias?, B residual?, B y, P LinearParams   y = norm(x)·Wᵀ + bias + residual
//   linear4  B x, B norm?, B w0, B w1?, B w2?, B w3?, B bias0? … bias3?, B y0 … y3, P LinearParams
//                                                                           up to four matrices on one x
//   swiglu   B x, B norm?, B gate, B up, B y, P LinearParams                y = silu(norm(x)·Gateᵀ) * (norm(x)·Upᵀ)
// Shapes: x [m, k], y and residual [m, n], bias [n], norm [k], all f32 and row-major; W [n, k]. `residual` may be `y` itself.
// Geometry, shared memory, and when `prepare` is needed are the backend's own matter.
#pragma once

#include <cstdint>
#include <string_view>

namespace metrale {

inline constexpr std::string_view kMatmulModule = "matmul";
/// Most matrices of one linear4.
inline constexpr std::uint32_t kMaxLinearMatrices = 4;

/// `fast`: quantised weights meet activations rounded to what the device multiplies quickest. `exact`: weights are dequantised to
/// f32 and everything is f32: the oracle, many times slower. Dense weights are computed in f32 by both.
enum class Precision : std::uint32_t { fast, exact };

struct LinearMatrix {
  std::uint32_t n = 0;       ///< Rows of W, columns of y.
  std::uint32_t dtype = 0;   ///< A DType.
  std::uint32_t packed = 0;  ///< 1 after `repack`.
  std::uint32_t ld_y = 0;    ///< Floats between rows of y and of residual.
};

/// The by-value argument of prepare, linear, linear4 and swiglu. swiglu reads `w[0]` for gate, `w[1]` for up and ld_y from `w[0]`;
/// prepare reads `w[0].dtype` only.
struct LinearParams {
  std::uint32_t m = 0;
  std::uint32_t k = 0;
  std::uint32_t ld_x = 0;        ///< Floats between rows of x; unused when prepared.
  std::uint32_t prepared = 0;    ///< 1: x is what `prepare` wrote.
  std::uint32_t precision = 0;   ///< A Precision; the same in prepare and its consumers.
  std::uint32_t norm_dtype = 0;  ///< f32 or bf16 (a DType), when norm is given.
  float norm_eps = 0;            ///< norm(x) = x / sqrt(mean(x²) + norm_eps) * (norm_add + norm).
  float norm_add = 0;
  LinearMatrix w[kMaxLinearMatrices];
};
static_assert(sizeof(LinearParams) == 96);

struct RepackParams {
  std::uint32_t n = 0;
  std::uint32_t k = 0;
  std::uint32_t dtype = 0;
};

struct GatherParams {
  std::uint32_t m = 0;  ///< Number of ids (int32, each in [0, n)).
  std::uint32_t n = 0;
  std::uint32_t k = 0;
  std::uint32_t dtype = 0;
  std::uint32_t packed = 0;
  std::uint32_t ld_y = 0;
};

}  // namespace metrale
