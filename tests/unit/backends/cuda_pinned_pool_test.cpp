// SPDX-License-Identifier: Apache-2.0
//
// The pool of page-locked memory, by itself on the fake driver.
#include "backends/cuda/pinned_pool.h"

#include <map>
#include <random>

#include "cuda_fixture.h"

namespace metrale::test {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

class CudaPinnedPool : public CudaCase {
 protected:
  CudaPinnedPool() { on(); }  // makes the context current here
  ~CudaPinnedPool() override { pool.close(true); }
  void TearDown() override {
    pool.close(true);
    CudaCase::TearDown();
  }

  cuda::PinnedPool pool{fake.driver()};
};

TEST_F(CudaPinnedPool, PartsAreAlignedAndDoNotOverlap) {
  std::map<std::uintptr_t, std::uint64_t> parts;
  for (std::uint64_t bytes = 1; bytes < 200'000; bytes = bytes * 3 + 1) {
    const auto at = reinterpret_cast<std::uintptr_t>(take(pool.take(bytes)));
    EXPECT_EQ(at % kPinnedAlignment, 0u);
    parts.emplace(at, bytes);
  }
  for (auto it = parts.begin(); std::next(it) != parts.end(); ++it) EXPECT_LE(it->first + it->second, std::next(it)->first);
}

TEST_F(CudaPinnedPool, GivenPartsJoinTheirNeighbours) {
  std::vector<void*> parts;
  for (int i = 0; i < 4; ++i) parts.push_back(take(pool.take(kMiB / 2)));
  const std::uint64_t held = pool.bytes_held();
  // In an order where each has neighbours of every kind.
  for (const std::size_t i : {1u, 3u, 0u, 2u}) pool.give(parts[i]);
  void* whole = take(pool.take(2 * kMiB));
  EXPECT_EQ(whole, parts[0]);
  EXPECT_EQ(pool.bytes_held(), held) << "a slab that was free in whole was not used again";
}

TEST_F(CudaPinnedPool, KeepsOneEmptySlab) {
  void* small = take(pool.take(kMiB));
  void* large = take(pool.take(40 * kMiB));
  pool.give(small);
  EXPECT_FALSE(pool.has_surplus());
  pool.give(large);
  EXPECT_TRUE(pool.has_surplus());
  pool.trim();
  EXPECT_FALSE(pool.has_surplus());
  EXPECT_EQ(pool.bytes_held(), 40 * kMiB) << "the larger one serves more";
  EXPECT_EQ(calls("cuMemHostAlloc", [&] { pool.give(take(pool.take(40 * kMiB))); }), 0u);
}

TEST_F(CudaPinnedPool, GivingTwiceOrAStrangersMemoryDoesNothing) {
  void* part = take(pool.take(1000));
  void* other = take(pool.take(1000));
  pool.give(part);
  pool.give(part);
  int mine = 0;
  pool.give(&mine);
  EXPECT_EQ(take(pool.take(1000)), part);
  EXPECT_NE(take(pool.take(1000)), part);
  pool.give(other);
}

TEST_F(CudaPinnedPool, PartsAreAliasedWithinTheirSlab) {
  auto* part = static_cast<std::byte*>(take(pool.take(1000)));
  const auto base = take(pool.alias(part));
  ASSERT_TRUE(base);
  EXPECT_EQ(calls("cuMemHostGetDevicePointer", [&] { EXPECT_EQ(take(pool.alias(part + 7)), *base + 7); }), 0u);
  int mine = 0;
  EXPECT_FALSE(take(pool.alias(&mine)));
}

TEST_F(CudaPinnedPool, StaysWholeUnderManySizes) {
  std::mt19937 random(7);
  std::map<std::byte*, std::uint64_t> live;
  for (int i = 0; i < 3000; ++i) {
    if (live.size() > 40 || (!live.empty() && random() % 2 == 0)) {
      auto it = live.begin();
      std::advance(it, static_cast<std::ptrdiff_t>(random() % live.size()));
      pool.give(it->first);
      live.erase(it);
      continue;
    }
    const std::uint64_t bytes = 1 + random() % (random() % 8 == 0 ? 3 * kMiB : 20'000);
    auto* part = static_cast<std::byte*>(take(pool.take(bytes)));
    const auto after = live.lower_bound(part);
    if (after != live.end()) {
      ASSERT_LE(part + bytes, after->first);
    }
    if (after != live.begin()) {
      ASSERT_LE(std::prev(after)->first + std::prev(after)->second, part);
    }
    live.emplace(part, bytes);
  }
  for (const auto& [part, bytes] : live) pool.give(part);
  pool.trim();
  EXPECT_FALSE(pool.has_surplus());
}

TEST_F(CudaPinnedPool, AClosedPoolTakesNothingBack) {
  void* part = take(pool.take(1000));
  pool.close(true);
  pool.give(part);
  EXPECT_EQ(pool.bytes_held(), 0u);
}

}  // namespace
}  // namespace metrale::test
