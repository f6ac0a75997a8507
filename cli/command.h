// SPDX-License-Identifier: Apache-2.0
//
// What the commands of metgpu share. A command is one file: it declares its options, calls the library and prints; whatever it does
// can be called from the library as well. Figures and progress go to standard error, results to standard output.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json_fwd.hpp>

#include "metrale/backend.h"
#include "metrale/backends.h"
#include "metrale/models/decoder.h"
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
void add_bench_command(CLI::App& app, ExitCode& exit);
void add_generate_command(CLI::App& app, ExitCode& exit);
void add_eval_command(CLI::App& app, ExitCode& exit);
void add_kernels_command(CLI::App& app, ExitCode& exit);
void add_report_command(CLI::App& app, ExitCode& exit);

/// Whether a command takes every backend, or only those that run kernels.
enum class Offer : std::uint8_t { every_backend, computing_backends };
/// Adds `--backend` with its help; "auto" by default, and a name that is not offered is wrong use.
void add_backend_option(CLI::App& command, std::string& backend, Offer offer);
/// Adds `--model`.
CLI::Option* add_model_option(CLI::App& command, std::string& model, const std::string& help);

/// How a model computes, as the command line says it.
struct ComputeChoice {
  std::string precision = "fast";
  std::string kv = "auto";
  std::uint32_t tokens_per_replay = 0;

  void apply(DecoderOptions& options) const;
};
/// Adds `--precision`, `--kv` and `--tokens-per-replay`.
void add_compute_options(CLI::App& command, ComputeChoice& choice);

/// Checks of an option's text, for `CLI::Option::check`: what is wrong with it, or nothing.
using Check = std::function<std::string(const std::string& text)>;
Check not_empty();
Check one_of(std::vector<std::string> names);
/// Decimal digits alone. CLI11 by itself wraps "-1" around and reads "010" as eight.
Check whole_number(std::uint64_t least, std::uint64_t most);
/// Adds an option for a whole number of at least `least`.
template <std::unsigned_integral T>
CLI::Option* add_number_option(CLI::App& command, const std::string& name, T& to, const std::string& help, T least = 0) {
  return command.add_option(name, to, help)->check(whole_number(least, std::numeric_limits<T>::max()))->capture_default_str();
}

/// Most bytes of a prompt on standard input, or of a text to evaluate: far beyond any model's context, and little for memory.
inline constexpr std::uint64_t kMaxTextBytes = std::uint64_t{16} << 20;
/// The bytes of a file.
/// Errors: those of FileSource::open, so folders, pipes and devices are refused; invalid_argument (more than kMaxTextBytes).
Result<std::string> read_text_file(const std::string& path);
/// Standard input to its end.
/// Errors: io (closed, a folder), invalid_argument (more than kMaxTextBytes: the rest is not read).
Result<std::string> read_standard_input();

/// Makes the backend a command asked for, with the kernels of this build beside those of `options`.
Result<std::unique_ptr<GpuBackend>> open_backend(const std::string& name, BackendOptions options = {});
/// Prints to standard output; bytes that are no UTF-8, as in a path, become U+FFFD.
void print_json(const nlohmann::json& value, int indent = -1);
/// `text` on one line: control characters become \xNN.
std::string one_line(std::string_view text);
/// Prints an error as one line on standard error and returns `failed`.
ExitCode fail(const Error& error);

}  // namespace metrale::cli
