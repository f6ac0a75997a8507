// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "metrale/kv_cache.h"
#include "unit/core/two_backends.h"

namespace metrale {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class BlockTableTest : public testing::Test {
 protected:
  std::unique_ptr<GpuBackend> backend_ = test::make_mock();
  std::unique_ptr<PagedKvCache> cache_ =
      std::move(*PagedKvCache::create(*backend_, KvLayout::uniform(1, 1, 8, DType::bf16, 4), 6, {.poison = false, .trace = false}));
};

TEST_F(BlockTableTest, ReserveTakesWholeBlocksAndNoMore) {
  BlockTable table(*cache_);
  ASSERT_OK(table.reserve(0));
  EXPECT_THAT(table.blocks(), IsEmpty());
  ASSERT_OK(table.reserve(1));
  EXPECT_EQ(table.blocks().size(), 1u);
  ASSERT_OK(table.reserve(4));
  EXPECT_EQ(table.blocks().size(), 1u);
  ASSERT_OK(table.reserve(5));
  EXPECT_THAT(table.blocks(), ElementsAre(0, 1));
  EXPECT_EQ(table.capacity_tokens(), 8u);
  ASSERT_OK(table.reserve(2));
  EXPECT_EQ(table.blocks().size(), 2u) << "never shrinks";
}

TEST_F(BlockTableTest, SlotIsTheRowInEveryPool) {
  ASSERT_OK(cache_->alloc_block());
  BlockTable table(*cache_);
  ASSERT_OK(table.reserve(8));
  EXPECT_THAT(table.blocks(), ElementsAre(1, 2));
  EXPECT_EQ(table.slot(0), 4);
  EXPECT_EQ(table.slot(3), 7);
  EXPECT_EQ(table.slot(5), 9);
}

TEST_F(BlockTableTest, ReserveThatDoesNotFitChangesNothing) {
  BlockTable table(*cache_);
  ASSERT_OK(table.reserve(8));
  const Result<> refused = table.reserve(25);
  EXPECT_ERRC(refused, Errc::out_of_memory);
  EXPECT_THAT(refused.error().message(), HasSubstr("25 tokens need 5 more blocks, 4 of 6 are free"));
  EXPECT_EQ(table.blocks().size(), 2u);
  EXPECT_EQ(cache_->num_free_blocks(), 4u);
  ASSERT_OK(table.reserve(24));
}

TEST_F(BlockTableTest, HugeTokenCounts) {
  static_assert(div_ceil(UINT64_MAX, 4) == std::uint64_t{1} << 62);
  static_assert(div_ceil(UINT64_MAX - 3, 4) == (std::uint64_t{1} << 62) - 1);
  BlockTable table(*cache_);
  EXPECT_ERRC(table.reserve(UINT64_MAX), Errc::out_of_memory);
  EXPECT_EQ(table.capacity_tokens(), 0u);
  ASSERT_OK(table.reserve(16));
  ASSERT_OK(table.truncate(UINT64_MAX));
  EXPECT_EQ(table.capacity_tokens(), 16u) << "keeping everything dropped something";
}

TEST_F(BlockTableTest, TruncateKeepsWhatTheTokensNeed) {
  BlockTable table(*cache_);
  ASSERT_OK(table.reserve(16));
  ASSERT_OK(table.truncate(9));
  EXPECT_THAT(table.blocks(), ElementsAre(0, 1, 2));
  ASSERT_OK(table.truncate(100));
  EXPECT_EQ(table.blocks().size(), 3u);
  ASSERT_OK(table.release());
  EXPECT_EQ(cache_->num_free_blocks(), 6u);
  ASSERT_OK(table.reserve(16));
  EXPECT_THAT(table.blocks(), ElementsAre(0, 1, 2, 3)) << "blocks come back in the order in which they were taken";
}

TEST_F(BlockTableTest, PrefixSharesWholeBlocksOnly) {
  BlockTable table(*cache_);
  ASSERT_OK(table.reserve(10));
  {
    Result<BlockTable> prefix = table.share_prefix(9);
    ASSERT_OK(prefix);
    EXPECT_THAT(prefix->blocks(), ElementsAre(0, 1));
    EXPECT_EQ(cache_->ref_count(0), 2u);
    EXPECT_EQ(cache_->ref_count(2), 1u);
    ASSERT_OK(prefix->reserve(12));
    EXPECT_THAT(prefix->blocks(), ElementsAre(0, 1, 3)) << "its own third block";
    ASSERT_OK(table.release());
    EXPECT_EQ(cache_->ref_count(0), 1u);
    EXPECT_EQ(cache_->num_free_blocks(), 3u);
  }
  EXPECT_EQ(cache_->num_free_blocks(), 6u);
  const Result<BlockTable> all = table.share_prefix(1000);
  ASSERT_OK(all);
  EXPECT_THAT(all->blocks(), IsEmpty());
}

TEST_F(BlockTableTest, MovingMovesTheReferences) {
  BlockTable a(*cache_);
  ASSERT_OK(a.reserve(4));
  BlockTable b = std::move(a);
  EXPECT_THAT(a.blocks(), IsEmpty());  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(b.blocks().size(), 1u);
  BlockTable c(*cache_);
  ASSERT_OK(c.reserve(8));
  c = std::move(b);
  EXPECT_THAT(c.blocks(), ElementsAre(0));
  EXPECT_EQ(cache_->num_free_blocks(), 5u);
}

TEST_F(BlockTableTest, TableThatOutlivesTheCachesMemoryIsQuiet) {
  test::LogLines log;
  {
    BlockTable table(*cache_);
    ASSERT_OK(table.reserve(8));
    ASSERT_OK(cache_->release(*backend_));
    ASSERT_OK(table.release());
    EXPECT_THAT(table.blocks(), IsEmpty());
    EXPECT_ERRC(table.reserve(1), Errc::out_of_memory);
  }
  EXPECT_EQ(log.text(), "");
}

TEST_F(BlockTableTest, TableWhoseBlockSomeoneElseDroppedSaysSo) {
  BlockTable table(*cache_);
  ASSERT_OK(table.reserve(8));
  ASSERT_OK(cache_->drop_ref(0));
  EXPECT_ERRC(table.release(), Errc::invalid_argument);
  EXPECT_EQ(cache_->num_free_blocks(), 6u) << "the other block came back";
}

}  // namespace
}  // namespace metrale
