// SPDX-License-Identifier: Apache-2.0
//
// METRALE_HOST_THREADS. A program of its own, because a process reads its switches once.
#include <cstdlib>

#include "metrale/backends.h"
#include "metrale/backends/host.h"
#include "support.h"

namespace metrale::test {
namespace {

class HostThreads : public testing::Test {
 protected:
  static void SetUpTestSuite() { ASSERT_EQ(setenv("METRALE_HOST_THREADS", "3", 1), 0); }
};

TEST_F(HostThreads, SwitchSetsTheThreadsOfEveryBackendThatNamesNone) {
  EXPECT_EQ(take(take(host::create())->sm_count()), 3u);
  EXPECT_EQ(take(take(create_backend("host"))->sm_count()), 3u);
}

TEST_F(HostThreads, TheProgramsOwnNumberComesFirst) {
  host::Options options;
  options.num_threads = 2;
  EXPECT_EQ(take(take(host::create(options))->sm_count()), 2u);
}

}  // namespace
}  // namespace metrale::test
