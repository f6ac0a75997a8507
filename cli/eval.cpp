// SPDX-License-Identifier: Apache-2.0
//
// metgpu eval: mean loss, perplexity and top-1 of a model on a known text.
#include <algorithm>
#include <sstream>

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "command.h"
#include "metrale/models/evaluate.h"
#include "metrale/models/generator.h"

namespace metrale::cli {
namespace {

struct Options {
  std::string model;
  std::string backend;
  std::string ids_file;
  std::string text_file;
  std::uint64_t window = 512;
  ComputeChoice compute;
  bool json = false;
};

Result<std::vector<TokenId>> parse_ids(const std::string& path, const std::string& text) {
  std::vector<TokenId> ids;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    std::size_t used = 0;
    long value = 0;
    try {
      value = std::stol(word, &used);
    } catch (const std::exception&) {
      used = 0;
    }
    if (used != word.size() || value < 0 || value > INT32_MAX) {
      return Error(Errc::bad_format,
                   fmt::format("{}: word {} is \"{}\", not a token id", path, ids.size() + 1, word.substr(0, 40)));
    }
    ids.push_back(static_cast<TokenId>(value));
  }
  return ids;
}

Result<ExitCode> run(const Options& options) {
  const std::string path = options.ids_file.empty() ? options.text_file : options.ids_file;
  const std::string text = METRALE_TRY(read_text_file(path));
  std::vector<TokenId> ids;
  if (!options.ids_file.empty()) ids = METRALE_TRY(parse_ids(path, text));

  const auto backend = METRALE_TRY(open_backend(options.backend));
  GeneratorOptions generator_options;
  options.compute.apply(generator_options.decoder);
  generator_options.extent = TeardownExtent::backend;
  const auto model = METRALE_TRY(Generator::load(options.model, *backend, generator_options));
  if (options.ids_file.empty()) {
    GenerateRequest request;
    request.prompt = text;
    ids = METRALE_TRY(model->encode(request));
  }

  METRALE_TRY(model->decoder()->reserve(std::min<std::uint64_t>({options.window, ids.size(), model->max_context_tokens()})));
  Result<Evaluation> evaluated = evaluate(*model->decoder(), ids, {.window_tokens = options.window});
  if (!evaluated)
    return std::move(evaluated).error().with_note(fmt::format("model {}, --window {}", options.model, options.window));
  const Evaluation& e = *evaluated;
  const Receipt receipt = model->unload();
  if (options.json) {
    const nlohmann::json report = {{"model", options.model},   {"tokens", e.num_tokens},         {"windows", e.num_windows},
                                   {"mean_loss", e.mean_loss}, {"perplexity", e.perplexity},     {"top1", e.top1},
                                   {"seconds", e.seconds},     {"unload_clean", receipt.clean()}};
    print_json(report);
  } else {
    fmt::print("{} tokens in {} windows of {}: mean loss {:.4f}, perplexity {:.3f}, top-1 {:.1f} %, {:.0f} tokens/s\n",
               e.num_tokens, e.num_windows, options.window, e.mean_loss, e.perplexity, 100 * e.top1,
               static_cast<double>(e.num_tokens) / e.seconds);
  }
  return receipt.clean() ? ExitCode::done : ExitCode::failed;
}

}  // namespace

void add_eval_command(CLI::App& app, ExitCode& exit) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("eval", "Mean loss, perplexity and top-1 on a known text");
  add_model_option(*command, options->model, "A GGUF file, or a folder with config.json, tokenizer.json and safetensors")
      ->required();
  add_backend_option(*command, options->backend, Offer::computing_backends);
  auto* source = command->add_option_group("text", "What to predict");
  source->add_option("--ids", options->ids_file, "File of token ids, separated by white space")->check(not_empty());
  source->add_option("--text", options->text_file, "File of text")->check(not_empty());
  source->require_option(1);
  add_number_option<std::uint64_t>(
      *command, "--window", options->window,
      "Tokens of a window: the text is cut into windows, and each predicts all its tokens but the first", 2);
  add_compute_options(*command, options->compute);
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &exit] {
    auto done = run(*options);
    exit = done ? *done : fail(done.error());
  });
}

}  // namespace metrale::cli
