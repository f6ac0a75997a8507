// SPDX-License-Identifier: Apache-2.0
//
// metgpu: answers prompts with real models through the public headers, and shows what the runtime sees.
#include <cerrno>
#include <cstdio>
#include <exception>
#include <iostream>
#include <system_error>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "command.h"

namespace metrale::cli {
namespace {

/// One line for wrong use. CLI11 looks for what is missing before it looks at what it does not know, so a mistyped word would go
/// unnamed.
std::string explain(const CLI::App* app, const CLI::Error& error) {
  std::string line = error.what();
  const std::vector<std::string> unknown = app->remaining(/*recurse=*/true);
  const bool missing = error.get_name() == "RequiredError";
  std::string name = "COMMAND";
  if (const auto chosen = app->get_subcommands(); !chosen.empty()) {
    name = chosen.front()->get_name();
    if (missing && !unknown.empty()) line += fmt::format(", and there is no {}", fmt::join(unknown, " "));
  } else if (missing && !unknown.empty()) {
    std::vector<std::string> commands;
    for (const CLI::App* command : app->get_subcommands(nullptr)) commands.push_back(command->get_name());
    line = fmt::format("there is no command '{}'; there are {}", unknown.front(), fmt::join(commands, ", "));
  }
  return fmt::format("metgpu: {}; metgpu {} --help has the options\n", one_line(line), name);
}

ExitCode run(int argc, char** argv) {
  ExitCode exit = ExitCode::done;
  CLI::App app{"metgpu: run language models on the metrale runtime, and look into it", "metgpu"};
  app.set_version_flag("--version", METRALE_VERSION);
  app.require_subcommand(1);
  app.failure_message(explain);
  add_info_command(app, exit);
  add_check_command(app, exit);
  add_bench_command(app, exit);
  add_generate_command(app, exit);
  add_eval_command(app, exit);
  add_kernels_command(app, exit);
  add_report_command(app, exit);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    exit = app.exit(error) == 0 ? ExitCode::done : ExitCode::wrong_use;
  }
  return exit;
}

/// Results may be piped into a file that cannot take them: what is still buffered, or an earlier part.
Result<> finish_output() {
  errno = 0;
  std::cout.flush();
  const bool flushed = std::fflush(stdout) == 0;
  const int number = errno;
  if (flushed && std::ferror(stdout) == 0 && std::cout.good()) return {};
  const std::string why = number == 0 ? "a part could not be written" : std::generic_category().message(number);
  return Error(Errc::io, fmt::format("standard output: {}", why));
}

}  // namespace
}  // namespace metrale::cli

int main(int argc, char** argv) {
  using namespace metrale;
  cli::ExitCode exit = cli::ExitCode::failed;
  try {
    exit = cli::run(argc, argv);
  } catch (const std::system_error& error) {  // fmt's, when standard output takes no more
    exit = cli::fail(Error(Errc::io, error.what()));
    return static_cast<int>(exit);
  } catch (const std::exception& error) {
    exit = cli::fail(Error(Errc::internal, error.what()));
  }
  if (const Result<> finished = cli::finish_output(); !finished) {
    const cli::ExitCode failed = cli::fail(finished.error());
    if (exit == cli::ExitCode::done) exit = failed;
  }
  return static_cast<int>(exit);
}
