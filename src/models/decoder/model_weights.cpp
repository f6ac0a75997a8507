// SPDX-License-Identifier: Apache-2.0
#include "models/decoder/model_weights.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <optional>

#include "core/release_log.h"
#include "core/text.h"
#include "models/decoder/release.h"

namespace metrale::models {
namespace {

constexpr std::string_view kFrequencyFactors = "rope_freqs.weight";

}  // namespace

void ModelWeights::matrix(std::string name, std::uint32_t n, std::uint32_t k, Matrix& to, Cut cut) {
  to.n = n;
  to.k = k;
  matrices_.push_back({std::move(name), &to, cut});
}

void ModelWeights::vector(std::string name, std::uint32_t n, WidenOp op, DevicePtr& to, Cut cut) {
  vectors_.push_back({std::move(name), {.rows = 1, .cols = n, .op = op}, &to, cut});
}

void ModelWeights::list_attention(const std::string& prefix, LayerWeights& layer) {
  const bool gguf = config_.weights == WeightFormat::gguf;
  const bool hybrid = config_.family == ModelFamily::qwen3_5;
  const auto name = [&](std::string_view hf, std::string_view ggml) {
    return gguf ? fmt::format("{}attn_{}", prefix, ggml) : fmt::format("{}self_attn.{}", prefix, hf);
  };
  AttentionWeights& a = layer.attention;
  const std::uint32_t h = config_.hidden_size;
  const std::uint32_t q_rows = hybrid ? 2 * config_.query_dim() : config_.query_dim();
  matrix(name("q_proj.weight", "q.weight"), q_rows, h, a.q, Cut::rows);
  matrix(name("k_proj.weight", "k.weight"), config_.kv_dim(), h, a.k, Cut::rows);
  matrix(name("v_proj.weight", "v.weight"), config_.kv_dim(), h, a.v, Cut::rows);
  matrix(name("o_proj.weight", "output.weight"), h, config_.query_dim(), a.o, Cut::cols);
  if (config_.attention_bias) {
    vector(name("q_proj.bias", "q.bias"), q_rows, WidenOp::copy, a.q_bias, Cut::cols);
    vector(name("k_proj.bias", "k.bias"), config_.kv_dim(), WidenOp::copy, a.k_bias, Cut::cols);
    vector(name("v_proj.bias", "v.bias"), config_.kv_dim(), WidenOp::copy, a.v_bias, Cut::cols);
    vector(name("o_proj.bias", "output.bias"), h, WidenOp::copy, a.o_bias);
  }
  if (hybrid) {
    const WidenOp around_zero = gguf ? WidenOp::copy : WidenOp::plus_one;
    vector(name("q_norm.weight", "q_norm.weight"), config_.head_dim, around_zero, a.q_norm);
    vector(name("k_norm.weight", "k_norm.weight"), config_.head_dim, around_zero, a.k_norm);
  }
}

void ModelWeights::list_linear_attention(const std::string& prefix, LayerWeights& layer) {
  const bool gguf = config_.weights == WeightFormat::gguf;
  const auto name = [&](std::string_view hf, std::string_view ggml) {
    return gguf ? prefix + std::string(ggml) : fmt::format("{}linear_attn.{}", prefix, hf);
  };
  LinearAttentionWeights& a = layer.linear;
  const LinearAttentionConfig& c = config_.linear;
  const std::uint32_t h = config_.hidden_size;
  matrix(name("in_proj_qkv.weight", "attn_qkv.weight"), c.conv_dim(), h, a.qkv);
  matrix(name("in_proj_z.weight", "attn_gate.weight"), c.value_dim(), h, a.z);
  matrix(name("in_proj_b.weight", "ssm_beta.weight"), c.num_value_heads, h, a.b);
  matrix(name("in_proj_a.weight", "ssm_alpha.weight"), c.num_value_heads, h, a.a);
  matrix(name("out_proj.weight", "ssm_out.weight"), h, c.value_dim(), a.out);
  vector(name("A_log", "ssm_a"), c.num_value_heads, gguf ? WidenOp::copy : WidenOp::negative_exp, a.decay);
  vector(name("dt_bias", "ssm_dt.bias"), c.num_value_heads, WidenOp::copy, a.dt_bias);
  vector(name("norm.weight", "ssm_norm.weight"), c.value_head_dim, WidenOp::copy, a.norm);
  vector(name("conv1d.weight", "ssm_conv1d.weight"), c.conv_kernel, WidenOp::copy, a.conv);
  vectors_.back().params.rows = c.conv_dim();
  vectors_.back().params.transpose = 1;
}

void ModelWeights::list_layer(std::uint32_t index) {
  const bool gguf = config_.weights == WeightFormat::gguf;
  const bool hybrid = config_.family == ModelFamily::qwen3_5;
  const WidenOp norm = hybrid && !gguf ? WidenOp::plus_one : WidenOp::copy;
  const std::string prefix = gguf ? fmt::format("blk.{}.", index) : fmt::format("{}layers.{}.", config_.tensor_prefix, index);
  LayerWeights& layer = layers[index];
  layer.kind = config_.layers[index];
  const std::uint32_t h = config_.hidden_size;
  vector(prefix + (gguf ? "attn_norm.weight" : "input_layernorm.weight"), h, norm, layer.input_norm);
  const char* ggml_post_norm = hybrid ? "post_attention_norm.weight" : "ffn_norm.weight";
  vector(prefix + (gguf ? ggml_post_norm : "post_attention_layernorm.weight"), h, norm, layer.post_norm);
  if (layer.kind == LayerKind::full_attention) {
    list_attention(prefix, layer);
  } else {
    list_linear_attention(prefix, layer);
  }
  matrix(prefix + (gguf ? "ffn_gate.weight" : "mlp.gate_proj.weight"), config_.intermediate_size, h, layer.gate, Cut::rows);
  matrix(prefix + (gguf ? "ffn_up.weight" : "mlp.up_proj.weight"), config_.intermediate_size, h, layer.up, Cut::rows);
  matrix(prefix + (gguf ? "ffn_down.weight" : "mlp.down_proj.weight"), h, config_.intermediate_size, layer.down, Cut::cols);
}

void ModelWeights::list() {
  const bool gguf = config_.weights == WeightFormat::gguf;
  const bool around_zero = config_.family == ModelFamily::qwen3_5 && !gguf;
  layers.resize(config_.num_layers);
  matrix(gguf ? "token_embd.weight" : config_.tensor_prefix + "embed_tokens.weight", config_.vocab_size, config_.hidden_size,
         embedding);
  for (std::uint32_t i = 0; i < config_.num_layers; ++i) list_layer(i);
  vector(gguf ? "output_norm.weight" : config_.tensor_prefix + "norm.weight", config_.hidden_size,
         around_zero ? WidenOp::plus_one : WidenOp::copy, final_norm);
  if (!config_.tie_word_embeddings)
    matrix(gguf ? "output.weight" : "lm_head.weight", config_.vocab_size, config_.hidden_size, head);
}

std::vector<TensorWant> ModelWeights::wanted(const ModelConfig& config) {
  ModelWeights weights(nullptr, config, {});
  weights.list();
  std::vector<TensorWant> wants;
  for (const MatrixWant& want : weights.matrices_) wants.push_back({want.name, {want.to->n, want.to->k}});
  for (const VectorWant& want : weights.vectors_) {
    wants.push_back({want.name, {want.params.cols}});
    if (want.params.rows != 1) wants.back().shape.insert(wants.back().shape.begin(), want.params.rows);
  }
  return wants;
}

Result<> ModelWeights::check(const WeightFile& file, const LaunchPlans& plans) {
  for (MatrixWant& want : matrices_) {
    const TensorInfo& tensor = *METRALE_TRY(file.get(want.name));
    const std::vector<std::uint64_t> shape{whole(want.to->n, want.cut == Cut::rows), whole(want.to->k, want.cut == Cut::cols)};
    if (tensor.shape != shape) {
      return Error(Errc::bad_format, fmt::format("{}: tensor {} is {}, and the configuration makes it {}", file.path().string(),
                                                 want.name, shape_text(tensor.shape), shape_text(shape)));
    }
    if (!tensor.dtype || !plans.supports(*tensor.dtype)) {
      return Error(Errc::unsupported, fmt::format("{}: tensor {} is of type {}, which the matrix kernels do not take",
                                                  file.path().string(), want.name, detail::quote(tensor.type_name)));
    }
    want.to->dtype = *tensor.dtype;
    if (const DTypeFacts& facts = dtype_facts(*tensor.dtype); want.to->k % facts.block_elements != 0) {
      return Error(Errc::unsupported,
                   fmt::format("{}: tensor {} has {} columns for each of {} ranks, and {} stores blocks of {}: take "
                               "fewer ranks",
                               file.path().string(), want.name, want.to->k, part_.ranks, facts.name, facts.block_elements));
    }
  }
  for (VectorWant& want : vectors_) {
    const TensorInfo& tensor = *METRALE_TRY(file.get(want.name));
    // A convolution may have its input channels, one in each group, as a dimension of 1.
    std::vector<std::uint64_t> dims;
    for (const std::uint64_t d : tensor.shape) {
      if (d != 1 || tensor.shape.size() == 1) dims.push_back(d);
    }
    std::vector<std::uint64_t> shape{whole(want.params.cols, want.cut != Cut::none)};
    if (want.params.rows != 1) shape.insert(shape.begin(), want.params.rows);
    std::erase_if(shape, [&](std::uint64_t d) { return d == 1 && shape.size() > 1; });
    if (dims != shape) {
      return Error(Errc::bad_format, fmt::format("{}: tensor {} is {}, and the configuration makes it {}", file.path().string(),
                                                 want.name, shape_text(tensor.shape), shape_text(shape)));
    }
    const DType type = tensor.dtype.value_or(DType::u8);
    if (type != DType::f32 && type != DType::bf16 && type != DType::f16) {
      return Error(Errc::unsupported, fmt::format("{}: tensor {} is of type {}; a vector must be f32, f16 or bf16",
                                                  file.path().string(), want.name, detail::quote(tensor.type_name)));
    }
    want.params.dtype = static_cast<std::uint32_t>(type);
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const Matrix& gate = layers[i].gate;
    const Matrix& up = layers[i].up;
    for (const Precision precision : {Precision::fast, Precision::exact}) {
      if (plans.activation_class(gate.dtype, precision) == plans.activation_class(up.dtype, precision)) continue;
      return Error(Errc::unsupported,
                   fmt::format("{}: layer {} has a gate of {} and an up matrix of {}, which cannot be multiplied together",
                               file.path().string(), i, to_string(gate.dtype), to_string(up.dtype)));
    }
  }
  return {};
}

Result<std::unique_ptr<ModelWeights>> ModelWeights::create(GpuBackend& backend, const ModelConfig& config, const WeightFile& file,
                                                           const LaunchPlans& plans, const Part& part) {
  if (config.mlp_bias) {
    return Error(Errc::unsupported, fmt::format("{}: mlp_bias is true, and the MLP kernels add no bias", file.path().string()));
  }
  std::unique_ptr<ModelWeights> weights(new ModelWeights(&backend, config, part));
  weights->list();
  METRALE_TRY(weights->check(file, plans));
  return weights;
}

std::vector<std::string> ModelWeights::names() const {
  std::vector<std::string> names;
  for (const MatrixWant& want : matrices_) names.push_back(want.name);
  for (const VectorWant& want : vectors_) names.push_back(want.name);
  return names;
}

Result<WeightPlan> ModelWeights::load_plan(const WeightFile& file) const {
  if (part_.ranks == 1) return WeightPlan::create(file, names());
  std::map<std::string_view, std::optional<TensorSlice>> wants;
  const auto part = [&](Cut cut, std::uint64_t rows, std::uint64_t cols) -> std::optional<TensorSlice> {
    if (cut == Cut::none) return std::nullopt;
    return TensorSlice{cut == Cut::rows ? part_.rank * rows : 0, rows, cut == Cut::cols ? part_.rank * cols : 0, cols};
  };
  for (const MatrixWant& want : matrices_) wants[want.name] = part(want.cut, want.to->n, want.to->k);
  for (const VectorWant& want : vectors_) wants[want.name] = part(want.cut, 1, want.params.cols);
  return WeightPlan::create(file, [&](const TensorInfo& tensor) {
    TensorChoice choice;
    const auto want = wants.find(tensor.name);
    choice.use = want == wants.end() ? TensorUse::skip : TensorUse::load;
    if (want != wants.end()) choice.slice = want->second;
    return choice;
  });
}

ModelWeights::~ModelWeights() {
  if (!arena_) return;
  if (const Result<> result = release(*backend_); !result)
    detail::log_warning_noexcept("{} not given back: {}", label(), result.error().to_string());
}

Result<std::vector<float>> ModelWeights::rotary_frequencies(const WeightFile& file) const {
  const std::vector<double> exact = config_.rope.inverse_frequencies();
  std::vector<float> factors(exact.size(), 1.0F);
  if (config_.rope.freq_factors_in_weights) {
    const TensorInfo& tensor = *METRALE_TRY(file.get(kFrequencyFactors));
    const std::vector<std::uint64_t> shape{exact.size()};
    if (tensor.shape != shape || tensor.dtype != DType::f32) {
      return Error(Errc::bad_format,
                   fmt::format("{}: tensor {} is {} of {}, and the configuration makes it {} of F32", file.path().string(),
                               kFrequencyFactors, shape_text(tensor.shape), detail::quote(tensor.type_name), shape_text(shape)));
    }
    METRALE_TRY(file.read(tensor, 0, std::as_writable_bytes(std::span(factors))));
    for (std::size_t i = 0; i < factors.size(); ++i) {
      if (factors[i] > 0.0F && std::isfinite(factors[i])) continue;
      return Error(Errc::bad_format,
                   fmt::format("{}: tensor {} holds {} at {}; frequencies are divided by it, so a positive finite "
                               "number is needed",
                               file.path().string(), kFrequencyFactors, factors[i], i));
    }
  }
  std::vector<float> frequencies(exact.size());
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const double frequency = exact[i] / static_cast<double>(factors[i]);
    // The kernels multiply it by positions, in float.
    if (!(std::abs(frequency) * config_.max_position <= std::numeric_limits<float>::max())) {
      return Error(
          Errc::bad_format,
          fmt::format("{}: rotary pair {} turns by {} a position, more than a float holds after {} of them; the rotary base "
                      "of {} or its scaling is wrong",
                      file.path().string(), i, frequency, config_.max_position, config_.rope.theta));
    }
    frequencies[i] = static_cast<float>(frequency);
  }
  return frequencies;
}

Result<> ModelWeights::bind(const WeightStore& store, const WeightFile& file, Ops& ops) {
  const std::vector<float> frequencies = METRALE_TRY(rotary_frequencies(file));
  std::uint64_t bytes = round_up(frequencies.size() * sizeof(float) + 1, kDeviceAlignment);
  for (const VectorWant& want : vectors_)
    bytes += round_up(std::uint64_t{want.params.rows} * want.params.cols * sizeof(float), kDeviceAlignment);
  arena_ = METRALE_TRY(backend_->alloc_arena(bytes));

  inverse_frequencies = arena_;
  METRALE_TRY(ops.copy_h2d(inverse_frequencies, std::as_bytes(std::span(frequencies))));
  std::uint64_t at = round_up(frequencies.size() * sizeof(float) + 1, kDeviceAlignment);
  for (const VectorWant& want : vectors_) {
    *want.to = arena_.offset(at);
    at += round_up(std::uint64_t{want.params.rows} * want.params.cols * sizeof(float), kDeviceAlignment);
    const DevicePtr from = METRALE_TRY(store.get(want.name)).ptr;
    METRALE_TRY(ops.widen(from, *want.to, want.params));
  }
  for (const MatrixWant& want : matrices_) {
    want.to->ptr = METRALE_TRY(store.get(want.name)).ptr;
    METRALE_TRY(ops.repack(*want.to));
  }
  if (config_.tie_word_embeddings) head = embedding;
  return backend_->synchronize(ops.stream());
}

Result<> ModelWeights::release(GpuBackend& backend) {
  METRALE_TRY(check_own_backend(*backend_, backend, label()));
  if (!arena_) return {};
  METRALE_TRY(backend.free_arena(arena_));
  arena_ = {};
  return {};
}

}  // namespace metrale::models
