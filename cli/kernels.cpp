// SPDX-License-Identifier: Apache-2.0
//
// metgpu kernels: modules, functions, what they publish, and with --check whether every kernel that the decoders need is there.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "command.h"
#include "metrale/models/required_kernels.h"

namespace metrale::cli {
namespace {

std::string describe(const KernelFacts& facts) {
  std::string text = fmt::format("{} arguments", facts.param_bytes.size());
  if (facts.n_tile) text += fmt::format(", n_tile {}", *facts.n_tile);
  if (facts.casts_a_to_e4m3) text += ", casts A to E4M3";
  if (facts.waits_for_dependency) text += ", waits for its predecessor";
  return text;
}

void print_loads(const LoadReport& report) {
  if (report.modules.empty()) return;
  constexpr double kMs = 1e6;
  fmt::print("\nloaded at creation\n  {:<16} {:>8} {:>10} {:>10} {:>10}  {}\n", "module", "kernels", "KiB", "load ms", "code ms",
             "from");
  for (const LoadReport::Module& module : report.modules) {
    fmt::print("  {:<16} {:>8} {:>10} {:>10.2f} {:>10.2f}  {}\n", module.name, module.num_kernels, module.size_bytes >> 10,
               static_cast<double>(module.load_ns) / kMs, static_cast<double>(module.warm_ns) / kMs, module.source);
  }
  fmt::print("loaded later, by look-ups: {}\n", report.num_lazy_loads);
}

ExitCode list(GpuBackend& backend) {
  KernelRegistry* registry = backend.kernel_registry();
  if (registry == nullptr) {
    fmt::print("the {} backend keeps no list of kernels\n", backend.name());
    return ExitCode::done;
  }
  const auto entries = registry->entries();
  if (!entries) return fail(entries.error());
  std::string module;
  for (const KernelRegistry::Entry& entry : *entries) {
    if (entry.module != module) {
      module = entry.module;
      fmt::print("{}\n", module);
    }
    fmt::print("  {:<32} {}\n", entry.function, describe(entry.facts));
  }
  fmt::print("{} kernels\n", entries->size());
  print_loads(registry->load_report());
  return ExitCode::done;
}

ExitCode check(GpuBackend& backend) {
  const auto all = required_kernels(backend);
  if (!all) return fail(all.error());
  for (const KernelName& needed : *all) {
    // The audit keeps what is missing.
    static_cast<void>(backend.kernel(needed.module, needed.function).has_value());
  }
  const KernelAudit audit = backend.kernel_audit();
  nlohmann::json misses = nlohmann::json::array();
  for (const LookupMiss& miss : audit.misses) {
    misses.push_back({{"module", miss.module},
                      {"function", miss.function},
                      {"declared_absent", miss.declared_absent},
                      {"count", miss.count},
                      {"asked_at", fmt::format("{}:{}", miss.site.file_name(), miss.site.line())}});
  }
  const nlohmann::json report = {
      {"backend", backend.name()}, {"resolved", audit.num_hits}, {"unresolved", audit.num_required_missing()}, {"misses", misses}};
  print_json(report);
  return audit.num_required_missing() == 0 ? ExitCode::done : ExitCode::failed;
}

}  // namespace

void add_kernels_command(CLI::App& app, ExitCode& exit) {
  struct Options {
    std::string backend;
    bool check = false;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("kernels", "List kernel modules, functions and what they publish");
  add_backend_option(*command, options->backend, Offer::every_backend);
  command->add_flag("--check", options->check, "Look up every kernel the decoders need; JSON, exit 1 if one is missing");
  command->callback([options, &exit] {
    const auto backend = open_backend(options->backend);
    if (!backend) {
      exit = fail(backend.error());
      return;
    }
    exit = options->check ? check(**backend) : list(**backend);
  });
}

}  // namespace metrale::cli
