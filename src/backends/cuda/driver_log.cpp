// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/driver_log.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <vector>

namespace metrale::cuda {

namespace {

constexpr std::size_t kLines = 8;

struct Log {
  std::mutex mutex;
  std::deque<std::string> lines;
  std::vector<const Driver*> heard;
};

Log& log_of_process() {
  // Never destroyed: the driver may log until the process ends.
  static Log& instance = *new Log;
  return instance;
}

void CUDA_CB on_line(void*, CUlogLevel, char* message, std::size_t length) noexcept {
  if (ExpectedRefusal::num_on_thread() != 0) return;
  try {
    std::string line(message, length);
    // A final zero may be counted, and the text goes into a single line.
    while (!line.empty() && (line.back() == '\0' || line.back() == '\n')) line.pop_back();
    std::replace(line.begin(), line.end(), '\n', ' ');
    if (line.empty()) return;
    Log& log = log_of_process();
    std::lock_guard lock(log.mutex);
    if (log.lines.size() == kLines) log.lines.pop_front();
    log.lines.push_back(std::move(line));
  } catch (...) {  // NOLINT(bugprone-empty-catch): the driver cannot be told
  }
}

}  // namespace

int& ExpectedRefusal::num_on_thread() noexcept {
  thread_local int count = 0;
  return count;
}

void listen_to_log(const Driver& driver) {
  if (driver.cuLogsRegisterCallback_ == nullptr) return;
  Log& log = log_of_process();
  {
    std::lock_guard lock(log.mutex);
    if (std::find(log.heard.begin(), log.heard.end(), &driver) != log.heard.end()) return;
    log.heard.push_back(&driver);
  }
  // Without a log the errors are as good as their codes.
  CUlogsCallbackHandle handle = nullptr;
  static_cast<void>(driver.cuLogsRegisterCallback_(on_line, nullptr, &handle));
}

std::string last_log_lines() {
  Log& log = log_of_process();
  std::lock_guard lock(log.mutex);
  std::string text;
  for (const std::string& line : log.lines) {
    if (!text.empty()) text += " | ";
    text += line;
  }
  return text;
}

}  // namespace metrale::cuda
