// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace metrale::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(GpuState, EveryReasonThatHoldsClocksDownIsNamed) {
  EXPECT_THAT(clock_limit_names(0), IsEmpty());
  EXPECT_THAT(clock_limit_names(0x1 | 0x4 | 0x40), ElementsAre("idle", "software power cap", "hardware thermal slowdown"));
}

TEST(GpuState, ACardThatIsNotThereHasNone) { EXPECT_FALSE(read_gpu_state("GPU-00000000-0000-0000-0000-000000000000").has_value()); }

}  // namespace
}  // namespace metrale::bench
