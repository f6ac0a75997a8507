// SPDX-License-Identifier: Apache-2.0
//
// alloc_arena, free_arena.
#include "conformance/case.h"

namespace metrale::conformance {
namespace {

class Arena : public CaseNeeding<memory> {};

TEST_F(Arena, IsOffLiveBytes) {
  const DevicePtr ptr = must(gpu().alloc_arena(1 << 20));
  EXPECT_EQ(gpu().live_bytes(), 0u);
  EXPECT_EQ(gpu().live_alloc_count(), 0u);
  EXPECT_EQ(gpu().peak_bytes(), 0u);
  EXPECT_TRUE(ok(gpu().free_arena(ptr)));
  EXPECT_EQ(gpu().live_bytes(), 0u);
}

TEST_F(Arena, IsListedWithItsKindAndCaller) {
  const DevicePtr ptr = must(gpu().alloc_arena(5000));
  const std::uint32_t line = __LINE__ - 1;
  const auto blocks = gpu().live_allocations();
  ASSERT_EQ(blocks.size(), 1u);
  EXPECT_EQ(blocks[0].base, ptr);
  EXPECT_EQ(blocks[0].bytes, 5000u);
  EXPECT_EQ(blocks[0].kind, MemoryKind::arena);
  EXPECT_EQ(blocks[0].site.line(), line);
}

TEST_F(Arena, IsReportedUnderItsOwnHeading) {
  EXPECT_EQ(gpu().alloc_report().find("arena"), std::string::npos);
  must(gpu().alloc_arena(3 << 20));
  const std::string report = gpu().alloc_report();
  const std::size_t heading = report.find("arena");
  ASSERT_NE(heading, std::string::npos) << report;
  EXPECT_NE(report.find("3.0 MiB", heading), std::string::npos) << report;
}

TEST_F(Arena, IsAlignedAndUsableToItsLastByte) {
  need({copies});
  for (const std::uint64_t bytes : {1, 4097, 3 << 20}) {
    const DevicePtr ptr = must(gpu().alloc_arena(bytes));
    EXPECT_EQ(ptr.address % kDeviceAlignment, 0u);
    const auto sent = pattern(bytes, 5);
    write(ptr, sent);
    EXPECT_EQ(read(ptr, bytes), sent);
  }
}

TEST_F(Arena, ServesCopiesInsideAndRefusesThoseThatLeaveIt) {
  need({copies});
  const DevicePtr ptr = must(gpu().alloc_arena(1024));
  const auto sent = pattern(24, 1);
  EXPECT_TRUE(ok(gpu().copy_h2d(ptr.offset(1000), sent)));
  EXPECT_EQ(read(ptr.offset(1000), 24), sent);
  EXPECT_TRUE(refused(gpu().copy_h2d(ptr.offset(1001), sent), Errc::out_of_range));
}

TEST_F(Arena, IsFreedByFreeArenaOnly) {
  const DevicePtr arena = must(gpu().alloc_arena(256));
  const DevicePtr plain = block(256);
  EXPECT_TRUE(refused(gpu().free_arena(plain), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().free(arena), Errc::invalid_argument));
  EXPECT_TRUE(ok(gpu().free_arena(arena)));
  EXPECT_TRUE(refused(gpu().free_arena(arena), Errc::invalid_argument));
  EXPECT_TRUE(ok(gpu().free(plain)));
}

TEST_F(Arena, IsOutsideTheBudget) {
  gpu().set_budget(100);
  EXPECT_TRUE(ok(gpu().alloc_arena(1 << 20)));
  EXPECT_TRUE(ok(gpu().alloc(100)));
}

TEST_F(Arena, BeyondTheDeviceIsOutOfMemory) {
  EXPECT_TRUE(refused(gpu().alloc_arena(std::uint64_t{1} << 60), Errc::out_of_memory));
}

TEST_F(Arena, IsNotHandedBackBeforeEarlierWorkIsDone) {
  need({copies, streams, host_callbacks});
  constexpr std::size_t kBytes = 40 << 10;
  const StreamHandle s = stream();
  const DevicePtr used = must(gpu().alloc_arena(kBytes));
  Gate gate(gpu(), s);
  must(gpu().memset_async(used, 0xAB, kBytes, s));
  Background freeing([&] { must(gpu().free_arena(used)); });
  freeing.is_back();
  std::vector<DevicePtr> next;
  for (int i = 0; i < 4; ++i) {
    next.push_back(must(gpu().alloc_arena(kBytes)));
    fill(next.back(), 0x11, kBytes);
  }
  gate.open();
  freeing.join();
  settle(s);
  for (const DevicePtr ptr : next) EXPECT_TRUE(holds(ptr, kBytes, 0x11)) << "work on a freed arena wrote into a new one";
}

}  // namespace
}  // namespace metrale::conformance
