// SPDX-License-Identifier: Apache-2.0
#include "metrale/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace metrale {
namespace {

class LogTest : public testing::Test {
 protected:
  ~LogTest() override { set_log_sink({}); }
};

TEST_F(LogTest, DefaultSinkWritesALineWithItsLevelToStandardError) {
  testing::internal::CaptureStderr();
  log(LogLevel::warning, "3 blocks {} left");
  log(LogLevel::error, "device lost");
  log(LogLevel::debug, "not shown");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "[metrale] [warning] 3 blocks {} left\n[metrale] [error] device lost\n");
}

TEST_F(LogTest, SinkReplacesStandardErrorUntilItIsRemoved) {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel level, std::string_view line) {
    EXPECT_EQ(level, LogLevel::info);
    lines.emplace_back(line);
  });
  testing::internal::CaptureStderr();
  log(LogLevel::info, "a");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_THAT(lines, testing::ElementsAre("a"));

  set_log_sink({});
  testing::internal::CaptureStderr();
  log(LogLevel::info, "b");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "[metrale] [info] b\n");
  EXPECT_EQ(lines.size(), 1u);
}

TEST_F(LogTest, SinkThatThrowsHurtsNoCaller) {
  set_log_sink([](LogLevel, std::string_view) { throw std::runtime_error("full"); });
  EXPECT_NO_THROW(log(LogLevel::info, "a"));
  EXPECT_NO_THROW(log(LogLevel::info, "b"));
}

TEST_F(LogTest, SinkThatLogsDoesNotWaitForItself) {
  int num_calls = 0;
  set_log_sink([&](LogLevel, std::string_view) {
    ++num_calls;
    log(LogLevel::info, "from the sink");
  });
  testing::internal::CaptureStderr();
  log(LogLevel::info, "a");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "[metrale] [info] from the sink\n");
  EXPECT_EQ(num_calls, 1);
}

TEST_F(LogTest, SinkThatReplacesItselfFinishesItsLine) {
  std::vector<std::string> lines;
  const auto kept = std::make_shared<std::string>("owned by the first sink");
  const std::weak_ptr<std::string> owned = kept;
  LogSink first = [&lines, kept](LogLevel, std::string_view line) {
    set_log_sink([&lines](LogLevel, std::string_view later) { lines.push_back("second: " + std::string(later)); });
    lines.push_back(*kept + ": " + std::string(line));
  };
  set_log_sink(std::move(first));
  log(LogLevel::info, "a");
  log(LogLevel::info, "b");
  EXPECT_THAT(lines, testing::ElementsAre("owned by the first sink: a", "second: b"));
  EXPECT_EQ(owned.use_count(), 1) << "the first sink went with its line";
}

TEST_F(LogTest, SinkThatRemovesItselfIsTheLastToHear) {
  int num_calls = 0;
  set_log_sink([&](LogLevel, std::string_view) {
    ++num_calls;
    set_log_sink({});
  });
  testing::internal::CaptureStderr();
  log(LogLevel::info, "a");
  log(LogLevel::info, "b");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "[metrale] [info] b\n");
  EXPECT_EQ(num_calls, 1);
}

TEST_F(LogTest, WhatAReplacedSinkOwnsMayLogAsItGoes) {
  struct LogsAtItsEnd {
    ~LogsAtItsEnd() { log(LogLevel::info, "gone"); }
  };
  std::vector<std::string> lines;
  const auto heard = [&lines](LogLevel, std::string_view line) { lines.emplace_back(line); };
  set_log_sink([owned = std::make_shared<LogsAtItsEnd>()](LogLevel, std::string_view) {});
  set_log_sink(heard);
  set_log_sink([owned = std::make_shared<LogsAtItsEnd>(), heard](LogLevel, std::string_view) { set_log_sink(heard); });
  log(LogLevel::info, "lost on the sink that goes");
  EXPECT_THAT(lines, testing::ElementsAre("gone", "gone"));
}

TEST_F(LogTest, ReplacedSinkIsNotRunningWhenTheCallReturns) {
  std::promise<void> entered, may_leave;
  std::atomic<bool> left{false};
  set_log_sink([&](LogLevel, std::string_view) {
    entered.set_value();
    may_leave.get_future().wait();
    left = true;
  });
  std::thread logs([] { log(LogLevel::info, "a"); });
  entered.get_future().wait();
  std::thread replaces([&] {
    set_log_sink({});
    EXPECT_TRUE(left);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // for a call that does not wait to show
  may_leave.set_value();
  logs.join();
  replaces.join();
}

TEST_F(LogTest, OneLineAtATime) {
  std::atomic<int> inside{0};
  int num_lines = 0;
  set_log_sink([&](LogLevel, std::string_view) {
    EXPECT_EQ(inside.fetch_add(1), 0);
    ++num_lines;
    inside.fetch_sub(1);
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 500; ++i) log(LogLevel::info, "x");
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(num_lines, 2000);
}

}  // namespace
}  // namespace metrale
