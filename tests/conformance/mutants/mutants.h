// SPDX-License-Identifier: Apache-2.0
//
// Mutants: deliberately broken variants of a backend, each with the case that must catch it. They show that the suite can fail. A
// mutant overrides a few hooks and calls the base for the rest; it is made by the same factory form as a real backend. One thread.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "conformance/backend_under_test.h"
#include "conformance/suite.h"

namespace metrale::conformance {

struct Mutant {
  std::string_view name;       ///< snake_case: what is broken.
  std::string_view caught_by;  ///< "Suite.Case".
  std::function<Result<std::unique_ptr<GpuBackend>>(const CreateOptions&)> create;
  std::string_view base = "host";  ///< The backend that it is a variant of.
};

/// Every mutant, by subject; one function a file.
std::vector<Mutant> memory_mutants();
std::vector<Mutant> copy_mutants();
std::vector<Mutant> stream_mutants();
std::vector<Mutant> graph_mutants();
std::vector<Mutant> kernel_mutants();
std::vector<Mutant> mock_mutants();
std::vector<Mutant> all_mutants();

/// Puts a mutant in the place of its backend for this process. False, with a line on standard error, when there is no such mutant.
bool use_mutant(std::string_view name, SuiteOptions& options);
/// Prints each mutant and the case that catches it; 0.
int list_mutants();
/// Runs every mutant whose name `filter` (a regular expression) is found in against its case, and the unbroken backends against the
/// same cases, in processes of their own and for a bounded time. Prints `N mutants, N caught`; 0 when all are caught and
/// nothing else fails.
int run_mutants(std::string_view filter);

}  // namespace metrale::conformance
