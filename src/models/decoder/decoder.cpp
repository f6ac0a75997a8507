// SPDX-License-Identifier: Apache-2.0
//
// Sequences, and the steps that lengthen them.
#include "metrale/models/decoder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "models/decoder/decoder_impl.h"

namespace metrale {

Sequence::Sequence(Decoder& decoder, PagedKvCache* cache, std::uint32_t slot) : decoder_(&decoder), blocks_(*cache), slot_(slot) {}

Sequence::Sequence(Sequence&& other) noexcept
    : decoder_(std::exchange(other.decoder_, nullptr)),
      blocks_(std::move(other.blocks_)),
      slot_(other.slot_),
      length_(other.length_),
      broken_(other.broken_) {}

Sequence& Sequence::operator=(Sequence&& other) noexcept {
  if (this == &other) return *this;
  close();
  decoder_ = std::exchange(other.decoder_, nullptr);
  blocks_ = std::move(other.blocks_);
  slot_ = other.slot_;
  length_ = other.length_;
  broken_ = other.broken_;
  return *this;
}

Sequence::~Sequence() { close(); }

void Sequence::close() noexcept {
  if (decoder_) decoder_->impl_->slot_taken[slot_] = false;
  decoder_ = nullptr;
}

Result<Sequence> Decoder::start() {
  Impl& d = *impl_;
  if (d.context_tokens == 0) return Error(Errc::invalid_argument, "the decoder has no context; reserve some first");
  const auto free = std::ranges::find(d.slot_taken, false);
  if (free == d.slot_taken.end()) {
    return Error(Errc::busy, fmt::format("{} sequences are alive and max_sequences is {}; end one first", d.slot_taken.size(),
                                         d.options.max_sequences));
  }
  const auto slot = static_cast<std::uint32_t>(free - d.slot_taken.begin());
  const LinearAttentionConfig& c = d.config.linear;
  for (const DecoderActivations::LinearState& state : d.act.states) {
    const std::uint64_t conv_bytes = std::uint64_t{c.conv_kernel - 1} * c.conv_dim() * sizeof(float);
    const std::uint64_t delta_bytes = std::uint64_t{c.key_head_dim} * c.value_dim() * sizeof(float);
    if (conv_bytes != 0) METRALE_TRY(d.ops->clear(state.conv.offset(slot * conv_bytes), conv_bytes));
    METRALE_TRY(d.ops->clear(state.delta.offset(slot * delta_bytes), delta_bytes));
  }
  *free = true;
  return Sequence(*this, d.kv.cache.get(), slot);
}

Result<> Decoder::Impl::check_append(const Sequence& sequence, std::span<const TokenId> ids) const {
  if (!sequence.decoder_ || sequence.decoder_->impl_.get() != this)
    return Error(Errc::invalid_argument, "the sequence belongs to another decoder, or was moved from");
  if (sequence.broken_) return Error(Errc::invalid_argument, "an earlier step of the sequence failed half-way; start a new one");
  if (ids.empty()) return Error(Errc::invalid_argument, "no token to append");
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && static_cast<std::uint32_t>(ids[i]) < config.vocab_size) continue;
    return Error(Errc::out_of_range, fmt::format("token {} at position {} is outside the vocabulary of {}", ids[i],
                                                 sequence.length_ + i, config.vocab_size));
  }
  const std::uint64_t room = std::min<std::uint64_t>(context_tokens, config.max_position);
  if (ids.size() > room - sequence.length_) {
    return Error(Errc::out_of_range,
                 fmt::format("{} tokens after {} do not fit into a context of {}; shorten the text or make more room", ids.size(),
                             sequence.length_, room));
  }
  return {};
}

void Decoder::Impl::stage(const Sequence& sequence, std::span<const TokenId> ids, std::span<const TokenId> targets) {
  std::byte* inputs = staging.inputs.bytes().data();
  const StepHeader header{.position = static_cast<std::int32_t>(sequence.length_),
                          .slot = static_cast<std::int32_t>(sequence.slot_)};
  std::memcpy(inputs, &header, sizeof(header));
  const std::span<const std::int32_t> blocks = sequence.blocks();
  std::memcpy(inputs + step_layout.table, blocks.data(), blocks.size_bytes());
  std::memcpy(inputs + step_layout.ids, ids.data(), ids.size_bytes());
  if (!targets.empty()) std::memcpy(inputs + step_layout.targets, targets.data(), targets.size_bytes());
}

void Decoder::Impl::stage_sampling(Sampler& sampler) {
  std::byte* to = staging.inputs.bytes().data() + step_layout.sampling;
  const SamplingInputs inputs{
      .inverse_temperature = sampler.inverse_temperature(), .top_p = sampler.options().top_p, .top_k = sampler.options().top_k};
  std::memcpy(to, &inputs, sizeof(inputs));
  to += sizeof(inputs);
  for (std::uint32_t i = 0; i < options.tokens_per_replay; ++i) {
    const double draw = sampler.uniform();
    std::memcpy(to + i * sizeof(draw), &draw, sizeof(draw));
  }
}

Result<> Decoder::Impl::run_chunk(Sequence& sequence, std::span<const TokenId> ids, std::span<const TokenId> targets) {
  stage(sequence, ids, targets);
  // The staging buffer is filled again while this chunk runs, so the copy must have taken it before the call returns.
  METRALE_TRY(ops->copy_h2d(step, staging.inputs.bytes()));
  METRALE_TRY(forward(static_cast<std::uint32_t>(ids.size())));
  sequence.length_ += ids.size();
  stats.tokens += ids.size();
  ++stats.prompt_chunks;
  return {};
}

Result<> Decoder::Impl::wait() {
  ++stats.waits;
  return ranks ? ranks->synchronize(stream.handle()) : backend.synchronize(stream.handle());
}

Result<Decoder::Step> Decoder::Impl::run(Sequence& sequence, std::span<const TokenId> ids, StepOutput output) {
  if (ids.size() == 1) {
    stage(sequence, ids, {});
    METRALE_TRY((output == StepOutput::token ? graphs.token : graphs.logits).launch(stream.handle()));
    ++stats.graph_replays;
    ++stats.tokens;
    ++sequence.length_;
  } else {
    std::uint32_t last = 0;
    while (!ids.empty()) {
      const std::size_t m = std::min<std::size_t>(ids.size(), options.chunk_tokens);
      METRALE_TRY(run_chunk(sequence, ids.first(m), {}));
      ids = ids.subspan(m);
      last = static_cast<std::uint32_t>(m - 1);
    }
    METRALE_TRY(finish(last, output));
  }
  METRALE_TRY(wait());
  Step result{.token = host_best(), .logits = {}};
  if (output == StepOutput::logits) result.logits = host_logits().first(config.vocab_size);
  if (result.token < 0) {
    return Error(Errc::internal,
                 fmt::format("the logits after {} tokens are not finite: the weights or a kernel are at fault", sequence.length_));
  }
  return result;
}

Result<std::span<const TokenId>> Decoder::Impl::run_several(Sequence& sequence, TokenId id, Graph& graph) {
  const std::uint32_t count = options.tokens_per_replay;
  stage(sequence, {&id, 1}, {});
  METRALE_TRY(graph.launch(stream.handle()));
  ++stats.graph_replays;
  stats.tokens += count;
  sequence.length_ += count;
  METRALE_TRY(wait());
  const std::span<const TokenId> tokens = host_tokens();
  const auto bad = std::ranges::find_if(tokens, [](TokenId token) { return token < 0; });
  if (bad == tokens.end()) return tokens;
  return Error(Errc::internal, fmt::format("the logits after {} tokens are not finite: the weights or a kernel are at fault",
                                           sequence.length_ - count + 1 + static_cast<std::uint64_t>(bad - tokens.begin())));
}

Result<std::vector<float>> Decoder::Impl::run_all_logits(Sequence& sequence, std::span<const TokenId> ids) {
  std::vector<float> logits(ids.size() * config.vocab_size);
  std::size_t done = 0;
  while (done < ids.size()) {
    const auto m = static_cast<std::uint32_t>(std::min<std::size_t>(ids.size() - done, options.chunk_tokens));
    METRALE_TRY(run_chunk(sequence, ids.subspan(done, m), {}));
    for (std::uint32_t first = 0; first < m; first += options.logit_rows) {
      const std::uint32_t count = std::min(options.logit_rows, m - first);
      METRALE_TRY(head(first, count));
      const std::span<float> rows = host_logits().first(std::size_t{count} * config.vocab_size);
      METRALE_TRY(ops->copy_d2h(std::as_writable_bytes(rows), act.logits));
      METRALE_TRY(wait());
      std::ranges::copy(rows, logits.begin() + static_cast<std::ptrdiff_t>((done + first) * config.vocab_size));
    }
    done += m;
  }
  return logits;
}

Result<std::vector<RowScore>> Decoder::Impl::run_scores(Sequence& sequence, std::span<const TokenId> ids,
                                                        std::span<const TokenId> targets) {
  std::vector<RowScore> scores(ids.size());
  std::size_t done = 0;
  while (done < ids.size()) {
    const auto m = static_cast<std::uint32_t>(std::min<std::size_t>(ids.size() - done, options.chunk_tokens));
    METRALE_TRY(run_chunk(sequence, ids.subspan(done, m), targets.subspan(done, m)));
    for (std::uint32_t first = 0; first < m; first += options.logit_rows) {
      const std::uint32_t count = std::min(options.logit_rows, m - first);
      METRALE_TRY(head(first, count));
      METRALE_TRY(ops->score(act.logits, step.offset(step_layout.targets + first * sizeof(std::int32_t)),
                             act.scores.offset(first * sizeof(RowScore)),
                             {.rows = count, .n = config.vocab_size, .ld = config.vocab_size}));
    }
    const std::span<RowScore> rows = host_scores().first(m);
    METRALE_TRY(ops->copy_d2h(std::as_writable_bytes(rows), act.scores));
    METRALE_TRY(wait());
    std::ranges::copy(rows, scores.begin() + static_cast<std::ptrdiff_t>(done));
    done += m;
  }
  return scores;
}

namespace {

/// Runs steps of a sequence, which is broken when they fail.
template <class Body>
auto guarded(bool& broken, Body&& body) {
  auto result = body();
  broken = !result;
  return result;
}

}  // namespace

Result<Decoder::Step> Decoder::append(Sequence& sequence, std::span<const TokenId> ids, StepOutput output) {
  METRALE_TRY(impl_->check_append(sequence, ids));
  METRALE_TRY(sequence.blocks_.reserve(sequence.length_ + ids.size()));
  return guarded(sequence.broken_, [&] { return impl_->run(sequence, ids, output); });
}

Result<std::uint64_t> Decoder::Impl::prepare_several(Sequence& sequence, TokenId id, std::uint64_t most) {
  METRALE_TRY(check_append(sequence, {&id, 1}));
  const std::uint64_t room = std::min<std::uint64_t>(context_tokens, config.max_position) - sequence.length_;
  const std::uint64_t several = options.tokens_per_replay;
  const std::uint64_t count = several <= std::min(most, room) ? several : 1;
  METRALE_TRY(sequence.blocks_.reserve(sequence.length_ + count));
  return count;
}

Result<std::span<const TokenId>> Decoder::append_greedy(Sequence& sequence, TokenId id, std::uint64_t most) {
  const std::uint64_t count = METRALE_TRY(impl_->prepare_several(sequence, id, most));
  return guarded(sequence.broken_, [&]() -> Result<std::span<const TokenId>> {
    if (count > 1) return impl_->run_several(sequence, id, impl_->graphs.several);
    METRALE_TRY(impl_->run(sequence, {&id, 1}, StepOutput::token));
    return std::span<const TokenId>(&impl_->host_best(), 1);
  });
}

Result<std::span<const TokenId>> Decoder::append_sampled(Sequence& sequence, TokenId id, std::uint64_t most, Sampler& sampler) {
  if (sampler.options().temperature == 0.0F) return append_greedy(sequence, id, most);
  Impl& d = *impl_;
  const std::uint64_t count = METRALE_TRY(d.prepare_several(sequence, id, most));
  if (count > 1 && !d.graphs.sampled) METRALE_TRY(d.capture_several(d.graphs.sampled, Impl::Choice::sampled));
  return guarded(sequence.broken_, [&]() -> Result<std::span<const TokenId>> {
    if (count > 1) {
      d.stage_sampling(sampler);
      return d.run_several(sequence, id, d.graphs.sampled);
    }
    const Step step = METRALE_TRY(d.run(sequence, {&id, 1}, StepOutput::logits));
    d.host_best() = METRALE_TRY(sampler.next(step.logits));
    return std::span<const TokenId>(&d.host_best(), 1);
  });
}

Result<std::vector<float>> Decoder::append_all_logits(Sequence& sequence, std::span<const TokenId> ids) {
  METRALE_TRY(impl_->check_append(sequence, ids));
  METRALE_TRY(sequence.blocks_.reserve(sequence.length_ + ids.size()));
  return guarded(sequence.broken_, [&] { return impl_->run_all_logits(sequence, ids); });
}

Result<std::vector<RowScore>> Decoder::append_scores(Sequence& sequence, std::span<const TokenId> ids,
                                                     std::span<const TokenId> targets) {
  METRALE_TRY(impl_->check_append(sequence, ids));
  if (targets.size() != ids.size())
    return Error(Errc::invalid_argument, fmt::format("{} tokens and {} targets; each token needs one", ids.size(), targets.size()));
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (targets[i] >= 0 && static_cast<std::uint32_t>(targets[i]) < impl_->config.vocab_size) continue;
    return Error(Errc::out_of_range, fmt::format("target {} of position {} is outside the vocabulary of {}", targets[i],
                                                 sequence.length_ + i, impl_->config.vocab_size));
  }
  METRALE_TRY(sequence.blocks_.reserve(sequence.length_ + ids.size()));
  return guarded(sequence.broken_, [&] { return impl_->run_scores(sequence, ids, targets); });
}

std::span<float> Decoder::Impl::host_logits() const {
  return staging.outputs.as<float>().first(std::size_t{options.logit_rows} * config.vocab_size);
}

std::span<RowScore> Decoder::Impl::host_scores() const {
  std::byte* start = staging.outputs.bytes().data() + host_logits().size_bytes();
  return {reinterpret_cast<RowScore*>(start), options.chunk_tokens};
}

std::int32_t& Decoder::Impl::host_best() const {
  return *reinterpret_cast<std::int32_t*>(staging.outputs.bytes().data() + host_logits().size_bytes() + host_scores().size_bytes());
}

std::span<std::int32_t> Decoder::Impl::host_tokens() const { return {&host_best() + 1, options.tokens_per_replay}; }

}  // namespace metrale
