// SPDX-License-Identifier: Apache-2.0
//
// Generator: a model from its files to text. It loads configuration, tokenizer and weights from a GGUF file or a Hugging Face
// folder, drives a Decoder, samples, and unloads with a receipt. It holds the backend by reference. One thread at a time; a
// cancellation flag may be set from any, also from a signal handler.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/backend.h"
#include "metrale/models/chat_template.h"
#include "metrale/models/decoder.h"
#include "metrale/models/model_config.h"
#include "metrale/models/sampler.h"
#include "metrale/models/tokenizer.h"
#include "metrale/result.h"
#include "metrale/teardown.h"

namespace metrale {

struct GeneratorOptions {
  /// Most tokens that the model reads: the prompt, and the answer without its last. 0: what the model was made for. Room is made
  /// as requests need it, so a large limit costs nothing by itself.
  std::uint64_t max_context_tokens = 0;
  /// `context_tokens` is ignored.
  DecoderOptions decoder = {};
  /// How far `unload` goes: `model` leaves the backend as it is, for others that live on it.
  TeardownExtent extent = TeardownExtent::model;
};

/// What loading cost.
struct LoadStats {
  std::uint64_t file_bytes = 0;    ///< Of the weight files.
  std::uint64_t weight_bytes = 0;  ///< Of the tensors that were loaded.
  double seconds = 0;              ///< Everything: headers, tokenizer, weights, packing.
  double weight_seconds = 0;       ///< Reading the tensors alone.
};

enum class StopReason : std::uint8_t {
  end_of_text,   ///< The model ended the text or its turn.
  max_tokens,    ///< The request's limit.
  context_full,  ///< No room for another token.
  cancelled,
};
std::string_view to_string(StopReason reason) noexcept;

struct GenerateRequest {
  std::string prompt = {};
  /// Put the prompt into the model's chat template, as the user's message.
  bool chat = false;
  Thinking thinking = Thinking::by_template;
  std::uint32_t max_tokens = 256;
  SamplerOptions sampling = {};
  /// Set to stop after the token, or the chunk of a long prompt, that is being computed. Outlives the call.
  const std::atomic<bool>* cancel = nullptr;
  /// The same as a question, asked before each token and each chunk of a long prompt; may be empty.
  std::function<bool()> cancelled = {};
};

struct GenerateStats {
  std::uint64_t prompt_tokens = 0;     ///< Fewer than the prompt has when it was cancelled while they were read.
  std::uint64_t generated_tokens = 0;  ///< The token that ended the text included.
  double prefill_seconds = 0;          ///< From the request to the first token.
  double decode_seconds = 0;           ///< For every token after the first.
  std::uint64_t kv_bytes = 0;
  std::uint64_t buffer_bytes = 0;
  /// Most memory the process has had resident so far; 0 where the system does not tell.
  std::uint64_t peak_resident_bytes = 0;

  double prefill_tokens_per_second() const noexcept { return prefill_seconds > 0 ? prompt_tokens / prefill_seconds : 0; }
  double decode_tokens_per_second() const noexcept {
    return decode_seconds > 0 && generated_tokens > 1 ? (generated_tokens - 1) / decode_seconds : 0;
  }
};

struct Generation {
  std::vector<TokenId> prompt_ids;
  std::vector<TokenId> ids;  ///< What was generated, without the token that ended the text.
  std::string text;
  StopReason stop = StopReason::max_tokens;
  GenerateStats stats;
};

class Generator {
 public:
  /// Called with each piece of text as it is complete; never with an empty one.
  using OnText = std::function<void(std::string_view piece)>;

  /// Loads a model. `path` is a GGUF file, or a folder with config.json, tokenizer.json and safetensors.
  /// Errors: those of the parsers, `WeightStore` and `Decoder`: one line that names the thing; everything is given back.
  static Result<std::unique_ptr<Generator>> load(const std::filesystem::path& path, GpuBackend& backend,
                                                 const GeneratorOptions& options = {});
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;
  /// Unloads, and logs a receipt that is not clean.
  ~Generator();

  /// The ids of a prompt, with the chat template or the start-of-text token where they belong.
  /// Errors: unsupported (chat without a template that is known), and those of the tokenizer.
  Result<std::vector<TokenId>> encode(const GenerateRequest& request) const;

  /// Continues a prompt until the model ends the text or a limit is met. `on_text` may be empty.
  /// Errors: as `encode`; invalid_argument (an empty prompt, the sampling options), out_of_range (the prompt does not fit into the
  ///   context), and those of `Decoder`. The generator stays usable after all but device_lost.
  Result<Generation> generate(const GenerateRequest& request, const OnText& on_text = {});
  /// The same for ids, which may come from anywhere; `request.prompt` and `request.chat` are ignored.
  Result<Generation> generate(std::span<const TokenId> prompt, const GenerateRequest& request, const OnText& on_text = {});

  /// Releases everything and says what came back. `generate` fails with invalid_argument afterwards; again: an empty receipt. The
  /// receipt balances against what the backend held before `load`: of several models on one backend, the last to come is unloaded
  /// first.
  Receipt unload();

  const ModelConfig& config() const noexcept { return config_; }
  const Tokenizer& tokenizer() const noexcept { return *tokenizer_; }
  /// Null when the model brought no template that is known.
  const ChatTemplate* chat_template() const noexcept { return chat_ ? &*chat_ : nullptr; }
  const LoadStats& load_stats() const noexcept { return load_stats_; }
  /// Most tokens that the model reads: the prompt, and the answer without its last.
  std::uint64_t max_context_tokens() const noexcept;
  /// For evaluation and tests. Null after `unload`.
  Decoder* decoder() noexcept { return decoder_.get(); }

 private:
  Generator(GpuBackend& backend, const GeneratorOptions& options) : backend_(&backend), options_(options) {}
  Result<> load_files(const std::filesystem::path& path);
  std::vector<TokenId> stop_ids(bool chat) const;

  GpuBackend* backend_;
  GeneratorOptions options_;
  std::string path_;
  ModelConfig config_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::optional<ChatTemplate> chat_;
  std::string why_no_chat_;
  LoadStats load_stats_;
  std::unique_ptr<WeightStore> weights_;
  std::unique_ptr<Decoder> decoder_;
  std::unique_ptr<Teardown> teardown_;  // last: it refers to what is above
};

}  // namespace metrale
