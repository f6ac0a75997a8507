// SPDX-License-Identifier: Apache-2.0
//
// alloc, alloc_managed, free, and the figures about memory.
#include <algorithm>
#include <cstring>

#include "conformance/case.h"

namespace metrale::conformance {
namespace {

class Alloc : public CaseNeeding<memory> {
 protected:
  std::vector<Allocation> at_line(std::uint32_t line) {
    std::vector<Allocation> found;
    for (const Allocation& a : gpu().live_allocations()) {
      if (a.site.line() == line && std::string_view(a.site.file_name()).ends_with("alloc_test.cpp")) found.push_back(a);
    }
    return found;
  }
};

TEST_F(Alloc, GivesAlignedBlocks) {
  for (const std::uint64_t bytes : {1, 3, 255, 256, 257, 4097, 65536, 1 << 20}) {
    const DevicePtr ptr = block(bytes);
    EXPECT_TRUE(ptr);
    EXPECT_EQ(ptr.address % kDeviceAlignment, 0u) << bytes << " bytes";
  }
}

TEST_F(Alloc, GivesBlocksThatDoNotOverlap) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> extents;
  for (std::uint64_t bytes = 1; bytes < 20000; bytes += 333) extents.emplace_back(block(bytes).address, bytes);
  std::sort(extents.begin(), extents.end());
  for (std::size_t i = 1; i < extents.size(); ++i) EXPECT_LE(extents[i - 1].first + extents[i - 1].second, extents[i].first);
}

TEST_F(Alloc, GivesBlocksUsableToTheirLastByte) {
  need({copies});
  for (const std::uint64_t bytes : {1, 255, 4097, 1 << 20}) {
    const DevicePtr ptr = block(bytes);
    const auto sent = pattern(bytes, 7);
    write(ptr, sent);
    EXPECT_EQ(read(ptr, bytes), sent) << bytes << " bytes";
  }
}

TEST_F(Alloc, EntersTheLedgerWithItsCaller) {
  const DevicePtr ptr = must(gpu().alloc(1000));
  const std::uint32_t line = __LINE__ - 1;
  const auto found = at_line(line);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].base, ptr);
  EXPECT_EQ(found[0].bytes, 1000u);
  EXPECT_EQ(found[0].kind, MemoryKind::device);
}

TEST_F(Alloc, LeavesContentsThatAreNotZero) {
  need({copies});
  need(under_test().fills_pattern, "this backend leaves fresh memory as it is");
  for (const DevicePtr ptr : {block(4096), must(gpu().alloc_managed(4096)), must(gpu().alloc_arena(4096))}) {
    const auto seen = read(ptr, 4096);
    EXPECT_EQ(std::count(seen.begin(), seen.end(), std::byte{0}), 0) << "code that relies on zeros would pass here";
  }
}

TEST_F(Alloc, FillsItsPatternAgainWhenMemoryIsReused) {
  need({copies});
  need(under_test().fills_pattern, "this backend leaves fresh memory as it is");
  for (int i = 0; i < 20; ++i) {
    const DevicePtr ptr = block(512);
    const auto seen = read(ptr, 512);
    EXPECT_EQ(std::count(seen.begin(), seen.end(), std::byte{0}), 0) << "round " << i;
    fill(ptr, 0, 512);
    must(gpu().free(ptr));
  }
}

TEST_F(Alloc, RefusesZeroBytes) {
  EXPECT_TRUE(refused(gpu().alloc(0), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().alloc_managed(0), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().alloc_arena(0), Errc::invalid_argument));
  EXPECT_EQ(gpu().live_allocations().size(), 0u);
}

TEST_F(Alloc, OutOfMemoryTellsBytesFreeAndTotal) {
  const std::uint64_t total = must(gpu().total_memory());
  const std::uint64_t asked = total + (std::uint64_t{1} << 40);
  const auto result = gpu().alloc(asked);
  EXPECT_TRUE(refused(result, Errc::out_of_memory, {std::to_string(asked), std::to_string(total), "free"}));
  EXPECT_EQ(gpu().live_bytes(), 0u);
  EXPECT_EQ(gpu().live_alloc_count(), 0u);
}

TEST_F(Alloc, OutOfMemoryTellsTheBytesThatWereAskedForNotTheGuardBand) {
  CreateOptions options;
  options.face.redzone_bytes = 64;
  remake(options);
  const std::uint64_t asked = std::uint64_t{1} << 60;
  EXPECT_TRUE(refused(gpu().alloc(asked), Errc::out_of_memory, {std::to_string(asked)}));
}

TEST_F(Alloc, OutOfMemoryNamesTheFiveLargestSites) {
  std::vector<std::string> sites;
  const auto hold = [&](std::uint64_t bytes, Site site = Site::current()) {
    must(gpu().alloc(bytes, site));
    sites.push_back(where(site));
  };
  hold(1000);
  hold(7000);
  hold(3000);
  hold(6000);
  hold(4000);
  hold(5000);
  const auto result = gpu().alloc(std::uint64_t{1} << 60);
  ASSERT_TRUE(refused(result, Errc::out_of_memory));
  const std::string text = result.error().to_string();
  std::vector<std::size_t> places;
  for (const std::size_t largest_first : {1u, 3u, 5u, 4u, 2u}) {
    const std::size_t place = text.find(sites[largest_first] + ",");
    const std::size_t last = text.find(sites[largest_first]);
    ASSERT_NE(last, std::string::npos) << sites[largest_first] << " is missing in: " << text;
    places.push_back(std::min(place, last));
  }
  EXPECT_TRUE(std::is_sorted(places.begin(), places.end())) << "not largest first: " << text;
  EXPECT_EQ(text.find(sites[0]), std::string::npos) << "a sixth site is named: " << text;
}

TEST_F(Alloc, OutOfMemoryLeavesEverythingUsable) {
  need({copies});
  const DevicePtr before = block(4096);
  fill(before, 0x21, 4096);
  EXPECT_TRUE(refused(gpu().alloc(std::uint64_t{1} << 60), Errc::out_of_memory));
  EXPECT_TRUE(holds(before, 4096, 0x21));
  EXPECT_TRUE(ok(gpu().alloc(4096)));
}

TEST_F(Alloc, TrimsPoolsAndRetriesBeforeItFails) {
  need({pooled_memory, streams});
  need(under_test().limits_memory, "this backend cannot be given less memory");
  constexpr std::uint64_t kMiB = 1 << 20;
  remake({.memory_limit_bytes = 64 * kMiB});
  const StreamHandle s = stream();
  const DevicePtr pooled = must(gpu().alloc_async(40 * kMiB, s));
  must(gpu().free_async(pooled, s));
  settle(s);
  ASSERT_GE(gpu().pool_reserved_bytes(), 40 * kMiB) << "the pool gave its memory back early: nothing to trim";
  EXPECT_TRUE(ok(gpu().alloc(50 * kMiB)));
  EXPECT_LT(gpu().pool_reserved_bytes(), 40 * kMiB);
}

TEST_F(Alloc, RefusesMoreThanTheDeviceHas) {
  need(under_test().limits_memory, "this backend cannot be given less memory");
  constexpr std::uint64_t kMiB = 1 << 20;
  remake({.memory_limit_bytes = 8 * kMiB});
  const DevicePtr first = block(6 * kMiB);
  EXPECT_TRUE(refused(gpu().alloc(4 * kMiB), Errc::out_of_memory));
  EXPECT_TRUE(refused(gpu().alloc_arena(4 * kMiB), Errc::out_of_memory));
  must(gpu().free(first));
  EXPECT_TRUE(eventually([&] { return gpu().alloc(4 * kMiB).has_value(); })) << "freed memory did not come back";
}

TEST_F(Alloc, ManagedIsMarkedAndLive) {
  const DevicePtr ptr = must(gpu().alloc_managed(3000));
  const auto found = at_line(__LINE__ - 1);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].base, ptr);
  EXPECT_EQ(found[0].kind, MemoryKind::managed);
  EXPECT_EQ(ptr.address % kDeviceAlignment, 0u);
  EXPECT_EQ(gpu().live_bytes(), 3000u);
  EXPECT_TRUE(ok(gpu().free(ptr)));
  EXPECT_EQ(gpu().live_bytes(), 0u);
}

TEST_F(Alloc, ManagedBeyondTheFreeMemoryIsOutOfMemory) {
  const std::uint64_t free = must(gpu().device_free_memory());
  EXPECT_TRUE(refused(gpu().alloc_managed(2 * free + (std::uint64_t{1} << 40)), Errc::out_of_memory));
  EXPECT_EQ(gpu().live_bytes(), 0u);
}

TEST_F(Alloc, ManagedMemoryIsTouchedByBothSides) {
  need({managed_memory, copies});
  const DevicePtr ptr = must(gpu().alloc_managed(4096));
  const auto sent = pattern(4096, 3);
  std::memcpy(reinterpret_cast<void*>(static_cast<std::uintptr_t>(ptr.address)), sent.data(), sent.size());
  EXPECT_EQ(read(ptr, 4096), sent);
  fill(ptr, 0x42, 4096);
  std::vector<std::byte> seen(4096);
  std::memcpy(seen.data(), reinterpret_cast<void*>(static_cast<std::uintptr_t>(ptr.address)), seen.size());
  EXPECT_EQ(seen, std::vector<std::byte>(4096, std::byte{0x42}));
}

// ---- free ----

TEST_F(Alloc, FreeTakesTheBlockOffTheLedger) {
  const DevicePtr a = block(1000);
  const DevicePtr b = block(500);
  must(gpu().free(a));
  EXPECT_EQ(gpu().live_bytes(), 500u);
  EXPECT_EQ(gpu().live_alloc_count(), 1u);
  must(gpu().free(b));
  EXPECT_EQ(gpu().live_allocations().size(), 0u);
}

TEST_F(Alloc, FreeOfNullDoesNothing) {
  EXPECT_TRUE(ok(gpu().free({})));
  EXPECT_TRUE(ok(gpu().free_arena({})));
  EXPECT_TRUE(ok(gpu().free_async({}, gpu().default_stream())));
  EXPECT_TRUE(ok(gpu().free_host_pinned(nullptr, 0)));
}

TEST_F(Alloc, FreeOfNoBaseNamesTheNearestBlockAndItsCaller) {
  const DevicePtr ptr = must(gpu().alloc(1000));
  const std::string site = line_above();
  EXPECT_TRUE(refused(gpu().free(ptr.offset(16)), Errc::invalid_argument, {site}));
  EXPECT_TRUE(refused(gpu().free(ptr.offset(1 << 20)), Errc::invalid_argument, {site}));
  EXPECT_EQ(gpu().live_bytes(), 1000u) << "a refused free changed the ledger";
  EXPECT_TRUE(ok(gpu().free(ptr)));
}

TEST_F(Alloc, FreeTwiceIsRefused) {
  const DevicePtr ptr = block(256);
  must(gpu().free(ptr));
  EXPECT_TRUE(refused(gpu().free(ptr), Errc::invalid_argument));
}

TEST_F(Alloc, FreeTakesItsOwnKindsOnly) {
  const DevicePtr arena = must(gpu().alloc_arena(256));
  EXPECT_TRUE(refused(gpu().free(arena), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().free_async(arena, gpu().default_stream()), Errc::invalid_argument));
  EXPECT_EQ(gpu().live_allocations().size(), 1u);
  if (!gpu().capabilities().has(pooled_memory)) return;
  const DevicePtr pooled = must(gpu().alloc_async(256, gpu().default_stream()));
  EXPECT_TRUE(refused(gpu().free(pooled), Errc::invalid_argument));
  EXPECT_EQ(gpu().live_bytes(), 256u);
}

TEST_F(Alloc, FreedMemoryIsUnknownToCopies) {
  need({copies});
  const DevicePtr ptr = block(256);
  must(gpu().free(ptr));
  std::vector<std::byte> bytes(256);
  EXPECT_TRUE(refused(gpu().copy_h2d(ptr, bytes), Errc::out_of_range));
}

TEST_F(Alloc, FreeDoesNotHandTheBlockBackBeforeEarlierWorkIsDone) {
  need({copies, streams, host_callbacks});
  constexpr std::size_t kBytes = 48 << 10;
  const StreamHandle s = stream();
  const DevicePtr used = block(kBytes);
  Gate gate(gpu(), s);
  must(gpu().memset_async(used, 0xAB, kBytes, s));
  Background freeing([&] { must(gpu().free(used)); });
  freeing.is_back();
  // The held fill must not reach whoever gets the memory next.
  std::vector<DevicePtr> next;
  for (int i = 0; i < 4; ++i) {
    next.push_back(block(kBytes));
    fill(next.back(), 0x11, kBytes);
  }
  gate.open();
  freeing.join();
  settle(s);
  for (const DevicePtr ptr : next) EXPECT_TRUE(holds(ptr, kBytes, 0x11)) << "work on a freed block wrote into a new one";
}

TEST_F(Alloc, FreeLeavesTheLedgerBeforeTheWorkIsDone) {
  need({streams, host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(4096);
  Gate gate(gpu(), s);
  must(gpu().memset_async(ptr, 1, 4096, s));
  Background freeing([&] { must(gpu().free(ptr)); });
  const bool left = eventually([&] { return gpu().live_bytes() == 0; });
  gate.open();
  freeing.join();
  EXPECT_TRUE(left);
}

TEST_F(Alloc, FreeDoesNotWaitForWorkEnqueuedLater) {
  need({streams, host_callbacks});
  const StreamHandle s = stream();
  const StreamHandle later = stream();
  const DevicePtr ptr = block(4096);
  Gate gate(gpu(), s);
  must(gpu().memset_async(ptr, 1, 4096, s));
  Background freeing([&] { must(gpu().free(ptr)); });
  EXPECT_TRUE(eventually([&] { return gpu().live_bytes() == 0; }));
  freeing.is_back();  // the free has asked the device by now
  Gate second(gpu(), later);
  gate.open();
  freeing.join();  // a wait for the whole device would last until the second gate gives up, which fails the case
}

// ---- figures and budget ----

TEST_F(Alloc, BudgetRefusesWhatWouldLiftLiveBytesAboveIt) {
  const DevicePtr held = block(1000);
  gpu().set_budget(2000);
  EXPECT_TRUE(refused(gpu().alloc(1001), Errc::out_of_memory, {"budget", "2000"}));
  EXPECT_TRUE(refused(gpu().alloc_managed(1001), Errc::out_of_memory, {"budget"}));
  EXPECT_TRUE(ok(gpu().alloc(1000)));
  EXPECT_TRUE(refused(gpu().alloc(1), Errc::out_of_memory));
  must(gpu().free(held));
  EXPECT_TRUE(ok(gpu().alloc(1)));
  gpu().set_budget(std::nullopt);
  EXPECT_TRUE(ok(gpu().alloc(5000)));
}

TEST_F(Alloc, TotalMemoryIsAtLeastWhatIsFree) {
  const std::uint64_t total = must(gpu().total_memory());
  EXPECT_GT(total, 0u);
  const std::uint64_t device_free = must(gpu().device_free_memory());
  EXPECT_LE(device_free, total);
  EXPECT_GT(device_free, 0u);
}

TEST_F(Alloc, FreeMemoryIsAtLeastTheDriversFigure) {
  // Memory of the machine may move between two questions; it does not move by a quarter.
  EXPECT_GE(must(gpu().free_memory()), must(gpu().device_free_memory()) / 4 * 3);
}

TEST_F(Alloc, DeviceFreeMemoryFallsByWhatIsAllocated) {
  need(under_test().limits_memory, "this backend cannot be given less memory");
  constexpr std::uint64_t kMiB = 1 << 20;
  remake({.memory_limit_bytes = 64 * kMiB});
  const std::uint64_t before = must(gpu().device_free_memory());
  EXPECT_LE(before, 64 * kMiB);
  const DevicePtr ptr = block(16 * kMiB);
  EXPECT_LE(must(gpu().device_free_memory()), before - 16 * kMiB);
  must(gpu().free(ptr));
  EXPECT_TRUE(eventually([&] { return must(gpu().device_free_memory()) == before; }));
}

}  // namespace
}  // namespace metrale::conformance
