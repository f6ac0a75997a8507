// SPDX-License-Identifier: Apache-2.0
#include "metrale/log.h"

#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <memory>
#include <mutex>
#include <utility>

namespace metrale {
namespace {

spdlog::level::level_enum to_spdlog(LogLevel level) noexcept {
  switch (level) {
    case LogLevel::debug: return spdlog::level::debug;
    case LogLevel::info: return spdlog::level::info;
    case LogLevel::warning: return spdlog::level::warn;
    case LogLevel::error: return spdlog::level::err;
  }
  return spdlog::level::err;
}

// Not in spdlog's own registry, which belongs to the application. Debug lines are left out.
void write_to_stderr(LogLevel level, std::string_view line) {
  // Never destroyed: destructors that run at exit still log.
  static spdlog::logger& logger = [&]() -> spdlog::logger& {
    auto* made = new spdlog::logger("metrale", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("[%n] [%l] %v");
    made->set_level(spdlog::level::info);
    return *made;
  }();
  logger.log(to_spdlog(level), spdlog::string_view_t(line.data(), line.size()));
}

struct SinkSlot {
  std::mutex mutex;               ///< Held while a sink runs: one line at a time, and a sink that was replaced runs no more.
  std::shared_ptr<LogSink> sink;  ///< Shared, as a sink that replaces itself has to outlive its call.
};

SinkSlot& slot() {
  static auto& slot = *new SinkSlot;
  return slot;
}

thread_local bool in_sink = false;

}  // namespace

void set_log_sink(LogSink sink) {
  // Holds the one that was there from the swap on, and so outlives the lock: what a sink owns may log as it goes.
  std::shared_ptr<LogSink> shared = sink ? std::make_shared<LogSink>(std::move(sink)) : nullptr;
  std::unique_lock lock(slot().mutex, std::defer_lock);
  if (!in_sink) lock.lock();  // else this thread holds it already
  slot().sink.swap(shared);
}

// Catches everything: most callers are destructors and fault paths, which have no use for a failure to log.
void log(LogLevel level, std::string_view line) {
  try {
    if (in_sink) return write_to_stderr(level, line);  // a sink that logs would wait for itself
    // Outside the lock: a sink that replaces itself is destroyed here, and what it owns may log.
    std::shared_ptr<LogSink> sink;
    const std::lock_guard lock(slot().mutex);
    sink = slot().sink;
    if (!sink) return write_to_stderr(level, line);
    struct Mark {
      Mark() { in_sink = true; }
      ~Mark() { in_sink = false; }
    } mark;
    (*sink)(level, line);
  } catch (...) {  // NOLINT(bugprone-empty-catch)
  }
}

}  // namespace metrale
