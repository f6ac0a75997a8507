// SPDX-License-Identifier: Apache-2.0
//
// What the runner tells the fixture about the run: the reason to leave a case out, whether a backend must be there, and how to run
// a case in a process of its own. Set by `run_suite`; read by the case that runs, from its thread.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "conformance/child_process.h"

namespace metrale::conformance {

/// Why the running case is left out on this backend; empty: it runs.
std::string exclusion_of_running_case();
/// Whether METRALE_REQUIRE_BACKENDS names the backend.
bool is_required(std::string_view backend);
/// A line printed with the running case's failures.
void note_for_running_case(std::string line);

/// Arguments that a child process needs besides backend and filter.
std::vector<std::string>& child_arguments();
/// Whether this process was started to run one case.
bool in_child_process();

/// Runs the running case in a process of its own, for a bounded time, with `variables` in its environment.
ChildResult run_case_in_child(std::vector<std::string> variables);

}  // namespace metrale::conformance
