// SPDX-License-Identifier: Apache-2.0
//
// metgpu report: who holds which byte, with a model loaded if one is named, and what its unload gives back.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "command.h"
#include "metrale/memory_statement.h"
#include "metrale/models/generator.h"

namespace metrale::cli {
namespace {

struct Options {
  std::string model;
  std::string backend;
  std::uint64_t context = 512;
  bool json = false;
};

nlohmann::json to_json(const MemoryStatement& s) {
  nlohmann::json report = {{"held_bytes", s.held_bytes},           {"held_by", s.held_by},
                           {"explained_bytes", s.explained_bytes}, {"residual_bytes", s.residual_bytes},
                           {"residual_means", s.residual_means},   {"explained", nlohmann::json::array()},
                           {"owners", nlohmann::json::array()},    {"sites", nlohmann::json::array()}};
  for (const auto& line : s.explained)
    report["explained"].push_back({{"what", line.what}, {"bytes", line.bytes}, {"blocks", line.blocks}});
  for (const auto& use : s.owners) report["owners"].push_back({{"owner", use.owner}, {"bytes", use.bytes}, {"blocks", use.count}});
  for (const auto& use : s.sites) {
    report["sites"].push_back(
        {{"site", fmt::format("{}:{}", use.site.file_name(), use.site.line())}, {"bytes", use.bytes}, {"blocks", use.count}});
  }
  return report;
}

Result<ExitCode> run(const Options& options) {
  const auto backend = METRALE_TRY(open_backend(options.backend));
  std::unique_ptr<Generator> model;
  if (!options.model.empty()) {
    GeneratorOptions generator_options;
    generator_options.extent = TeardownExtent::backend;
    model = METRALE_TRY(Generator::load(options.model, *backend, generator_options));
    METRALE_TRY(model->decoder()->reserve(std::min(options.context, model->max_context_tokens())));
  }
  const MemoryStatement statement = METRALE_TRY(memory_statement(*backend));
  Receipt receipt;
  if (model) receipt = model->unload();
  if (options.json) {
    nlohmann::json report = to_json(statement);
    if (model) {
      nlohmann::json lines = nlohmann::json::array();
      for (const Receipt::Line& line : receipt.lines)
        lines.push_back({{"label", line.label}, {"bytes", line.bytes}, {"blocks", line.blocks}});
      report["unload"] = {{"lines", std::move(lines)}, {"balance_bytes", receipt.balance_bytes}};
    }
    print_json(report, 2);
  } else {
    fmt::print("{}", statement.to_string());
    if (model) fmt::print("unload\n{}", receipt.to_string());
  }
  return receipt.clean() ? ExitCode::done : ExitCode::failed;
}

}  // namespace

void add_report_command(CLI::App& app, ExitCode& exit) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("report", "Show who holds which byte: by kind, owner and call site, and the residual");
  add_backend_option(*command, options->backend, Offer::every_backend);
  add_model_option(*command, options->model, "Load this model first, and show what its unload gives back");
  add_number_option(*command, "--context", options->context, "Tokens of context to make room for");
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &exit] {
    auto done = run(*options);
    exit = done ? *done : fail(done.error());
  });
}

}  // namespace metrale::cli
