// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/spare_blocks.h"

#include <gtest/gtest.h>

#include <set>

namespace metrale::cuda {
namespace {

TEST(SpareBlocks, GivesWhatWasPutOnceAndOfThatSizeOnly) {
  SpareBlocks spares;
  EXPECT_TRUE(spares.put({0x1000}, 512));
  EXPECT_TRUE(spares.put({0x2000}, 1024));
  EXPECT_EQ(spares.take(256), std::nullopt);
  EXPECT_EQ(spares.take(512), DevicePtr{0x1000});
  EXPECT_EQ(spares.take(512), std::nullopt);
  EXPECT_EQ(spares.take(1024), DevicePtr{0x2000});
}

TEST(SpareBlocks, RefusesLargeOnesAndWhatExceedsItsBytesOrItsNumber) {
  SpareBlocks bytes;
  EXPECT_FALSE(bytes.put({0x1000}, SpareBlocks::kLargest + 1));
  std::uint64_t held = 0;
  while (bytes.put({0x10000 + held}, SpareBlocks::kLargest)) held += SpareBlocks::kLargest;
  EXPECT_EQ(held, SpareBlocks::kMostBytes);
  ASSERT_TRUE(bytes.take(SpareBlocks::kLargest));
  EXPECT_TRUE(bytes.put({0x1000}, SpareBlocks::kLargest)) << "what was taken makes room";

  SpareBlocks number;
  std::size_t count = 0;
  while (number.put({0x1000 + 256 * count}, 256)) ++count;
  EXPECT_EQ(count, SpareBlocks::kMostBlocks);
}

TEST(SpareBlocks, MoreSizesThanItHasPlacesForAreRefusedUntilOneIsEmpty) {
  SpareBlocks spares;
  std::uint64_t bytes = 256;
  while (spares.put({bytes << 12}, bytes)) bytes += 256;
  ASSERT_LT(bytes, SpareBlocks::kLargest);
  EXPECT_FALSE(spares.put({0x1000}, bytes));
  EXPECT_TRUE(spares.take(512));
  EXPECT_TRUE(spares.put({0x1000}, bytes));
  EXPECT_EQ(spares.take(bytes), DevicePtr{0x1000});
}

TEST(SpareBlocks, TakesAnyUntilNoneIsLeft) {
  SpareBlocks spares;
  std::set<std::pair<std::uint64_t, std::uint64_t>> left;
  for (const std::uint64_t bytes : {256U, 256U, 4096U, 512U}) {
    const DevicePtr base{0x10000 * (left.size() + 1)};
    ASSERT_TRUE(spares.put(base, bytes));
    left.emplace(base.address, bytes);
  }
  while (const auto block = spares.take_any()) EXPECT_EQ(left.erase({block->base.address, block->bytes}), 1U);
  EXPECT_TRUE(left.empty());
  EXPECT_EQ(spares.take(256), std::nullopt);
}

}  // namespace
}  // namespace metrale::cuda
