// SPDX-License-Identifier: Apache-2.0
//
// The tiny models written down as GGUF, the way its converters do it, must answer as their safetensors do: rotary pairs side by
// side, norms as 1 + w, decay as -exp(A_log), a convolution without its dimension of 1.
#include <functional>

#include "metrale/gguf.h"
#include "model_fixture.h"
#include "support/gguf_writer.h"

namespace metrale::test {
namespace {

float from_bf16(std::uint16_t bits) {
  const std::uint32_t word = static_cast<std::uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &word, 4);
  return value;
}

/// Writes tensors of a safetensors folder under other names.
class Converter {
 public:
  explicit Converter(const std::filesystem::path& folder) : file_(ok(WeightFile::open(folder))) {}

  std::vector<std::uint16_t> read(const std::string& name) const {
    const auto bytes = ok(file_->read(*ok(file_->get(name))));
    std::vector<std::uint16_t> values(bytes.size() / 2);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  void matrix(const std::string& from, const std::string& to) {
    const auto& shape = ok(file_->get(from))->shape;
    writer.tensor(to, GgufWriter::BF16, {shape[1], shape[0]}, bytes_of(read(from)));
  }
  /// Rows of each head from [2, half] to [half, 2].
  void rotary_matrix(const std::string& from, const std::string& to, std::uint32_t head_dim) {
    const auto& shape = ok(file_->get(from))->shape;
    const auto rows = read(from);
    auto permuted = rows;
    const std::size_t k = shape[1], half = head_dim / 2;
    for (std::size_t r = 0; r < shape[0]; ++r) {
      const std::size_t head = r / head_dim, side = r % head_dim / half, pair = r % half;
      std::copy_n(&rows[r * k], k, &permuted[(head * head_dim + 2 * pair + side) * k]);
    }
    writer.tensor(to, GgufWriter::BF16, {shape[1], shape[0]}, bytes_of(permuted));
  }
  void vector(const std::string& from, const std::string& to, const std::function<float(float)>& change = {},
              std::vector<std::uint64_t> dims = {}) {
    std::vector<float> values;
    for (const std::uint16_t bits : read(from)) values.push_back(change ? change(from_bf16(bits)) : from_bf16(bits));
    if (dims.empty()) dims = {values.size()};
    writer.tensor(to, GgufWriter::F32, std::move(dims), bytes_of(values));
  }

  GgufWriter writer;

 private:
  std::unique_ptr<WeightFile> file_;
};

void common_keys(GgufWriter& writer, const std::string& arch, const ModelConfig& config) {
  writer.key("general.architecture", arch)
      .key(arch + ".block_count", config.num_layers)
      .key(arch + ".embedding_length", config.hidden_size)
      .key(arch + ".feed_forward_length", config.intermediate_size)
      .key(arch + ".attention.head_count", config.num_heads)
      .key(arch + ".attention.head_count_kv", config.num_kv_heads)
      .key(arch + ".attention.key_length", config.head_dim)
      .key(arch + ".attention.value_length", config.head_dim)
      .key(arch + ".context_length", config.max_position)
      .key(arch + ".attention.layer_norm_rms_epsilon", config.rms_norm_eps)
      .key(arch + ".rope.dimension_count", config.rope.rotary_dim)
      .key(arch + ".vocab_size", config.vocab_size);
}

std::vector<std::byte> llama_gguf(const std::filesystem::path& folder, float theta, const std::vector<float>& factors) {
  const ModelConfig config = ok(load_model_config(folder));
  Converter c(folder);
  common_keys(c.writer, "llama", config);
  c.writer.key("llama.rope.freq_base", theta);
  c.matrix("model.embed_tokens.weight", "token_embd.weight");
  c.vector("model.norm.weight", "output_norm.weight");
  if (!factors.empty()) c.writer.tensor("rope_freqs.weight", GgufWriter::F32, {factors.size()}, bytes_of(factors));
  for (std::uint32_t i = 0; i < config.num_layers; ++i) {
    const std::string from = "model.layers." + std::to_string(i) + ".", to = "blk." + std::to_string(i) + ".";
    c.vector(from + "input_layernorm.weight", to + "attn_norm.weight");
    c.vector(from + "post_attention_layernorm.weight", to + "ffn_norm.weight");
    c.rotary_matrix(from + "self_attn.q_proj.weight", to + "attn_q.weight", config.head_dim);
    c.rotary_matrix(from + "self_attn.k_proj.weight", to + "attn_k.weight", config.head_dim);
    c.matrix(from + "self_attn.v_proj.weight", to + "attn_v.weight");
    c.matrix(from + "self_attn.o_proj.weight", to + "attn_output.weight");
    c.matrix(from + "mlp.gate_proj.weight", to + "ffn_gate.weight");
    c.matrix(from + "mlp.up_proj.weight", to + "ffn_up.weight");
    c.matrix(from + "mlp.down_proj.weight", to + "ffn_down.weight");
  }
  return c.writer.bytes();
}

/// With one key head, tiled and grouped order of the value heads are the same.
std::vector<std::byte> hybrid_gguf(const std::filesystem::path& folder) {
  const ModelConfig config = ok(load_model_config(folder));
  Converter c(folder);
  common_keys(c.writer, "qwen35", config);
  c.writer.key("qwen35.rope.freq_base", static_cast<float>(config.rope.theta))
      .key("qwen35.full_attention_interval", std::uint32_t{4})
      .key("qwen35.ssm.conv_kernel", config.linear.conv_kernel)
      .key("qwen35.ssm.state_size", config.linear.key_head_dim)
      .key("qwen35.ssm.group_count", config.linear.num_key_heads)
      .key("qwen35.ssm.time_step_rank", config.linear.num_value_heads)
      .key("qwen35.ssm.inner_size", config.linear.value_dim());
  const auto plus_one = [](float w) { return 1 + w; };
  c.matrix("model.embed_tokens.weight", "token_embd.weight");
  c.vector("model.norm.weight", "output_norm.weight", plus_one);
  for (std::uint32_t i = 0; i < config.num_layers; ++i) {
    const std::string from = "model.layers." + std::to_string(i) + ".", to = "blk." + std::to_string(i) + ".";
    c.vector(from + "input_layernorm.weight", to + "attn_norm.weight", plus_one);
    c.vector(from + "post_attention_layernorm.weight", to + "post_attention_norm.weight", plus_one);
    c.matrix(from + "mlp.gate_proj.weight", to + "ffn_gate.weight");
    c.matrix(from + "mlp.up_proj.weight", to + "ffn_up.weight");
    c.matrix(from + "mlp.down_proj.weight", to + "ffn_down.weight");
    if (config.layers[i] == LayerKind::full_attention) {
      c.matrix(from + "self_attn.q_proj.weight", to + "attn_q.weight");
      c.matrix(from + "self_attn.k_proj.weight", to + "attn_k.weight");
      c.matrix(from + "self_attn.v_proj.weight", to + "attn_v.weight");
      c.matrix(from + "self_attn.o_proj.weight", to + "attn_output.weight");
      c.vector(from + "self_attn.q_norm.weight", to + "attn_q_norm.weight", plus_one);
      c.vector(from + "self_attn.k_norm.weight", to + "attn_k_norm.weight", plus_one);
      continue;
    }
    c.matrix(from + "linear_attn.in_proj_qkv.weight", to + "attn_qkv.weight");
    c.matrix(from + "linear_attn.in_proj_z.weight", to + "attn_gate.weight");
    c.matrix(from + "linear_attn.in_proj_b.weight", to + "ssm_beta.weight");
    c.matrix(from + "linear_attn.in_proj_a.weight", to + "ssm_alpha.weight");
    c.matrix(from + "linear_attn.out_proj.weight", to + "ssm_out.weight");
    c.vector(from + "linear_attn.A_log", to + "ssm_a", [](float w) { return -std::exp(w); });
    c.vector(from + "linear_attn.dt_bias", to + "ssm_dt.bias");
    c.vector(from + "linear_attn.norm.weight", to + "ssm_norm.weight");
    c.vector(from + "linear_attn.conv1d.weight", to + "ssm_conv1d.weight", {},
             {config.linear.conv_kernel, config.linear.conv_dim()});
  }
  return c.writer.bytes();
}

void expect_golden_logits(const std::vector<std::byte>& gguf, const std::filesystem::path& folder) {
  const TempFolder temp;
  const std::filesystem::path path = temp / "model.gguf";
  write_file(path, gguf);
  const ModelConfig config = ok(model_config_from_gguf(ok(parse_gguf(MemorySource(gguf))), "model.gguf"));
  const auto backend = host_backend();
  LoadedModel model(*backend, path, config);
  const Golden golden(folder);
  for (int n = 0; n < Golden::kPrompts; ++n) {
    Sequence sequence = ok(model.decoder->start());
    const auto logits = ok(model.decoder->append_all_logits(sequence, golden.prompt(n)));
    EXPECT_LT(worst_row(logits, golden.logits(n), config.vocab_size), 1e-4) << "prompt " << n;
  }
  Sequence sequence = ok(model.decoder->start());
  const Decoder::Step step = ok(model.decoder->append(sequence, golden.get<TokenId>("long_ids"), StepOutput::logits));
  EXPECT_LT(relative_l2(step.logits, golden.get<float>("long_last_logits")), 1e-4);
}

TEST(GgufDecoder, LlamaWithInterleavedRotaryPairs) {
  const auto folder = model_folder("kjv-llama-2m");
  expect_golden_logits(llama_gguf(folder, 10000.0F, {}), folder);
}

TEST(GgufDecoder, FrequencyFactorsDivideTheFrequencies) {
  const auto folder = model_folder("kjv-llama-2m");
  // Frequencies of another base, brought back by factors.
  const std::vector<double> right = ok(load_model_config(folder)).rope.inverse_frequencies();
  std::vector<float> factors(right.size());
  for (std::size_t j = 0; j < right.size(); ++j)
    factors[j] = static_cast<float>(std::pow(500000.0, -static_cast<double>(j) / static_cast<double>(right.size())) / right[j]);
  expect_golden_logits(llama_gguf(folder, 500000.0F, factors), folder);
}

void expect_factors_refused(const std::vector<float>& factors, const std::vector<std::string>& parts) {
  const auto gguf = llama_gguf(model_folder("kjv-llama-2m"), 10000.0F, factors);
  const TempFolder temp;
  write_file(temp / "model.gguf", gguf);
  const ModelConfig config = ok(model_config_from_gguf(ok(parse_gguf(MemorySource(gguf))), "model.gguf"));
  const auto backend = host_backend();
  const auto file = ok(WeightFile::open(temp / "model.gguf"));
  const auto weights = ok(WeightStore::load(*backend, *file, ok(Decoder::tensors(*backend, config, *file))));
  expect_error(Decoder::create(*backend, config, *file, *weights), Errc::bad_format, parts);
}

TEST(GgufDecoder, FrequencyFactorsOfTheWrongLengthAreRefused) {
  expect_factors_refused(std::vector<float>(7, 1.0F), {"rope_freqs.weight", "[7]", "[32]"});
}

TEST(GgufDecoder, FrequencyFactorsThatDivideByNothingAreRefused) {
  for (const float wrong : {0.0F, -1.0F, HUGE_VALF, std::nanf("")}) {
    SCOPED_TRACE(wrong);
    std::vector<float> factors(32, 1.0F);
    factors[3] = wrong;
    expect_factors_refused(factors, {"model.gguf", "rope_freqs.weight holds ", "at 3"});
  }
}

TEST(GgufDecoder, HybridWithItsNormsAndDecaysFolded) {
  const auto folder = model_folder("kjv-hybrid-4m");
  expect_golden_logits(hybrid_gguf(folder), folder);
}

}  // namespace
}  // namespace metrale::test
