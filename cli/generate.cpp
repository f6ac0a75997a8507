// SPDX-License-Identifier: Apache-2.0
//
// metgpu generate: answers a prompt. The text goes to standard output as it is made, everything else to standard error.
#include <atomic>
#include <csignal>
#include <cstdio>
#include <string_view>

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "command.h"
#include "metrale/models/generator.h"
#include "metrale/switches.h"

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

nlohmann::json to_json(const Options& options, const Generator& model, const Generation& result, const Receipt& receipt) {
  const GenerateStats& s = result.stats;
  const LoadStats& load = model.load_stats();
  return {{"model", options.model},
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
           {{"balance_bytes", receipt.balance_bytes}, {"balance_blocks", receipt.balance_blocks}, {"clean", receipt.clean()}}}};
}

void print_stats(const Generator& model, const Generation& result, const Receipt& receipt) {
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
  fmt::print(stderr, "unload   {} bytes released, balance {} bytes in {} blocks{}\n", receipt.released_bytes(),
             receipt.balance_bytes, receipt.balance_blocks, receipt.clean() ? "" : " (not clean)");
}

Result<ExitCode> run(Options& options) {
  if (options.hermetic) set_hermetic(true);
  if (options.no_ssm_tail_midchunk) set_ssm_tail_midchunk(false);
  options.request.prompt = options.prompt == "-" ? METRALE_TRY(read_standard_input()) : options.prompt;
  options.request.cancel = &interrupted;

  const auto backend = METRALE_TRY(open_backend(options.backend));
  GeneratorOptions generator_options;
  generator_options.max_context_tokens = options.context;
  options.compute.apply(generator_options.decoder);
  generator_options.extent = TeardownExtent::backend;
  const auto model = METRALE_TRY(Generator::load(options.model, *backend, generator_options));

  const InterruptGuard interrupt;
  Generator::OnText on_text;
  if (!options.json) {
    on_text = [](std::string_view piece) {
      std::fwrite(piece.data(), 1, piece.size(), stdout);
      std::fflush(stdout);
    };
  }
  const Generation result = METRALE_TRY(model->generate(options.request, on_text));
  const Receipt receipt = model->unload();
  if (options.json) {
    print_json(to_json(options, *model, result, receipt));
  } else {
    fmt::print("\n");
  }
  if (options.stats) print_stats(*model, result, receipt);
  if (!receipt.clean()) {
    fmt::print(stderr, "{}", receipt.to_string());
    return ExitCode::failed;
  }
  return ExitCode::done;
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
