// SPDX-License-Identifier: Apache-2.0
//
// metgpu generate: answers a prompt. The text goes to standard output as it is made, everything else to standard error.
#include <atomic>
#include <csignal>
#include <cstdio>
#include <optional>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "command.h"
#include "metrale/models/generator.h"
#include "metrale/switches.h"
#include "ranks.h"

namespace metrale::cli {
namespace {

// Published as switches for an engine that links to metrale and keeps recurrent states between requests.
constexpr std::string_view kForEngines = "(for engines; the reference decoders keep no snapshots)";

struct Options {
  std::string model;
  std::string backend;
  std::string prompt;
  GenerateRequest request;
  std::uint64_t context = 0;
  std::uint32_t ranks = 1;
  ComputeChoice compute;
  bool hermetic = false;
  bool no_ssm_tail_midchunk = false;
  bool stats = false;
  bool json = false;
};

std::atomic<bool> interrupted{false};

/// Lets Ctrl-C end the text instead of the process; a second one ends the process.
class InterruptGuard {
 public:
  InterruptGuard() {
    interrupted = false;
    struct sigaction action = {};
    action.sa_handler = [](int) { interrupted = true; };
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    sigaction(SIGINT, &action, &before_);
  }
  ~InterruptGuard() { sigaction(SIGINT, &before_, nullptr); }
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

 private:
  struct sigaction before_ = {};
};

/// The receipts as one: what they hold together.
struct Unloaded {
  std::int64_t balance_bytes = 0;
  std::int64_t balance_blocks = 0;
  std::uint64_t released_bytes = 0;
  bool is_clean = true;
};

Unloaded sum(const std::vector<Receipt>& receipts) {
  Unloaded all;
  for (const Receipt& receipt : receipts) {
    all.balance_bytes += receipt.balance_bytes;
    all.balance_blocks += receipt.balance_blocks;
    all.released_bytes += receipt.released_bytes();
    all.is_clean = all.is_clean && receipt.clean();
  }
  return all;
}

nlohmann::json to_json(const Options& options, const Generator& model, const Generation& result, const Unloaded& unloaded) {
  const GenerateStats& s = result.stats;
  const LoadStats& load = model.load_stats();
  return {{"model", options.model},
          {"ranks", options.ranks},
          {"text", result.text},
          {"prompt_ids", result.prompt_ids},
          {"ids", result.ids},
          {"stop", to_string(result.stop)},
          {"load", {{"file_bytes", load.file_bytes}, {"weight_bytes", load.weight_bytes}, {"seconds", load.seconds}}},
          {"prompt_tokens", s.prompt_tokens},
          {"generated_tokens", s.generated_tokens},
          {"prefill_seconds", s.prefill_seconds},
          {"decode_seconds", s.decode_seconds},
          {"prefill_tokens_per_second", s.prefill_tokens_per_second()},
          {"decode_tokens_per_second", s.decode_tokens_per_second()},
          {"kv_bytes", s.kv_bytes},
          {"buffer_bytes", s.buffer_bytes},
          {"peak_resident_bytes", s.peak_resident_bytes},
          {"unload",
           {{"balance_bytes", unloaded.balance_bytes}, {"balance_blocks", unloaded.balance_blocks}, {"clean", unloaded.is_clean}}}};
}

void print_stats(const Generator& model, const Generation& result, const Unloaded& unloaded) {
  const GenerateStats& s = result.stats;
  const LoadStats& load = model.load_stats();
  const auto mib = [](std::uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  fmt::print(stderr, "load     {:.1f} MiB in {:.3f} s, weights at {:.2f} GB/s\n", mib(load.file_bytes), load.seconds,
             load.weight_seconds > 0 ? static_cast<double>(load.weight_bytes) / load.weight_seconds / 1e9 : 0.0);
  fmt::print(stderr, "prefill  {} tokens in {:.3f} s, {:.1f} tokens/s\n", s.prompt_tokens, s.prefill_seconds,
             s.prefill_tokens_per_second());
  fmt::print(stderr, "decode   {} tokens in {:.3f} s, {:.1f} tokens/s; stopped: {}\n", s.generated_tokens, s.decode_seconds,
             s.decode_tokens_per_second(), to_string(result.stop));
  fmt::print(stderr, "memory   peak resident {:.1f} MiB; kv cache {:.1f} MiB, buffers {:.1f} MiB\n", mib(s.peak_resident_bytes),
             mib(s.kv_bytes), mib(s.buffer_bytes));
  fmt::print(stderr, "unload   {} bytes released, balance {} bytes in {} blocks{}\n", unloaded.released_bytes,
             unloaded.balance_bytes, unloaded.balance_blocks, unloaded.is_clean ? "" : " (not clean)");
}

Result<ExitCode> run(Options& options) {
  if (options.hermetic) set_hermetic(true);
  if (options.no_ssm_tail_midchunk) set_ssm_tail_midchunk(false);
  options.request.prompt = options.prompt == "-" ? METRALE_TRY(read_standard_input()) : options.prompt;

  GeneratorOptions generator_options;
  generator_options.max_context_tokens = options.context;
  options.compute.apply(generator_options.decoder);
  generator_options.extent = TeardownExtent::backend;
  const auto model = METRALE_TRY(RankedModel::load(options.model, options.backend, options.ranks, generator_options));

  // One of several processes that stopped early would leave the others waiting: Ctrl-C ends them all.
  std::optional<InterruptGuard> interrupt;
  if (!model->is_of_processes()) {
    interrupt.emplace();
    options.request.cancel = &interrupted;
  }
  Generator::OnText on_text;
  if (!options.json) {
    on_text = [](std::string_view piece) {
      std::fwrite(piece.data(), 1, piece.size(), stdout);
      std::fflush(stdout);
    };
  }
  const Generation result = METRALE_TRY(model->generate(options.request, on_text));
  const std::vector<Receipt> receipts = model->unload();
  const Unloaded unloaded = sum(receipts);
  if (options.json && model->is_first()) print_json(to_json(options, model->generator(), result, unloaded));
  if (!options.json && model->is_first()) fmt::print("\n");
  if (options.stats && model->is_first()) print_stats(model->generator(), result, unloaded);
  for (const Receipt& receipt : receipts) {
    if (!receipt.clean()) fmt::print(stderr, "{}", receipt.to_string());
  }
  return unloaded.is_clean ? ExitCode::done : ExitCode::failed;
}

}  // namespace

void add_generate_command(CLI::App& app, ExitCode& exit) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("generate", "Continue a prompt, or answer it with --chat");
  add_model_option(*command, options->model, "A GGUF file, or a folder with config.json, tokenizer.json and safetensors")
      ->required();
  add_backend_option(*command, options->backend, Offer::computing_backends);
  command
      ->add_option("--prompt", options->prompt,
                   fmt::format("The text to continue; - reads standard input, {} MiB at most", kMaxTextBytes >> 20))
      ->required();
  command->add_flag("--chat", options->request.chat, "Put the prompt into the model's chat template");
  add_number_option(*command, "--max-tokens", options->request.max_tokens, "Most tokens to generate");
  command->add_option("--temperature", options->request.sampling.temperature, "0 picks the most probable token")
      ->capture_default_str();
  add_number_option(*command, "--top-k", options->request.sampling.top_k, "Draw from so many tokens; 0 for all");
  command->add_option("--top-p", options->request.sampling.top_p, "Draw from the tokens that make up this probability")
      ->capture_default_str();
  add_number_option(*command, "--seed", options->request.sampling.seed, "Seed of the draws");
  add_number_option(*command, "--context", options->context,
                    "Most tokens that the model reads: the prompt, and the answer without its last; 0 for the model's own limit");
  command
      ->add_option("--tensor-parallel", options->ranks,
                   "Divide the model among so many devices, or as many processes where torchrun or MPI started them")
      ->check(whole_number(1, kMaxRanks))
      ->capture_default_str();
  add_compute_options(*command, options->compute);
  command->add_flag("--hermetic", options->hermetic, fmt::format("Never restore another request's state {}", kForEngines));
  command->add_flag("--no-ssm-tail-midchunk", options->no_ssm_tail_midchunk,
                    fmt::format("Split prompt chunks at the last block boundary {}", kForEngines));
  command->add_flag("--stats", options->stats, "Print load, speed, memory and unload figures to standard error");
  command->add_flag("--json", options->json, "Print one JSON object instead of the text");
  command->callback([options, &exit] {
    if (const auto sampler = Sampler::create(options->request.sampling); !sampler)
      throw CLI::ValidationError(sampler.error().message());
    auto done = run(*options);
    exit = done ? *done : fail(done.error());
  });
}

}  // namespace metrale::cli
