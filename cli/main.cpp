// SPDX-License-Identifier: Apache-2.0
//
// metgpu: answers prompts with real models through the public headers, and shows what the runtime sees.
#include <cstdio>
#include <exception>

#include <fmt/format.h>

#include "command.h"

int main(int argc, char** argv) {
  using metrale::cli::ExitCode;
  ExitCode exit = ExitCode::done;
  try {
    CLI::App app{"metgpu: run language models on the metrale runtime, and look into it", "metgpu"};
    app.set_version_flag("--version", METRALE_VERSION);
    app.require_subcommand(1);
    metrale::cli::add_info_command(app, exit);
    metrale::cli::add_check_command(app, exit);
    metrale::cli::add_generate_command(app, exit);
    metrale::cli::add_eval_command(app, exit);
    metrale::cli::add_kernels_command(app, exit);
    metrale::cli::add_report_command(app, exit);
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      return static_cast<int>(app.exit(error) == 0 ? ExitCode::done : ExitCode::wrong_use);
    }
    // Results may be piped into a file that cannot take them.
    if (std::fflush(stdout) != 0) {
      std::perror("metgpu: io: standard output");
      return static_cast<int>(ExitCode::failed);
    }
    return static_cast<int>(exit);
  } catch (const std::exception& error) {
    fmt::print(stderr, "metgpu: internal: {}\n", error.what());
    return static_cast<int>(ExitCode::failed);
  }
}
