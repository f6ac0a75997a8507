// SPDX-License-Identifier: Apache-2.0
//
// The kernels that the reference decoders launch, beside those of module "matmul": names, argument lists and by-value structs. A
// backend that serves them under these names runs every decoder. Plain values; any thread.
//
// Module kDecoderModule (B = Buffer, P = by-value struct; a Buffer marked `?` may be null):
//   widen         B src, B dst, P WidenParams                              small weights -> f32, once at load
//   rotary        B step, B inverse_frequencies, B table, P RotaryParams   cos and sin of the step's positions
//   rotate_store  B q, B k, B v, B q_norm?, B k_norm?, B rotary, B step, B block_table, B key_cache, B value_cache,
//                 P RotateStoreParams                                      norm and rotate q in place; k, v -> cache
//   attend        B q, B key_cache, B value_cache, B step, B block_table, B out, P AttendParams     causal attention of m tokens
//   attend_one    as attend                                                the same for m = 1
//   conv          B x, B weight, B state, B step, P ConvParams             causal depthwise convolution and silu, in place
//   delta         B qkv, B z, B a, B b, B decay, B dt_bias, B norm, B state, B step, B out, P DeltaParams
//                                                                          gated delta rule, then gated RMS norm
//   argmax        B logits, B ids, P RowsParams                            largest of each row; -1 where one is NaN or +inf
//   score         B logits, B targets, B scores, P RowsParams              loss and largest of each row
//
// Optional; a backend that lacks it is given the two kernels it stands for:
//   rotate_attend B q, B k, B v, B q_norm?, B k_norm?, B rotary, B step, B block_table, B key_cache, B value_cache, B out,
//                 B scratch?, P RotateAttendParams       rotate_store, then attend_one, of one token; q is left as it was
//
// Optional too, module kLayersModule, an entry for each model that has one; the backend's plans say which:
//   <entry>       B table, B embedding, B ids, B inverse_frequencies, B step, B block_table, B exchange, B hidden, P LayersParams
//                 all layers for one token, from its id to the residual stream after the last: rotary, gather, and for each layer
//                 the matrices, rotate_attend and swiglu. table: LayerAddresses [layers]; exchange: zeroed once, for one launch at
//                 a time
//
// Grids: widen any x; rotary and rotate_store {m}; attend {num_heads, ceil(m / n_tile)}; attend_one any x up to num_heads;
// conv {ceil(channels / n_tile)}; delta {num_value_heads}; argmax and score {rows}; n_tile is what the kernel publishes. Blocks
// and shared memory are the backend's own matter.
//
// All matrices are f32 and row-major. Caches are addressed as
// base + block_table[t / block_tokens] * block_stride + (t % block_tokens) * token_stride + head * head_stride, in elements.
#pragma once

#include <cstdint>
#include <string_view>

namespace metrale {

inline constexpr std::string_view kDecoderModule = "decoder";
inline constexpr std::string_view kLayersModule = "layers";

/// The first bytes of the `step` Buffer.
struct StepHeader {
  std::int32_t position = 0;  ///< Of the first token of the step.
  std::int32_t slot = 0;      ///< Which recurrent state the step reads and writes.
  std::int32_t reserved[14] = {};
};
static_assert(sizeof(StepHeader) == 64);

enum class WidenOp : std::uint32_t {
  copy,
  plus_one,      ///< 1 + w: norms stored around zero.
  negative_exp,  ///< -exp(w): decay rates stored as logarithms.
};

/// dst f32 [rows, cols] from src of `dtype` (f32, f16 or bf16); transposed, dst is [cols, rows].
struct WidenParams {
  std::uint32_t rows = 1;
  std::uint32_t cols = 0;
  std::uint32_t dtype = 0;
  WidenOp op = WidenOp::copy;
  std::uint32_t transpose = 0;
};

/// table [m, 2, pairs]: cosines, then sines, of (position + i) * inverse_frequencies[pairs], products rounded to f32.
struct RotaryParams {
  std::uint32_t m = 0;
  std::uint32_t pairs = 0;
};

/// How keys and values lie in their cache. Strides are in elements.
struct CacheLayout {
  std::uint32_t dtype = 0;  ///< f32 or bf16.
  std::uint32_t block_tokens = 0;
  std::uint64_t block_stride = 0;
  std::uint32_t token_stride = 0;
  std::uint32_t head_stride = 0;
};

/// q: head h of token i at i * ld_q + h * q_head_stride; k, v: [m, num_kv_heads, head_dim] with rows ld_kv apart.
/// The first 2 * pairs elements of a head are rotated; pair j is (j, j + pairs), or (2j, 2j + 1) when `interleaved`.
struct RotateStoreParams {
  std::uint32_t m = 0;
  std::uint32_t num_heads = 0;
  std::uint32_t num_kv_heads = 0;
  std::uint32_t head_dim = 0;
  std::uint32_t pairs = 0;
  std::uint32_t interleaved = 0;
  std::uint32_t ld_q = 0;
  std::uint32_t q_head_stride = 0;
  std::uint32_t ld_kv = 0;
  float norm_eps = 0;  ///< Of the norms over head_dim, where their weights are given.
  CacheLayout cache;
};

/// out [m, num_heads, head_dim]. Token i attends to positions 0 … position + i. Query head h uses cache head
/// h / (num_heads / num_kv_heads).
struct AttendParams {
  std::uint32_t m = 0;
  std::uint32_t num_heads = 0;
  std::uint32_t num_kv_heads = 0;
  std::uint32_t head_dim = 0;
  std::uint32_t ld_q = 0;
  std::uint32_t q_head_stride = 0;
  std::uint32_t gated = 0;  ///< 1: multiply by the sigmoid of the head_dim values that follow each query.
  float scale = 0;
  CacheLayout cache;
};

/// For rotate_attend: a step of one token, attending with the sizes that `rotate` gives.
struct RotateAttendParams {
  RotateStoreParams rotate;
  std::uint32_t gated = 0;  ///< As in AttendParams, and so is `scale`.
  float scale = 0;
};

/// Where a layer's tensors lie, as one entry of the table of kLayersModule: device addresses, aligned to 16 bytes. Matrices are
/// bf16 in rows, norms f32; keys and values are the layer's pools.
struct LayerAddresses {
  std::uint64_t q = 0;
  std::uint64_t k = 0;
  std::uint64_t v = 0;
  std::uint64_t o = 0;
  std::uint64_t gate = 0;
  std::uint64_t up = 0;
  std::uint64_t down = 0;
  std::uint64_t input_norm = 0;
  std::uint64_t post_norm = 0;
  std::uint64_t keys = 0;
  std::uint64_t values = 0;
  std::uint64_t reserved[5] = {};
};
static_assert(sizeof(LayerAddresses) == 128);

/// For the kernels of kLayersModule. All elements of a head are rotated; the cache is bf16.
struct LayersParams {
  std::uint32_t num_layers = 0;
  std::uint32_t interleaved = 0;  ///< As in RotateStoreParams.
  float norm_eps = 0;
  float scale = 0;  ///< As in AttendParams.
  CacheLayout cache;
};

/// x [m, channels] in place; weight [kernel, channels]; state [slots, kernel - 1, channels], oldest first.
struct ConvParams {
  std::uint32_t m = 0;
  std::uint32_t channels = 0;
  std::uint32_t kernel = 0;
  std::uint32_t ld_x = 0;
};

/// qkv [m, 2 * num_key_heads * key_dim + num_value_heads * value_dim]; z and out [m, num_value_heads * value_dim]; a, b [m,
/// num_value_heads]; decay, dt_bias [num_value_heads]; norm [value_dim]; state [slots, num_value_heads, key_dim, value_dim].
/// Per value head, with unit-length q and k, q scaled by 1 / sqrt(key_dim), g = decay * softplus(a + dt_bias), beta = sigmoid(b):
/// S = exp(g) * S; S += k (beta * (v - k S)); o = q S; out = norm * o / rms(o) * silu(z).
struct DeltaParams {
  std::uint32_t m = 0;
  std::uint32_t num_key_heads = 0;
  std::uint32_t num_value_heads = 0;
  std::uint32_t key_dim = 0;
  std::uint32_t value_dim = 0;
  std::uint32_t tiled = 0;  ///< 1: value head h uses key head h % num_key_heads; 0: h / (num_value_heads / num_key_heads).
  std::uint32_t ld_qkv = 0;
  std::uint32_t ld_z = 0;
  std::uint32_t ld_ab = 0;
  float norm_eps = 0;
};

/// logits [rows, n], rows ld apart; ids and targets int32 [rows]; scores [rows].
struct RowsParams {
  std::uint32_t rows = 0;
  std::uint32_t n = 0;
  std::uint32_t ld = 0;
};

/// What `score` writes for each row.
struct RowScore {
  float loss = 0;         ///< -log of the target's probability.
  std::int32_t best = 0;  ///< As `argmax`.
};

}  // namespace metrale
