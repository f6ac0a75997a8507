// SPDX-License-Identifier: Apache-2.0
//
// Environment switches as a backend obeys them. Each is read once in a process, so each case has a process of its own.
#include "conformance/case.h"

namespace metrale::conformance {
namespace {

class Switches : public CaseNeeding<memory, copies, streams> {
 protected:
  bool follows_environment() const override { return true; }
};

TEST_F(Switches, RedzoneArmsBandsOfRoundedSizeWithTheirFill) {
  if (isolated({"METRALE_REDZONE=50", "METRALE_REDZONE_FILL=17", "METRALE_UNCHECKED=1"})) return;
  const DevicePtr ptr = block(100);
  EXPECT_TRUE(holds(ptr.offset(100), 64, 17));
  EXPECT_EQ(must(gpu().scan_redzones()), 0u);
  write(ptr.offset(163), std::vector<std::byte>(1, std::byte{1}));
  EXPECT_EQ(must(gpu().scan_redzones()), 1u);
  EXPECT_TRUE(holds(ptr.offset(100), 64, 17));
}

TEST_F(Switches, RedzoneMinIdxLeavesEarlierBlocksWithoutABand) {
  if (isolated({"METRALE_REDZONE=64", "METRALE_REDZONE_MIN_IDX=2", "METRALE_UNCHECKED=1"})) return;
  block(100);
  block(100);
  const DevicePtr third = block(100);
  EXPECT_TRUE(holds(third.offset(100), 64, 0xEE));
  must(gpu().poison_redzones(0, 2));
  EXPECT_TRUE(holds(third.offset(100), 64, 0x00)) << "indices count from the first block, with or without a band";
  write(third.offset(100), std::vector<std::byte>(1, std::byte{1}));
  EXPECT_EQ(must(gpu().scan_redzones()), 1u);
}

TEST_F(Switches, RedzoneTraceIdxLogsTheCallerOfThatAllocation) {
  if (isolated({"METRALE_REDZONE=64", "METRALE_REDZONE_TRACE_IDX=1"})) return;
  block(100);
  must(gpu().alloc(200));
  const std::string site = line_above();
  block(300);
  EXPECT_EQ(log_lines(site).size(), 1u);
  EXPECT_EQ(log_lines("allocation").size(), 1u);
}

TEST_F(Switches, RedzoneOffIsTheDefault) {
  if (isolated({"METRALE_REDZONE=0", "METRALE_UNCHECKED=1"})) return;
  block(100);
  EXPECT_EQ(must(gpu().scan_redzones()), 0u);
  must(gpu().poison_redzones(0, 10));
}

TEST_F(Switches, UncheckedSkipsTheCheckOfCopyEnds) {
  if (isolated({"METRALE_REDZONE=64", "METRALE_UNCHECKED=1"})) return;
  const DevicePtr ptr = block(100);
  EXPECT_TRUE(ok(gpu().memset(ptr, 0, 101)));
  EXPECT_EQ(must(gpu().scan_redzones()), 1u);
}

TEST_F(Switches, UncheckedIsArmedByOneOnly) {
  if (isolated({"METRALE_REDZONE=64", "METRALE_UNCHECKED=yes"})) return;
  const DevicePtr ptr = block(100);
  EXPECT_TRUE(refused(gpu().memset(ptr, 0, 101), Errc::out_of_range));
}

TEST_F(Switches, DebugSyncKernelsWaitsAfterEachLaunch) {
  if (isolated({"METRALE_DEBUG_SYNC_KERNELS=1"})) return;
  need({kernels, host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr out = block(64);
  const KernelHandle k = kernel(kTiled);
  Gate gate(gpu(), s);
  EXPECT_FALSE(returns_before(gate, [&] { launch(k, s, {KernelArg::buffer(out)}); }));
}

}  // namespace
}  // namespace metrale::conformance
