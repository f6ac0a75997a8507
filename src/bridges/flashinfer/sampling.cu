// SPDX-License-Identifier: Apache-2.0
//
// Logits to one token a row: softmax with temperature, then rejection sampling from what top-k and top-p leave.
#include <flashinfer/sampling.cuh>

#include "bridges/flashinfer/guard.cuh"

namespace metrale::fi {

Outcome sample(const SampleArgs& args) {
  return guarded([&] {
    const cudaError_t code = ::flashinfer::sampling::OnlineSoftmax<float>(
        args.logits, args.probabilities, args.rows, args.vocabulary, args.temperatures, args.temperature, args.workspace,
        args.workspace_bytes, /*enable_pdl=*/false, stream_of(args.stream));
    if (code != cudaSuccess) return code;
    return ::flashinfer::sampling::TopKTopPSamplingFromProb<float, std::int32_t>(
        args.probabilities, args.top_ks, args.top_ps, args.tokens, args.valid, /*indices=*/nullptr, args.rows, args.top_k,
        args.top_p, args.vocabulary, /*deterministic=*/true, args.seed_device, args.seed, args.offset_device, args.offset,
        stream_of(args.stream));
  });
}

}  // namespace metrale::fi
