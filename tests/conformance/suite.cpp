// SPDX-License-Identifier: Apache-2.0
#include "conformance/suite.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <mutex>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "conformance/backend_under_test.h"
#include "conformance/case.h"
#include "conformance/child_process.h"
#include "conformance/name_filter.h"
#include "conformance/run_state.h"

namespace metrale::conformance {
namespace {

constexpr const char* kChildVariable = "METRALE_CONFORMANCE_CHILD";
constexpr int kLostExit = 1;

struct Outcome {
  std::string backend;
  std::string name;
  std::string status;  // passed, failed, skipped
  std::string text;    // failures, or the reason of a skip
  double seconds = 0;
};

// What the run in progress knows; one at a time.
struct Run {
  const SuiteOptions* options = nullptr;
  const BackendUnderTest* backend = nullptr;
  std::FILE* lines = stdout;  // where the lines for people go: not among JSON
  std::vector<std::string> notes;
  std::vector<Outcome> outcomes;
};
Run& current() {
  static Run run;
  return run;
}

bool armed(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::string_view(value) == "1";
}

bool matches(std::string_view pattern, std::string_view name) {
  if (pattern.ends_with(".*")) return name.starts_with(pattern.substr(0, pattern.size() - 1));
  return name == pattern;
}

const Exclusion* find_exclusion(const std::vector<Exclusion>& list, std::string_view name) {
  const auto found = std::find_if(list.begin(), list.end(), [&](const Exclusion& e) { return matches(e.pattern, name); });
  return found == list.end() ? nullptr : &*found;
}

std::string name_of(const ::testing::TestInfo& info) { return std::string(info.test_suite_name()) + "." + info.name(); }

std::string running_case() {
  const ::testing::TestInfo* info = ::testing::UnitTest::GetInstance()->current_test_info();
  return info == nullptr ? std::string() : name_of(*info);
}

// ---- results ----

int finish(const Run& run, const std::string& json_path) {
  std::size_t passed = 0, failed = 0, skipped = 0;
  nlohmann::json cases = nlohmann::json::array();
  for (const Outcome& o : run.outcomes) {
    ++(o.status == "passed" ? passed : o.status == "failed" ? failed : skipped);
    nlohmann::json entry{{"backend", o.backend}, {"name", o.name}, {"status", o.status}, {"seconds", o.seconds}};
    if (!o.text.empty()) entry[o.status == "skipped" ? "reason" : "text"] = o.text;
    cases.push_back(std::move(entry));
  }

  // One line for each reason, in the order of its first skip.
  std::vector<std::pair<std::string, std::vector<std::string>>> reasons;
  for (const Outcome& o : run.outcomes) {
    if (o.status != "skipped") continue;
    const std::string reason = o.backend + ": " + o.text;
    auto known = std::find_if(reasons.begin(), reasons.end(), [&](const auto& r) { return r.first == reason; });
    if (known == reasons.end()) known = reasons.insert(reasons.end(), {reason, {}});
    known->second.push_back(o.name);
  }
  for (const auto& [reason, names] : reasons) {
    fmt::print(run.lines, "skipped {} on {}\n", names.size(), reason);
    for (const std::string& name : names) fmt::print(run.lines, "    {}\n", name);
  }
  if (!json_path.empty()) {
    const std::string text =
        nlohmann::json{{"passed", passed}, {"failed", failed}, {"skipped", skipped}, {"cases", std::move(cases)}}.dump(
            2, ' ', false, nlohmann::json::error_handler_t::replace) +
        "\n";
    if (json_path == "-") {
      fmt::print("{}", text);
    } else {
      std::ofstream file(json_path);
      file << text;
      file.flush();
      if (!file) {
        fmt::print(stderr, "cannot write {}\n", json_path);
        return 1;
      }
    }
  }
  fmt::print(run.lines, "{} passed, {} failed, {} skipped\n", passed, failed, skipped);
  std::fflush(stdout);
  return failed > 0 || passed + skipped == 0 ? 1 : 0;
}

/// Ends the process when a case hangs: what it waits for will not come, and a thread cannot be taken out of a call.
class Watchdog {
 public:
  Watchdog() : thread_([this] { watch(); }) {}
  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void begin(std::string name) {
    std::lock_guard lock(mutex_);
    name_ = std::move(name);
    since_ = std::chrono::steady_clock::now();
  }
  void end() {
    std::lock_guard lock(mutex_);
    name_.clear();
  }

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      changed_.wait_for(lock, std::chrono::milliseconds(100));
      const auto waited = std::chrono::steady_clock::now() - since_;
      if (name_.empty() || waited < 6 * kPatience) continue;
      Run& run = current();
      const double seconds = std::chrono::duration<double>(waited).count();
      const std::string text = fmt::format("hung for {:.0f} s; the rest of the suite was not run", seconds);
      run.outcomes.push_back({std::string(run.backend->name), name_, "failed", text, seconds});
      fmt::print(run.lines, "failed   {}\n    {}\n", name_, text);
      finish(run, run.options->json_path);
      std::_Exit(kLostExit);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::string name_;
  std::chrono::steady_clock::time_point since_;
  bool stop_ = false;
  std::thread thread_;
};

class Reporter : public ::testing::EmptyTestEventListener {
 public:
  void OnTestStart(const ::testing::TestInfo& info) override {
    current().notes.clear();
    watchdog_.begin(name_of(info));
  }

  void OnTestEnd(const ::testing::TestInfo& info) override {
    watchdog_.end();
    Run& run = current();
    const ::testing::TestResult& result = *info.result();
    Outcome outcome{std::string(run.backend->name), name_of(info), "passed", "", static_cast<double>(result.elapsed_time()) / 1e3};
    for (int i = 0; i < result.total_part_count(); ++i) {
      const ::testing::TestPartResult& part = result.GetTestPartResult(i);
      if (part.passed()) continue;
      if (!outcome.text.empty()) outcome.text += "\n";
      if (part.failed() && part.file_name() != nullptr)
        outcome.text += fmt::format("{}:{}: ", part.file_name(), part.line_number());
      std::string_view message = part.message();
      while (message.ends_with('\n')) message.remove_suffix(1);
      outcome.text += message;
    }
    if (result.Failed()) {
      outcome.status = "failed";
      for (const std::string& note : run.notes) outcome.text += "\n" + note;
    } else if (result.Skipped()) {
      outcome.status = "skipped";
    }
    if (const Exclusion* xfail = find_exclusion(run.backend->expected_failures, outcome.name); xfail != nullptr) {
      // Reached under METRALE_VERIFY_XFAILS only.
      if (outcome.status == "failed") {
        outcome = {outcome.backend, outcome.name, "skipped", fmt::format("fails as expected: {}", xfail->because), outcome.seconds};
      } else if (outcome.status == "passed") {
        outcome.status = "failed";
        outcome.text = fmt::format("passes, but is listed as an expected failure: {}", xfail->because);
      }
    }
    if (outcome.status == "failed" || run.options->verbose) {
      fmt::print(run.lines, "{:8} {} [{}] {:.3f} s\n", outcome.status, outcome.name, outcome.backend, outcome.seconds);
      if (outcome.status == "failed") {
        std::string_view text = outcome.text;
        while (!text.empty()) {
          const std::size_t end = std::min(text.find('\n'), text.size());
          fmt::print(run.lines, "    {}\n", text.substr(0, end));
          text.remove_prefix(std::min(end + 1, text.size()));
        }
      }
      std::fflush(run.lines);
    }
    run.outcomes.push_back(std::move(outcome));
  }

 private:
  Watchdog watchdog_;
};

// ---- selection ----

/// The cases whose name `filter` is found in, as GoogleTest's own filter; empty when there are none.
std::string select(const NameFilter& filter) {
  std::string names;
  const ::testing::UnitTest& all = *::testing::UnitTest::GetInstance();
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const ::testing::TestSuite& suite = *all.GetTestSuite(s);
    for (int c = 0; c < suite.total_test_count(); ++c) {
      const std::string name = name_of(*suite.GetTestInfo(c));
      if (filter.matches(name)) names += (names.empty() ? "" : ":") + name;
    }
  }
  return names;
}

}  // namespace

// ---- what the fixture asks ----

std::string exclusion_of_running_case() {
  const BackendUnderTest& backend = under_test();
  const std::string name = running_case();
  if (const Exclusion* never = find_exclusion(backend.unsupported, name)) return fmt::format("unsupported: {}", never->because);
  if (const Exclusion* later = find_exclusion(backend.expected_failures, name); later && !armed("METRALE_VERIFY_XFAILS")) {
    return fmt::format("expected to fail: {}", later->because);
  }
  return {};
}

bool is_required(std::string_view backend) {
  const char* list = std::getenv("METRALE_REQUIRE_BACKENDS");
  return list != nullptr && fmt::format(",{},", list).find(fmt::format(",{},", backend)) != std::string::npos;
}

void note_for_running_case(std::string line) { current().notes.push_back(std::move(line)); }

std::vector<std::string>& child_arguments() {
  static std::vector<std::string> arguments;
  return arguments;
}

bool in_child_process() { return armed(kChildVariable); }

ChildResult run_case_in_child(std::vector<std::string> variables) {
  std::vector<std::string> words = current().options->child_command;
  words.insert(words.end(), child_arguments().begin(), child_arguments().end());
  words.insert(words.end(), {"--backend", std::string(under_test().name), "--filter", exact_filter(running_case())});
  variables.push_back(std::string(kChildVariable) + "=1");
  return run_program(words, 6 * kPatience, variables);
}

const BackendUnderTest& under_test() { return *current().backend; }

std::vector<BackendUnderTest>& backends_under_test() {
  static std::vector<BackendUnderTest> all{
#if defined(METRALE_WITH_CUDA)
      cuda_under_test(),
#endif
      host_under_test(), mock_under_test()};
  return all;
}

std::vector<std::string> backend_names() {
  std::vector<std::string> names;
  for (const BackendUnderTest& backend : backends_under_test()) names.emplace_back(backend.name);
  return names;
}

int run_suite(const SuiteOptions& options) {
  std::vector<const BackendUnderTest*> chosen;
  for (const BackendUnderTest& backend : backends_under_test()) {
    if (options.backend.empty() || backend.name == options.backend) chosen.push_back(&backend);
  }
  if (chosen.empty()) {
    fmt::print(stderr, "not_found: no backend '{}' in this build; there are: {}\n", options.backend,
               fmt::join(backend_names(), ", "));
    return 1;
  }

  static const bool initialised = [] {
    int argc = 1;
    std::string name = "conformance";
    std::array<char*, 2> argv{name.data(), nullptr};
    ::testing::InitGoogleTest(&argc, argv.data());
    return true;
  }();
  static_cast<void>(initialised);
  const Result<NameFilter> filter = NameFilter::create(options.filter);
  if (!filter) {
    fmt::print(stderr, "{}\n", filter.error().to_string());
    return 2;
  }
  const std::string names = select(*filter);
  if (names.empty()) {
    fmt::print(stderr, "not_found: no case matches '{}'\n", options.filter);
    return 1;
  }
  GTEST_FLAG_SET(filter, names);
  GTEST_FLAG_SET(catch_exceptions, true);

  Run& run = current();
  run = Run{};
  run.options = &options;
  if (options.json_path == "-") run.lines = stderr;
  ::testing::TestEventListeners& listeners = ::testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());
  Reporter reporter;
  listeners.Append(&reporter);
  for (const BackendUnderTest* backend : chosen) {
    run.backend = backend;
    [[maybe_unused]] const int gtest_result = RUN_ALL_TESTS();  // the reporter counts, expected failures included
  }
  listeners.Release(&reporter);
  const int code = finish(run, options.json_path);
  run.options = nullptr;
  return code;
}

}  // namespace metrale::conformance
