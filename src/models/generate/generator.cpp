// SPDX-License-Identifier: Apache-2.0
#include "metrale/models/generator.h"

#if __has_include(<malloc.h>)
#include <malloc.h>
#endif

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include "metrale/log.h"

namespace metrale {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// The high-water mark of resident memory, as Linux keeps it.
std::uint64_t peak_resident_bytes() {
  std::ifstream status("/proc/self/status");
  std::string key;
  while (status >> key) {
    std::uint64_t kib = 0;
    if (key == "VmHWM:" && status >> kib) return kib * 1024;
    status.ignore(1 << 16, '\n');
  }
  return 0;
}

/// Hands the heap's unused pages to the system: what loading takes for a moment lies between what it keeps, and a process that
/// loads model after model would otherwise grow by those gaps.
void return_unused_heap() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

// Room is made in steps, so that requests of like length share it.
constexpr std::uint64_t kContextStep = 256;

}  // namespace

std::string_view to_string(StopReason reason) noexcept {
  switch (reason) {
    case StopReason::end_of_text: return "end_of_text";
    case StopReason::max_tokens: return "max_tokens";
    case StopReason::context_full: return "context_full";
    case StopReason::cancelled: return "cancelled";
  }
  return "?";
}

Result<std::unique_ptr<Generator>> Generator::load(const std::filesystem::path& path, GpuBackend& backend,
                                                   const GeneratorOptions& options) {
  const Clock::time_point start = Clock::now();
  std::unique_ptr<Generator> generator(new Generator(backend, options));
  METRALE_TRY(generator->load_files(path));
  generator->load_stats_.seconds = seconds_since(start);
  return generator;
}

Result<> Generator::load_files(const std::filesystem::path& path) {
  path_ = path.string();
  std::unique_ptr<WeightFile> file;
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    config_ = METRALE_TRY(load_model_config(path));
    tokenizer_ = METRALE_TRY(Tokenizer::from_folder(path));
    file = METRALE_TRY(WeightFile::open(path));
  } else {
    const auto source = METRALE_TRY(FileSource::open(path));
    if (!is_gguf(*source)) {
      return Error(Errc::bad_format,
                   fmt::format("{} is no GGUF file; give one, or the folder with config.json, tokenizer.json and safetensors",
                               path.string()));
    }
    file = METRALE_TRY(WeightFile::open(path));
    config_ = METRALE_TRY(model_config_from_gguf(*file->gguf_header(), path.string()));
    tokenizer_ = METRALE_TRY(Tokenizer::from_gguf(file->gguf_header()->metadata, path.string()));
  }
  if (Result<ChatTemplate> chat = ChatTemplate::detect(tokenizer_->chat_template())) {
    chat_ = std::move(*chat);
  } else {
    why_no_chat_ = chat.error().message();
  }

  const WeightPlan plan = METRALE_TRY(Decoder::weight_plan(*backend_, config_, *file, options_.decoder.communicator));
  teardown_ = std::make_unique<Teardown>(*backend_, options_.extent);
  const Clock::time_point start = Clock::now();
  weights_ = METRALE_TRY(WeightStore::load(*backend_, *file, plan));
  teardown_->add(*weights_);
  load_stats_.weight_seconds = seconds_since(start);
  load_stats_.weight_bytes = weights_->size_bytes();
  load_stats_.file_bytes = file->file_bytes();
  DecoderOptions decoder = options_.decoder;
  decoder.context_tokens = 0;
  Result<std::unique_ptr<Decoder>> created = Decoder::create(*backend_, config_, *file, *weights_, decoder);
  if (!created) return std::move(created).error().with_note(fmt::format("model {}", path_));
  decoder_ = std::move(*created);
  decoder_->add_to(*teardown_);
  return {};
}

Generator::~Generator() {
  if (!teardown_) return;
  if (const Receipt receipt = unload(); !receipt.clean()) log(LogLevel::warning, receipt.to_string());
}

Receipt Generator::unload() {
  if (!teardown_) return {};
  const Receipt receipt = teardown_->run();
  teardown_.reset();
  decoder_.reset();
  weights_.reset();
  return_unused_heap();
  return receipt;
}

std::uint64_t Generator::max_context_tokens() const noexcept {
  const std::uint64_t model = config_.max_position;
  return options_.max_context_tokens == 0 ? model : std::min<std::uint64_t>(options_.max_context_tokens, model);
}

Result<std::vector<TokenId>> Generator::encode(const GenerateRequest& request) const {
  std::vector<TokenId> ids;
  if (request.chat) {
    if (!chat_) return Error(Errc::unsupported, fmt::format("no chat with this model: {}", why_no_chat_));
    const ChatMessage message{"user", request.prompt};
    ids = METRALE_TRY(chat_->encode(*tokenizer_, {&message, 1}, GenerationPrompt::add, request.thinking));
  } else {
    ids = METRALE_TRY(tokenizer_->encode(request.prompt));
  }
  const std::optional<TokenId> bos = tokenizer_->bos();
  if (tokenizer_->add_bos() && bos && (ids.empty() || ids.front() != *bos)) ids.insert(ids.begin(), *bos);
  return ids;
}

std::vector<TokenId> Generator::stop_ids(bool chat) const {
  std::vector<TokenId> ids(tokenizer_->end_ids().begin(), tokenizer_->end_ids().end());
  if (chat && chat_) ids = chat_->stop_ids(*tokenizer_);
  ids.insert(ids.end(), config_.eos_ids.begin(), config_.eos_ids.end());
  std::ranges::sort(ids);
  return ids;
}

Result<Generation> Generator::generate(const GenerateRequest& request, const OnText& on_text) {
  const std::vector<TokenId> ids = METRALE_TRY(encode(request));
  return generate(ids, request, on_text);
}

Result<Generation> Generator::generate(std::span<const TokenId> prompt, const GenerateRequest& request, const OnText& on_text) {
  if (!decoder_) return Error(Errc::invalid_argument, "the model was unloaded");
  if (prompt.empty())
    return Error(Errc::invalid_argument, "the prompt is empty and the model has no token that starts a text; give one word");
  const std::uint64_t limit = max_context_tokens();
  if (prompt.size() > limit) {
    return Error(Errc::out_of_range,
                 fmt::format("the prompt has {} tokens and the context holds {}; shorten the prompt or raise the limit",
                             prompt.size(), limit));
  }
  Sampler sampler = METRALE_TRY(Sampler::create(request.sampling));
  const bool greedy = request.sampling.temperature == 0.0F;
  const StepOutput output = greedy ? StepOutput::token : StepOutput::logits;
  const std::vector<TokenId> stops = stop_ids(request.chat);
  // The last token that is generated is not read again, and takes no room.
  METRALE_TRY(decoder_->reserve(std::min(round_up(prompt.size() + request.max_tokens, kContextStep), limit)));

  Generation out;
  out.prompt_ids.assign(prompt.begin(), prompt.end());
  out.stats.prompt_tokens = prompt.size();
  StreamDecoder text(*tokenizer_);
  const auto emit = [&](const std::string& piece) {
    if (piece.empty()) return;
    out.text += piece;
    if (on_text) on_text(piece);
  };
  const auto cancelled = [&] {
    if (request.cancelled && request.cancelled()) return true;
    return request.cancel && request.cancel->load(std::memory_order_relaxed);
  };

  Sequence sequence = METRALE_TRY(decoder_->start());
  const auto of_this_model = [&](Error error) {
    // What is not finite is most often in the weights.
    return error.code() == Errc::internal ? std::move(error).with_note(fmt::format("model {}", path_)) : std::move(error);
  };
  const auto append = [&](std::span<const TokenId> tokens, StepOutput wanted) -> Result<Decoder::Step> {
    Result<Decoder::Step> step = decoder_->append(sequence, tokens, wanted);
    if (!step) return of_this_model(std::move(step).error());
    return step;
  };
  const std::size_t chunk = decoder_->options().chunk_tokens;
  const Clock::time_point start = Clock::now();
  Clock::time_point first_token = start;
  std::span<const TokenId> next = prompt;
  TokenId token = 0;
  // Choices that are already made, where several tokens are decoded at a time.
  std::vector<TokenId> ahead;
  std::size_t taken = 0;
  while (true) {
    if (cancelled()) {
      out.stop = StopReason::cancelled;
      break;
    }
    if (out.ids.size() == request.max_tokens) {
      out.stop = StopReason::max_tokens;
      break;
    }
    if (taken == ahead.size() && sequence.length() + next.size() > limit) {
      out.stop = StopReason::context_full;
      break;
    }
    if (next.size() > chunk) {
      // The decoder's own chunks, so nothing changes but that a long prompt can be cancelled between them.
      METRALE_TRY(append(next.first(chunk), StepOutput::token));
      next = next.subspan(chunk);
      continue;
    }
    if (taken < ahead.size()) {
      token = ahead[taken++];
    } else if (out.stats.generated_tokens != 0) {
      const std::uint64_t most = std::min<std::uint64_t>(request.max_tokens - out.ids.size(), limit - sequence.length());
      Result<std::span<const TokenId>> choices = decoder_->append_sampled(sequence, token, most, sampler);
      if (!choices) return of_this_model(std::move(choices).error());
      ahead.assign(choices->begin(), choices->end());
      token = ahead[0];
      taken = 1;
    } else {
      const Decoder::Step step = METRALE_TRY(append(next, output));
      token = greedy ? step.token : METRALE_TRY(sampler.next(step.logits));
    }
    if (out.stats.generated_tokens++ == 0) first_token = Clock::now();
    if (std::ranges::binary_search(stops, token)) {
      out.stop = StopReason::end_of_text;
      break;
    }
    out.ids.push_back(token);
    // A model may have more rows than its tokenizer has words; those are padding that carries no text.
    if (static_cast<std::size_t>(token) < tokenizer_->vocab_size()) emit(METRALE_TRY(text.push(token)));
    next = {&token, 1};
  }
  emit(text.finish());
  if (out.stats.generated_tokens == 0) {
    first_token = Clock::now();
    if (out.stop == StopReason::cancelled) out.stats.prompt_tokens = sequence.length();
  }
  out.stats.decode_seconds = seconds_since(first_token);
  out.stats.prefill_seconds = std::chrono::duration<double>(first_token - start).count();
  out.stats.kv_bytes = decoder_->kv_bytes();
  out.stats.buffer_bytes = decoder_->buffer_bytes();
  out.stats.peak_resident_bytes = peak_resident_bytes();
  return out;
}

}  // namespace metrale
