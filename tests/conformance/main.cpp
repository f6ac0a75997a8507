// SPDX-License-Identifier: Apache-2.0
//
// The suite as a program for CTest. `metgpu check` is the same for users; this one also has the mutants.
#include <CLI/CLI.hpp>

#include "conformance/backends/samples.h"
#include "conformance/backends/skeleton.h"
#include "conformance/mutants/mutants.h"
#include "conformance/suite.h"
#if defined(METRALE_WITH_CUDA)
#include "conformance/backends/fake_cuda.h"
#endif

int main(int argc, char** argv) {
  using namespace metrale::conformance;
  backends_under_test().push_back(skeleton_under_test());
#if defined(METRALE_WITH_CUDA)
  backends_under_test().push_back(fake_cuda_under_test());
  backends_under_test().push_back(fake_cuda_sm_80_under_test());
#endif
  SuiteOptions options;
  std::string mutant;
  std::string mutant_filter;
  bool run_all_mutants = false;
  bool list = false;
  CLI::App app{"Runs the conformance suite"};
  app.add_option("--backend", options.backend, "Backend to check; every one without");
  app.add_option("--filter", options.filter, "Regular expression searched for in Suite.Case");
  app.add_option("--json", options.json_path,
                 "Where to write the results; - is standard output, and the lines go to standard error");
  app.add_flag("--verbose", options.verbose, "A line for each case");
  app.add_option("--mutant", mutant, "Check this broken variant instead of its backend");
  app.add_flag("--list-mutants", list, "Print each broken variant and the case that catches it");
  app.add_flag("--mutants", run_all_mutants, "Run each broken variant against its case, in processes of their own");
  app.add_option("--only", mutant_filter, "With --mutants: regular expression searched for in the variant's name");
  CLI11_PARSE(app, argc, argv);
  if (options.backend.starts_with("sample_")) {
    for (BackendUnderTest& sample : sample_backends()) backends_under_test().push_back(std::move(sample));
  }
  if (list) return list_mutants();
  if (run_all_mutants) return run_mutants(mutant_filter);
  if (!mutant.empty()) {
    if (!use_mutant(mutant, options)) return 2;
  }
  return run_suite(options);
}
