// SPDX-License-Identifier: Apache-2.0
//
// The conformance suite as one call: every promise of backend.h as a case, run against a backend of this build. Used by the test
// program and by `metgpu check`. One thread at a time; the process's log sink is replaced while it runs.
#pragma once

#include <string>
#include <vector>

namespace metrale::conformance {

struct SuiteOptions {
  /// The backend to check, by name; empty: each backend of `backend_names()` in turn.
  std::string backend;
  /// Regular expression (POSIX extended) searched for in "Suite.Case"; empty: every case.
  std::string filter;
  /// Where to write all results as JSON; empty: nowhere. "-": standard output, and the lines for people go to standard error.
  std::string json_path;
  /// Print a line for each case, also where it passed.
  bool verbose = false;
  /// How to start this program again so that it runs one case, to be followed by `--backend B --filter RE`: cases that lose the
  /// device run in a process of their own. `metgpu` gives {"/proc/self/exe", "check"}.
  std::vector<std::string> child_command{"/proc/self/exe"};
};

/// Runs the cases, prints failures, the reason of each skip and the closing line `N passed, N failed, N skipped`.
/// Returns 0 when nothing failed, 1 when something did, no case matched or the backend is not built, 2 for a malformed filter.
/// Environment: METRALE_REQUIRE_BACKENDS=a,b makes it a failure that one of these cannot run here; METRALE_VERIFY_XFAILS=1 runs the
/// cases that are expected to fail, and fails on each that passes.
int run_suite(const SuiteOptions& options);

/// The backends that the suite knows in this build.
std::vector<std::string> backend_names();

}  // namespace metrale::conformance
