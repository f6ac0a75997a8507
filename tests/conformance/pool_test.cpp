// SPDX-License-Identifier: Apache-2.0
//
// alloc_async, free_async, trim: the pool, ordered by streams.
#include <algorithm>

#include "conformance/case.h"

namespace metrale::conformance {
namespace {

class Pool : public CaseNeeding<memory, pooled_memory, streams> {
 protected:
  DevicePtr take(std::uint64_t bytes, StreamHandle s, Site site = Site::current()) {
    return must(gpu().alloc_async(bytes, s, site), site);
  }
  void give(DevicePtr ptr, StreamHandle s, Site site = Site::current()) { must(gpu().free_async(ptr, s), site); }
};

TEST_F(Pool, BlocksServeTheWorkEnqueuedNext) {
  need({copies});
  const StreamHandle s = stream();
  const DevicePtr ptr = take(5000, s);
  must(gpu().memset_async(ptr, 0x31, 5000, s));
  std::vector<std::byte> seen(5000);
  must(gpu().copy_d2h_on_stream(seen, ptr, s));
  EXPECT_EQ(seen, std::vector<std::byte>(5000, std::byte{0x31}));
  EXPECT_EQ(ptr.address % kDeviceAlignment, 0u);
}

TEST_F(Pool, BlocksDoNotOverlap) {
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  std::vector<std::pair<std::uint64_t, std::uint64_t>> extents;
  for (std::uint64_t bytes = 1; bytes < 3'000'000; bytes = bytes * 3 / 2 + 100) {
    extents.emplace_back(take(bytes, a).address, bytes);
    extents.emplace_back(take(bytes, b).address, bytes);
  }
  std::sort(extents.begin(), extents.end());
  for (std::size_t i = 1; i < extents.size(); ++i) EXPECT_LE(extents[i - 1].first + extents[i - 1].second, extents[i].first);
}

TEST_F(Pool, BlocksAreOnTheLedgerWithKindAndCaller) {
  const DevicePtr ptr = must(gpu().alloc_async(777, gpu().default_stream()));
  const std::uint32_t line = __LINE__ - 1;
  const auto blocks = gpu().live_allocations();
  ASSERT_EQ(blocks.size(), 1u);
  EXPECT_EQ(blocks[0].base, ptr);
  EXPECT_EQ(blocks[0].bytes, 777u);
  EXPECT_EQ(blocks[0].kind, MemoryKind::pooled);
  EXPECT_EQ(blocks[0].site.line(), line);
}

TEST_F(Pool, LiveBytesCountWhatIsInUseNotWhatIsReserved) {
  const StreamHandle s = stream();
  const DevicePtr ptr = take(100'000, s);
  EXPECT_EQ(gpu().live_bytes(), 100'000u);
  EXPECT_GE(gpu().pool_reserved_bytes(), 100'000u);
  give(ptr, s);
  settle(s);
  EXPECT_EQ(gpu().live_bytes(), 0u);
  EXPECT_GE(gpu().pool_reserved_bytes(), 100'000u) << "the pool keeps what it has until trim";
}

TEST_F(Pool, ReusesBlocksOnTheirStream) {
  const StreamHandle s = stream();
  give(take(300'000, s), s);
  const std::uint64_t reserved = gpu().pool_reserved_bytes();
  for (int i = 0; i < 200; ++i) give(take(300'000, s), s);
  EXPECT_EQ(gpu().pool_reserved_bytes(), reserved);
}

TEST_F(Pool, ReusesABlockOfAnotherStreamOnlyBehindItsWork) {
  need({copies, host_callbacks});
  constexpr std::size_t kBytes = 600'000;
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const DevicePtr first = take(kBytes, a);
  Gate gate(gpu(), a);
  must(gpu().memset_async(first, 0xAA, kBytes, a));
  give(first, a);
  std::vector<DevicePtr> next;
  for (int i = 0; i < 3; ++i) {
    next.push_back(take(kBytes, b));
    must(gpu().memset_async(next.back(), 0xBB, kBytes, b));
  }
  static_cast<void>(gpu().synchronize_for(b, kGrace).has_value());  // passes unless the pool put it behind the gate
  gate.open();
  settle(a);
  settle(b);
  for (const DevicePtr ptr : next)
    EXPECT_TRUE(holds(ptr, kBytes, 0xBB)) << "the earlier user wrote into a block given to another stream";
}

TEST_F(Pool, ReusesABlockOfAnotherStreamBehindItsWorkWhenMemoryIsShort) {
  need({copies, host_callbacks});
  need(under_test().limits_memory, "this backend cannot be given less memory");
  remake({.memory_limit_bytes = 6 << 20});
  constexpr std::size_t kBytes = 4 << 20;
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const DevicePtr first = take(kBytes, a);
  Gate gate(gpu(), a);
  must(gpu().memset_async(first, 0xAA, kBytes, a));
  give(first, a);
  const auto second = gpu().alloc_async(kBytes, b);
  if (second) must(gpu().memset_async(*second, 0xBB, kBytes, b));
  static_cast<void>(gpu().synchronize_for(b, kGrace).has_value());
  gate.open();
  settle(a);
  settle(b);
  ASSERT_TRUE(ok(second)) << "the only block was free, behind an event";
  EXPECT_TRUE(holds(*second, kBytes, 0xBB));
}

TEST_F(Pool, WorkEnqueuedBeforeFreeAsyncStillUsesTheBlock) {
  need({copies, host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr ptr = take(4096, s);
  const DevicePtr kept = block(4096);
  {
    Gate gate(gpu(), s);
    must(gpu().memset_async(ptr, 0x44, 4096, s));
    must(gpu().copy_d2d_async(kept, ptr, 4096, s));
    give(ptr, s);
    // The same stream's next user comes after that work.
    const DevicePtr next = take(4096, s);
    must(gpu().memset_async(next, 0x55, 4096, s));
  }
  settle(s);
  EXPECT_TRUE(holds(kept, 4096, 0x44));
}

TEST_F(Pool, FreeAsyncDoesNotWaitForTheStream) {
  need({host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr ptr = take(4096, s);
  Gate gate(gpu(), s);
  must(gpu().memset_async(ptr, 1, 4096, s));
  give(ptr, s);
  EXPECT_EQ(gpu().live_bytes(), 0u);
  EXPECT_FALSE(must(gpu().query(s)));
}

TEST_F(Pool, TakesBlocksBackOnAnyStream) {
  need({copies, host_callbacks});
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const DevicePtr ptr = take(4096, a);
  settle(a);
  Gate gate(gpu(), b);
  must(gpu().memset_async(ptr, 0x66, 4096, b));
  give(ptr, b);
  const DevicePtr next = take(4096, a);
  must(gpu().memset_async(next, 0x77, 4096, a));
  static_cast<void>(gpu().synchronize_for(a, kGrace).has_value());
  gate.open();
  settle(b);
  settle(a);
  EXPECT_TRUE(holds(next, 4096, 0x77)) << "the stream that gave the block back still wrote into it";
}

TEST_F(Pool, TrimReturnsWhatIsUnused) {
  const StreamHandle s = stream();
  give(take(3 << 20, s), s);
  settle(s);
  const std::uint64_t reserved = gpu().pool_reserved_bytes();
  ASSERT_GE(reserved, std::uint64_t{3} << 20);
  const std::uint64_t returned = must(gpu().trim());
  EXPECT_GE(returned, std::uint64_t{3} << 20);
  EXPECT_EQ(gpu().pool_reserved_bytes(), reserved - returned);
  EXPECT_EQ(must(gpu().trim()), 0u);
}

TEST_F(Pool, TrimKeepsWhatIsInUse) {
  need({copies});
  const StreamHandle s = stream();
  const DevicePtr kept = take(1 << 20, s);
  const DevicePtr small = take(500, s);
  must(gpu().memset_async(kept, 0x12, 1 << 20, s));
  must(gpu().memset_async(small, 0x13, 500, s));
  give(take(5 << 20, s), s);
  settle(s);
  must(gpu().trim());
  EXPECT_EQ(gpu().live_bytes(), (1u << 20) + 500);
  EXPECT_GE(gpu().pool_reserved_bytes(), (1u << 20) + 500);
  EXPECT_TRUE(holds(kept, 1 << 20, 0x12));
  EXPECT_TRUE(holds(small, 500, 0x13));
}

TEST_F(Pool, TrimDoesNotHandBackABlockWithWorkInFlight) {
  need({copies, host_callbacks});
  constexpr std::size_t kBytes = 3 << 20;
  const StreamHandle s = stream();
  const DevicePtr ptr = take(kBytes, s);
  Gate gate(gpu(), s);
  must(gpu().memset_async(ptr, 0xAA, kBytes, s));
  give(ptr, s);
  Background trimming([&] { must(gpu().trim()); });
  trimming.is_back();
  std::vector<DevicePtr> next;
  for (int i = 0; i < 3; ++i) {
    next.push_back(block(kBytes));
    fill(next.back(), 0x11, kBytes);
  }
  gate.open();
  trimming.join();
  settle(s);
  for (const DevicePtr p : next) EXPECT_TRUE(holds(p, kBytes, 0x11)) << "work on a trimmed block wrote into a new one";
}

TEST_F(Pool, BlocksOutliveTheStreamTheyCameFrom) {
  need({copies});
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const DevicePtr ptr = take(4096, a);
  must(gpu().memset_async(ptr, 0x21, 4096, a));
  settle(a);
  must(gpu().destroy_stream(a));
  EXPECT_TRUE(holds(ptr, 4096, 0x21));
  give(ptr, b);
  settle(b);
  EXPECT_EQ(gpu().live_bytes(), 0u);
  EXPECT_TRUE(eventually([&] { return must(gpu().trim()) > 0 || gpu().pool_reserved_bytes() == 0; }));
  EXPECT_EQ(gpu().pool_reserved_bytes(), 0u);
}

TEST_F(Pool, BlocksFreedOnADestroyedStreamComeBack) {
  for (int i = 0; i < 20; ++i) {
    const StreamHandle s = stream();
    give(take(1 << 20, s), s);
    settle(s);
    must(gpu().destroy_stream(s));
  }
  EXPECT_LE(gpu().pool_reserved_bytes(), std::uint64_t{8} << 20) << "each stream took its blocks with it";
}

TEST_F(Pool, RefusesZeroBytesAndWhatItNeverGave) {
  const StreamHandle s = stream();
  EXPECT_TRUE(refused(gpu().alloc_async(0, s), Errc::invalid_argument));
  const DevicePtr ptr = take(512, s);
  EXPECT_TRUE(refused(gpu().free_async(ptr.offset(256), s), Errc::invalid_argument));
  const DevicePtr plain = block(512);
  EXPECT_TRUE(refused(gpu().free_async(plain, s), Errc::invalid_argument));
  give(ptr, s);
  EXPECT_TRUE(refused(gpu().free_async(ptr, s), Errc::invalid_argument));
  EXPECT_EQ(gpu().live_bytes(), 512u);
}

TEST_F(Pool, ObeysTheBudget) {
  gpu().set_budget(1000);
  const StreamHandle s = stream();
  const DevicePtr ptr = take(900, s);
  EXPECT_TRUE(refused(gpu().alloc_async(101, s), Errc::out_of_memory, {"budget"}));
  EXPECT_TRUE(ok(gpu().alloc_async(100, s)));
  give(ptr, s);
  EXPECT_TRUE(ok(gpu().alloc_async(900, s)));
}

TEST_F(Pool, BeyondTheDeviceIsOutOfMemory) {
  EXPECT_TRUE(refused(gpu().alloc_async(std::uint64_t{1} << 50, gpu().default_stream()), Errc::out_of_memory, {"free"}));
  EXPECT_EQ(gpu().live_bytes(), 0u);
}

TEST_F(Pool, HoldsUnderManyStreamsAtOnce) {
  need({copies});
  on_threads(4, [&](std::size_t t) {
    const StreamHandle s = must(gpu().create_stream());
    for (int i = 0; i < 100; ++i) {
      const std::size_t bytes = 1000 + 700 * ((t + static_cast<std::size_t>(i)) % 5);
      const DevicePtr ptr = must(gpu().alloc_async(bytes, s));
      const auto value = static_cast<std::uint8_t>(t * 50 + static_cast<std::size_t>(i) % 50);
      must(gpu().memset_async(ptr, value, bytes, s));
      std::vector<std::byte> seen(bytes);
      must(gpu().copy_d2h_on_stream(seen, ptr, s));
      if (seen != std::vector<std::byte>(bytes, std::byte{value}))
        fail(Site::current(), "another stream wrote into a pooled block");
      must(gpu().free_async(ptr, s));
    }
  });
  EXPECT_EQ(gpu().live_bytes(), 0u);
}

}  // namespace
}  // namespace metrale::conformance
