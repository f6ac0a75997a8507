// SPDX-License-Identifier: Apache-2.0
//
// Paged attention of any number of queries, on tensor cores of compute capability 8.0 and later. Packed keys and values are pages
// of one token. A generated source includes this for each head dimension, mask and variant.
#pragma once

#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/scheduler.cuh>

#include "bridges/flashinfer/pages.cuh"

namespace metrale::fi {

using PrefillParams = ::flashinfer::BatchPrefillPagedParams<Element, Element, Element, std::int32_t>;

template <std::uint32_t HeadDim, Variant V, bool Causal>
Outcome run_prefill(const RunArgs& args) {
  return guarded([&]() -> cudaError_t {
    constexpr auto kMask = Causal ? ::flashinfer::MaskMode::kCausal : ::flashinfer::MaskMode::kNone;
    ::flashinfer::PrefillPlanInfo info;
    info.FromVector(*args.info);
    PrefillParams params;
    params.q = static_cast<Element*>(args.q);
    params.paged_kv = paged_kv(args.kv, args.batch);
    params.q_indptr = args.q_indptr;
    params.o = static_cast<Element*>(args.out);
    params.lse = args.lse;
    params.group_size = ::flashinfer::uint_fastdiv(args.num_q_heads / args.kv.num_heads);
    params.num_qo_heads = args.num_q_heads;
    params.q_stride_n = static_cast<std::int32_t>(args.q_stride);
    params.q_stride_h = HeadDim;
    params.window_left = args.window_left;
    params.logits_soft_cap = args.soft_cap;
    params.sm_scale = args.scale;
    params.rope_rcp_scale = 1;
    params.rope_rcp_theta = 1;
    params.padded_batch_size = static_cast<std::uint32_t>(info.padded_batch_size);
    params.max_total_num_rows = static_cast<std::uint32_t>(info.total_num_rows);
    params.request_indices = at<std::int32_t>(args.ints_device, info.request_indices_offset);
    params.qo_tile_indices = at<std::int32_t>(args.ints_device, info.qo_tile_indices_offset);
    params.kv_tile_indices = at<std::int32_t>(args.ints_device, info.kv_tile_indices_offset);
    params.o_indptr = at<std::int32_t>(args.ints_device, info.o_indptr_offset);
    params.kv_chunk_size_ptr = at<std::int32_t>(args.ints_device, info.kv_chunk_size_ptr_offset);
    if (info.enable_cuda_graph) params.total_num_rows = at<std::uint32_t>(args.ints_device, info.total_num_rows_offset);
    Element* partial_values = nullptr;
    float* partial_sums = nullptr;
    if (info.split_kv) {
      params.merge_indptr = at<std::int32_t>(args.ints_device, info.merge_indptr_offset);
      partial_values = at<Element>(args.partials, info.v_offset);
      partial_sums = at<float>(args.partials, info.s_offset);
      if (info.enable_cuda_graph) params.block_valid_mask = at<bool>(args.ints_device, info.block_valid_mask_offset);
    }
    cudaError_t code = cudaErrorNotSupported;
    DISPATCH_CTA_TILE_Q(info.cta_tile_q, CTA_TILE_Q, {
      code =
          ::flashinfer::BatchPrefillWithPagedKVCacheDispatched<CTA_TILE_Q, HeadDim, HeadDim, ::flashinfer::PosEncodingMode::kNone,
                                                               /*use_fp16_qk_reduction=*/false, kMask, AttentionOf<V>>(
              params, partial_values, partial_sums, /*enable_pdl=*/false, stream_of(args.stream));
    });
    return code;
  });
}

}  // namespace metrale::fi
