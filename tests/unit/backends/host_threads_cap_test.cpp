// SPDX-License-Identifier: Apache-2.0
//
// METRALE_HOST_THREADS far beyond the machine. A program of its own, because a process reads its switches once.
#include <algorithm>
#include <cstdlib>
#include <string>
#include <thread>

#include "metrale/backends/host.h"
#include "metrale/log.h"
#include "support.h"

namespace metrale::test {
namespace {

TEST(HostThreadsCap, ASwitchBeyondTheCoresIsCutWithAWarning) {
  ASSERT_EQ(setenv("METRALE_HOST_THREADS", "4000", 1), 0);
  std::string text;
  set_log_sink([&](LogLevel, std::string_view line) { text += line; });
  const std::uint32_t num_threads = take(take(host::create())->sm_count());
  set_log_sink({});
  EXPECT_GE(num_threads, std::max(1u, std::thread::hardware_concurrency()));
  EXPECT_LT(num_threads, 4000u);
  EXPECT_NE(text.find("METRALE_HOST_THREADS=4000"), std::string::npos) << text;
  EXPECT_NE(text.find(std::to_string(num_threads)), std::string::npos) << text;
}

}  // namespace
}  // namespace metrale::test
