// SPDX-License-Identifier: Apache-2.0
//
// metgpu check: the conformance suite on this machine.
#include "command.h"
#include "conformance/suite.h"

namespace metrale::cli {

void add_check_command(CLI::App& app, ExitCode& exit) {
  auto options = std::make_shared<conformance::SuiteOptions>();
  options->child_command = {"/proc/self/exe", "check"};
  CLI::App* command = app.add_subcommand("check", "Run the conformance suite on this machine");
  std::string names;
  for (const std::string& name : conformance::backend_names()) names += (names.empty() ? "" : ", ") + name;
  command->add_option("--backend", options->backend, "Backend to check: " + names + "; each in turn by default");
  command->add_option("--filter", options->filter, "Run the cases whose \"Suite.Case\" matches this regular expression");
  command->add_option("--json", options->json_path, "Write all results to this file; - for standard output");
  command->add_flag("--verbose", options->verbose, "Print a line for each case");
  command->callback([options, &exit] { exit = static_cast<ExitCode>(conformance::run_suite(*options)); });
}

}  // namespace metrale::cli
