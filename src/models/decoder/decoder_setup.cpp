// SPDX-License-Identifier: Apache-2.0
//
// Making and unmaking a decoder: sizes, allocation, the captured step.
#include <fmt/format.h>

#include <algorithm>

#include "core/release_log.h"
#include "metrale/models/tensor_parallel.h"
#include "models/decoder/decoder_impl.h"

namespace metrale {

using models::ModelWeights;
using models::Ops;

Result<> Decoder::Impl::check_options() const {
  const auto wrong = [](std::string text) { return Error(Errc::invalid_argument, std::move(text)); };
  if (options.chunk_tokens == 0 || options.logit_rows == 0 || options.max_sequences == 0 || options.kv_block_tokens == 0)
    return wrong("chunk_tokens, logit_rows, max_sequences and kv_block_tokens of a decoder must be 1 or more");
  if (options.chunk_tokens > (1U << 16) || options.logit_rows > options.chunk_tokens || options.max_sequences > (1U << 16)) {
    return wrong(fmt::format("chunk_tokens {} and max_sequences {} of a decoder may be 65536, and logit_rows {} a chunk at most",
                             options.chunk_tokens, options.max_sequences, options.logit_rows));
  }
  if (options.tokens_per_replay > 256)
    return wrong(fmt::format("tokens_per_replay {} of a decoder; 256 is the most", options.tokens_per_replay));
  if (options.kv_type.value_or(DType::f32) != DType::f32 && options.kv_type != DType::bf16)
    return wrong(fmt::format("the decoders keep keys and values as f32 or bf16, not {}", to_string(*options.kv_type)));
  if (config.num_layers_of(LayerKind::full_attention) == 0)
    return Error(Errc::unsupported, "a model without attention layers has nothing to cache; the decoders need one such layer");
  return {};
}

Result<> Decoder::Impl::allocate_activations() {
  const std::uint64_t m = options.chunk_tokens;
  const std::uint64_t f = sizeof(float);
  const bool gated = config.family == ModelFamily::qwen3_5;
  const LinearAttentionConfig& linear = config.linear;
  const std::uint32_t num_linear = config.num_layers_of(LayerKind::linear_attention);
  const std::uint64_t widest = std::max({config.hidden_size, config.query_dim(), config.intermediate_size, linear.value_dim()});
  models::Regions& r = activation_regions;
  r.add("hidden", m * config.hidden_size * f, act.hidden);
  r.add("q", m * config.query_dim() * (gated ? 2 : 1) * f, act.q);
  r.add("k", m * config.kv_dim() * f, act.k);
  r.add("v", m * config.kv_dim() * f, act.v);
  r.add("mixed", m * std::max(config.query_dim(), linear.value_dim()) * f, act.mixed);
  r.add("mlp", m * config.intermediate_size * f, act.mlp);
  r.add("prepared", ops->plans().prepared_bytes(options.chunk_tokens, static_cast<std::uint32_t>(widest)), act.prepared);
  r.add("rotary", m * config.rope.rotary_dim * f, act.rotary);
  const std::uint64_t scratch_bytes =
      ops->has_rotate_attend() ? ops->plans().attend_scratch_bytes(config.num_heads, config.num_kv_heads, config.head_dim) : 0;
  r.add("attend scratch", scratch_bytes, act.attend_scratch);
  r.add("logits", std::uint64_t{options.logit_rows} * config.vocab_size * f, act.logits);
  r.add("best", sizeof(std::int32_t), act.best);
  r.add("tokens", options.tokens_per_replay * sizeof(std::int32_t), act.tokens);
  if (options.tokens_per_replay > 1)
    r.add("sample scratch", std::uint64_t{config.vocab_size} * sizeof(std::uint64_t), act.sample_scratch);
  r.add("scores", m * sizeof(RowScore), act.scores);
  const std::uint64_t exchange_bytes = ops->layers_plan() ? ops->layers_plan()->exchange_bytes : 0;
  r.add("exchange", exchange_bytes, act.exchange);
  act.states.resize(num_linear);
  if (num_linear != 0) {
    r.add("qkv", m * linear.conv_dim() * f, act.qkv);
    r.add("z", m * linear.value_dim() * f, act.z);
    r.add("a", m * linear.num_value_heads * f, act.a);
    r.add("b", m * linear.num_value_heads * f, act.b);
    for (DecoderActivations::LinearState& state : act.states) {
      r.add("conv state", std::uint64_t{options.max_sequences} * (linear.conv_kernel - 1) * linear.conv_dim() * f, state.conv);
      r.add("delta state", std::uint64_t{options.max_sequences} * linear.key_head_dim * linear.value_dim() * f, state.delta);
    }
  }
  METRALE_TRY(r.allocate());
  ops->set_prepared(act.prepared);
  if (scratch_bytes != 0) METRALE_TRY(ops->clear(act.attend_scratch, scratch_bytes));
  if (exchange_bytes != 0) METRALE_TRY(ops->clear(act.exchange, exchange_bytes));
  const std::uint64_t output_bytes = std::uint64_t{options.logit_rows} * config.vocab_size * f + m * sizeof(RowScore) +
                                     (1 + options.tokens_per_replay) * sizeof(std::int32_t);
  staging.outputs = METRALE_TRY(PinnedBuffer::create(backend, output_bytes));
  return {};
}

Result<> Decoder::Impl::meet_ranks() {
  const std::uint64_t most = std::uint64_t{options.chunk_tokens} * config.hidden_size;
  // In place: what a call reads and writes is twice its memory.
  METRALE_TRY(ranks->prepare(stream.handle(), 2 * most * sizeof(float)));
  METRALE_TRY(ops->clear(act.hidden, most * sizeof(float)));
  for (const std::uint64_t count : {std::uint64_t{config.hidden_size}, most})
    METRALE_TRY(ops->all_reduce(*ranks, act.hidden, count));
  return ranks->synchronize(stream.handle());
}

Result<> Decoder::Impl::drop_context() {
  context_tokens = 0;
  METRALE_TRY(graphs.release(backend));
  METRALE_TRY(kv.release(backend));
  kv.cache.reset();
  METRALE_TRY(step_regions.release(backend));
  return staging.inputs.release();
}

bool Decoder::Impl::suits_one_kernel() const {
  if (!options.one_kernel || ranks || options.precision != Precision::fast || options.kv_type != DType::bf16) return false;
  const auto suits = [](const models::Matrix& m) { return m.dtype == DType::bf16 && m.ptr.address % 16 == 0; };
  return suits(weights->embedding) && std::ranges::all_of(weights->layers, [&](const models::LayerWeights& l) {
           const models::AttentionWeights& a = l.attention;
           return l.kind == LayerKind::full_attention && suits(a.q) && suits(a.k) && suits(a.v) && suits(a.o) && suits(l.gate) &&
                  suits(l.up) && suits(l.down);
         });
}

Result<> Decoder::Impl::write_layer_table() {
  layer_addresses.clear();
  if (!act.exchange) return {};
  for (std::uint32_t i = 0; i < config.num_layers; ++i) {
    const models::LayerWeights& l = weights->layers[i];
    layer_addresses.push_back({.q = l.attention.q.ptr.address,
                               .k = l.attention.k.ptr.address,
                               .v = l.attention.v.ptr.address,
                               .o = l.attention.o.ptr.address,
                               .gate = l.gate.ptr.address,
                               .up = l.up.ptr.address,
                               .down = l.down.ptr.address,
                               .input_norm = l.input_norm.address,
                               .post_norm = l.post_norm.address,
                               .keys = kv.cache->k_pool(i).address,
                               .values = kv.cache->v_pool(i).address});
  }
  METRALE_TRY(ops->copy_h2d(layer_table, std::as_bytes(std::span(layer_addresses))));
  // Kernels read it ahead of their wait for what came before.
  return backend.synchronize(stream.handle());
}

Result<> Decoder::Impl::make_context(std::uint64_t tokens) {
  // Every sequence may leave its last block unfilled.
  const std::uint64_t blocks = div_ceil(tokens, options.kv_block_tokens) + options.max_sequences - 1;
  if (blocks > 0x7fff'ffff) {
    return Error(Errc::out_of_range, fmt::format("{} tokens of context need {} cache blocks; make blocks of more than {} tokens",
                                                 tokens, blocks, options.kv_block_tokens));
  }
  table_entries = blocks;
  const std::uint64_t sampling_bytes =
      options.tokens_per_replay > 1 ? sizeof(SamplingInputs) + options.tokens_per_replay * sizeof(double) : 0;
  step_layout.table = step_layout.sampling + round_up(sampling_bytes, 64);
  step_layout.ids = step_layout.table + round_up(blocks * sizeof(std::int32_t), 64);
  step_layout.one_token_end = step_layout.ids + sizeof(std::int32_t);
  step_layout.targets = step_layout.ids + round_up(options.chunk_tokens * sizeof(std::int32_t), 64);
  step_layout.end = step_layout.targets + options.chunk_tokens * sizeof(std::int32_t);

  KvLayout layout = KvLayout::uniform(config.num_layers_of(LayerKind::full_attention), config.num_kv_heads, config.head_dim,
                                      *options.kv_type, options.kv_block_tokens);
  kv.cache = METRALE_TRY(PagedKvCache::create(backend, std::move(layout), static_cast<std::uint32_t>(blocks),
                                              {.poison = {}, .trace = {}, .poison_stream = stream.handle()}));
  step_regions.clear();
  step_regions.add("step", step_layout.end, step);
  step_regions.add("layer table", act.exchange ? config.num_layers * sizeof(LayerAddresses) : 0, layer_table);
  METRALE_TRY(step_regions.allocate());
  staging.inputs = METRALE_TRY(PinnedBuffer::create(backend, step_layout.end));
  METRALE_TRY(write_layer_table());
  METRALE_TRY(capture_step(graphs.token, StepOutput::token));
  METRALE_TRY(capture_step(graphs.logits, StepOutput::logits));
  if (options.tokens_per_replay > 1) METRALE_TRY(capture_several(graphs.several, Choice::greedy));
  context_tokens = tokens;
  return {};
}

Result<> Decoder::Impl::capture_step(Graph& graph, StepOutput output) {
  CaptureScope capture = METRALE_TRY(CaptureScope::begin(backend, stream.handle()));
  const std::span<const std::byte> inputs = staging.inputs.bytes().first(step_layout.one_token_end);
  METRALE_TRY(ops->copy_h2d_retained(step, inputs));
  METRALE_TRY(forward(1));
  METRALE_TRY(finish(0, output));
  graph = METRALE_TRY(capture.end());
  ++stats.graph_captures;
  return {};
}

Result<> Decoder::Impl::capture_several(Graph& graph, Choice choice) {
  CaptureScope capture = METRALE_TRY(CaptureScope::begin(backend, stream.handle()));
  METRALE_TRY(ops->copy_h2d_retained(step, staging.inputs.bytes().first(step_layout.one_token_end)));
  for (std::uint32_t i = 0; i < options.tokens_per_replay; ++i) {
    if (!act.exchange) ops->begin_step();
    METRALE_TRY(forward(1));
    METRALE_TRY(head(0, 1));
    METRALE_TRY(ops->argmax(act.logits, act.best, {.rows = 1, .n = config.vocab_size, .ld = config.vocab_size}));
    if (choice == Choice::sampled) {
      METRALE_TRY(ops->sample(act.logits, step.offset(step_layout.sampling), act.best, act.sample_scratch,
                              {.n = config.vocab_size, .draw = i}));
    }
    METRALE_TRY(ops->advance(act.best, step, step.offset(step_layout.ids), act.tokens, {.index = i}));
  }
  METRALE_TRY(ops->copy_d2h(std::as_writable_bytes(host_tokens()), act.tokens));
  graph = METRALE_TRY(capture.end());
  ++stats.graph_captures;
  return {};
}

Decoder::Decoder(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Decoder::~Decoder() {
  Impl& d = *impl_;
  const auto check = [](const Result<>& result) {
    if (!result) detail::log_warning_noexcept("a decoder could not give back what it holds: {}", result.error().to_string());
  };
  check(d.drop_context());
  check(d.activation_regions.release(d.backend));
  check(d.staging.release(d.backend));
  if (d.weights) check(d.weights->release(d.backend));
  check(d.ranks_staging.release(d.backend));
}

Result<std::vector<std::string>> Decoder::tensors(GpuBackend& backend, const ModelConfig& config, const WeightFile& file) {
  const auto plans = METRALE_TRY(models::launch_plans(backend));
  return METRALE_TRY(ModelWeights::create(backend, config, file, *plans))->names();
}

namespace {

models::Part part_for(const Communicator* communicator) {
  return communicator ? models::Part{communicator->rank(), communicator->size()} : models::Part{};
}

}  // namespace

Result<WeightPlan> Decoder::weight_plan(GpuBackend& backend, const ModelConfig& config, const WeightFile& file,
                                        const Communicator* communicator) {
  const auto plans = METRALE_TRY(models::launch_plans(backend));
  const models::Part part = part_for(communicator);
  const ModelConfig shape = METRALE_TRY(part_of_model(config, part.ranks));
  return METRALE_TRY(ModelWeights::create(backend, shape, file, *plans, part))->load_plan(file);
}

Result<std::unique_ptr<Decoder>> Decoder::create(GpuBackend& backend, const ModelConfig& config, const WeightFile& file,
                                                 const WeightStore& weights, const DecoderOptions& options) {
  std::unique_ptr<Decoder> decoder(new Decoder(std::make_unique<Impl>(backend, config, options)));
  Impl& d = *decoder->impl_;
  METRALE_TRY(d.check_options());
  if (options.communicator && &options.communicator->backend() != &backend)
    return Error(Errc::invalid_argument, "the decoder's communicator was made on another backend; make it on the decoder's own");
  const models::Part part = part_for(options.communicator);
  d.config = METRALE_TRY(part_of_model(config, part.ranks));
  d.slot_taken.resize(options.max_sequences);
  d.stream = METRALE_TRY(Stream::create(backend));
  d.ops = METRALE_TRY(Ops::create(backend, d.stream.handle(), {options.precision, options.dependent_launch}));
  if (options.tokens_per_replay == 0) d.options.tokens_per_replay = d.ops->plans().default_tokens_per_replay();
  if (!options.kv_type) d.options.kv_type = d.ops->plans().default_kv_type(options.precision);
  d.weights = METRALE_TRY(ModelWeights::create(backend, d.config, file, d.ops->plans(), part));
  METRALE_TRY(d.weights->bind(weights, file, *d.ops));
  if (d.suits_one_kernel()) METRALE_TRY(d.ops->find_layers(config));
  METRALE_TRY(d.allocate_activations());
  if (d.ranks) METRALE_TRY(d.meet_ranks());
  if (options.context_tokens != 0) METRALE_TRY(decoder->reserve(options.context_tokens));
  return decoder;
}

Result<> Decoder::reserve(std::uint64_t tokens) {
  Impl& d = *impl_;
  if (tokens <= d.context_tokens) return {};
  if (std::ranges::find(d.slot_taken, true) != d.slot_taken.end())
    return Error(Errc::busy, fmt::format("{} tokens of context asked for while a sequence holds the {} there are; end it first",
                                         tokens, d.context_tokens));
  const std::uint64_t limit = std::uint64_t{d.config.max_position} * d.options.max_sequences;
  if (tokens > limit) {
    return Error(Errc::out_of_range, fmt::format("{} tokens of context asked for; the model takes {} in each of {} sequences",
                                                 tokens, d.config.max_position, d.options.max_sequences));
  }
  METRALE_TRY(d.drop_context());
  Result<> made = d.make_context(tokens);
  if (!made) {
    if (const Result<> dropped = d.drop_context(); !dropped) detail::log_warning_noexcept("{}", dropped.error().to_string());
  }
  return made;
}

void Decoder::add_to(Teardown& teardown) {
  Impl& d = *impl_;
  if (d.ranks) teardown.add(d.ranks_staging);
  if (d.weights) teardown.add(*d.weights);
  teardown.add(d.activation_regions);
  teardown.add(d.staging);
  teardown.add(d.step_regions);
  teardown.add(d.kv);
  teardown.add(d.graphs);
}

const ModelConfig& Decoder::config() const noexcept { return impl_->whole; }
const DecoderOptions& Decoder::options() const noexcept { return impl_->options; }
bool Decoder::has_one_kernel() const noexcept { return static_cast<bool>(impl_->act.exchange); }
const DecoderStats& Decoder::stats() const noexcept { return impl_->stats; }
std::uint64_t Decoder::context_tokens() const noexcept { return impl_->context_tokens; }
const PagedKvCache* Decoder::kv_cache() const noexcept { return impl_->kv.cache.get(); }
std::uint64_t Decoder::kv_bytes() const noexcept { return impl_->kv.cache ? impl_->kv.cache->size_bytes() : 0; }
std::uint64_t Decoder::buffer_bytes() const noexcept {
  return impl_->activation_regions.size_bytes() + impl_->step_regions.size_bytes();
}

}  // namespace metrale
