// SPDX-License-Identifier: Apache-2.0
//
// The ledger's answers: sums, sites, reports, memory of other libraries, the sweep.
#include <algorithm>
#include <array>

#include "conformance/case.h"
#include "metrale/owner_scope.h"

namespace metrale::conformance {
namespace {

class Ledger : public CaseNeeding<memory> {
 protected:
  void at(Site site, std::uint64_t bytes, int count = 1) {
    for (int i = 0; i < count; ++i) must(gpu().alloc(bytes, site));
  }
};

TEST_F(Ledger, StartsEmpty) {
  EXPECT_EQ(gpu().live_bytes(), 0u);
  EXPECT_EQ(gpu().peak_bytes(), 0u);
  EXPECT_EQ(gpu().live_alloc_count(), 0u);
  EXPECT_TRUE(gpu().live_allocations().empty());
  EXPECT_EQ(gpu().pool_reserved_bytes(), 0u);
  EXPECT_EQ(gpu().abandoned_bytes(), 0u);
}

TEST_F(Ledger, LiveBytesAreTheSumOfWhatWasAskedFor) {
  std::uint64_t sum = 0;
  std::vector<DevicePtr> blocks;
  for (const std::uint64_t bytes : {1, 100, 256, 1000, 70'000, 3'000'000}) {
    blocks.push_back(block(bytes));
    sum += bytes;
    EXPECT_EQ(gpu().live_bytes(), sum);
    EXPECT_EQ(gpu().live_alloc_count(), blocks.size());
  }
  for (const DevicePtr ptr : blocks) must(gpu().free(ptr));
  EXPECT_EQ(gpu().live_bytes(), 0u);
  EXPECT_EQ(gpu().live_alloc_count(), 0u);
}

TEST_F(Ledger, PeakKeepsTheHighest) {
  const DevicePtr a = block(1'000'000);
  const DevicePtr b = block(500'000);
  must(gpu().free(a));
  must(gpu().free(b));
  EXPECT_EQ(gpu().peak_bytes(), 1'500'000u);
  block(100);
  EXPECT_EQ(gpu().peak_bytes(), 1'500'000u);
}

TEST_F(Ledger, AllocationsAreListedByAddressWithGenerationsNeverReused) {
  std::uint64_t newest = 0;
  for (int i = 0; i < 50; ++i) {
    const DevicePtr ptr = block(256);
    const auto blocks = gpu().live_allocations();
    ASSERT_EQ(blocks.size(), 1u);
    EXPECT_GT(blocks[0].generation, newest);
    newest = blocks[0].generation;
    must(gpu().free(ptr));
  }
  for (int i = 0; i < 50; ++i) block(static_cast<std::uint64_t>(1 + i * 777));
  const auto blocks = gpu().live_allocations();
  EXPECT_TRUE(
      std::is_sorted(blocks.begin(), blocks.end(), [](const Allocation& a, const Allocation& b) { return a.base < b.base; }));
}

TEST_F(Ledger, SitesAreThoseOfTheCallers) {
  const auto helper = [&](Site site = Site::current()) { return must(gpu().alloc(64, site)); };
  helper();
  const std::uint32_t line = __LINE__ - 1;
  const auto blocks = gpu().live_allocations();
  ASSERT_EQ(blocks.size(), 1u);
  EXPECT_EQ(blocks[0].site.line(), line);
  EXPECT_TRUE(std::string_view(blocks[0].site.file_name()).ends_with("ledger_test.cpp"));
}

TEST_F(Ledger, OwnersAreThoseOfTheInnermostScope) {
  {
    OwnerScope outer("kv cache");
    block(64);
    OwnerScope inner("op scratch");
    block(64);
  }
  block(64);
  std::vector<std::string_view> owners;
  for (const Allocation& a : gpu().live_allocations()) owners.push_back(a.owner);
  std::sort(owners.begin(), owners.end());
  EXPECT_EQ(owners, (std::vector<std::string_view>{"", "kv cache", "op scratch"}));
  EXPECT_NE(gpu().alloc_report().find("kv cache"), std::string::npos) << gpu().alloc_report();
}

// ---- reports ----

TEST_F(Ledger, ReportListsSitesLargestFirstWithCountAndMiB) {
  const Site small = Site::current();
  const Site large = Site::current();
  const Site middle = Site::current();
  at(small, 1 << 20);
  at(large, 4 << 20, 2);
  at(middle, 3 << 20);
  const std::string report = gpu().alloc_report();
  const std::size_t first = report.find(where(large));
  const std::size_t second = report.find(where(middle));
  const std::size_t third = report.find(where(small));
  ASSERT_NE(first, std::string::npos) << report;
  ASSERT_NE(second, std::string::npos) << report;
  ASSERT_NE(third, std::string::npos) << report;
  EXPECT_LT(first, second) << report;
  EXPECT_LT(second, third) << report;
  const std::size_t line_begin = report.rfind('\n', first) + 1;
  const std::string line = report.substr(line_begin, report.find('\n', first) - line_begin);
  EXPECT_NE(line.find("8.0 MiB"), std::string::npos) << line;
  EXPECT_NE(line.find("2"), std::string::npos) << line;
}

TEST_F(Ledger, ReportFoldsTheRest) {
  const Site small = Site::current();
  const Site large = Site::current();
  const Site middle = Site::current();
  at(small, 1 << 20);
  at(large, 4 << 20);
  at(middle, 3 << 20);
  const std::string top = gpu().alloc_report(1);
  EXPECT_NE(top.find(where(large)), std::string::npos) << top;
  EXPECT_EQ(top.find(where(middle)), std::string::npos) << top;
  EXPECT_EQ(top.find(where(small)), std::string::npos) << top;
  EXPECT_NE(top.find("4.0 MiB in 2 more"), std::string::npos) << top;
  const std::string heavy = gpu().alloc_report(20, 3);
  EXPECT_NE(heavy.find(where(middle)), std::string::npos) << heavy;
  EXPECT_EQ(heavy.find(where(small)), std::string::npos) << heavy;
  EXPECT_NE(heavy.find("1.0 MiB in 1 more"), std::string::npos) << heavy;
}

TEST_F(Ledger, ReportRollsUpByFile) {
  at(Site::current(), 1 << 20);
  at(Site::current(), 2 << 20);
  const std::string report = gpu().alloc_report();
  const std::size_t by_file = report.find("by file");
  ASSERT_NE(by_file, std::string::npos) << report;
  EXPECT_NE(report.find("3.0 MiB", by_file), std::string::npos) << report;
  EXPECT_NE(report.find("ledger_test.cpp\n", by_file), std::string::npos) << report;
}

TEST_F(Ledger, ChunkSlackIsKnownWhereTheDriverPacksOnly) {
  EXPECT_EQ(gpu().chunk_slack_bytes().has_value(), under_test().packs_chunks);
  if (!under_test().packs_chunks) return;
  block(1 << 20);
  EXPECT_GE(*gpu().chunk_slack_bytes(), std::uint64_t{1} << 20);
}

// ---- memory of other libraries ----

TEST_F(Ledger, AdoptedMemoryIsOutsideLiveBytesAndReported) {
  const DevicePtr theirs = foreign_memory(3 << 20);
  must(gpu().adopt(theirs, 3 << 20, "torch"));
  EXPECT_EQ(gpu().live_bytes(), 0u);
  EXPECT_EQ(gpu().live_alloc_count(), 0u);
  const auto blocks = gpu().live_allocations();
  ASSERT_EQ(blocks.size(), 1u);
  EXPECT_EQ(blocks[0].kind, MemoryKind::adopted);
  const std::string report = gpu().alloc_report();
  EXPECT_NE(report.find("adopted"), std::string::npos) << report;
  EXPECT_NE(report.find("torch"), std::string::npos) << report;
  must(gpu().disown(theirs));
  EXPECT_TRUE(gpu().live_allocations().empty());
}

TEST_F(Ledger, AdoptedMemoryIsKnownToCopies) {
  need({copies, streams});
  const DevicePtr theirs = foreign_memory(4096);
  const auto sent = pattern(4096, 3);
  EXPECT_TRUE(refused(gpu().copy_h2d(theirs, sent), Errc::out_of_range));
  must(gpu().adopt(theirs, 4096, "torch"));
  EXPECT_TRUE(refused(gpu().copy_h2d(theirs.offset(1), sent), Errc::out_of_range));
  if (under_test().foreign_memory) {
    write(theirs, sent);
    EXPECT_EQ(read(theirs, 4096), sent);
  }
  must(gpu().disown(theirs));
  EXPECT_TRUE(refused(gpu().copy_h2d(theirs, sent), Errc::out_of_range));
}

TEST_F(Ledger, AdoptRefusesNothingAndOverlaps) {
  const DevicePtr mine = block(4096);
  const DevicePtr theirs = foreign_memory(4096);
  EXPECT_TRUE(refused(gpu().adopt({}, 64, "null"), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().adopt(theirs, 0, "empty"), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().adopt(mine, 64, "mine"), Errc::invalid_argument, {"mine"}));
  EXPECT_TRUE(refused(gpu().adopt(mine.offset(4095), 64, "mine"), Errc::invalid_argument));
  must(gpu().adopt(theirs, 4096, "torch"));
  EXPECT_TRUE(refused(gpu().adopt(theirs, 4096, "again"), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().adopt(theirs, UINT64_MAX, "all"), Errc::invalid_argument));
}

TEST_F(Ledger, AdoptedMemoryIsNeverFreedByUs) {
  const DevicePtr theirs = foreign_memory(4096);
  must(gpu().adopt(theirs, 4096, "torch"));
  EXPECT_TRUE(refused(gpu().free(theirs), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().free_arena(theirs), Errc::invalid_argument));
  EXPECT_EQ(must(gpu().sweep_unreleased()), 0u);
  EXPECT_TRUE(ok(gpu().disown(theirs)));
}

TEST_F(Ledger, DisownWaitsForEarlierWork) {
  need({copies, streams, host_callbacks});
  need(under_test().foreign_memory != nullptr, "no memory of another library is there to be written");
  for (const bool is_destroyed : {false, true}) {
    const DevicePtr theirs = foreign_memory(4096);
    must(gpu().adopt(theirs, 4096, "torch"));
    fill(theirs, 0x01, 4096);
    const StreamHandle s = stream();
    Gate gate(gpu(), s);
    must(gpu().memset_async(theirs, 0x66, 4096, s));
    if (is_destroyed) must(gpu().destroy_stream(s));
    EXPECT_FALSE(returns_before(gate, [&] { must(gpu().disown(theirs)); }));
    must(gpu().adopt(theirs, 4096, "torch"));
    EXPECT_TRUE(holds(theirs, 4096, 0x66)) << "the memory is still to be written when its owner may free it";
    must(gpu().disown(theirs));
  }
}

TEST_F(Ledger, DisownRefusesWhatWasNotAdopted) {
  const DevicePtr mine = block(64);
  EXPECT_TRUE(refused(gpu().disown(mine), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().disown({0x5000}), Errc::invalid_argument));
  const DevicePtr theirs = foreign_memory(64);
  must(gpu().adopt(theirs, 64, "torch"));
  EXPECT_TRUE(refused(gpu().disown(theirs.offset(1)), Errc::invalid_argument));
  must(gpu().disown(theirs));
  EXPECT_TRUE(refused(gpu().disown(theirs), Errc::invalid_argument));
  EXPECT_TRUE(ok(gpu().free(mine)));
}

// ---- the sweep ----

TEST_F(Ledger, SweepFreesEverythingAndASecondFindsNothing) {
  const auto& caps = gpu().capabilities();
  std::uint64_t expected = 3;
  block(100);
  must(gpu().alloc_managed(200));
  must(gpu().alloc_arena(300));
  if (caps.has(pooled_memory)) must(gpu().alloc_async(400, gpu().default_stream())), ++expected;
  std::span<std::byte> pinned;
  if (caps.has(pinned_memory)) pinned = must(gpu().alloc_host_pinned(500)), ++expected;
  EXPECT_EQ(must(gpu().sweep_unreleased()), expected);
  EXPECT_EQ(gpu().live_bytes(), 0u);
  EXPECT_EQ(gpu().live_alloc_count(), 0u);
  EXPECT_TRUE(gpu().live_allocations().empty());
  EXPECT_FALSE(gpu().is_pinned(pinned));
  EXPECT_EQ(must(gpu().sweep_unreleased()), 0u);
}

TEST_F(Ledger, SweepWarnsOnceWithCountBytesAndSites) {
  must(gpu().alloc(1000));
  const std::string site = line_above();
  block(234);
  must(gpu().sweep_unreleased());
  const auto lines = log_lines("sweep");
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find(" 2 blocks"), std::string::npos) << lines[0];
  EXPECT_NE(lines[0].find(" 1234 bytes"), std::string::npos) << lines[0];
  EXPECT_NE(lines[0].find(site), std::string::npos) << lines[0];
  must(gpu().sweep_unreleased());
  EXPECT_EQ(log_lines("sweep").size(), 1u) << "an empty sweep has nothing to warn of";
}

TEST_F(Ledger, SweepDestroysLeftoverGraphsFirst) {
  need({streams, graphs});
  const DevicePtr ptr = block(64);
  const StreamHandle s = stream();
  must(gpu().begin_capture(s));
  must(gpu().memset_async(ptr, 1, 64, s));
  const GraphHandle graph = must(gpu().end_capture(s));
  EXPECT_EQ(must(gpu().sweep_unreleased()), 1u) << "a graph names the block, and the sweep takes both";
  EXPECT_EQ(gpu().live_graph_count(), 0u);
  EXPECT_TRUE(refused(gpu().launch_graph(graph, s), Errc::invalid_argument));
  EXPECT_TRUE(gpu().live_allocations().empty());
}

TEST_F(Ledger, SweepWaitsForWorkInFlight) {
  need({copies, streams, host_callbacks});
  constexpr std::size_t kBytes = 48 << 10;
  const StreamHandle s = stream();
  const DevicePtr used = block(kBytes);
  Gate gate(gpu(), s);
  must(gpu().memset_async(used, 0xAB, kBytes, s));
  Background sweeping([&] { must(gpu().sweep_unreleased()); });
  sweeping.is_back();
  ASSERT_TRUE(eventually([&] { return gpu().live_bytes() == 0; }));
  std::vector<DevicePtr> next;
  for (int i = 0; i < 4; ++i) {
    next.push_back(block(kBytes));
    fill(next.back(), 0x11, kBytes);
  }
  gate.open();
  sweeping.join();
  settle(s);
  for (const DevicePtr ptr : next) EXPECT_TRUE(holds(ptr, kBytes, 0x11)) << "work on a swept block wrote into a new one";
}

TEST_F(Ledger, SweepLeavesRegisteredMemoryToItsOwner) {
  need({host_registration});
  std::vector<std::byte> mine(4096, std::byte{9});
  must(gpu().register_host(mine));
  must(gpu().sweep_unreleased());
  EXPECT_EQ(std::count(mine.begin(), mine.end(), std::byte{9}), 4096);
}

}  // namespace
}  // namespace metrale::conformance
