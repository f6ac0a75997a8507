// SPDX-License-Identifier: Apache-2.0
//
// New keys and values into their pages, and addition with RMS norm.
#include <flashinfer/norm.cuh>

#include "bridges/flashinfer/pages.cuh"

namespace metrale::fi {

Outcome append(const AppendArgs& args) {
  return guarded([&] {
    return ::flashinfer::AppendPagedKVCache<Element, std::int32_t>(
        paged_kv(args.kv, args.batch), static_cast<Element*>(args.k), static_cast<Element*>(args.v), args.batch_indices,
        args.positions, args.rows, args.row_stride, args.kv.head_dim, args.row_stride, args.kv.head_dim, stream_of(args.stream));
  });
}

Outcome add_rms_norm(const AddNormArgs& args) {
  return guarded([&] {
    const auto run =
        args.bias_one ? ::flashinfer::norm::GemmaFusedAddRMSNorm<Element> : ::flashinfer::norm::FusedAddRMSNorm<Element>;
    return run(static_cast<Element*>(args.x), static_cast<Element*>(args.residual), static_cast<Element*>(args.weight), args.rows,
               args.columns, args.x_stride, args.residual_stride, args.eps, /*enable_pdl=*/false, stream_of(args.stream));
  });
}

}  // namespace metrale::fi
