// SPDX-License-Identifier: Apache-2.0
//
// metgpu check: the conformance suite on this machine.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "command.h"
#include "conformance/suite.h"

namespace metrale::cli {

void add_check_command(CLI::App& app, ExitCode& exit) {
  auto options = std::make_shared<conformance::SuiteOptions>();
  options->child_command = {"/proc/self/exe", "check"};
  CLI::App* command = app.add_subcommand("check", "Run the conformance suite on this machine");
  const std::vector<std::string> names = conformance::backend_names();
  command
      ->add_option("--backend", options->backend,
                   fmt::format("Backend to check: {}; each in turn by default", fmt::join(names, ", ")))
      ->check(one_of(names));
  command->add_option("--filter", options->filter, "Run the cases whose \"Suite.Case\" matches this regular expression");
  command
      ->add_option("--json", options->json_path,
                   "Write all results to this file; - for standard output, the lines for people go to standard error then")
      ->check(not_empty());
  command->add_flag("--verbose", options->verbose, "Print a line for each case");
  command->callback([options, &exit] { exit = static_cast<ExitCode>(conformance::run_suite(*options)); });
}

}  // namespace metrale::cli
