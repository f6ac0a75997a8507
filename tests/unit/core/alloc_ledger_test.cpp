// SPDX-License-Identifier: Apache-2.0
#include "metrale/alloc_ledger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "metrale/owner_scope.h"

namespace metrale {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t kPage = 64 * 1024;

std::uint64_t add(AllocLedger& ledger, std::uint64_t base, std::uint64_t bytes, MemoryKind kind = MemoryKind::device) {
  return ledger.add({base}, bytes, kind, std::source_location::current());
}

TEST(AllocLedger, FindsInteriorAddressesOfSmallAndLargeBlocks) {
  AllocLedger ledger;
  add(ledger, 0x10000, 256);
  add(ledger, 0x20000, 10 * kPage);
  EXPECT_EQ(ledger.find({0x10000})->bytes, 256u);
  EXPECT_EQ(ledger.find({0x100ff})->bytes, 256u);
  EXPECT_FALSE(ledger.find({0x10100}));
  EXPECT_EQ(ledger.find({0x20000 + 10 * kPage - 1})->bytes, 10 * kPage);
  EXPECT_FALSE(ledger.find({0x20000 + 10 * kPage}));
  EXPECT_FALSE(ledger.find({0xffff}));
}

TEST(AllocLedger, FindsASmallBlockThatCrossesItsPage) {
  AllocLedger ledger;
  add(ledger, 2 * kPage - 256, kPage - 1);
  EXPECT_TRUE(ledger.find({2 * kPage + 100}));
  EXPECT_EQ(ledger.check({2 * kPage}, kPage - 1 - 256), AllocLedger::Range::inside);
  EXPECT_EQ(ledger.check({2 * kPage}, kPage - 256), AllocLedger::Range::leaves);
}

TEST(AllocLedger, CheckTellsUnknownFromLeaving) {
  AllocLedger ledger;
  add(ledger, 0x10000, 1000);
  EXPECT_EQ(ledger.check({0x10000}, 1000), AllocLedger::Range::inside);
  EXPECT_EQ(ledger.check({0x10000 + 999}, 1), AllocLedger::Range::inside);
  EXPECT_EQ(ledger.check({0x10000 + 999}, 2), AllocLedger::Range::leaves);
  EXPECT_EQ(ledger.check({0x10000}, UINT64_MAX), AllocLedger::Range::leaves);
  EXPECT_EQ(ledger.check({0x10000 + 1000}, 1), AllocLedger::Range::unknown);
}

TEST(AllocLedger, TakeAcceptsOnlyBasesOfTheRightKind) {
  AllocLedger ledger;
  add(ledger, 0x10000, 256, MemoryKind::arena);
  EXPECT_EQ(ledger.take({0x10100}, kAllKinds).status, AllocLedger::Take::not_a_base);
  EXPECT_EQ(ledger.take({0x10000}, kind_bit(MemoryKind::device)).status, AllocLedger::Take::wrong_kind);
  EXPECT_EQ(ledger.take({0x10000}, kAllKinds).status, AllocLedger::Take::taken);
  EXPECT_EQ(ledger.take({0x10000}, kAllKinds).status, AllocLedger::Take::not_a_base);
}

TEST(AllocLedger, ABlockNamedByAGraphGoesWhereTheCallerSaysSo) {
  AllocLedger ledger;
  add(ledger, 0x10000, 256);
  ledger.add_graph_ref({0x10000});
  EXPECT_EQ(ledger.take({0x10000}, kAllKinds, AllocLedger::Named::stays).status, AllocLedger::Take::named_by_graph);
  EXPECT_EQ(ledger.take({0x10000}, kind_bit(MemoryKind::arena), AllocLedger::Named::goes).status, AllocLedger::Take::wrong_kind);
  EXPECT_EQ(ledger.take({0x10000}, kAllKinds, AllocLedger::Named::goes).status, AllocLedger::Take::taken);
  EXPECT_FALSE(ledger.find({0x10000}));
}

TEST(AllocLedger, EveryKindIsInTheSetOfAll) {
  for (unsigned kind = 0; kind <= static_cast<unsigned>(MemoryKind::module_symbol); ++kind) {
    AllocLedger ledger;
    add(ledger, 0x10000, 256, static_cast<MemoryKind>(kind));
    EXPECT_EQ(ledger.take({0x10000}, kAllKinds & ~kind_bit(static_cast<MemoryKind>(kind))).status, AllocLedger::Take::wrong_kind);
    EXPECT_EQ(ledger.take({0x10000}, kAllKinds).status, AllocLedger::Take::taken) << to_string(static_cast<MemoryKind>(kind));
  }
}

TEST(AllocLedger, ABlockNamedByAGraphStaysUntilTheLastReferenceGoes) {
  for (const std::uint64_t bytes : {std::uint64_t{256}, 3 * kPage}) {
    AllocLedger ledger;
    const std::uint64_t generation = add(ledger, 0x40000, bytes);
    ledger.add_graph_ref({0x40000 + 7});
    ledger.add_graph_ref({0x40000});
    EXPECT_EQ(ledger.take({0x40000}, kAllKinds).status, AllocLedger::Take::named_by_graph);
    ledger.drop_graph_ref({0x40000}, generation);
    EXPECT_EQ(ledger.take({0x40000}, kAllKinds).status, AllocLedger::Take::named_by_graph);
    ledger.drop_graph_ref({0x40000}, generation);
    EXPECT_EQ(ledger.take({0x40000}, kAllKinds).status, AllocLedger::Take::taken);
  }
}

TEST(AllocLedger, AReferenceOfAnEarlierBlockAtTheAddressIsIgnored) {
  AllocLedger ledger;
  const std::uint64_t first = add(ledger, 0x10000, 256);
  ASSERT_EQ(ledger.take({0x10000}, kAllKinds).status, AllocLedger::Take::taken);
  const std::uint64_t second = add(ledger, 0x10000, 256);
  EXPECT_NE(first, second);
  ledger.add_graph_ref({0x10000});
  ledger.drop_graph_ref({0x10000}, first);
  EXPECT_EQ(ledger.take({0x10000}, kAllKinds).status, AllocLedger::Take::named_by_graph);
}

TEST(AllocLedger, OnlyLiveKindsCount) {
  AllocLedger ledger;
  add(ledger, 0x10000, 100, MemoryKind::device);
  add(ledger, 0x20000, 200, MemoryKind::managed);
  add(ledger, 0x30000, 300, MemoryKind::pooled);
  add(ledger, 0x40000, 400, MemoryKind::arena);
  add(ledger, 0x50001, 500, MemoryKind::adopted);
  EXPECT_EQ(ledger.live_bytes(), 600u);
  EXPECT_EQ(ledger.live_alloc_count(), 3u);
  EXPECT_EQ(ledger.snapshot().size(), 5u);
}

TEST(AllocLedger, PeakIsExactForOneThread) {
  AllocLedger ledger;
  add(ledger, 0x10000, 256);
  add(ledger, 0x20000, 512);
  ledger.take({0x10000}, kAllKinds);
  EXPECT_EQ(ledger.peak_bytes(), 768u);
  add(ledger, 0x100000, 5 * kPage);
  ledger.take({0x100000}, kAllKinds);
  EXPECT_EQ(ledger.peak_bytes(), 512u + 5 * kPage);
  add(ledger, 0x10000, 256);
  EXPECT_EQ(ledger.peak_bytes(), 512u + 5 * kPage);
  EXPECT_EQ(ledger.live_bytes(), 768u);
}

TEST(AllocLedger, NearestNamesTheClosestExtent) {
  AllocLedger ledger;
  EXPECT_FALSE(ledger.nearest({1}));
  add(ledger, 0x10000, 256);
  add(ledger, 0x90000, 256);
  EXPECT_EQ(ledger.nearest({0x10200})->base, (DevicePtr{0x10000}));
  EXPECT_EQ(ledger.nearest({0x8f000})->base, (DevicePtr{0x90000}));
}

// Against a plain map, over random blocks of all sizes and alignments.
TEST(AllocLedger, AgreesWithAnOrderedMap) {
  std::mt19937_64 random(11);
  AllocLedger ledger;
  std::map<std::uint64_t, std::uint64_t> model;
  std::uint64_t model_bytes = 0;
  const auto overlaps = [&](std::uint64_t base, std::uint64_t bytes) {
    auto next = model.lower_bound(base);
    if (next != model.end() && next->first < base + bytes) return true;
    return next != model.begin() && std::prev(next)->first + std::prev(next)->second > base;
  };
  for (int step = 0; step < 20'000; ++step) {
    if (random() % 3 != 0 || model.empty()) {
      const std::uint64_t alignment = random() % 8 == 0 ? 1 : 256;
      const std::uint64_t base = 0x100000 + random() % (64 * kPage) / alignment * alignment;
      const std::uint64_t bytes = 1 + (random() % 4 == 0 ? random() % (4 * kPage) : random() % 2048);
      if (overlaps(base, bytes)) continue;
      add(ledger, base, bytes);
      model[base] = bytes;
      model_bytes += bytes;
    } else {
      auto victim = std::next(model.begin(), static_cast<std::ptrdiff_t>(random() % model.size()));
      ASSERT_EQ(ledger.take({victim->first}, kAllKinds).status, AllocLedger::Take::taken);
      model_bytes -= victim->second;
      model.erase(victim);
    }
    const std::uint64_t probe = 0x100000 + random() % (68 * kPage);
    const auto after = model.upper_bound(probe);
    const bool inside = after != model.begin() && probe - std::prev(after)->first < std::prev(after)->second;
    const auto found = ledger.find({probe});
    ASSERT_EQ(found.has_value(), inside) << "at step " << step;
    if (inside) {
      ASSERT_EQ(found->base.address, std::prev(after)->first);
    }
    ASSERT_EQ(ledger.live_bytes(), model_bytes);
    ASSERT_EQ(ledger.live_alloc_count(), model.size());
  }
}

TEST(AllocLedger, ThreadsBalance) {
  AllocLedger ledger;
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&ledger, t] {
      for (std::uint64_t i = 0; i < 5000; ++i) {
        const std::uint64_t base = (t + 1) * 0x1000000 + i % 50 * (i % 2 == 0 ? 256 : 2 * kPage);
        add(ledger, base, i % 2 == 0 ? 256 : 2 * kPage);
        if (!ledger.add_graph_ref({base})) std::abort();
        ledger.drop_graph_ref({base}, ledger.find({base})->generation);
        if (ledger.take({base}, kAllKinds).status != AllocLedger::Take::taken) std::abort();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ledger.live_bytes(), 0u);
  EXPECT_EQ(ledger.live_alloc_count(), 0u);
  EXPECT_GE(ledger.peak_bytes(), 2 * kPage);
  EXPECT_LE(ledger.peak_bytes(), 4 * 2 * kPage + (1u << 20));
}

TEST(AllocLedger, ChecksGoOnWhileBlocksComeAndGo) {
  AllocLedger ledger;
  add(ledger, 0x10000, 256);
  std::atomic<bool> stop{false};
  std::thread churn([&] {
    for (std::uint64_t bytes = 1; !stop; bytes = bytes % 256 + 1) {
      add(ledger, 0x10100, bytes);
      ledger.take({0x10100}, kAllKinds);
    }
  });
  for (int i = 0; i < 20'000; ++i) {
    ASSERT_EQ(ledger.check({0x100ff}, 1), AllocLedger::Range::inside);
    ASSERT_NE(ledger.check({0x10100}, 1), AllocLedger::Range::leaves);
    ASSERT_NE(ledger.check({0x10100}, 257), AllocLedger::Range::inside);
  }
  stop = true;
  churn.join();
}

TEST(AllocReport, ListsSitesLargestFirstAndFoldsTheRest) {
  AllocLedger ledger;
  ledger.add({0x1000000}, 3u << 20, MemoryKind::device, std::source_location::current());
  const std::uint32_t big_line = __LINE__ + 1;
  ledger.add({0x2000000}, 5u << 20, MemoryKind::device, std::source_location::current());
  ledger.add({0x3000000}, 7u << 20, MemoryKind::arena, std::source_location::current());
  const std::string report = format_alloc_report(ledger.snapshot(), 1, 0);
  EXPECT_THAT(report, HasSubstr("0.008 GB in 2 blocks from 2 sites"));
  EXPECT_THAT(report, HasSubstr("5.0 MiB x 1"));
  EXPECT_THAT(report, HasSubstr("alloc_ledger_test.cpp:" + std::to_string(big_line)));
  EXPECT_THAT(report, HasSubstr("3.0 MiB in 1 more sites"));
  EXPECT_THAT(report, HasSubstr("arenas: 7.0 MiB in 1 blocks"));
  EXPECT_THAT(format_alloc_report(ledger.snapshot(), 10, 4), HasSubstr("3.0 MiB in 1 more sites"));
}

TEST(AllocReport, SumsByOwnerScope) {
  AllocLedger ledger;
  {
    const OwnerScope outer("weights");
    add(ledger, 0x1000000, 4u << 20, MemoryKind::arena);
    {
      const OwnerScope inner("kv cache");
      add(ledger, 0x2000000, 2u << 20);
    }
    add(ledger, 0x3000000, 1u << 20);
  }
  add(ledger, 0x4000000, 1u << 20);
  const std::vector<OwnerUse> uses = uses_by_owner(ledger.snapshot());
  ASSERT_EQ(uses.size(), 3u);
  EXPECT_EQ(uses[0].owner, "weights");
  EXPECT_EQ(uses[0].bytes, 5u << 20);
  EXPECT_EQ(uses[1].owner, "kv cache");
  EXPECT_EQ(uses[2].owner, "");
  EXPECT_THAT(format_alloc_report(ledger.snapshot(), 10, 0), HasSubstr("2.0 MiB x 1      kv cache"));
}

TEST(ChunkSlack, CountsEachTouchedChunkOnce) {
  constexpr std::uint64_t kChunk = 2u << 20;
  const auto block = [](std::uint64_t base, std::uint64_t bytes) { return Allocation{.base = {base}, .bytes = bytes}; };
  EXPECT_EQ(chunk_slack_bytes({}), 0u);
  EXPECT_EQ(chunk_slack_bytes({block(0, 1000), block(4096, 1000)}), kChunk - 2000);
  EXPECT_EQ(chunk_slack_bytes({block(kChunk - 512, 1024)}), 2 * kChunk - 1024);
  EXPECT_EQ(chunk_slack_bytes({block(0, 512), block(2 * kChunk - 100, 200), block(5 * kChunk, 7)}), 4 * kChunk - 719);
  EXPECT_EQ(chunk_slack_bytes({block(0, kChunk)}), 0u);
}

}  // namespace
}  // namespace metrale
