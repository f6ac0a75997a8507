// SPDX-License-Identifier: Apache-2.0
//
// Decoder: a language model on a device, one token at a time or a prompt in chunks. It is written against `GpuBackend` alone and
// finds its kernels by name (matmul_kernels.h, decoder_kernels.h), so it runs wherever those are served. It holds its backend and
// the weight store by reference and owns its activations, caches, stream and graphs; nothing is allocated between two tokens. A
// decoder and its sequences belong to one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "metrale/backend.h"
#include "metrale/dtype.h"
#include "metrale/kv_cache.h"
#include "metrale/models/decoder_kernels.h"
#include "metrale/models/matmul_kernels.h"
#include "metrale/models/model_config.h"
#include "metrale/models/sampler.h"
#include "metrale/models/tokenizer.h"
#include "metrale/result.h"
#include "metrale/teardown.h"
#include "metrale/weight_file.h"
#include "metrale/weight_plan.h"
#include "metrale/weight_store.h"

namespace metrale {

class Communicator;

struct DecoderOptions {
  /// Tokens of context to make room for, in all sequences together; 0: none yet, see `Decoder::reserve`.
  std::uint64_t context_tokens = 0;
  /// Most tokens of a prompt that pass through the layers at once.
  std::uint32_t chunk_tokens = 512;
  std::uint32_t max_sequences = 1;
  /// Rows of logits that are computed at once where every position's are wanted.
  std::uint32_t logit_rows = 16;
  /// f32 or bf16. Left open: bf16 on a GPU that computes fast, f32 for exact results and on the host.
  std::optional<DType> kv_type = {};
  std::uint32_t kv_block_tokens = 16;
  Precision precision = Precision::fast;
  /// Tokens that one replay decodes in `append_greedy` and `append_sampled`. 0: what suits the backend, 1 on the host.
  std::uint32_t tokens_per_replay = 0;
  /// Let a kernel of a step start before the one ahead of it ends, where backend and kernel can. Off to compare.
  bool dependent_launch = true;
  /// Let one kernel run all layers for one token, where the backend has one for the model. Off to compare.
  bool one_kernel = true;
  /// The ranks that the model is divided among (tensor_parallel.h); null: it is whole. Every rank makes the same calls of its
  /// decoder. On the decoder's backend; outlives the decoder.
  Communicator* communicator = nullptr;
};

/// Counts since the decoder was made.
struct DecoderStats {
  std::uint64_t graph_captures = 0;
  std::uint64_t graph_replays = 0;
  std::uint64_t prompt_chunks = 0;  ///< Chunks that ran launch by launch.
  std::uint64_t tokens = 0;
  std::uint64_t waits = 0;  ///< Times the host waited for the device.
};

class Decoder;

/// One text on its way through a decoder: its blocks of the cache, its recurrent state, its length. Gives them back when it dies,
/// and must die before the decoder. Move-only.
class Sequence {
 public:
  Sequence(Sequence&& other) noexcept;
  Sequence& operator=(Sequence&& other) noexcept;
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;
  ~Sequence();

  /// Tokens so far.
  std::uint64_t length() const noexcept { return length_; }
  /// The blocks of the cache that hold them, in order.
  std::span<const std::int32_t> blocks() const noexcept { return blocks_.blocks(); }

 private:
  friend class Decoder;
  Sequence(Decoder& decoder, PagedKvCache* cache, std::uint32_t slot);
  void close() noexcept;

  Decoder* decoder_;
  BlockTable blocks_;
  std::uint32_t slot_;
  std::uint64_t length_ = 0;
  bool broken_ = false;  // a step failed half-way: what the caches hold is unknown
};

/// What a step gives of the last token.
enum class StepOutput : std::uint8_t {
  token,   ///< The largest logit's id, found on the device: four bytes come back.
  logits,  ///< That and every logit.
};

class Decoder {
 public:
  /// The result of a step. `logits` is empty unless wanted, and valid until the decoder's next call.
  struct Step {
    TokenId token = 0;
    std::span<const float> logits;
  };

  /// The tensors that a decoder of `config` needs, for `WeightStore` to load no others.
  /// Errors: not_found (the file lacks one: names it), bad_format (a shape that differs from the configuration's),
  ///   unsupported (a type).
  static Result<std::vector<std::string>> tensors(GpuBackend& backend, const ModelConfig& config, const WeightFile& file);

  /// What a rank's store is to load: the same tensors, and of divided ones the rank's part. Null: as `tensors`.
  /// Lifetime: the file outlives the plan. Errors: as `tensors` and `part_of_model`; unsupported (a quantised matrix whose blocks
  ///   the ranks would cut).
  static Result<WeightPlan> weight_plan(GpuBackend& backend, const ModelConfig& config, const WeightFile& file,
                                        const Communicator* communicator);

  /// Makes a decoder of weights that were loaded from `file`. Matrices are put into the kernels' order in place: a store
  /// serves one decoder.
  /// Lifetime: backend and store outlive the decoder; the file may go.
  /// Errors: as `tensors` and `part_of_model`; invalid_argument (the options); not_found (the backend lacks a kernel), unsupported
  ///   (it has no decoder kernels), otherwise as `GpuBackend::alloc`. Everything is given back.
  static Result<std::unique_ptr<Decoder>> create(GpuBackend& backend, const ModelConfig& config, const WeightFile& file,
                                                 const WeightStore& weights, const DecoderOptions& options = {});
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;
  /// Releases what is left; failures are logged.
  ~Decoder();

  /// Makes room for `tokens` of context in place of what there was, and captures the decode step anew. A no-op when there
  /// is room enough.
  /// Errors: busy (a sequence is alive), out_of_range (beyond the model's own limit), otherwise as `GpuBackend::alloc`:
  ///   no room then.
  Result<> reserve(std::uint64_t tokens);
  /// Tokens that there is room for.
  std::uint64_t context_tokens() const noexcept;

  /// Starts an empty sequence. Errors: busy (max_sequences are alive), invalid_argument (nothing is reserved).
  Result<Sequence> start();

  /// Appends `ids`, one or more, to a sequence, and returns the model's choice of the next token. One token replays the captured
  /// step; more run in chunks. Waits for the device once.
  /// Errors: invalid_argument (no ids, a sequence of another decoder or one that failed before), out_of_range (an id outside the
  ///   vocabulary, more tokens than there is context), out_of_memory (other sequences hold the blocks): the sequence is as before;
  ///   internal (the logits are not finite), otherwise those of the backend: the sequence can only be dropped then.
  Result<Step> append(Sequence& sequence, std::span<const TokenId> ids, StepOutput output = StepOutput::token);

  /// Appends `id`, then the model's own choices one after the other, and returns the choices: `tokens_per_replay` of them where so
  /// many are allowed by `most` and by the context, else one. The last is not appended yet; give it to the next call. Waits for the
  /// device once. A choice that ends the text is found by the caller, and what follows it is to be dropped with the sequence.
  /// Lifetime: the choices are valid until the decoder's next call.
  /// Errors: as `append`.
  Result<std::span<const TokenId>> append_greedy(Sequence& sequence, TokenId id, std::uint64_t most);

  /// As `append_greedy`, with choices that `sampler` draws as its `next` would, on the device where several are made at once.
  Result<std::span<const TokenId>> append_sampled(Sequence& sequence, TokenId id, std::uint64_t most, Sampler& sampler);

  /// Appends `ids` and returns every position's logits, [ids.size(), vocab], finite or not. Waits once for every `logit_rows`
  /// rows. Errors: as `append`, but for internal.
  Result<std::vector<float>> append_all_logits(Sequence& sequence, std::span<const TokenId> ids);

  /// Appends `ids` and scores each position's logits against `targets`, one for each id; `best` is -1 where they are not finite.
  /// Waits once for a chunk.
  /// Errors: as `append`, but for internal; also invalid_argument (sizes differ), out_of_range (a target outside the vocabulary).
  Result<std::vector<RowScore>> append_scores(Sequence& sequence, std::span<const TokenId> ids, std::span<const TokenId> targets);

  /// Of the whole model, also where a rank holds a part of it.
  const ModelConfig& config() const noexcept;
  /// Whether one kernel runs all layers for one token.
  bool has_one_kernel() const noexcept;
  /// With `kv_type` and `tokens_per_replay` decided.
  const DecoderOptions& options() const noexcept;
  const DecoderStats& stats() const noexcept;
  /// The cache of the attention layers, in their order; null before `reserve`.
  const PagedKvCache* kv_cache() const noexcept;
  /// Its size, 0 where there is none.
  std::uint64_t kv_bytes() const noexcept;
  /// Bytes of activations, step inputs and recurrent states.
  std::uint64_t buffer_bytes() const noexcept;

  /// Hands the decoder's resources to `teardown`, which releases graphs, cache, buffers and widened weights in this order.
  /// Lifetime: the decoder outlives `teardown.run()`; every call fails afterwards.
  void add_to(Teardown& teardown);

 private:
  friend class Sequence;
  struct Impl;
  explicit Decoder(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace metrale
