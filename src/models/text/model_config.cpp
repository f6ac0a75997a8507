// SPDX-License-Identifier: Apache-2.0
#include "metrale/models/model_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/text.h"
#include "models/text/model_config_check.h"

namespace metrale {

std::string_view to_string(ModelFamily family) noexcept { return family == ModelFamily::llama ? "llama" : "qwen3_5"; }

std::string_view to_string(LayerKind kind) noexcept {
  return kind == LayerKind::full_attention ? "full_attention" : "linear_attention";
}

std::vector<double> RopeConfig::inverse_frequencies() const {
  std::vector<double> frequencies(rotary_dim / 2);
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    double frequency = std::pow(theta, -2.0 * static_cast<double>(i) / rotary_dim);
    if (scaling == RopeScaling::linear) {
      frequency /= factor;
    } else if (scaling == RopeScaling::llama3) {
      // How often the pair turns within the context of the original training decides how far it is stretched.
      const double turns = original_max_position * frequency / (2.0 * std::numbers::pi);
      const double keep = std::clamp((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0);
      frequency = (1.0 - keep) * frequency / factor + keep * frequency;
    }
    frequencies[i] = frequency;
  }
  return frequencies;
}

std::uint32_t ModelConfig::num_layers_of(LayerKind kind) const noexcept {
  return static_cast<std::uint32_t>(std::count(layers.begin(), layers.end(), kind));
}

std::uint64_t ModelConfig::num_parameters() const noexcept {
  // The limits keep each term below 2^62, and check() has bounded the sum.
  const std::uint64_t hidden = hidden_size;
  const std::uint64_t gate = family == ModelFamily::qwen3_5 ? 2 : 1;  // the query projection also makes the output gate
  const std::uint64_t attention = hidden * ((gate + 1) * query_dim() + 2 * std::uint64_t{kv_dim()});
  const std::uint64_t delta = hidden * (std::uint64_t{linear.conv_dim()} + 2 * std::uint64_t{linear.value_dim()} +
                                        2 * std::uint64_t{linear.num_value_heads}) +
                              std::uint64_t{linear.conv_dim()} * linear.conv_kernel;
  const std::uint64_t mlp = 3 * hidden * intermediate_size;
  const std::uint64_t embeddings = (tie_word_embeddings ? 1 : 2) * hidden * vocab_size;
  return embeddings + num_layers * mlp + num_layers_of(LayerKind::full_attention) * attention +
         num_layers_of(LayerKind::linear_attention) * delta;
}

namespace text {

Result<> check(const ModelConfig& config, const ConfigNames& names) {
  const auto refuse = [&](std::string_view key, auto value, std::string_view reason) {
    return Error(Errc::bad_format, fmt::format("{}: \"{}\" is {}: {}", names.file, key, value, reason));
  };
  if (config.num_heads % config.num_kv_heads != 0)
    return refuse(names.num_kv_heads, config.num_kv_heads, fmt::format("it must divide the {} query heads", config.num_heads));
  if (config.head_dim % 2 != 0) return refuse(names.head_dim, config.head_dim, "rotary embedding needs an even size");
  if (std::uint64_t{config.num_heads} * config.head_dim > ModelLimits::kProjection)
    return refuse(names.head_dim, config.head_dim,
                  fmt::format("{} heads of this size exceed {}", config.num_heads, ModelLimits::kProjection));
  if (!(config.rms_norm_eps > 0.0F) || !std::isfinite(config.rms_norm_eps))
    return refuse(names.rms_norm_eps, config.rms_norm_eps, "a positive finite number is needed");
  const RopeConfig& rope = config.rope;
  if (!(rope.theta > 0.0) || !std::isfinite(rope.theta))
    return refuse(names.rope_theta, rope.theta, "a positive finite number is needed");
  if (rope.rotary_dim == 0 || rope.rotary_dim % 2 != 0 || rope.rotary_dim > config.head_dim)
    return refuse(names.rotary_dim, rope.rotary_dim,
                  fmt::format("the rotated part of a head must be even, positive and at most {}", config.head_dim));
  if (rope.scaling != RopeScaling::none && (!(rope.factor > 0.0) || !std::isfinite(rope.factor)))
    return refuse(names.rope_factor, rope.factor, "a positive finite number is needed");
  if (config.layers.size() != config.num_layers)
    return refuse(names.layer_types, fmt::format("a list of {}", config.layers.size()),
                  fmt::format("there are {} layers", config.num_layers));
  if (config.family == ModelFamily::qwen3_5) {
    const LinearAttentionConfig& linear = config.linear;
    if (linear.num_value_heads % linear.num_key_heads != 0)
      return refuse(names.linear_num_value_heads, linear.num_value_heads,
                    fmt::format("it must be a multiple of the {} key heads", linear.num_key_heads));
    // Head sizes are bounded such that no projection exceeds kProjection.
    static_assert(std::uint64_t{ModelLimits::kHeads} * ModelLimits::kLinearHeadDim <= ModelLimits::kProjection);
    if (std::uint64_t{linear.key_head_dim} * linear.value_dim() > ModelLimits::kLinearState)
      return refuse(names.linear_value_head_dim, linear.value_head_dim,
                    fmt::format("{} heads of this size over keys of {} make a state of more than {} numbers",
                                linear.num_value_heads, linear.key_head_dim, ModelLimits::kLinearState));
  }
  if (const std::uint64_t parameters = config.num_parameters(); parameters > ModelLimits::kParameters)
    return Error(Errc::bad_format, fmt::format("{}: its shapes make {} parameters; at most {} are believed", names.file, parameters,
                                               ModelLimits::kParameters));
  for (const std::int32_t id : config.eos_ids) {
    if (id < 0 || static_cast<std::uint32_t>(id) >= config.vocab_size)
      return refuse(names.eos_token_id, id, fmt::format("the vocabulary has {} tokens", config.vocab_size));
  }
  return {};
}

}  // namespace text
}  // namespace metrale
