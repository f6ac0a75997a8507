// SPDX-License-Identifier: Apache-2.0
//
// What a Decoder is made of. Regions hold everything that kernels read or write; `Context` is the part that depends on how much
// context there is room for, and is made anew by `reserve`.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "metrale/bridges/communicator.h"
#include "metrale/graph.h"
#include "metrale/models/decoder.h"
#include "metrale/pinned_buffer.h"
#include "metrale/stream.h"
#include "models/decoder/model_weights.h"
#include "models/decoder/ops.h"
#include "models/decoder/regions.h"
#include "models/decoder/release.h"

namespace metrale {

/// Activations of one chunk, [chunk_tokens, …] f32 unless said, and the states of recurrent layers.
struct DecoderActivations {
  DevicePtr hidden;        ///< [.., hidden_size], the residual stream
  DevicePtr q, k, v;       ///< attention layers
  DevicePtr mixed;         ///< what attention or delta rule gave, before the output matrix
  DevicePtr qkv, z, a, b;  ///< linear attention layers
  DevicePtr mlp;           ///< [.., intermediate_size]
  DevicePtr prepared;      ///< rows as the matrix kernels like them
  DevicePtr attend_scratch;
  DevicePtr rotary;          ///< [.., 2, pairs]
  DevicePtr logits;          ///< [logit_rows, vocab]
  DevicePtr best;            ///< int32 [1]
  DevicePtr tokens;          ///< int32 [tokens_per_replay]
  DevicePtr sample_scratch;  ///< uint64 [vocab], where several tokens are decoded at once
  DevicePtr scores;          ///< RowScore [chunk_tokens]
  DevicePtr exchange;        ///< of the kernel of all layers; null where there is none
  struct LinearState {
    DevicePtr conv;   ///< [max_sequences, conv_kernel - 1, conv_dim]
    DevicePtr delta;  ///< [max_sequences, value heads, key dim, value dim]
  };
  std::vector<LinearState> states;  ///< by linear attention layer
};

/// Bytes from the start of the step's inputs, on both sides of the copy: header, sampling (SamplingInputs and
/// double [tokens_per_replay]), block table, ids, targets.
struct StepLayout {
  std::uint64_t sampling = sizeof(StepHeader);
  std::uint64_t table = 0;
  std::uint64_t ids = 0;
  std::uint64_t targets = 0;
  std::uint64_t end = 0;
  std::uint64_t one_token_end = 0;  ///< What a step of one token copies.
};

/// Frees the captured steps, whose memory nothing else can free before.
class DecoderGraphs final : public ModelResource {
 public:
  explicit DecoderGraphs(GpuBackend& backend) noexcept : backend_(&backend) {}
  std::string_view label() const noexcept override { return "decode graphs"; }
  Result<> release(GpuBackend& backend) override {
    METRALE_TRY(models::check_own_backend(*backend_, backend, label()));
    Result<> first = token.release();
    first = models::first_failure(std::move(first), several.release());
    first = models::first_failure(std::move(first), sampled.release());
    return models::first_failure(std::move(first), logits.release());
  }
  Graph token;    ///< ends with the id
  Graph several;  ///< `tokens_per_replay` steps, each of which feeds the next; none where that is 1
  Graph sampled;  ///< the same with tokens that are drawn; made when it is first wanted
  Graph logits;   ///< ends with the id and every logit

 private:
  GpuBackend* backend_;
};

/// What the communicator took for the decoder's calls.
class DecoderRanks final : public ModelResource {
 public:
  explicit DecoderRanks(Communicator* communicator) noexcept : communicator_(communicator) {}
  std::string_view label() const noexcept override { return "collective staging"; }
  Result<> release(GpuBackend&) override { return communicator_ ? communicator_->trim() : Result<>{}; }

 private:
  Communicator* communicator_;
};

/// The cache, which `reserve` replaces, under one address.
class DecoderCache final : public ModelResource {
 public:
  std::string_view label() const noexcept override { return "kv cache"; }
  Result<> release(GpuBackend& backend) override { return cache ? cache->release(backend) : Result<>{}; }
  std::unique_ptr<PagedKvCache> cache;
};

/// Staging in pinned memory.
class DecoderStaging final : public ModelResource {
 public:
  explicit DecoderStaging(GpuBackend& backend) noexcept : backend_(&backend) {}
  std::string_view label() const noexcept override { return "step staging"; }
  Result<> release(GpuBackend& backend) override {
    METRALE_TRY(models::check_own_backend(*backend_, backend, label()));
    Result<> first = inputs.release();
    return models::first_failure(std::move(first), outputs.release());
  }
  PinnedBuffer inputs;   ///< a StepLayout
  PinnedBuffer outputs;  ///< logits [logit_rows, vocab], scores [chunk_tokens], best, tokens [tokens_per_replay]

 private:
  GpuBackend* backend_;
};

struct Decoder::Impl {
  Impl(GpuBackend& b, const ModelConfig& c, const DecoderOptions& o)
      : backend(b),
        whole(c),
        config(c),
        options(o),
        ranks(o.communicator && o.communicator->size() > 1 ? o.communicator : nullptr),
        ranks_staging(ranks),
        activation_regions(b, "activations"),
        staging(b),
        step_regions(b, "step inputs"),
        graphs(b) {}

  GpuBackend& backend;
  ModelConfig whole;
  ModelConfig config;  ///< of this rank's part
  DecoderOptions options;
  Communicator* ranks;  ///< null: the model is whole
  DecoderRanks ranks_staging;
  DecoderStats stats;

  Stream stream;
  std::optional<models::Ops> ops;
  std::unique_ptr<models::ModelWeights> weights;
  DecoderActivations act;
  models::Regions activation_regions;
  DecoderStaging staging;

  // Made by `reserve`.
  std::uint64_t context_tokens = 0;
  std::uint64_t table_entries = 0;
  StepLayout step_layout;
  DevicePtr step;
  DevicePtr layer_table;  ///< LayerAddresses [num_layers]; null without `act.exchange`
  std::vector<LayerAddresses> layer_addresses;
  models::Regions step_regions;
  DecoderCache kv;
  DecoderGraphs graphs;

  std::vector<bool> slot_taken;

  // decoder_setup.cpp
  Result<> check_options() const;
  Result<> allocate_activations();
  /// Meets the other ranks for the first time, outside captures.
  Result<> meet_ranks();
  Result<> drop_context();
  Result<> make_context(std::uint64_t tokens);
  /// Whether weights and cache are such as the kernel of all layers takes.
  bool suits_one_kernel() const;
  Result<> write_layer_table();
  Result<> capture_step(Graph& graph, StepOutput output);
  enum class Choice : std::uint8_t { greedy, sampled };
  Result<> capture_several(Graph& graph, Choice choice);

  // forward.cpp; each enqueues on `stream`
  Result<> forward(std::uint32_t m);
  Result<> all_layers();
  CacheLayout cache_layout() const;
  Result<> attention_layer(const models::LayerWeights& layer, std::uint32_t index, std::uint32_t m);
  Result<> linear_attention_layer(const models::LayerWeights& layer, std::uint32_t index, std::uint32_t m);
  Result<> mlp(const models::LayerWeights& layer, std::uint32_t m);
  /// hidden += rows · weightᵀ + bias, over all ranks.
  Result<> add_to_hidden(const models::Rows& rows, const models::Matrix& weight, DevicePtr bias);
  /// Logits of rows [first, first + count) of the chunk.
  Result<> head(std::uint32_t first, std::uint32_t count);
  /// The last row's logits and choice, copied to the host.
  Result<> finish(std::uint32_t row, StepOutput output);

  // decoder.cpp
  Result<> check_append(const Sequence& sequence, std::span<const TokenId> ids) const;
  void stage(const Sequence& sequence, std::span<const TokenId> ids, std::span<const TokenId> targets);
  void stage_sampling(Sampler& sampler);
  Result<> run_chunk(Sequence& sequence, std::span<const TokenId> ids, std::span<const TokenId> targets);
  Result<Step> run(Sequence& sequence, std::span<const TokenId> ids, StepOutput output);
  /// Checks, and takes the cache's blocks for as many tokens as are appended at once; returns how many those are.
  Result<std::uint64_t> prepare_several(Sequence& sequence, TokenId id, std::uint64_t most);
  Result<std::span<const TokenId>> run_several(Sequence& sequence, TokenId id, Graph& graph);
  Result<std::vector<float>> run_all_logits(Sequence& sequence, std::span<const TokenId> ids);
  Result<std::vector<RowScore>> run_scores(Sequence& sequence, std::span<const TokenId> ids, std::span<const TokenId> targets);
  Result<> wait();

  std::span<float> host_logits() const;
  std::span<RowScore> host_scores() const;
  std::int32_t& host_best() const;
  std::span<std::int32_t> host_tokens() const;
};

}  // namespace metrale
