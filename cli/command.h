// SPDX-License-Identifier: Apache-2.0
//
// What the commands of metgpu share. A command is one file: it declares its options, calls the library and prints; whatever it does
// can be called from the library as well. Figures and progress go to standard error, results to standard output.
#pragma once

#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "metrale/backend.h"
#include "metrale/result.h"

namespace metrale::cli {

enum class ExitCode : int {
  done = 0,
  failed = 1,
  wrong_use = 2,
};

/// Each adds its command to `app` and sets `exit` when it ran.
void add_info_command(CLI::App& app, ExitCode& exit);
void add_check_command(CLI::App& app, ExitCode& exit);
void add_generate_command(CLI::App& app, ExitCode& exit);
void add_eval_command(CLI::App& app, ExitCode& exit);
void add_kernels_command(CLI::App& app, ExitCode& exit);
void add_report_command(CLI::App& app, ExitCode& exit);

/// Adds `--backend` with its help; `fallback` is the default.
void add_backend_option(CLI::App& command, std::string& backend, const std::string& fallback);
/// Makes the backend a command asked for, with the kernels of this build.
Result<std::unique_ptr<GpuBackend>> open_backend(const std::string& name);
/// Prints an error as one line on standard error and returns `failed`.
ExitCode fail(const Error& error);

}  // namespace metrale::cli
