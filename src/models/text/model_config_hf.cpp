// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <optional>

#include "core/text.h"
#include "metrale/models/model_config.h"
#include "models/text/json_reader.h"
#include "models/text/model_config_check.h"

namespace metrale {
namespace {

using text::JsonNode;

using Max = ModelLimits;

struct Identity {
  ModelFamily family;
  bool nested;  // the decoder's part is in "text_config", beside a vision part
};

std::optional<Identity> identity_of(std::string_view name) {
  if (name == "LlamaForCausalLM" || name == "llama") return Identity{ModelFamily::llama, false};
  if (name == "Qwen3_5ForCausalLM" || name == "qwen3_5_text") return Identity{ModelFamily::qwen3_5, false};
  if (name == "Qwen3_5ForConditionalGeneration" || name == "qwen3_5") return Identity{ModelFamily::qwen3_5, true};
  return std::nullopt;
}

// "architectures" decides; configs that were saved without a model have only "model_type".
Result<Identity> identify(const JsonNode& root) {
  constexpr std::string_view kKnown = "metrale runs LlamaForCausalLM and Qwen3_5ForCausalLM";
  auto architectures = root.find("architectures");
  if (architectures) METRALE_TRY(architectures->require_array());
  const bool listed = architectures && !architectures->value().empty();
  const JsonNode node = listed ? architectures->at(0) : METRALE_TRY(root.require("model_type"));
  if (const auto identity = identity_of(METRALE_TRY(node.string()))) return *identity;
  return node.error(Errc::unsupported, kKnown);
}

Result<> read_llama3_scaling(const JsonNode& node, RopeConfig& rope) {
  rope.scaling = RopeScaling::llama3;
  rope.factor = METRALE_TRY(node.number_of("factor"));
  const JsonNode low = METRALE_TRY(node.require("low_freq_factor"));
  const JsonNode high = METRALE_TRY(node.require("high_freq_factor"));
  rope.low_freq_factor = METRALE_TRY(low.number());
  rope.high_freq_factor = METRALE_TRY(high.number());
  if (!(rope.low_freq_factor > 0.0)) return low.error(Errc::bad_format, "a positive number is needed");
  if (!(rope.high_freq_factor > rope.low_freq_factor))
    return high.error(Errc::bad_format, fmt::format("a number above low_freq_factor, {}, is needed", rope.low_freq_factor));
  rope.original_max_position = METRALE_TRY(node.count("original_max_position_embeddings", 1, Max::kPositions));
  return {};
}

// What an object says about rotary embedding; what it leaves out stays as it is.
Result<> read_rope_object(const JsonNode& node, RopeConfig& rope, double& rotated) {
  METRALE_TRY(node.require_object());
  rope.theta = METRALE_TRY(node.number_or("rope_theta", rope.theta));
  rotated = METRALE_TRY(node.number_or("partial_rotary_factor", rotated));
  const auto named = node.find("rope_type");
  const auto type = named ? named : node.find("type");
  if (!type) return {};
  const std::string_view scaling = METRALE_TRY(type->string());
  if (scaling == "llama3") return read_llama3_scaling(node, rope);
  if (scaling == "linear") {
    rope.scaling = RopeScaling::linear;
    rope.factor = METRALE_TRY(node.number_of("factor"));
    return {};
  }
  // Sections of positions for pictures and film: with text all positions are equal, which makes it the plain form.
  if (scaling != "default" && scaling != "mrope")
    return type->error(Errc::unsupported, "metrale knows the rotary scalings default, linear and llama3");
  rope.scaling = RopeScaling::none;
  return {};
}

bool same_scaling(const RopeConfig& a, const RopeConfig& b) noexcept {
  return a.scaling == b.scaling && a.factor == b.factor && a.low_freq_factor == b.low_freq_factor &&
         a.high_freq_factor == b.high_freq_factor && a.original_max_position == b.original_max_position;
}

// Newer configs hold everything in "rope_parameters", older ones in "rope_theta", "rope_scaling" and "partial_rotary_factor".
Result<> read_rope(const JsonNode& root, ModelConfig& config) {
  RopeConfig& rope = config.rope;
  rope.theta = METRALE_TRY(root.number_or("rope_theta", rope.theta));
  double rotated = METRALE_TRY(root.number_or("partial_rotary_factor", config.family == ModelFamily::qwen3_5 ? 0.25 : 1.0));
  const auto older = root.find("rope_scaling");
  if (older) METRALE_TRY(read_rope_object(*older, rope, rotated));
  if (const auto newer = root.find("rope_parameters")) {
    const RopeConfig before = rope;
    METRALE_TRY(read_rope_object(*newer, rope, rotated));
    if (older && !same_scaling(before, rope))
      return newer->error(Errc::bad_format, "\"rope_scaling\" is there as well and says otherwise; one of them must go");
  }
  if (!(rotated > 0.0) || rotated > 1.0)
    return Error(Errc::bad_format,
                 fmt::format("{}: \"partial_rotary_factor\" is {}: a number above 0, at most 1, is needed", root.file(), rotated));
  rope.rotary_dim = static_cast<std::uint32_t>(config.head_dim * rotated);
  return {};
}

Result<LayerKind> layer_kind(const JsonNode& node, ModelFamily family) {
  const std::string_view name = METRALE_TRY(node.string());
  if (name == "full_attention") return LayerKind::full_attention;
  if (name == "linear_attention" && family == ModelFamily::qwen3_5) return LayerKind::linear_attention;
  return node.error(Errc::unsupported, family == ModelFamily::qwen3_5 ? "layers are full_attention or linear_attention"
                                                                      : "layers of this family are full_attention");
}

Result<> read_layers(const JsonNode& root, ModelConfig& config) {
  if (const auto types = root.find("layer_types")) {
    METRALE_TRY(types->require_array());
    if (types->value().size() != config.num_layers)
      return types->error(Errc::bad_format, fmt::format("num_hidden_layers is {}", config.num_layers));
    for (std::size_t i = 0; i < config.num_layers; ++i)
      config.layers.push_back(METRALE_TRY(layer_kind(types->at(i), config.family)));
    return {};
  }
  config.layers.assign(config.num_layers, LayerKind::full_attention);
  if (config.family == ModelFamily::qwen3_5) {
    const std::uint32_t interval = METRALE_TRY(root.count_or("full_attention_interval", 4, 1, Max::kLayers));
    for (std::uint32_t i = 0; i < config.num_layers; ++i) {
      if ((i + 1) % interval != 0) config.layers[i] = LayerKind::linear_attention;
    }
  }
  return {};
}

Result<> read_eos(const JsonNode& root, ModelConfig& config) {
  const auto node = root.find("eos_token_id");
  if (!node) return {};
  const bool list = node->value().is_array();
  const std::size_t count = list ? node->value().size() : 1;
  if (count > 64) return node->error(Errc::bad_format, "at most 64 ids are read");
  for (std::size_t i = 0; i < count; ++i) {
    const JsonNode id = list ? node->at(i) : *node;
    config.eos_ids.push_back(static_cast<std::int32_t>(METRALE_TRY(id.integer(0, std::int64_t{config.vocab_size} - 1))));
  }
  return {};
}

Result<> read_linear(const JsonNode& root, ModelConfig& config) {
  config.linear.conv_kernel = METRALE_TRY(root.count_or("linear_conv_kernel_dim", 4, 2, Max::kConvKernel));
  config.linear.key_head_dim = METRALE_TRY(root.count_or("linear_key_head_dim", 128, 1, Max::kLinearHeadDim));
  config.linear.value_head_dim = METRALE_TRY(root.count_or("linear_value_head_dim", 128, 1, Max::kLinearHeadDim));
  config.linear.num_key_heads = METRALE_TRY(root.count("linear_num_key_heads", 1, Max::kHeads));
  config.linear.num_value_heads = METRALE_TRY(root.count("linear_num_value_heads", 1, Max::kHeads));
  return {};
}

Result<> refuse_foreign(const JsonNode& root) {
  for (const std::string_view key : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    const auto node = root.find(key);
    if (node && METRALE_TRY(node->integer(0, INT32_MAX)) > 0) return node->error(Errc::unsupported, "metrale has no expert layers");
  }
  if (const auto activation = root.find("hidden_act"); activation && METRALE_TRY(activation->string()) != "silu")
    return activation->error(Errc::unsupported, "metrale knows the activation silu");
  if (const auto gate = root.find("attn_output_gate"); gate && !METRALE_TRY(gate->flag()))
    return gate->error(Errc::unsupported, "attention of this family has an output gate");
  if (const auto quantised = root.find("quantization_config"))
    return quantised->error(Errc::unsupported, "metrale reads bfloat16, float16 and float32 checkpoints, and quantised GGUF");
  return {};
}

Result<ModelConfig> read(const JsonNode& document, std::string_view file) {
  METRALE_TRY(document.require_object());
  const Identity identity = METRALE_TRY(identify(document));
  const JsonNode root = identity.nested ? METRALE_TRY(document.require("text_config")) : document;
  METRALE_TRY(root.require_object());
  METRALE_TRY(refuse_foreign(root));

  ModelConfig config;
  config.family = identity.family;
  config.weights = WeightFormat::hugging_face;
  if (identity.nested) config.tensor_prefix = "model.language_model.";
  config.vocab_size = METRALE_TRY(root.count("vocab_size", 1, Max::kVocab));
  config.hidden_size = METRALE_TRY(root.count("hidden_size", 1, Max::kHidden));
  config.intermediate_size = METRALE_TRY(root.count("intermediate_size", 1, Max::kIntermediate));
  config.num_layers = METRALE_TRY(root.count("num_hidden_layers", 1, Max::kLayers));
  config.num_heads = METRALE_TRY(root.count("num_attention_heads", 1, Max::kHeads));
  config.num_kv_heads = METRALE_TRY(root.count_or("num_key_value_heads", config.num_heads, 1, Max::kHeads));
  if (const auto head_dim = root.find("head_dim")) {
    config.head_dim = static_cast<std::uint32_t>(METRALE_TRY(head_dim->integer(2, Max::kHeadDim)));
  } else if (config.hidden_size % config.num_heads != 0) {
    return METRALE_TRY(root.require("hidden_size"))
        .error(Errc::bad_format, fmt::format("without head_dim it must be a multiple of the {} heads", config.num_heads));
  } else {
    config.head_dim = config.hidden_size / config.num_heads;
  }
  config.max_position = METRALE_TRY(root.count_or("max_position_embeddings", 2048, 1, Max::kPositions));
  config.rms_norm_eps = static_cast<float>(METRALE_TRY(root.number_or("rms_norm_eps", 1e-6)));
  // A checkpoint with a vision part may say so at the top only.
  const bool tied_above = METRALE_TRY(document.flag_or("tie_word_embeddings", false));
  config.tie_word_embeddings = METRALE_TRY(root.flag_or("tie_word_embeddings", tied_above));
  config.attention_bias = METRALE_TRY(root.flag_or("attention_bias", false));
  config.mlp_bias = METRALE_TRY(root.flag_or("mlp_bias", false));
  METRALE_TRY(read_rope(root, config));
  METRALE_TRY(read_layers(root, config));
  METRALE_TRY(read_eos(root, config));
  if (config.family == ModelFamily::qwen3_5) METRALE_TRY(read_linear(root, config));

  METRALE_TRY(text::check(config, {.file = file,
                                   .num_kv_heads = "num_key_value_heads",
                                   .head_dim = "head_dim",
                                   .rms_norm_eps = "rms_norm_eps",
                                   .rope_theta = "rope_theta",
                                   .rotary_dim = "head_dim x partial_rotary_factor",
                                   .rope_factor = "rope_parameters.factor",
                                   .layer_types = "layer_types",
                                   .linear_num_value_heads = "linear_num_value_heads",
                                   .linear_value_head_dim = "linear_value_head_dim",
                                   .eos_token_id = "eos_token_id"}));
  return config;
}

}  // namespace

Result<ModelConfig> parse_model_config(std::string_view json, std::string_view file) {
  if (json.size() > ModelLimits::kConfigBytes)
    return Error(Errc::bad_format, fmt::format("{}: {} bytes; at most {} are read", file, json.size(), ModelLimits::kConfigBytes));
  const nlohmann::json document = METRALE_TRY(text::parse_json(json, file, {}));
  return detail::guarded(file, [&] { return read(JsonNode(document, file), file); });
}

Result<ModelConfig> load_model_config(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "config.json";
  const std::string json = METRALE_TRY(text::read_text_file(path, ModelLimits::kConfigBytes));
  return parse_model_config(json, path.string());
}

}  // namespace metrale
