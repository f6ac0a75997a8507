// SPDX-License-Identifier: Apache-2.0
//
// Module "layers": all layers of a decoder for one token in one kernel, an entry for each model. Names and arguments are those of
// metrale/models/decoder_kernels.h, launches those of layers_plan.h. Devices before sm_90 lack it: it needs clusters.
#include "layers_attention.cuh"
#include "layers_mlp.cuh"

namespace metrale::cuda::layers {
namespace {

template <class S>
__device__ inline void run(const LayersBuffers& b, const LayersParams& p, char* shared) {
  let_dependents_start();
  const u32 warp = warp_id();
  const bool fetches = warp == kKeyWarps + kMatrixWarps;
  const u32 block = blockIdx.x;
  const bool attends = block < S::kAttentionBlocks;
  Step step{b.table, &p, nullptr, b.inverse_frequencies, b.block_table, b.exchange, b.hidden, 0, 0};
  const Attention<S> attention(step, block / kClusterBlocks, block % kClusterBlocks, shared);
  const Mlp<S> mlp(step, block - S::kAttentionBlocks, shared);
  if (threadIdx.x == 32 * (kKeyWarps + kMatrixWarps)) {
    if (attends) {
      attention.init();
    } else {
      mlp.init();
    }
    fence_barriers();
  }
  // Weights are no one's result, so they may be on their way before the predecessor has ended.
  __syncwarp();
  const u32 ahead = min(p.num_layers, attends ? S::kAttentionDepth : S::kMlpDepth);
  if (fetches) {
    if (attends) {
      attention.fetch(0, ahead);
    } else {
      mlp.fetch(0, ahead);
    }
  }
  wait_for_predecessor();
  step.position = static_cast<u32>(*static_cast<const volatile std::int32_t*>(&b.step->position));
  step.embedded = b.embedding + static_cast<u64>(static_cast<u32>(*static_cast<const volatile std::int32_t*>(b.ids))) * S::kHidden;
  step.done = static_cast<const volatile u32*>(reinterpret_cast<const u32*>(b.exchange))[S::kExchangeCount];
  decoder::cluster_arrive();
  decoder::cluster_wait();
  if (fetches) {
    if (attends) {
      attention.fetch(ahead, p.num_layers);
    } else {
      mlp.fetch(ahead, p.num_layers);
    }
  } else if (warp >= kKeyWarps) {
    if (attends) {
      attention.multiply(warp - kKeyWarps);
    } else {
      mlp.multiply(warp - kKeyWarps);
    }
  } else if (attends) {
    attention.attend(warp);
  } else if (warp == 0) {
    mlp.finish();
  }
  // A block's shared memory stays while others may write to it.
  __syncwarp();
  decoder::cluster_arrive();
  decoder::cluster_wait();
}

}  // namespace
}  // namespace metrale::cuda::layers

METRALE_PUBLISH_WAITS(layers_576_9_3_64_1536);

extern "C" __global__ void METRALE_CLUSTER_OF(8) __launch_bounds__(metrale::cuda::layers::kThreads, 1)
    layers_576_9_3_64_1536(const metrale::LayerAddresses* table, const std::uint16_t* embedding, const std::int32_t* ids,
                           const float* inverse_frequencies, const metrale::StepHeader* step, const std::int32_t* block_table,
                           float* exchange, float* hidden, const __grid_constant__ metrale::LayersParams p) {
  using namespace metrale::cuda::layers;
  run<Sizes<Small>>({table, embedding, ids, inverse_frequencies, step, block_table, exchange, hidden}, p, dynamic_shared());
}
