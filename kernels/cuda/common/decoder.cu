// SPDX-License-Identifier: Apache-2.0
//
// Module "decoder": attention, rotary embedding, recurrent layers and the choice of a token. Names and arguments are those of
// metrale/models/decoder_kernels.h, launches those of decoder_plan.h.
#include "decoder_attend.cuh"
#include "decoder_attend_one.cuh"
#include "decoder_conv.cuh"
#include "decoder_delta.cuh"
#include "decoder_rotary.cuh"
#include "decoder_rows.cuh"

namespace decoder = metrale::cuda::decoder;
using metrale::let_dependents_start;
using metrale::StepHeader;

METRALE_PUBLISH_N_TILE(attend, decoder::kAttendTile);
METRALE_PUBLISH_N_TILE(conv, decoder::kConvTile);
METRALE_PUBLISH_WAITS(widen);
METRALE_PUBLISH_WAITS(rotary);
METRALE_PUBLISH_WAITS(rotate_store);
METRALE_PUBLISH_WAITS(attend);
METRALE_PUBLISH_WAITS(attend_one);
METRALE_PUBLISH_WAITS(rotate_attend);
METRALE_PUBLISH_WAITS(conv);
METRALE_PUBLISH_WAITS(delta);
METRALE_PUBLISH_WAITS(argmax);
METRALE_PUBLISH_WAITS(score);

extern __shared__ __align__(16) float dynamic_shared[];

extern "C" __global__ void __launch_bounds__(256)
    widen(const void* src, float* dst, const __grid_constant__ metrale::WidenParams p) {
  let_dependents_start();
  decoder::widen_elements(src, dst, p);
}

extern "C" __global__ void __launch_bounds__(128) rotary(const StepHeader* step, const float* inverse_frequencies, float* table,
                                                         const __grid_constant__ metrale::RotaryParams p) {
  let_dependents_start();
  decoder::rotary_row(step, inverse_frequencies, table, p);
}

extern "C" __global__ void __launch_bounds__(128)
    rotate_store(float* q, float* k, const float* v, const float* q_norm, const float* k_norm, const float* rotary_table,
                 const StepHeader* step, const std::int32_t* block_table, void* key_cache, void* value_cache,
                 const __grid_constant__ metrale::RotateStoreParams p) {
  let_dependents_start();
  decoder::rotate_store_rows({q, k, v, q_norm, k_norm, rotary_table, step, block_table, key_cache, value_cache}, p, dynamic_shared);
}

extern "C" __global__ void __launch_bounds__(128)
    attend(const float* q, const void* key_cache, const void* value_cache, const StepHeader* step, const std::int32_t* block_table,
           float* out, const __grid_constant__ metrale::AttendParams p) {
  let_dependents_start();
  decoder::attend_tile({q, key_cache, value_cache, step, block_table, out}, p, dynamic_shared);
}

extern "C" __global__ void METRALE_CLUSTER_OF(8) __launch_bounds__(32 * decoder::kOneWarps, 2)
    attend_one(const float* q, void* key_cache, void* value_cache, const StepHeader* step, const std::int32_t* block_table,
               float* out, const __grid_constant__ metrale::AttendParams p) {
  let_dependents_start();
  const metrale::RotateAttendParams params{.rotate = {.m = 1,
                                                      .num_heads = p.num_heads,
                                                      .num_kv_heads = p.num_kv_heads,
                                                      .head_dim = p.head_dim,
                                                      .ld_q = p.ld_q,
                                                      .q_head_stride = p.q_head_stride,
                                                      .cache = p.cache},
                                           .gated = p.gated,
                                           .scale = p.scale};
  decoder::attend_token<false>(
      {.q = q, .step = step, .block_table = block_table, .key_cache = key_cache, .value_cache = value_cache, .out = out}, params);
}

extern "C" __global__ void METRALE_CLUSTER_OF(8) __launch_bounds__(32 * decoder::kOneWarps, 2)
    rotate_attend(const float* q, const float* k, const float* v, const float* q_norm, const float* k_norm,
                  const float* rotary_table, const StepHeader* step, const std::int32_t* block_table, void* key_cache,
                  void* value_cache, float* out, float* scratch, const __grid_constant__ metrale::RotateAttendParams p) {
  let_dependents_start();
  decoder::attend_token<true>({q, k, v, q_norm, k_norm, rotary_table, step, block_table, key_cache, value_cache, out, scratch}, p);
}

extern "C" __global__ void __launch_bounds__(512)
    conv(float* x, const float* weight, float* state, const StepHeader* step, const __grid_constant__ metrale::ConvParams p) {
  let_dependents_start();
  decoder::conv_channels({x, weight, state, step}, p, dynamic_shared);
}

extern "C" __global__ void METRALE_CLUSTER_OF(4) __launch_bounds__(decoder::kDeltaChunkThreads, 2)
    delta(const float* qkv, const float* z, const float* a, const float* b, const float* decay, const float* dt_bias,
          const float* norm, float* state, const StepHeader* step, float* out, const __grid_constant__ metrale::DeltaParams p) {
  let_dependents_start();
  decoder::delta_head({qkv, z, a, b, decay, dt_bias, norm, state, step, out}, p, dynamic_shared);
}

extern "C" __global__ void METRALE_CLUSTER_OF(8) __launch_bounds__(512)
    argmax(const float* logits, std::int32_t* ids, const __grid_constant__ metrale::RowsParams p) {
  let_dependents_start();
  decoder::argmax_row(logits, ids, p);
}

extern "C" __global__ void METRALE_CLUSTER_OF(8) __launch_bounds__(512)
    score(const float* logits, const std::int32_t* targets, metrale::RowScore* scores,
          const __grid_constant__ metrale::RowsParams p) {
  let_dependents_start();
  decoder::score_row(logits, targets, scores, p);
}
