// SPDX-License-Identifier: Apache-2.0
//
// Plans of the tensor-core kernels, which depend on no instance, and what the device is.
#include <flashinfer/attention/scheduler.cuh>

#include "bridges/flashinfer/guard.cuh"

namespace metrale::fi {
namespace {

__global__ void probe_kernel() {}

}  // namespace

Outcome plan_prefill(const PlanArgs& args, Planned& planned) {
  return guarded([&] {
    ::flashinfer::PrefillPlanInfo info;
    // Only offsets from the begin of the partial results are used.
    void* const pretended = reinterpret_cast<void*>(std::uintptr_t{4096});
    const cudaError_t code = ::flashinfer::PrefillPlan<std::int32_t>(
        pretended, std::size_t{1} << 44, args.ints_device, args.ints_host, args.ints_bytes, info, args.q_indptr, args.kv_indptr,
        args.rows, args.batch, args.num_q_heads, args.num_kv_heads, args.head_dim, args.head_dim, args.page_size, args.under_graph,
        /*sizeof_dtype_o=*/2, args.window_left, /*fixed_split_size=*/-1, /*disable_split_kv=*/false, /*num_colocated_ctas=*/0,
        stream_of(args.stream));
    if (code != cudaSuccess) return code;
    planned.info = info.ToVector();
    planned.partials_bytes =
        info.split_kv ? info.s_offset + std::uint64_t{args.num_q_heads} * info.padded_batch_size * info.cta_tile_q * sizeof(float)
                      : 0;
    return cudaSuccess;
  });
}

Outcome plan_hopper(const PlanArgs& args, Planned& planned) {
  return guarded([&] {
    ::flashinfer::PrefillPlanSM90Info info;
    const cudaError_t code = ::flashinfer::PrefillSM90Plan<std::int32_t>(
        nullptr, 0, args.ints_device, args.ints_host, args.ints_bytes, info, args.q_indptr, args.kv_indptr, args.kv_len, args.rows,
        args.batch, args.num_q_heads, args.num_kv_heads, args.head_dim, args.head_dim, args.page_size, args.causal,
        args.under_graph,
        /*sizeof_dtype_o=*/2, stream_of(args.stream));
    if (code != cudaSuccess) return code;
    // The instances are those with a schedule for each head.
    FLASHINFER_CHECK(!info.same_schedule_for_all_heads, "too many tiles of queries for one schedule");
    planned.info = info.ToVector();
    planned.partials_bytes = 0;
    return cudaSuccess;
  });
}

Outcome probe(Device& device) {
  return guarded([&] {
    int ordinal = 0;
    cudaFuncAttributes attributes;
    cudaError_t code = cudaGetDevice(&ordinal);
    if (code == cudaSuccess) code = cudaDeviceGetAttribute(&device.major, cudaDevAttrComputeCapabilityMajor, ordinal);
    if (code == cudaSuccess) code = cudaDeviceGetAttribute(&device.minor, cudaDevAttrComputeCapabilityMinor, ordinal);
    if (code == cudaSuccess) code = cudaDeviceGetAttribute(&device.num_sms, cudaDevAttrMultiProcessorCount, ordinal);
    return code == cudaSuccess ? cudaFuncGetAttributes(&attributes, probe_kernel) : code;
  });
}

}  // namespace metrale::fi
