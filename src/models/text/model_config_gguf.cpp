// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <variant>

#include "core/text.h"
#include "metrale/models/model_config.h"
#include "models/text/model_config_check.h"

namespace metrale {
namespace {

using Max = ModelLimits;

// Keys of one architecture: "<architecture>.<name>".
class Keys {
 public:
  Keys(const GgufMetadata& metadata, std::string_view file, std::string architecture)
      : metadata_(metadata), file_(file), architecture_(std::move(architecture)) {}

  std::string name(std::string_view key) const { return fmt::format("{}.{}", architecture_, key); }
  bool has(std::string_view key) const { return metadata_.contains(name(key)); }
  template <class T>
  Result<T> get_or(std::string_view key, T fallback) const {
    return metadata_.get_or<T>(name(key), std::move(fallback));
  }
  Result<std::uint32_t> count(std::string_view key, std::uint32_t low, std::uint32_t high) const {
    const auto value = METRALE_TRY(metadata_.get<std::int64_t>(name(key)));
    if (value < low || value > high) return refuse(key, value, fmt::format("an integer from {} to {} is needed", low, high));
    return static_cast<std::uint32_t>(value);
  }
  Result<std::uint32_t> count_or(std::string_view key, std::uint32_t fallback, std::uint32_t low, std::uint32_t high) const {
    if (!has(key)) return fallback;
    return count(key, low, high);
  }
  template <class T>
  Error refuse(std::string_view key, const T& value, std::string_view reason, Errc code = Errc::bad_format) const {
    return Error(code, fmt::format("{}: \"{}\" is {}: {}", file_, name(key), value, reason));
  }

 private:
  const GgufMetadata& metadata_;
  std::string_view file_;
  std::string architecture_;
};

Result<ModelFamily> family_of(const std::string& architecture, std::string_view file) {
  if (architecture == "llama") return ModelFamily::llama;
  if (architecture == "qwen35") return ModelFamily::qwen3_5;
  return Error(Errc::unsupported,
               fmt::format("{}: \"general.architecture\" is {}: metrale runs llama and qwen35", file, detail::quote(architecture)));
}

Result<> read_rope(const Keys& keys, const GgufHeader& header, ModelConfig& config) {
  config.rope.theta = METRALE_TRY(keys.get_or<double>("rope.freq_base", 10000.0));
  config.rope.rotary_dim = METRALE_TRY(keys.count_or("rope.dimension_count", config.head_dim, 1, Max::kHeadDim));
  config.rope.freq_factors_in_weights = header.tensors.find("rope_freqs.weight") != nullptr;
  const auto scaling = METRALE_TRY(keys.get_or<std::string>("rope.scaling.type", "none"));
  if (scaling == "linear") {
    config.rope.scaling = RopeScaling::linear;
    config.rope.factor = METRALE_TRY(keys.get_or<double>("rope.scaling.factor", 1.0));
  } else if (scaling != "none") {
    return keys.refuse("rope.scaling.type", detail::quote(scaling), "metrale knows the rotary scalings none and linear",
                       Errc::unsupported);
  }
  return {};
}

// Layers are recurrent but for every n-th, unless the file lists them. A file may append layers that predict further tokens; they
// follow the decoder's own and are not run.
Result<> read_hybrid(const Keys& keys, const GgufMetadata& metadata, ModelConfig& config) {
  const std::uint32_t further = METRALE_TRY(keys.count_or("nextn_predict_layers", 0, 0, config.num_layers - 1));
  const std::uint32_t listed_layers = config.num_layers;
  config.num_layers -= further;
  config.layers.assign(config.num_layers, LayerKind::full_attention);
  if (const GgufValue* listed = metadata.find(keys.name("attention.recurrent_layers"))) {
    std::vector<bool> recurrent;
    if (const auto* flags = std::get_if<std::vector<bool>>(listed)) {
      recurrent = *flags;
    } else {
      for (const std::int64_t value : METRALE_TRY(metadata.ints(keys.name("attention.recurrent_layers"))))
        recurrent.push_back(value != 0);
    }
    if (recurrent.size() != listed_layers && recurrent.size() != config.num_layers)
      return keys.refuse("attention.recurrent_layers", fmt::format("a list of {}", recurrent.size()),
                         fmt::format("there are {} layers", listed_layers));
    for (std::uint32_t i = 0; i < config.num_layers; ++i) {
      if (recurrent[i]) config.layers[i] = LayerKind::linear_attention;
    }
  } else {
    const std::uint32_t interval = METRALE_TRY(keys.count_or("full_attention_interval", 4, 1, Max::kLayers));
    for (std::uint32_t i = 0; i < config.num_layers; ++i) {
      if ((i + 1) % interval != 0) config.layers[i] = LayerKind::linear_attention;
    }
  }
  config.linear.conv_kernel = METRALE_TRY(keys.count("ssm.conv_kernel", 2, Max::kConvKernel));
  config.linear.key_head_dim = METRALE_TRY(keys.count("ssm.state_size", 1, Max::kLinearHeadDim));
  config.linear.num_key_heads = METRALE_TRY(keys.count("ssm.group_count", 1, Max::kHeads));
  config.linear.num_value_heads = METRALE_TRY(keys.count("ssm.time_step_rank", 1, Max::kHeads));
  const std::uint32_t inner = METRALE_TRY(keys.count("ssm.inner_size", 1, Max::kProjection));
  if (inner % config.linear.num_value_heads != 0 || inner / config.linear.num_value_heads > Max::kLinearHeadDim)
    return keys.refuse("ssm.inner_size", inner,
                       fmt::format("{} value heads of at most {} are needed", config.linear.num_value_heads, Max::kLinearHeadDim));
  config.linear.value_head_dim = inner / config.linear.num_value_heads;
  return {};
}

Result<std::uint32_t> read_vocab_size(const Keys& keys, const GgufMetadata& metadata) {
  if (keys.has("vocab_size")) return keys.count("vocab_size", 1, Max::kVocab);
  const auto tokens = METRALE_TRY(metadata.strings("tokenizer.ggml.tokens"));
  if (tokens.empty() || tokens.size() > Max::kVocab)
    return keys.refuse("vocab_size", "absent", fmt::format("the file lists {} tokens", tokens.size()));
  return static_cast<std::uint32_t>(tokens.size());
}

Result<> read_head_dim(const Keys& keys, ModelConfig& config) {
  if (keys.has("attention.key_length")) {
    config.head_dim = METRALE_TRY(keys.count("attention.key_length", 2, Max::kHeadDim));
  } else if (config.hidden_size % config.num_heads != 0) {
    return keys.refuse("embedding_length", config.hidden_size,
                       fmt::format("without attention.key_length it must be a multiple of the {} heads", config.num_heads));
  } else {
    config.head_dim = config.hidden_size / config.num_heads;
  }
  const std::uint32_t value_length = METRALE_TRY(keys.count_or("attention.value_length", config.head_dim, 1, Max::kHeadDim));
  if (value_length != config.head_dim)
    return keys.refuse("attention.value_length", value_length,
                       fmt::format("keys have {}; metrale needs them equal", config.head_dim), Errc::unsupported);
  return {};
}

Result<ModelConfig> read(const GgufHeader& header, std::string_view file) {
  const GgufMetadata& metadata = header.metadata;
  auto architecture = METRALE_TRY(metadata.get<std::string>("general.architecture"));
  ModelConfig config;
  config.family = METRALE_TRY(family_of(architecture, file));
  config.weights = WeightFormat::gguf;
  const Keys keys(metadata, file, std::move(architecture));
  if (const auto experts = METRALE_TRY(keys.get_or<std::uint32_t>("expert_count", 0)); experts > 0)
    return keys.refuse("expert_count", experts, "metrale has no expert layers", Errc::unsupported);

  config.vocab_size = METRALE_TRY(read_vocab_size(keys, metadata));
  config.hidden_size = METRALE_TRY(keys.count("embedding_length", 1, Max::kHidden));
  config.intermediate_size = METRALE_TRY(keys.count("feed_forward_length", 1, Max::kIntermediate));
  config.num_layers = METRALE_TRY(keys.count("block_count", 1, Max::kLayers));
  config.num_heads = METRALE_TRY(keys.count("attention.head_count", 1, Max::kHeads));
  config.num_kv_heads = METRALE_TRY(keys.count_or("attention.head_count_kv", config.num_heads, 1, Max::kHeads));
  METRALE_TRY(read_head_dim(keys, config));
  config.max_position = METRALE_TRY(keys.count("context_length", 1, Max::kPositions));
  if (const auto window = METRALE_TRY(keys.get_or<std::uint64_t>("attention.sliding_window", 0));
      window != 0 && window < config.max_position)
    return keys.refuse("attention.sliding_window", window, "metrale has no sliding-window attention", Errc::unsupported);
  config.rms_norm_eps = METRALE_TRY(metadata.get<float>(keys.name("attention.layer_norm_rms_epsilon")));
  config.tie_word_embeddings = header.tensors.find("output.weight") == nullptr;
  config.attention_bias = header.tensors.find("blk.0.attn_q.bias") != nullptr;
  config.mlp_bias = header.tensors.find("blk.0.ffn_gate.bias") != nullptr;
  METRALE_TRY(read_rope(keys, header, config));
  config.layers.assign(config.num_layers, LayerKind::full_attention);
  if (config.family == ModelFamily::qwen3_5) METRALE_TRY(read_hybrid(keys, metadata, config));
  if (metadata.contains("tokenizer.ggml.eos_token_id"))
    config.eos_ids.push_back(METRALE_TRY(metadata.get<std::int32_t>("tokenizer.ggml.eos_token_id")));

  const std::string kv_heads = keys.name("attention.head_count_kv");
  const std::string head_dim = keys.name("attention.key_length");
  const std::string eps = keys.name("attention.layer_norm_rms_epsilon");
  const std::string theta = keys.name("rope.freq_base");
  const std::string rotary = keys.name("rope.dimension_count");
  const std::string factor = keys.name("rope.scaling.factor");
  const std::string layers = keys.name("attention.recurrent_layers");
  const std::string value_heads = keys.name("ssm.time_step_rank");
  const std::string value_dim = keys.name("ssm.inner_size");
  METRALE_TRY(text::check(config, {.file = file,
                                   .num_kv_heads = kv_heads,
                                   .head_dim = head_dim,
                                   .rms_norm_eps = eps,
                                   .rope_theta = theta,
                                   .rotary_dim = rotary,
                                   .rope_factor = factor,
                                   .layer_types = layers,
                                   .linear_num_value_heads = value_heads,
                                   .linear_value_head_dim = value_dim,
                                   .eos_token_id = "tokenizer.ggml.eos_token_id"}));
  return config;
}

}  // namespace

Result<ModelConfig> model_config_from_gguf(const GgufHeader& header, std::string_view file) {
  return detail::guarded(file, [&] { return read(header, file); });
}

}  // namespace metrale
