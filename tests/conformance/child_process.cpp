// SPDX-License-Identifier: Apache-2.0
#include "conformance/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>

#include <fmt/format.h>

extern char** environ;

namespace metrale::conformance {

ChildResult run_program(std::vector<std::string> words, std::chrono::nanoseconds limit, std::vector<std::string> variables) {
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  std::vector<char*> environment;
  for (std::string& variable : variables) environment.push_back(variable.data());
  for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
  environment.push_back(nullptr);

  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return {false, "no pipe could be made"};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  pid_t pid = 0;
  const int status = posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environment.data());
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  if (status != 0) {
    close(ends[0]);
    return {false, fmt::format("cannot start {}: error {}", words[0], status)};
  }

  ChildResult result;
  const auto deadline = std::chrono::steady_clock::now() + limit;
  std::array<char, 4096> buffer{};
  bool late = false;
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    pollfd end{ends[0], POLLIN, 0};
    if (left <= 0 || poll(&end, 1, static_cast<int>(left)) == 0) {
      late = true;
      kill(pid, SIGKILL);
      break;
    }
    const ssize_t got = ::read(ends[0], buffer.data(), buffer.size());
    if (got <= 0) break;
    result.output.append(buffer.data(), static_cast<std::size_t>(got));
  }
  close(ends[0]);
  int exit_status = 0;
  waitpid(pid, &exit_status, 0);
  if (late) {
    result.output += "\nit hung and was ended";
  } else if (WIFSIGNALED(exit_status)) {
    result.output += fmt::format("\nended by signal {}", WTERMSIG(exit_status));
  }
  result.passed = !late && WIFEXITED(exit_status) && WEXITSTATUS(exit_status) == 0;
  return result;
}

}  // namespace metrale::conformance
