// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>

#include "metrale/models/synthetic.h"

namespace metrale {
namespace {

constexpr std::array<std::string_view, 3> kNames{"llama-8b", "smollm2-135m", "hybrid-4b"};

ModelConfig llama_8b() {
  ModelConfig c;
  c.vocab_size = 128256;
  c.hidden_size = 4096;
  c.intermediate_size = 14336;
  c.num_layers = 32;
  c.num_heads = 32;
  c.num_kv_heads = 8;
  c.head_dim = 128;
  c.max_position = 131072;
  c.rms_norm_eps = 1e-5F;
  c.rope = {.theta = 500000.0,
            .rotary_dim = 128,
            .scaling = RopeScaling::llama3,
            .factor = 8.0,
            .low_freq_factor = 1.0,
            .high_freq_factor = 4.0,
            .original_max_position = 8192};
  c.layers.assign(c.num_layers, LayerKind::full_attention);
  return c;
}

ModelConfig smollm2_135m() {
  ModelConfig c;
  c.vocab_size = 49152;
  c.hidden_size = 576;
  c.intermediate_size = 1536;
  c.num_layers = 30;
  c.num_heads = 9;
  c.num_kv_heads = 3;
  c.head_dim = 64;
  c.max_position = 8192;
  c.rms_norm_eps = 1e-5F;
  c.rope.theta = 100000.0;
  c.rope.rotary_dim = 64;
  c.tie_word_embeddings = true;
  c.layers.assign(c.num_layers, LayerKind::full_attention);
  return c;
}

ModelConfig hybrid_4b() {
  ModelConfig c;
  c.family = ModelFamily::qwen3_5;
  c.vocab_size = 151936;
  c.hidden_size = 2560;
  c.intermediate_size = 9728;
  c.num_layers = 32;
  c.num_heads = 16;
  c.num_kv_heads = 4;
  c.head_dim = 256;
  c.max_position = 262144;
  c.rms_norm_eps = 1e-6F;
  c.rope.theta = 10000000.0;
  c.rope.rotary_dim = 64;
  c.tie_word_embeddings = true;
  for (std::uint32_t i = 0; i < c.num_layers; ++i)
    c.layers.push_back(i % 4 == 3 ? LayerKind::full_attention : LayerKind::linear_attention);
  c.linear = {.conv_kernel = 4, .num_key_heads = 16, .num_value_heads = 32, .key_head_dim = 128, .value_head_dim = 128};
  return c;
}

}  // namespace

std::span<const std::string_view> model_shapes() noexcept { return kNames; }

Result<ModelConfig> model_shape(std::string_view name) {
  if (name == kNames[0]) return llama_8b();
  if (name == kNames[1]) return smollm2_135m();
  if (name == kNames[2]) return hybrid_4b();
  return Error(Errc::not_found, fmt::format("no model shape \"{}\"; there are {}", name.substr(0, 40), fmt::join(kNames, ", ")));
}

}  // namespace metrale
