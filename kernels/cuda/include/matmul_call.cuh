// SPDX-License-Identifier: Apache-2.0
//
// One launch of linear, linear4 or swiglu, with its buffers side by side, and what happens to a finished product.
#pragma once

#include "matmul_memory.cuh"
#include "matmul_types.cuh"

namespace metrale::cuda::matmul {

struct Call {
  LinearParams p;
  const void* x;
  const void* norm;
  const std::byte* w[kMaxLinearMatrices];
  const float* bias[kMaxLinearMatrices];
  const float* residual;
  float* y[kMaxLinearMatrices];
  u32 matrices;  ///< 2 for swiglu: gate and up.
};

/// Array elements by a run-time index, without an array that is indexed at run time: that would live in local memory.
template <class T>
__device__ __forceinline__ T pick(const T (&from)[kMaxLinearMatrices], u32 i) {
  return i == 0 ? from[0] : i == 1 ? from[1] : i == 2 ? from[2] : from[3];
}
__device__ __forceinline__ LinearMatrix matrix_of(const Call& call, u32 i) {
  const LinearMatrix& a = call.p.w[0];
  const LinearMatrix& b = call.p.w[1];
  const LinearMatrix& c = call.p.w[2];
  const LinearMatrix& d = call.p.w[3];
  return {i == 0   ? a.n
          : i == 1 ? b.n
          : i == 2 ? c.n
                   : d.n,
          i == 0   ? a.dtype
          : i == 1 ? b.dtype
          : i == 2 ? c.dtype
                   : d.dtype,
          i == 0   ? a.packed
          : i == 1 ? b.packed
          : i == 2 ? c.packed
                   : d.packed,
          i == 0   ? a.ld_y
          : i == 1 ? b.ld_y
          : i == 2 ? c.ld_y
                   : d.ld_y};
}
__device__ __forceinline__ MatrixView view_of(const Call& call, u32 i) {
  const LinearMatrix m = matrix_of(call, i);
  return {pick(call.w, i), m.n, call.p.k, m.packed != 0};
}

/// y[row, column] of matrix `i` from its finished sum.
__device__ __forceinline__ void write_linear(const Call& call, u32 i, u32 row, u32 column, float value) {
  const float* bias = pick(call.bias, i);
  const u64 at = u64{row} * matrix_of(call, i).ld_y + column;
  if (bias) value += bias[column];
  if (call.residual) value += __ldcg(call.residual + at);
  pick(call.y, i)[at] = value;
}
__device__ __forceinline__ void write_gated(const Call& call, u32 row, u32 column, float gate, float up) {
  call.y[0][u64{row} * call.p.w[0].ld_y + column] = silu(gate) * up;
}

}  // namespace metrale::cuda::matmul
