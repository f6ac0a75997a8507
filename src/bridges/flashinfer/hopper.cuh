// SPDX-License-Identifier: Apache-2.0
//
// Attention of many queries by Hopper's wgmma, keys and values packed or in pages. A generated source includes this for each head
// dimension, mask and variant; it compiles for compute capability 9.0a alone, and needs CUTLASS's headers.
#pragma once

#include <flashinfer/cutlass_utils.cuh>
#include <flashinfer/layout.cuh>
#include <flashinfer/math.cuh>

#include <flashinfer/attention/hopper/attention_updater.cuh>
#include <flashinfer/attention/hopper/default_params.cuh>
#include <flashinfer/attention/hopper/prefill_sm90.cuh>
#include <flashinfer/attention/hopper/variant_helper.cuh>
#include <flashinfer/attention/hopper/variants.cuh>
#include <flashinfer/attention/scheduler.cuh>

#include "bridges/flashinfer/guard.cuh"

namespace metrale::fi {

using HopperElement = cutlass::bfloat16_t;
using HopperPacked = ::flashinfer::BatchPrefillRaggedParams<HopperElement, HopperElement, HopperElement, std::int32_t>;
using HopperPaged = ::flashinfer::BatchPrefillPagedParams<HopperElement, HopperElement, HopperElement, std::int32_t>;

template <class Params>
Params hopper_params(const RunArgs& args) {
  ::flashinfer::PrefillPlanSM90Info info;
  info.FromVector(*args.info);
  const auto ints = [&](std::int64_t offset) {
    return reinterpret_cast<std::int32_t*>(static_cast<char*>(args.ints_device) + offset);
  };
  Params params{};
  params.q_ptr = static_cast<HopperElement*>(args.q);
  params.k_ptr = static_cast<HopperElement*>(args.kv.k);
  params.v_ptr = static_cast<HopperElement*>(args.kv.v);
  params.o_ptr = static_cast<HopperElement*>(args.out);
  params.lse_ptr = args.lse;
  params.qo_tile_indices = ints(info.qo_tile_indices_offset);
  params.qo_indptr = ints(info.qo_indptr_offset);
  params.kv_indptr = ints(info.kv_indptr_offset);
  params.qo_lens = ints(info.qo_len_offset);
  params.kv_lens = ints(info.kv_len_offset);
  params.head_indices = ints(info.head_indices_offset);
  params.work_indptr = ints(info.work_indptr_offset);
  params.batch_indices = ints(info.batch_indices_offset);
  params.additional_params.logits_soft_cap = args.soft_cap;
  params.additional_params.sm_scale = args.scale;
  params.q_stride_n = static_cast<std::int64_t>(args.q_stride);
  params.q_stride_h = args.kv.head_dim;
  params.k_stride_n = params.v_stride_n = static_cast<std::int64_t>(args.kv.token_stride);
  params.k_stride_h = params.v_stride_h = static_cast<std::int64_t>(args.kv.head_stride);
  params.o_stride_n = std::int64_t{args.num_q_heads} * args.kv.head_dim;
  params.o_stride_h = args.kv.head_dim;
  params.nnz_qo = args.rows;
  params.num_qo_heads = static_cast<int>(args.num_q_heads);
  params.num_kv_heads = static_cast<int>(args.kv.num_heads);
  params.group_size = static_cast<int>(args.num_q_heads / args.kv.num_heads);
  params.window_left = args.window_left;
  params.causal = args.causal;
  return params;
}

template <std::uint32_t HeadDim, Variant V, bool Causal, bool Packed>
Outcome run_hopper(const RunArgs& args) {
  return guarded([&] {
    constexpr auto kMask = Causal ? ::flashinfer::MaskMode::kCausal : ::flashinfer::MaskMode::kNone;
    constexpr bool kWindow = V != Variant::plain;
    using Attention = ::flashinfer::DefaultAttention<V == Variant::window_and_cap>;
    if constexpr (Packed) {
      auto params = hopper_params<HopperPacked>(args);
      params.nnz_kv = static_cast<std::int64_t>(args.packed_rows);
      return ::flashinfer::BatchPrefillWithRaggedKVCacheDispatched<HeadDim, HeadDim, kMask, kWindow, /*same schedule=*/false,
                                                                   Attention>(params, /*enable_pdl=*/false, stream_of(args.stream));
    } else {
      auto params = hopper_params<HopperPaged>(args);
      params.kv_indices = args.kv.indices;
      params.k_page_stride = params.v_page_stride = static_cast<std::int64_t>(args.kv.page_stride);
      params.page_size = static_cast<int>(args.kv.page_size);
      return ::flashinfer::BatchPrefillWithPagedKVCacheDispatched<HeadDim, HeadDim, kMask, kWindow, /*same schedule=*/false,
                                                                  Attention>(params, /*enable_pdl=*/false, stream_of(args.stream));
    }
  });
}

}  // namespace metrale::fi
