// SPDX-License-Identifier: Apache-2.0
//
// The layers of a decoder, as launches for `m` tokens whose ids, positions and blocks the step's inputs hold. Also what is
// captured: no allocation, no wait, no host address but pinned ones.
#include <cmath>

#include "models/decoder/decoder_impl.h"

namespace metrale {

using models::AttentionWeights;
using models::LayerWeights;
using models::LinearAttentionWeights;
using models::Ops;
using models::Product;

CacheLayout Decoder::Impl::cache_layout() const {
  const std::uint32_t token_stride = config.kv_dim();
  return {.dtype = static_cast<std::uint32_t>(*options.kv_type),
          .block_tokens = options.kv_block_tokens,
          .block_stride = std::uint64_t{options.kv_block_tokens} * token_stride,
          .token_stride = token_stride,
          .head_stride = config.head_dim};
}

Result<> Decoder::Impl::all_layers() {
  for (const LayerAddresses& layer : layer_addresses) {
    for (const std::uint64_t address : {layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down, layer.input_norm,
                                        layer.post_norm, layer.keys, layer.values})
      METRALE_TRY(backend.capture_uses(stream.handle(), DevicePtr{address}));
  }
  return ops->layers({.table = layer_table,
                      .embedding = weights->embedding.ptr,
                      .ids = step.offset(step_layout.ids),
                      .inverse_frequencies = weights->inverse_frequencies,
                      .step = step,
                      .block_table = step.offset(step_layout.table),
                      .exchange = act.exchange,
                      .hidden = act.hidden},
                     {.num_layers = config.num_layers,
                      .interleaved = config.weights == WeightFormat::gguf,
                      .norm_eps = config.rms_norm_eps,
                      .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config.head_dim))),
                      .cache = cache_layout()});
}

Result<> Decoder::Impl::forward(std::uint32_t m) {
  if (m == 1 && act.exchange) return all_layers();
  METRALE_TRY(ops->rotary(step, weights->inverse_frequencies, act.rotary, {.m = m, .pairs = config.rope.rotary_dim / 2}));
  METRALE_TRY(ops->gather(step.offset(step_layout.ids), weights->embedding, m, act.hidden));
  std::uint32_t attention_index = 0, linear_index = 0;
  for (const LayerWeights& layer : weights->layers) {
    if (layer.kind == LayerKind::full_attention) {
      METRALE_TRY(attention_layer(layer, attention_index++, m));
    } else {
      METRALE_TRY(linear_attention_layer(layer, linear_index++, m));
    }
    METRALE_TRY(mlp(layer, m));
  }
  return {};
}

Result<> Decoder::Impl::attention_layer(const LayerWeights& layer, std::uint32_t index, std::uint32_t m) {
  const AttentionWeights& w = layer.attention;
  const Product products[] = {{&w.q, w.q_bias, {}, act.q}, {&w.k, w.k_bias, {}, act.k}, {&w.v, w.v_bias, {}, act.v}};
  METRALE_TRY(ops->linear({act.hidden, m, config.hidden_size, layer.input_norm, config.rms_norm_eps}, products));

  const bool gated = config.family == ModelFamily::qwen3_5;
  const std::uint32_t q_head_stride = gated ? 2 * config.head_dim : config.head_dim;
  const std::uint32_t token_stride = config.kv_dim();
  const CacheLayout layout = cache_layout();
  const Ops::Cache cache{kv.cache->k_pool(index), kv.cache->v_pool(index), step, step.offset(step_layout.table)};
  const RotateStoreParams rotate{.m = m,
                                 .num_heads = config.num_heads,
                                 .num_kv_heads = config.num_kv_heads,
                                 .head_dim = config.head_dim,
                                 .pairs = config.rope.rotary_dim / 2,
                                 .interleaved = config.family == ModelFamily::llama && config.weights == WeightFormat::gguf,
                                 .ld_q = config.num_heads * q_head_stride,
                                 .q_head_stride = q_head_stride,
                                 .ld_kv = token_stride,
                                 .norm_eps = config.rms_norm_eps,
                                 .cache = layout};
  const Ops::RotateStore tensors{act.q, act.k, act.v, w.q_norm, w.k_norm, act.rotary};
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config.head_dim)));
  if (m == 1 && ops->has_rotate_attend()) {
    METRALE_TRY(ops->rotate_attend(tensors, cache, act.attend_scratch, act.mixed, {rotate, gated, scale}));
  } else {
    METRALE_TRY(ops->rotate_store(tensors, cache, rotate));
    METRALE_TRY(ops->attend(act.q, cache, act.mixed,
                            {.m = m,
                             .num_heads = config.num_heads,
                             .num_kv_heads = config.num_kv_heads,
                             .head_dim = config.head_dim,
                             .ld_q = config.num_heads * q_head_stride,
                             .q_head_stride = q_head_stride,
                             .gated = gated,
                             .scale = scale,
                             .cache = layout}));
  }
  return add_to_hidden({act.mixed, m, config.query_dim(), {}, 0}, w.o, w.o_bias);
}

Result<> Decoder::Impl::linear_attention_layer(const LayerWeights& layer, std::uint32_t index, std::uint32_t m) {
  const LinearAttentionWeights& w = layer.linear;
  const LinearAttentionConfig& c = config.linear;
  const Product products[] = {{&w.qkv, {}, {}, act.qkv}, {&w.z, {}, {}, act.z}, {&w.b, {}, {}, act.b}, {&w.a, {}, {}, act.a}};
  METRALE_TRY(ops->linear({act.hidden, m, config.hidden_size, layer.input_norm, config.rms_norm_eps}, products));
  const DecoderActivations::LinearState& state = act.states[index];
  METRALE_TRY(ops->conv(act.qkv, w.conv, state.conv, step,
                        {.m = m, .channels = c.conv_dim(), .kernel = c.conv_kernel, .ld_x = c.conv_dim()}));
  METRALE_TRY(ops->delta({act.qkv, act.z, act.a, act.b, w.decay, w.dt_bias, w.norm, state.delta, step, act.mixed},
                         {.m = m,
                          .num_key_heads = c.num_key_heads,
                          .num_value_heads = c.num_value_heads,
                          .key_dim = c.key_head_dim,
                          .value_dim = c.value_head_dim,
                          .tiled = config.weights == WeightFormat::gguf,
                          .ld_qkv = c.conv_dim(),
                          .ld_z = c.value_dim(),
                          .ld_ab = c.num_value_heads,
                          .norm_eps = config.rms_norm_eps}));
  return add_to_hidden({act.mixed, m, c.value_dim(), {}, 0}, w.out, {});
}

Result<> Decoder::Impl::mlp(const LayerWeights& layer, std::uint32_t m) {
  METRALE_TRY(
      ops->swiglu({act.hidden, m, config.hidden_size, layer.post_norm, config.rms_norm_eps}, layer.gate, layer.up, act.mlp));
  return add_to_hidden({act.mlp, m, config.intermediate_size, {}, 0}, layer.down, {});
}

Result<> Decoder::Impl::add_to_hidden(const models::Rows& rows, const models::Matrix& weight, DevicePtr bias) {
  // What is there and the bias count once: one rank brings them.
  const bool first = ranks == nullptr || ranks->rank() == 0;
  const Product output{&weight, first ? bias : DevicePtr{}, first ? act.hidden : DevicePtr{}, act.hidden};
  METRALE_TRY(ops->linear(rows, {&output, 1}));
  if (ranks == nullptr) return {};
  return ops->all_reduce(*ranks, act.hidden, std::uint64_t{rows.m} * config.hidden_size);
}

Result<> Decoder::Impl::head(std::uint32_t first, std::uint32_t count) {
  const DevicePtr rows = act.hidden.offset(std::uint64_t{first} * config.hidden_size * sizeof(float));
  const Product output{&weights->head, {}, {}, act.logits};
  return ops->linear({rows, count, config.hidden_size, weights->final_norm, config.rms_norm_eps}, {&output, 1});
}

Result<> Decoder::Impl::finish(std::uint32_t row, StepOutput output) {
  METRALE_TRY(head(row, 1));
  METRALE_TRY(ops->argmax(act.logits, act.best, {.rows = 1, .n = config.vocab_size, .ld = config.vocab_size}));
  METRALE_TRY(ops->copy_d2h(std::as_writable_bytes(std::span(&host_best(), 1)), act.best));
  if (output == StepOutput::token) return {};
  const std::span<float> logits = host_logits().first(config.vocab_size);
  return ops->copy_d2h(std::as_writable_bytes(logits), act.logits);
}

}  // namespace metrale
