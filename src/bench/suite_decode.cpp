// SPDX-License-Identifier: Apache-2.0
//
// Suite decode: tokens a second of whole models, one sequence, the most likely token each time: models of random weights in
// published shapes, and one from a file as it is stored. Times are the host's and include its waits: one for as many
// tokens as the decoder makes in a replay.
#include <random>

#include <fmt/format.h>

#include "bench/profile.h"
#include "bench/suites.h"
#include "metrale/models/generator.h"
#include "metrale/models/synthetic.h"

namespace metrale::bench {
namespace {

constexpr std::uint32_t kWarmUpSteps = 8;

struct Model {
  std::string_view shape;
  Target tokens_per_second;
  Target share_of_sweep;
};

constexpr Model kModels[] = {
    {"llama-8b", {.minimum = 235, .goal = 275}, {.minimum = {}, .goal = 0.91}},
    {"smollm2-135m", {.minimum = 3'000, .goal = 6'500}, {}},
    {"hybrid-4b", {}, {.minimum = 0.75, .goal = 0.88}},
};

std::uint64_t bytes_of(DType type) { return type == DType::f32 ? 4 : 2; }

/// Bytes that one token moves at least: weights, keys and values of `tokens`, and each recurrent state read and written.
std::uint64_t step_bytes(const Decoder& decoder, std::uint64_t weight_bytes, std::uint64_t tokens) {
  const ModelConfig& c = decoder.config();
  const std::uint64_t kv_element = bytes_of(decoder.options().kv_type.value_or(DType::f32));
  const std::uint64_t kv = std::uint64_t{c.num_layers_of(LayerKind::full_attention)} * 2 * c.kv_dim() * tokens * kv_element;
  const LinearAttentionConfig& l = c.linear;
  const std::uint64_t numbers = std::uint64_t{l.key_head_dim} * l.value_dim() + std::uint64_t{l.conv_kernel} * l.conv_dim();
  const std::uint64_t state = c.num_layers_of(LayerKind::linear_attention) * numbers * sizeof(float);
  return weight_bytes + kv + 2 * state;
}

Result<double> seconds_to_append(Decoder& decoder, Sequence& sequence, std::span<const TokenId> ids, TokenId& next) {
  return host_seconds([&]() -> Result<> {
    next = METRALE_TRY(decoder.append(sequence, ids)).token;
    return {};
  });
}

/// Appends `next` and what follows it; `count` is how many choices were made, `next` the last of them.
Result<double> seconds_to_continue(Decoder& decoder, Sequence& sequence, std::uint64_t most, TokenId& next, std::uint64_t& count) {
  return host_seconds([&]() -> Result<> {
    const std::span<const TokenId> choices = METRALE_TRY(decoder.append_greedy(sequence, next, most));
    count = choices.size();
    next = choices.back();
    return {};
  });
}

struct Named {
  std::string name;
  Target tokens_per_second;
  Target share_of_sweep;
};

Result<> measure_decoder(Session& session, const Options& options, Decoder& decoder, std::uint64_t weight_bytes,
                         const Named& named) {
  const Scale& scale = session.scale();
  const std::uint32_t vocab = decoder.config().vocab_size;
  METRALE_TRY(decoder.reserve(scale.context_tokens + kWarmUpSteps + scale.decode_steps + kProfileTokens));
  std::mt19937 random(1);
  std::vector<TokenId> prompt(scale.context_tokens);
  for (TokenId& id : prompt) id = static_cast<TokenId>(random() % vocab);

  METRALE_TRY(session.warm_up());  // loading a model keeps the host busy and lets the device's clocks fall
  // A first prompt takes what is done once; the second is timed.
  double prefill = 0;
  std::optional<Sequence> sequence;
  TokenId next = 0;
  for (int pass = 0; pass < 2; ++pass) {
    sequence.reset();
    sequence.emplace(METRALE_TRY(decoder.start()));
    prefill = METRALE_TRY(seconds_to_append(decoder, *sequence, prompt, next));
  }
  Series tokens = series("Decoder::append_greedy");
  const std::uint64_t steps = kWarmUpSteps + scale.decode_steps;
  for (std::uint64_t i = 0; i < steps;) {
    std::uint64_t count = 0;
    const double seconds = METRALE_TRY(seconds_to_continue(decoder, *sequence, steps - i, next, count));
    if (i >= kWarmUpSteps) tokens.samples.push_back(static_cast<double>(count) / seconds);
    i += count;
  }

  const double seconds = 1 / tokens.summary().median;
  const std::uint64_t bytes = step_bytes(decoder, weight_bytes, scale.context_tokens + kWarmUpSteps + scale.decode_steps / 2);
  const double sweep = METRALE_TRY(session.sweep_bytes_per_second());
  const std::string what = fmt::format("{}, context {}", named.name, scale.context_tokens);
  std::vector<Row>& rows = session.report().rows;
  rows.push_back({.suite = "decode",
                  .name = what,
                  .unit = "tokens/s",
                  .ours = std::move(tokens),
                  .better = Better::larger,
                  .target = named.tokens_per_second,
                  .note = fmt::format("{:.4f} ms a token", seconds * 1e3)});
  rows.push_back({.suite = "decode",
                  .name = fmt::format("{}: bytes a token / time / sweep", named.name),
                  .unit = "share",
                  .measure = Measure::share_of_limit,
                  .figure = static_cast<double>(bytes) / seconds / sweep,
                  .better = Better::larger,
                  .target = named.share_of_sweep,
                  .note = fmt::format("{} bytes of weights, keys, values and twice the state", bytes)});
  rows.push_back({.suite = "decode",
                  .name = fmt::format("{}: prompt of {} tokens", named.name, scale.context_tokens),
                  .unit = "tokens/s",
                  .ours = Series{.name = "Decoder::append", .samples = {scale.context_tokens / prefill}},
                  .better = Better::larger});
  if (!options.profile || session.raw() == nullptr) return {};
  session.report().profiles.push_back(METRALE_TRY(profile_step(session, decoder, *sequence, named.name, seconds)));
  return {};
}

Result<> measure_shape(Session& session, const Options& options, const Model& model) {
  GpuBackend& backend = session.backend();
  const ModelConfig config = METRALE_TRY(model_shape(model.shape));
  const SyntheticModel synthetic = METRALE_TRY(make_synthetic(backend, config, DType::bf16, 1));
  const std::unique_ptr<Decoder> decoder = METRALE_TRY(synthetic.make_decoder(backend));
  // Of an embedding that is not also the head, one row is read.
  const std::uint64_t matrix = std::uint64_t{config.vocab_size} * config.hidden_size * 2;
  const std::uint64_t held = synthetic.weights->size_bytes();
  return measure_decoder(session, options, *decoder, config.tie_word_embeddings ? held : held - matrix,
                         {fmt::format("{}, bf16", model.shape), model.tokens_per_second, model.share_of_sweep});
}

Result<> measure_file(Session& session, const Options& options) {
  const auto model = METRALE_TRY(Generator::load(options.model, session.backend()));
  METRALE_TRY(measure_decoder(session, options, *model->decoder(), model->load_stats().weight_bytes,
                              {fmt::format("{}, as stored", options.model.substr(options.model.find_last_of('/') + 1)), {}, {}}));
  const Receipt receipt = model->unload();
  if (receipt.clean()) return {};
  return Error(Errc::internal, fmt::format("the unload of {} left {} bytes", options.model, receipt.balance_bytes));
}

}  // namespace

Result<> run_decode(Session& session, const Options& options) {
  METRALE_TRY(session.sweep_bytes_per_second());
  // A model that does not run is no reason to leave out the others.
  const auto note = [&](std::string_view name, const Result<>& done) {
    if (!done) session.report().failures.push_back(fmt::format("decode, {}: {}", name, done.error().to_string()));
  };
  if (session.scale().large_models) {
    for (const Model& model : kModels) {
      note(model.shape, measure_shape(session, options, model));
      METRALE_TRY(session.backend().health());
    }
  }
  if (!options.model.empty()) note(options.model, measure_file(session, options));
  return {};
}

}  // namespace metrale::bench
