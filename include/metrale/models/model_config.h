// SPDX-License-Identifier: Apache-2.0
//
// ModelConfig: the shape of a decoder, in one form for both families and both file formats. It is read from a Hugging Face
// config.json or from GGUF metadata, and whoever holds one may trust it: every count has been checked against the limits below,
// heads divide as attention needs them to, and no product of two dimensions overflows. A plain value; any number of threads
// may read it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/gguf.h"
#include "metrale/result.h"

namespace metrale {

/// Largest values that are believed. They lie far above published models and far below what would overflow 64-bit sizes.
struct ModelLimits {
  static constexpr std::uint32_t kVocab = 0x7fff'ffff;
  static constexpr std::uint32_t kLayers = 4096;
  static constexpr std::uint32_t kHidden = 1U << 20;
  static constexpr std::uint32_t kIntermediate = 1U << 22;
  static constexpr std::uint32_t kHeads = 1U << 14;
  static constexpr std::uint32_t kHeadDim = 1U << 14;
  static constexpr std::uint32_t kProjection = 1U << 24;  ///< heads x head_dim
  static constexpr std::uint32_t kConvKernel = 64;
  static constexpr std::uint32_t kLinearHeadDim = 1024;
  static constexpr std::uint32_t kLinearState = 1U << 26;  ///< Numbers in a layer's recurrent state: key_head_dim x value_dim.
  static constexpr std::uint32_t kPositions = 0x7fff'ffff;
  static constexpr std::uint64_t kParameters = std::uint64_t{1} << 48;
  static constexpr std::uint64_t kConfigBytes = std::uint64_t{4} << 20;  ///< Longest config.json.
};

enum class ModelFamily : std::uint8_t {
  llama,    ///< LlamaForCausalLM: attention and gated MLP in every layer.
  qwen3_5,  ///< Qwen3_5ForCausalLM: gated DeltaNet layers with a gated attention layer at intervals.
};

/// Where weights come from, since the formats store some of them differently: GGUF interleaves the rotary pairs of Llama query and
/// key rows, and for Qwen3.5 holds `1 + w` for norms, `-exp(A_log)` for the decay and value heads in tiled order.
enum class WeightFormat : std::uint8_t { hugging_face, gguf };

enum class LayerKind : std::uint8_t { full_attention, linear_attention };

enum class RopeScaling : std::uint8_t {
  none,
  linear,  ///< Every frequency divided by `factor`.
  llama3,  ///< Low frequencies divided by `factor`, high ones kept, a ramp between.
};

/// Rotary position embedding of the full-attention layers.
struct RopeConfig {
  double theta = 10000.0;
  std::uint32_t rotary_dim = 0;  ///< Leading elements of a head that are rotated; even, at most head_dim.
  RopeScaling scaling = RopeScaling::none;
  double factor = 1.0;
  double low_freq_factor = 1.0;             ///< llama3 only
  double high_freq_factor = 4.0;            ///< llama3 only
  std::uint32_t original_max_position = 0;  ///< llama3 only
  /// The weights hold a tensor `rope_freqs.weight` [rotary_dim / 2] by which each frequency is to be divided (GGUF of Llama 3).
  bool freq_factors_in_weights = false;

  /// Radians per position for each rotated pair, scaling applied, [rotary_dim / 2].
  std::vector<double> inverse_frequencies() const;
};

/// Gated DeltaNet layers; all 0 in a family without them.
struct LinearAttentionConfig {
  std::uint32_t conv_kernel = 0;
  std::uint32_t num_key_heads = 0;
  std::uint32_t num_value_heads = 0;  ///< A multiple of num_key_heads.
  std::uint32_t key_head_dim = 0;
  std::uint32_t value_head_dim = 0;

  std::uint32_t key_dim() const noexcept { return num_key_heads * key_head_dim; }
  std::uint32_t value_dim() const noexcept { return num_value_heads * value_head_dim; }
  /// Channels of the convolution: queries, keys, values.
  std::uint32_t conv_dim() const noexcept { return 2 * key_dim() + value_dim(); }
};

struct ModelConfig {
  ModelFamily family = ModelFamily::llama;
  WeightFormat weights = WeightFormat::hugging_face;
  /// What precedes "layers.0…" in tensor names: "model." or, in a checkpoint that also has a vision part, "model.language_model.".
  /// Unused with GGUF.
  std::string tensor_prefix = "model.";

  std::uint32_t vocab_size = 0;
  std::uint32_t hidden_size = 0;
  std::uint32_t intermediate_size = 0;
  std::uint32_t num_layers = 0;
  std::uint32_t num_heads = 0;
  std::uint32_t num_kv_heads = 0;  ///< Divides num_heads.
  std::uint32_t head_dim = 0;      ///< Even.
  std::uint32_t max_position = 0;  ///< Tokens of context that the model was made for.
  float rms_norm_eps = 0.0F;       ///< Positive and finite.
  RopeConfig rope;
  bool tie_word_embeddings = false;  ///< The output matrix is the embedding.
  bool attention_bias = false;
  bool mlp_bias = false;
  std::vector<LayerKind> layers;  ///< [num_layers]
  LinearAttentionConfig linear;
  std::vector<std::int32_t> eos_ids;  ///< Ids that end a text, as the config names them; often empty.

  std::uint32_t query_dim() const noexcept { return num_heads * head_dim; }
  std::uint32_t kv_dim() const noexcept { return num_kv_heads * head_dim; }
  std::uint32_t num_layers_of(LayerKind kind) const noexcept;
  /// Elements of all weight matrices, vectors left out.
  std::uint64_t num_parameters() const noexcept;
};

std::string_view to_string(ModelFamily family) noexcept;
std::string_view to_string(LayerKind kind) noexcept;

/// Reads the text of a Hugging Face config.json; `file` names it in messages.
/// Errors: bad_format (no JSON, too deep, a key missing or of the wrong type, an impossible value), unsupported (an architecture,
/// layer type, activation, rotary scaling or quantisation that metrale has no code for). One line: file, key, value.
/// Threads: any.
Result<ModelConfig> parse_model_config(std::string_view json, std::string_view file);

/// Reads `config.json` of a Hugging Face folder.
/// Errors: as `parse_model_config`, and not_found, io.
Result<ModelConfig> load_model_config(const std::filesystem::path& folder);

/// Reads the metadata of a GGUF file, architecture `llama` or `qwen35`; `file` names it in messages.
/// Errors: as `parse_model_config`.
/// Source: the key names of gguf-py/gguf/constants.py in the llama.cpp repository.
Result<ModelConfig> model_config_from_gguf(const GgufHeader& header, std::string_view file);

}  // namespace metrale
