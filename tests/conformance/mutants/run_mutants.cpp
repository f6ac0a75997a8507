// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <thread>

#include <fmt/format.h>

#include "conformance/child_process.h"
#include "conformance/mutants/mutants.h"
#include "conformance/name_filter.h"
#include "conformance/run_state.h"

namespace metrale::conformance {
namespace {

// A mutant mostly sleeps until a gate gives up, so several run at a time; but not so many that a busy machine looks like
// a broken one.
constexpr std::size_t kAtOnce = 3;
constexpr std::chrono::seconds kLimit{40};

ChildResult run_suite_on(std::string_view base, std::string_view mutant, const std::string& filter) {
  std::vector<std::string> words{"/proc/self/exe", "--backend", std::string(base), "--filter", filter};
  if (!mutant.empty()) words.insert(words.end(), {"--mutant", std::string(mutant)});
  return run_program(words, kLimit);
}

}  // namespace

std::vector<Mutant> all_mutants() {
  std::vector<Mutant> all;
  for (auto* part : {memory_mutants, copy_mutants, stream_mutants, graph_mutants, kernel_mutants, mock_mutants}) {
    const std::vector<Mutant> some = part();
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

bool use_mutant(std::string_view name, SuiteOptions& options) {
  for (const Mutant& mutant : all_mutants()) {
    if (mutant.name != name) continue;
    for (BackendUnderTest& backend : backends_under_test()) {
      if (backend.name == mutant.base) backend.create = mutant.create;
    }
    options.backend = mutant.base;
    child_arguments() = {"--mutant", std::string(name)};
    return true;
  }
  fmt::print(stderr, "not_found: no mutant '{}'; --list-mutants names them\n", name);
  return false;
}

int list_mutants() {
  for (const Mutant& mutant : all_mutants()) fmt::print("{} [{}]: {}\n", mutant.name, mutant.base, mutant.caught_by);
  return 0;
}

int run_mutants(std::string_view filter) {
  const Result<NameFilter> wanted = NameFilter::create(std::string(filter));
  if (!wanted) {
    fmt::print(stderr, "{}\n", wanted.error().to_string());
    return 2;
  }
  std::vector<Mutant> chosen;
  for (Mutant& mutant : all_mutants()) {
    if (wanted->matches(std::string(mutant.name))) chosen.push_back(std::move(mutant));
  }
  if (chosen.empty()) {
    fmt::print(stderr, "not_found: no mutant matches '{}'\n", filter);
    return 1;
  }

  // The unbroken backend must pass what catches its mutants: else a mutant would be caught for nothing.
  bool sound = true;
  std::map<std::string_view, std::string> cases;
  for (const Mutant& mutant : chosen) {
    std::string& all = cases[mutant.base];
    if (!all.empty()) all += '|';
    all += exact_filter(mutant.caught_by);
  }
  for (const auto& [base, names] : cases) {
    const ChildResult unbroken = run_suite_on(base, "", names);
    if (unbroken.passed && unbroken.output.find(" 0 skipped") != std::string::npos) continue;
    sound = false;
    fmt::print("the unbroken {} backend does not pass all cases that catch its mutants:\n{}\n", base, unbroken.output);
  }

  std::atomic<std::size_t> next{0};
  std::atomic<std::size_t> num_caught{0};
  std::mutex print_mutex;
  const auto work = [&] {
    for (std::size_t i = next++; i < chosen.size(); i = next++) {
      const Mutant& mutant = chosen[i];
      const ChildResult run = run_suite_on(mutant.base, mutant.name, exact_filter(mutant.caught_by));
      // Caught is: the suite ran to its end, and that case failed. A crash proves nothing about the case.
      const bool caught = !run.passed && run.output.find(fmt::format("failed   {} ", mutant.caught_by)) != std::string::npos &&
                          run.output.find("0 passed, 1 failed, 0 skipped") != std::string::npos;
      if (caught) ++num_caught;
      std::lock_guard lock(print_mutex);
      fmt::print("{} {} by {}\n", caught ? "caught  " : "SURVIVED", mutant.name, mutant.caught_by);
      if (!caught) fmt::print("{}\n", run.output);
      std::fflush(stdout);
    }
  };
  std::vector<std::thread> workers;
  for (std::size_t i = 0; i < kAtOnce; ++i) workers.emplace_back(work);
  for (std::thread& worker : workers) worker.join();

  fmt::print("{} mutants, {} caught\n", chosen.size(), num_caught.load());
  return sound && num_caught == chosen.size() ? 0 : 1;
}

}  // namespace metrale::conformance
