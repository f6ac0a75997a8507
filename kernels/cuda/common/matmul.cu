// SPDX-License-Identifier: Apache-2.0
//
// Module "matmul": the entries of metrale/models/matmul_kernels.h. Launch geometry: matmul_plan.h.
#include "matmul_convert.cuh"
#include "matmul_few.cuh"
#include "matmul_one.cuh"
#include "matmul_stream.cuh"
#include "matmul_tiles.cuh"
#include "publish.cuh"

namespace {

namespace mm = metrale::cuda::matmul;
using metrale::GatherParams;
using metrale::LinearParams;
using metrale::RepackParams;

template <bool gated>
__device__ __forceinline__ void multiply(const mm::Call& call) {
  extern __shared__ __align__(16) std::byte shared[];
  if (!call.p.prepared) return mm::stream<gated>(call, shared);
  metrale::let_dependents_start();
  metrale::wait_for_predecessor();
  mm::tiles<gated>(call, shared);
}

template <bool gated>
__device__ __forceinline__ void multiply_many(const mm::Call& call) {
  extern __shared__ __align__(16) std::byte shared[];
  metrale::let_dependents_start();
  metrale::wait_for_predecessor();
  mm::direct_tiles<gated>(call, shared);
}

template <metrale::DType type, mm::OneKind kind, bool few>
__device__ __forceinline__ void multiply_one(const mm::Call& call) {
  extern __shared__ __align__(16) std::byte shared[];
  constexpr mm::u32 rows = mm::one_rows(type, kind == mm::OneKind::gated, few);
  if constexpr (few) {
    mm::one_few<type, kind, rows>(call, shared);
  } else {
    mm::one_row<type, kind, rows, mm::kOneAhead>(call, shared);
  }
}

}  // namespace

// At most 64 registers: two kernels that follow each other then fit on a multiprocessor side by side, and the weights of the second
// are on their way while the first ends.
#define METRALE_MATMUL_BOUNDS __launch_bounds__(512, 2)

extern "C" {

__global__ void __launch_bounds__(256) repack(std::byte* w, const RepackParams p) {
  extern __shared__ __align__(16) std::byte shared[];
  metrale::wait_for_predecessor();
  mm::repack_group(w, p, shared);
}

__global__ void __launch_bounds__(256) gather(const std::int32_t* ids, const std::byte* w, float* y, const GatherParams p) {
  metrale::let_dependents_start();
  metrale::wait_for_predecessor();
  mm::gather_rows(ids, w, y, p);
}

__global__ void __launch_bounds__(256) prepare(const float* x, const void* norm, void* out, const LinearParams p) {
  metrale::let_dependents_start();
  metrale::wait_for_predecessor();
  mm::prepare_rows(x, norm, out, p);
}

__global__ void METRALE_MATMUL_BOUNDS linear(const void* x, const void* norm, const std::byte* w, const float* bias,
                                             const float* residual, float* y, const LinearParams p) {
  multiply<false>({p, x, norm, {w}, {bias}, residual, {y}, 1});
}

__global__ void METRALE_MATMUL_BOUNDS linear4(const void* x, const void* norm, const std::byte* w0, const std::byte* w1,
                                              const std::byte* w2, const std::byte* w3, const float* bias0, const float* bias1,
                                              const float* bias2, const float* bias3, float* y0, float* y1, float* y2, float* y3,
                                              const LinearParams p) {
  const mm::u32 matrices = p.w[1].n == 0 ? 1 : p.w[2].n == 0 ? 2 : p.w[3].n == 0 ? 3 : 4;
  multiply<false>({p, x, norm, {w0, w1, w2, w3}, {bias0, bias1, bias2, bias3}, nullptr, {y0, y1, y2, y3}, matrices});
}

__global__ void METRALE_MATMUL_BOUNDS swiglu(const void* x, const void* norm, const std::byte* gate, const std::byte* up, float* y,
                                             const LinearParams p) {
  multiply<true>({p, x, norm, {gate, up}, {}, nullptr, {y}, 2});
}

// One row of x and weights of one type: matmul_plan.h says when.
#define METRALE_MATMUL_ONE_OF(type, suffix, few)                                                                                  \
  __global__ void __launch_bounds__(mm::one_threads(metrale::DType::type, few), 2)                                                \
      linear_##type##suffix(const void* x, const void* norm, const std::byte* w, const float* bias, const float* residual,        \
                            float* y, const __grid_constant__ LinearParams p) {                                                   \
    multiply_one<metrale::DType::type, mm::OneKind::single, few>({p, x, norm, {w}, {bias}, residual, {y}, 1});                    \
  }                                                                                                                               \
  __global__ void __launch_bounds__(mm::one_threads(metrale::DType::type, few), 2)                                                \
      linear4_##type##suffix(const void* x, const void* norm, const std::byte* w0, const std::byte* w1, const std::byte* w2,      \
                             const std::byte* w3, const float* bias0, const float* bias1, const float* bias2, const float* bias3, \
                             float* y0, float* y1, float* y2, float* y3, const __grid_constant__ LinearParams p) {                \
    multiply_one<metrale::DType::type, mm::OneKind::several, few>(                                                                \
        {p, x, norm, {w0, w1, w2, w3}, {bias0, bias1, bias2, bias3}, nullptr, {y0, y1, y2, y3}, metrale::kMaxLinearMatrices});    \
  }                                                                                                                               \
  __global__ void __launch_bounds__(mm::one_threads(metrale::DType::type, few), 2)                                                \
      swiglu_##type##suffix(const void* x, const void* norm, const std::byte* gate, const std::byte* up, float* y,                \
                            const __grid_constant__ LinearParams p) {                                                             \
    multiply_one<metrale::DType::type, mm::OneKind::gated, few>({p, x, norm, {gate, up}, {}, nullptr, {y}, 2});                   \
  }
#define METRALE_MATMUL_ONE(type)         \
  METRALE_MATMUL_ONE_OF(type, _1, false) \
  METRALE_MATMUL_ONE_OF(type, _1_few, true)
METRALE_MATMUL_ONE(f32)
METRALE_MATMUL_ONE(f16)
METRALE_MATMUL_ONE(bf16)
METRALE_MATMUL_ONE(q4_0)
METRALE_MATMUL_ONE(q4_1)
METRALE_MATMUL_ONE(q8_0)
METRALE_MATMUL_ONE(q4_k)
METRALE_MATMUL_ONE(q6_k)

// Prepared rows and bf16 weights.
__global__ void __launch_bounds__(512, 1) linear_bf16_n(const void* x, const void*, const std::byte* w, const float* bias,
                                                        const float* residual, float* y, const __grid_constant__ LinearParams p) {
  multiply_many<false>({p, x, nullptr, {w}, {bias}, residual, {y}, 1});
}
__global__ void __launch_bounds__(512, 1)
    linear4_bf16_n(const void* x, const void*, const std::byte* w0, const std::byte* w1, const std::byte* w2, const std::byte* w3,
                   const float* bias0, const float* bias1, const float* bias2, const float* bias3, float* y0, float* y1, float* y2,
                   float* y3, const __grid_constant__ LinearParams p) {
  const mm::u32 matrices = p.w[1].n == 0 ? 1 : p.w[2].n == 0 ? 2 : p.w[3].n == 0 ? 3 : 4;
  multiply_many<false>({p, x, nullptr, {w0, w1, w2, w3}, {bias0, bias1, bias2, bias3}, nullptr, {y0, y1, y2, y3}, matrices});
}
__global__ void __launch_bounds__(512, 1) swiglu_bf16_n(const void* x, const void*, const std::byte* gate, const std::byte* up,
                                                        float* y, const __grid_constant__ LinearParams p) {
  multiply_many<true>({p, x, nullptr, {gate, up}, {}, nullptr, {y}, 2});
}

}  // extern "C"

METRALE_PUBLISH_WAITS(repack);
METRALE_PUBLISH_WAITS(gather);
METRALE_PUBLISH_WAITS(prepare);
METRALE_PUBLISH_WAITS(linear);
METRALE_PUBLISH_WAITS(linear4);
METRALE_PUBLISH_WAITS(swiglu);
#define METRALE_PUBLISH_ONE_OF(type, suffix)     \
  METRALE_PUBLISH_WAITS(linear_##type##suffix);  \
  METRALE_PUBLISH_WAITS(linear4_##type##suffix); \
  METRALE_PUBLISH_WAITS(swiglu_##type##suffix)
#define METRALE_PUBLISH_ONE(type)   \
  METRALE_PUBLISH_ONE_OF(type, _1); \
  METRALE_PUBLISH_ONE_OF(type, _1_few)
METRALE_PUBLISH_ONE(f32);
METRALE_PUBLISH_ONE(f16);
METRALE_PUBLISH_ONE(bf16);
METRALE_PUBLISH_ONE(q4_0);
METRALE_PUBLISH_ONE(q4_1);
METRALE_PUBLISH_ONE(q8_0);
METRALE_PUBLISH_ONE(q4_k);
METRALE_PUBLISH_ONE(q6_k);
METRALE_PUBLISH_WAITS(linear_bf16_n);
METRALE_PUBLISH_WAITS(linear4_bf16_n);
METRALE_PUBLISH_WAITS(swiglu_bf16_n);
