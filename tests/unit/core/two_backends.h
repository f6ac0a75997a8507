// SPDX-License-Identifier: Apache-2.0
//
// The backends that owners are tested on: host, where work really runs, and mock, where any call can be made to fail.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "metrale/backends/host.h"
#include "metrale/backends/mock.h"
#include "metrale/log.h"

namespace metrale::test {

inline std::unique_ptr<GpuBackend> make_mock(mock::Options options = {}) {
  auto made = mock::create(std::move(options));
  if (!made) throw std::runtime_error(made.error().to_string());
  return std::move(*made);
}

inline std::unique_ptr<GpuBackend> make_host(host::Options options = {}) {
  if (options.num_threads == 0) options.num_threads = 2;
  auto made = host::create(std::move(options));
  if (!made) throw std::runtime_error(made.error().to_string());
  return std::move(*made);
}

/// Keeps warnings for inspection while it lives.
class LogLines {
 public:
  LogLines() {
    set_log_sink([this](LogLevel, std::string_view line) { text_ += std::string(line) + '\n'; });
  }
  ~LogLines() { set_log_sink({}); }
  LogLines(const LogLines&) = delete;
  LogLines& operator=(const LogLines&) = delete;
  const std::string& text() const noexcept { return text_; }

 private:
  std::string text_;
};

/// A test run once on each.
class OnBothBackends : public testing::TestWithParam<const char*> {
 protected:
  std::unique_ptr<GpuBackend> backend_ = GetParam() == std::string_view("mock") ? make_mock() : make_host();
};

inline std::string backend_name(const testing::TestParamInfo<const char*>& info) { return info.param; }

#define METRALE_ON_BOTH_BACKENDS(suite) \
  INSTANTIATE_TEST_SUITE_P(Backend, suite, testing::Values("host", "mock"), test::backend_name)

}  // namespace metrale::test

/// The code of a failed result, or a test failure and nothing.
#define EXPECT_ERRC(result, errc)                                                         \
  do {                                                                                    \
    const auto& metrale_result = (result);                                                \
    ASSERT_FALSE(metrale_result.has_value());                                             \
    EXPECT_EQ(metrale_result.error().code(), errc) << metrale_result.error().to_string(); \
  } while (false)
#define ASSERT_OK(result)                                                          \
  do {                                                                             \
    const auto& metrale_result = (result);                                         \
    ASSERT_TRUE(metrale_result.has_value()) << metrale_result.error().to_string(); \
  } while (false)
