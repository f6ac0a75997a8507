// SPDX-License-Identifier: Apache-2.0
//
// metgpu bench: what going through the backend costs next to the raw driver, and how close its kernels come to what the device can
// do.
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <system_error>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "bench/html.h"
#include "bench/suites.h"
#include "command.h"
#include "metrale/backends.h"
#include "metrale/switches.h"

namespace metrale::cli {
namespace {

constexpr std::uint32_t kMostRounds = 1'000;

struct Options {
  std::string backend = "cuda";
  std::vector<std::string> suites;
  std::uint32_t rounds = 0;
  bool quick = false;
  bool profile = false;
  std::string model;
  std::string json;
  std::string html;
  std::string command;
};

std::vector<std::string> suite_names() {
  std::vector<std::string> names;
  for (const bench::Suite& suite : bench::suites()) names.emplace_back(suite.name);
  return names;
}

/// Writes `text`, or, without one, only sees whether it could.
Result<> write_file(const std::string& path, const std::string* text) {
  if (path.empty()) return {};
  errno = 0;
  std::ofstream file(path, std::ios::binary | (text != nullptr ? std::ios::trunc : std::ios::app));
  if (text != nullptr) file << *text;
  file.close();
  if (file) return {};
  return Error(Errc::io, fmt::format("{}: {}", path, std::generic_category().message(errno == 0 ? EIO : errno)));
}

Result<ExitCode> run(const Options& options) {
  // A path that is wrong shows now and not after minutes of measuring.
  for (const std::string& path : {options.json, options.html}) METRALE_TRY(write_file(path, nullptr));
  if (find_backend(options.backend) == nullptr) {
    return Error(Errc::unsupported,
                 fmt::format("bench compares the {0} backend with its driver, and this build has no {0} backend; configure it with "
                             "a CUDA toolkit (METRALE_WITH_CUDA), or take --backend host, which compares nothing",
                             options.backend));
  }
  BackendOptions backend_options;
  backend_options.face.redzone_bytes = 0;
  backend_options.face.debug_sync_kernels = false;
  backend_options.host_kernels.push_back(bench::host_kernels());
  const int device = static_cast<int>(switches().cuda_device);
  backend_options.cuda_device = device;
  const auto backend = METRALE_TRY(open_backend(options.backend, backend_options));
  const auto raw = METRALE_TRY(bench::open_raw_device(*backend, device));

  bench::Options bench_options;
  if (options.quick || raw == nullptr) bench_options.scale = bench::Scale::small();
  if (options.rounds != 0) bench_options.scale.rounds = bench_options.scale.most_rounds = options.rounds;
  bench_options.suites = options.suites.empty() ? suite_names() : options.suites;
  bench_options.model = options.model;
  bench_options.profile = options.profile;
  bench::Report report = METRALE_TRY(bench::run_suites(
      *backend, raw.get(), bench_options, [](std::string_view what) { fmt::print(stderr, "metgpu bench: {}\n", what); }));
  report.version = METRALE_VERSION;
  report.command = options.command;

  fmt::print("{}", bench::to_table(report));
  const std::string json = bench::to_json(report).dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  METRALE_TRY(write_file(options.json, &json));
  const std::string page = bench::to_html(report);
  METRALE_TRY(write_file(options.html, &page));
  fmt::print("{} at their goal, {} at their minimum, {} missed, {} not judged\n", report.count(bench::Status::goal),
             report.count(bench::Status::minimum), report.count(bench::Status::missed), report.count(bench::Status::not_judged));
  // A figure that is missed is a finding, not a failure of the command.
  return report.failures.empty() ? ExitCode::done : ExitCode::failed;
}

}  // namespace

void add_bench_command(CLI::App& app, ExitCode& exit) {
  auto options = std::make_shared<Options>();
  const std::vector<std::string> names = suite_names();
  CLI::App* command = app.add_subcommand("bench", "Measure the backend against the raw driver and the device's limits");
  command->add_option("--backend", options->backend, "What to measure: cuda, or host, which is compared with nothing")
      ->check(one_of({"cuda", "host"}))
      ->capture_default_str();
  command->add_option("--suite", options->suites, fmt::format("Suites to run, all by default: {}", fmt::join(names, ",")))
      ->delimiter(',')
      ->check(one_of(names));
  command->add_option("--rounds", options->rounds, "Samples of each side")->check(whole_number(1, kMostRounds));
  command->add_flag("--quick", options->quick, "Small sizes: to see that it runs, its figures say nothing");
  command->add_flag("--profile", options->profile, "Suite decode also says where a step spends its time");
  add_model_option(*command, options->model, "Suite decode also measures this model as it is stored");
  command->add_option("--json", options->json, "Write the report to this file as JSON")->check(not_empty());
  command->add_option("--html", options->html, "Write the report to this file as a page")->check(not_empty());
  command->callback([options, &exit] {
    options->command = fmt::format("metgpu bench --backend {}", options->backend);
    if (!options->suites.empty()) options->command += fmt::format(" --suite {}", fmt::join(options->suites, ","));
    if (options->rounds != 0) options->command += fmt::format(" --rounds {}", options->rounds);
    if (options->quick) options->command += " --quick";
    if (options->profile) options->command += " --profile";
    if (!options->model.empty())
      options->command += fmt::format(" --model {}", options->model.substr(options->model.rfind('/') + 1));
    auto done = run(*options);
    exit = done ? *done : fail(done.error());
  });
}

}  // namespace metrale::cli
