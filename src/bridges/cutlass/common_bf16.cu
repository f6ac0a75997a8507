// SPDX-License-Identifier: Apache-2.0
//
// The dense product for every chip: CUTLASS's kernel of the Ampere generation.
#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/gemm/device/gemm.h>
#include <cutlass/numeric_types.h>

#include "bridges/cutlass/cuda_status.cuh"
#include "bridges/cutlass/cutlass_status.cuh"

namespace metrale::cutlass {
namespace {

using Bf16 = ::cutlass::bfloat16_t;
using Rows = ::cutlass::layout::RowMajor;
using Columns = ::cutlass::layout::ColumnMajor;
using Epilogue =
    ::cutlass::epilogue::thread::LinearCombination<Bf16, 8, float, float, ::cutlass::epilogue::thread::ScaleType::OnlyAlphaScaling>;
using Gemm = ::cutlass::gemm::device::Gemm<Bf16, Rows, Bf16, Columns, Bf16, Rows, float, ::cutlass::arch::OpClassTensorOp,
                                           ::cutlass::arch::Sm80, ::cutlass::gemm::GemmShape<128, 128, 32>,
                                           ::cutlass::gemm::GemmShape<64, 64, 32>, ::cutlass::gemm::GemmShape<16, 8, 16>, Epilogue,
                                           ::cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, 4>;

}  // namespace

Foreign common_bf16_ready() noexcept {
  cudaFuncAttributes attributes{};
  return cuda_status(cudaFuncGetAttributes(&attributes, ::cutlass::Kernel<Gemm::GemmKernel>), "cudaFuncGetAttributes");
}

Foreign launch_common_bf16(const CommonArguments& a, std::uint64_t stream) noexcept {
  // The weights [n, k] are read as [k, n] by columns.
  auto* act = static_cast<Bf16*>(const_cast<void*>(a.act));
  auto* weight = static_cast<Bf16*>(const_cast<void*>(a.weight));
  auto* out = static_cast<Bf16*>(a.out);
  const typename Gemm::Arguments arguments({a.m, a.n, a.k}, {act, a.act_stride}, {weight, a.k}, {out, a.out_stride},
                                           {out, a.out_stride}, {a.alpha});
  if (const Foreign f = cutlass_status(Gemm::can_implement(arguments), "can_implement"); !f.ok()) return f;
  Gemm gemm;
  const auto native = reinterpret_cast<cudaStream_t>(stream);
  if (const Foreign f = cutlass_status(gemm.initialize(arguments, nullptr, native), "initialize"); !f.ok()) return f;
  return cutlass_status(gemm.run(native), "run");
}

}  // namespace metrale::cutlass
