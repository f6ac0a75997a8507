// SPDX-License-Identifier: Apache-2.0
//
// Runs metgpu as a user does, through a shell, and keeps what it printed. One thread at a time.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "support/byte_writer.h"

namespace metrale::test {

struct ToolRun {
  int exit = -1;  ///< 124 when it ran out of time, 128 and more for a signal.
  std::string out;
  std::string err;
};

inline std::string read_all(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Runs `metgpu arguments`, which the shell reads: redirections may follow, and `before` may pipe something in.
inline ToolRun run_tool(const std::string& arguments, const std::string& before = "") {
  const std::filesystem::path tool =
      std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path().parent_path() / "cli" / "metgpu";
  const TempFolder scratch;
  const std::string out = (scratch / "out").string();
  const std::string err = (scratch / "err").string();
  const std::string line =
      "{ " + before + " timeout 60 '" + tool.string() + "' " + arguments + "; } >'" + out + "' 2>'" + err + "' </dev/null";
  const int status = std::system(line.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_all(out), read_all(err)};
}

/// Expects `exit`, and one line on standard error that has every one of `parts`.
inline void expect_refusal(const ToolRun& run, int exit, const std::vector<std::string>& parts) {
  EXPECT_EQ(run.exit, exit) << run.err;
  for (const std::string& part : parts) EXPECT_THAT(run.err, ::testing::HasSubstr(part));
  EXPECT_EQ(run.err.find('\n'), run.err.size() - 1) << "not one line: " << run.err;
  EXPECT_EQ(run.err.find("internal"), std::string::npos) << run.err;
}

}  // namespace metrale::test
