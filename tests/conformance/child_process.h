// SPDX-License-Identifier: Apache-2.0
//
// Runs a program and takes its output, for a bounded time. Any thread.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace metrale::conformance {

struct ChildResult {
  bool passed = false;  ///< It exited with 0.
  std::string output;   ///< Standard output and error together, and why it ended if not by itself.
};

/// Runs `words` with `variables` ("NAME=value") before the environment; ends it by a signal after `limit`.
ChildResult run_program(std::vector<std::string> words, std::chrono::nanoseconds limit, std::vector<std::string> variables = {});

}  // namespace metrale::conformance
