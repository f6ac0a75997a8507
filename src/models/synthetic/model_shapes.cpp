// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "metrale/models/synthetic.h"

namespace metrale {
namespace {

struct Shape {
  std::string_view name;
  ModelFamily family;
  std::uint32_t vocab_size;
  std::uint32_t hidden_size;
  std::uint32_t intermediate_size;
  std::uint32_t num_layers;
  std::uint32_t attention_every;  ///< One layer in so many has attention, the last of them; the others are recurrent.
  std::uint32_t num_heads;
  std::uint32_t num_kv_heads;
  std::uint32_t head_dim;
  std::uint32_t max_position;
  float rms_norm_eps;
  bool tie_word_embeddings;
  RopeConfig rope;
  LinearAttentionConfig linear;
};

constexpr RopeConfig kLlama31Rope{.theta = 5e5,
                                  .rotary_dim = 128,
                                  .scaling = RopeScaling::llama3,
                                  .factor = 8.0,
                                  .low_freq_factor = 1.0,
                                  .high_freq_factor = 4.0,
                                  .original_max_position = 8192};
constexpr LinearAttentionConfig kDeltaNet{
    .conv_kernel = 4, .num_key_heads = 16, .num_value_heads = 32, .key_head_dim = 128, .value_head_dim = 128};

constexpr RopeConfig rope(double theta, std::uint32_t rotary_dim) { return {.theta = theta, .rotary_dim = rotary_dim}; }

using enum ModelFamily;
// clang-format off
constexpr Shape kShapes[] = {
    //name           family   vocab   hidden MLP    layers, 1 in  heads, kv dim  context eps    tied   rope           recurrent
    {"llama-8b",     llama,   128256, 4096,  14336, 32,     1,    32,    8, 128, 131072, 1e-5F, false, kLlama31Rope,  {}},
    {"smollm2-135m", llama,   49152,  576,   1536,  30,     1,    9,     3, 64,  8192,   1e-5F, true,  rope(1e5, 64), {}},
    {"hybrid-4b",    qwen3_5, 151936, 2560,  9728,  32,     4,    16,    4, 256, 262144, 1e-6F, true,  rope(1e7, 64), kDeltaNet},
};
// clang-format on

constexpr auto kNames = [] {
  std::array<std::string_view, std::size(kShapes)> names;
  std::ranges::transform(kShapes, names.begin(), &Shape::name);
  return names;
}();

ModelConfig config_of(const Shape& shape) {
  ModelConfig config;
  config.family = shape.family;
  config.vocab_size = shape.vocab_size;
  config.hidden_size = shape.hidden_size;
  config.intermediate_size = shape.intermediate_size;
  config.num_layers = shape.num_layers;
  config.num_heads = shape.num_heads;
  config.num_kv_heads = shape.num_kv_heads;
  config.head_dim = shape.head_dim;
  config.max_position = shape.max_position;
  config.rms_norm_eps = shape.rms_norm_eps;
  config.tie_word_embeddings = shape.tie_word_embeddings;
  config.rope = shape.rope;
  config.linear = shape.linear;
  for (std::uint32_t layer = 1; layer <= shape.num_layers; ++layer)
    config.layers.push_back(layer % shape.attention_every == 0 ? LayerKind::full_attention : LayerKind::linear_attention);
  return config;
}

}  // namespace

std::span<const std::string_view> model_shapes() noexcept { return kNames; }

Result<ModelConfig> model_shape(std::string_view name) {
  const auto* shape = std::ranges::find(kShapes, name, &Shape::name);
  if (shape != std::end(kShapes)) return config_of(*shape);
  return Error(Errc::not_found, fmt::format("no model shape \"{}\"; there are {}", name.substr(0, 40), fmt::join(kNames, ", ")));
}

}  // namespace metrale
