// SPDX-License-Identifier: Apache-2.0
//
// Paged decode: one query for each sequence. A generated source includes this for each head dimension and variant.
#pragma once

#include <flashinfer/attention/decode.cuh>
#include <flashinfer/attention/default_decode_params.cuh>
#include <flashinfer/attention/scheduler.cuh>

#include "bridges/flashinfer/pages.cuh"

namespace metrale::fi {

using DecodeParams = ::flashinfer::BatchDecodeParams<Element, Element, Element, std::int32_t>;
inline constexpr auto kNoPositions = ::flashinfer::PosEncodingMode::kNone;

template <std::uint32_t HeadDim, Variant V>
Outcome plan_decode(const PlanArgs& args, Planned& planned) {
  return guarded([&]() -> cudaError_t {
    using Attention = AttentionOf<V>;
    ::flashinfer::DecodePlanInfo info;
    cudaError_t code = cudaErrorNotSupported;
    DISPATCH_GQA_GROUP_SIZE(args.num_q_heads / args.num_kv_heads, GROUP_SIZE, {
      auto estimate = ::flashinfer::BatchDecodeWithPagedKVCacheWorkEstimationDispatched<GROUP_SIZE, HeadDim, kNoPositions,
                                                                                        Attention, DecodeParams>;
      code = ::flashinfer::DecodePlan<HeadDim, kNoPositions, Attention, DecodeParams>(
          pretended_partials(), kPretendedBytes, args.ints_device, args.ints_host, args.ints_bytes, info, args.kv_indptr,
          args.batch, args.num_q_heads, args.page_size, args.under_graph, stream_of(args.stream), estimate);
    });
    if (code != cudaSuccess) return code;
    planned.info = info.ToVector();
    planned.partials_bytes =
        info.split_kv ? info.s_offset + std::uint64_t{args.num_q_heads} * info.padded_batch_size * sizeof(float) : 0;
    return cudaSuccess;
  });
}

template <std::uint32_t HeadDim, Variant V>
Outcome run_decode(const RunArgs& args) {
  return guarded([&] {
    ::flashinfer::DecodePlanInfo info;
    info.FromVector(*args.info);
    DecodeParams params;
    params.q = static_cast<Element*>(args.q);
    params.paged_kv = paged_kv(args.kv, args.batch);
    params.o = static_cast<Element*>(args.out);
    params.lse = args.lse;
    params.num_qo_heads = args.num_q_heads;
    params.q_stride_n = static_cast<std::int32_t>(args.q_stride);
    params.q_stride_h = HeadDim;
    params.window_left = args.window_left;
    params.logits_soft_cap = args.soft_cap;
    params.sm_scale = args.scale;
    params.rope_rcp_scale = 1;
    params.rope_rcp_theta = 1;
    params.padded_batch_size = static_cast<std::uint32_t>(info.padded_batch_size);
    params.request_indices = at<std::int32_t>(args.ints_device, info.request_indices_offset);
    params.kv_tile_indices = at<std::int32_t>(args.ints_device, info.kv_tile_indices_offset);
    params.o_indptr = at<std::int32_t>(args.ints_device, info.o_indptr_offset);
    params.kv_chunk_size_ptr = at<std::int32_t>(args.ints_device, info.kv_chunk_size_ptr_offset);
    Element* partial_values = nullptr;
    float* partial_sums = nullptr;
    if (info.split_kv) {
      partial_values = at<Element>(args.partials, info.v_offset);
      partial_sums = at<float>(args.partials, info.s_offset);
      if (info.enable_cuda_graph) params.block_valid_mask = at<bool>(args.ints_device, info.block_valid_mask_offset);
    }
    return ::flashinfer::BatchDecodeWithPagedKVCacheDispatched<HeadDim, kNoPositions, AttentionOf<V>>(
        params, partial_values, partial_sums, /*enable_pdl=*/false, stream_of(args.stream));
  });
}

}  // namespace metrale::fi
