// SPDX-License-Identifier: Apache-2.0
//
// The dense NVFP4 product, CUTLASS's block-scaled kernel for one architecture.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cute/tensor.hpp>
#include <cutlass/detail/sm100_blockscaled_layout.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/util/packed_stride.hpp>

#include "bridges/cutlass/cuda_status.cuh"
#include "bridges/cutlass/cutlass_status.cuh"

namespace metrale::cutlass {

template <class Arch, class Tile, class Cluster>
struct Nvfp4Gemm {
  using Packed = ::cutlass::nv_float4_t<::cutlass::float_e2m1_t>;
  using Out = ::cutlass::bfloat16_t;
  using Rows = ::cutlass::layout::RowMajor;
  using Columns = ::cutlass::layout::ColumnMajor;
  using Class = ::cutlass::arch::OpClassBlockScaledTensorOp;
  using Epilogue = typename ::cutlass::epilogue::collective::CollectiveBuilder<
      Arch, Class, Tile, Cluster, ::cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Rows, 8, Out, Rows, 8,
      ::cutlass::epilogue::collective::EpilogueScheduleAuto>::CollectiveOp;
  using Mainloop = typename ::cutlass::gemm::collective::CollectiveBuilder<
      Arch, Class, Packed, Rows, 32, Packed, Columns, 32, float, Tile, Cluster,
      ::cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      ::cutlass::gemm::collective::KernelScheduleAuto>::CollectiveOp;
  using Kernel = ::cutlass::gemm::kernel::GemmUniversal<::cute::Shape<int, int, int, int>, Mainloop, Epilogue, void>;
  using Gemm = ::cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using Scales = typename Mainloop::Sm1xxBlkScaledConfig;

  static typename Gemm::Arguments arguments(const Nvfp4GemmArguments& a) {
    const auto shape = ::cute::make_shape(a.m, a.n, a.k, 1);
    const auto act_stride = ::cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {a.m, a.k, 1});
    const auto weight_stride = ::cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {a.n, a.k, 1});
    const auto out_stride =
        ::cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {a.m, static_cast<int>(a.out_stride), 1});
    using Value = typename Packed::DataType;
    using Scale = typename Packed::ScaleFactorType;
    typename Gemm::Arguments made{::cutlass::gemm::GemmUniversalMode::kGemm,
                                  {a.m, a.n, a.k, 1},
                                  {static_cast<const Value*>(a.act), act_stride, static_cast<const Value*>(a.weight), weight_stride,
                                   static_cast<const Scale*>(a.act_scales), Scales::tile_atom_to_shape_SFA(shape),
                                   static_cast<const Scale*>(a.weight_scales), Scales::tile_atom_to_shape_SFB(shape)},
                                  {{}, nullptr, {}, static_cast<Out*>(a.out), out_stride}};
    made.epilogue.thread.alpha = a.alpha;
    made.epilogue.thread.beta = 0;
    made.hw_info.sm_count = a.sm_count;
    return made;
  }

  static std::size_t workspace_bytes(const Nvfp4GemmArguments& a) noexcept { return Gemm::get_workspace_size(arguments(a)); }
  static Foreign launch(const Nvfp4GemmArguments& a, void* workspace, std::uint64_t stream) noexcept {
    const auto made = arguments(a);
    if (const Foreign f = cutlass_status(Gemm::can_implement(made), "can_implement"); !f.ok()) return f;
    Gemm gemm;
    const auto native = reinterpret_cast<cudaStream_t>(stream);
    if (const Foreign f = cutlass_status(gemm.initialize(made, workspace, native), "initialize"); !f.ok()) return f;
    return cutlass_status(gemm.run(native), "run");
  }
  static constexpr Nvfp4Kernel kKernel{.workspace_bytes = &workspace_bytes, .launch = &launch};
};

}  // namespace metrale::cutlass
