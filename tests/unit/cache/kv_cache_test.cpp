// SPDX-License-Identifier: Apache-2.0
#include "metrale/kv_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include "metrale/graph.h"
#include "metrale/stream.h"
#include "unit/core/two_backends.h"

namespace metrale {
namespace {

using testing::Each;
using testing::HasSubstr;

// Every element type, and sides that differ.
KvLayout mixed_layout() {
  KvLayout layout;
  layout.block_size = 4;
  layout.layers = {{{2, 8, DType::bf16}, {2, 8, DType::bf16}}, {{1, 16, DType::f32}, {3, 4, DType::f8_e4m3}}};
  return layout;
}

class KvCacheTest : public test::OnBothBackends {
 protected:
  std::unique_ptr<PagedKvCache> make(std::uint32_t num_blocks, KvOptions options = {.poison = false, .trace = false}) {
    auto made = PagedKvCache::create(*backend_, mixed_layout(), num_blocks, options);
    EXPECT_TRUE(made.has_value()) << made.error().to_string();
    return made ? std::move(*made) : nullptr;
  }
  // The bytes of one block of one pool, once the default stream is done.
  std::vector<std::byte> read(DevicePtr pool, std::uint32_t block, std::uint64_t block_bytes) {
    std::vector<std::byte> seen(block_bytes);
    const Result<> copied = backend_->copy_d2h(seen, pool.offset(block * block_bytes));
    EXPECT_TRUE(copied.has_value()) << copied.error().to_string();
    return seen;
  }
  // Each pool of `cache` with the bytes of its blocks.
  static std::vector<std::pair<DevicePtr, std::uint64_t>> pools(const PagedKvCache& cache) {
    std::vector<std::pair<DevicePtr, std::uint64_t>> all;
    for (std::uint32_t i = 0; i < cache.num_layers(); ++i) {
      all.emplace_back(cache.k_pool(i), cache.layout().block_bytes(cache.layout().layers[i].k));
      all.emplace_back(cache.v_pool(i), cache.layout().block_bytes(cache.layout().layers[i].v));
    }
    return all;
  }
};
METRALE_ON_BOTH_BACKENDS(KvCacheTest);

TEST_P(KvCacheTest, EachSideOfEachLayerIsAPoolOfItsOwn) {
  const auto cache = make(10);
  std::set<DevicePtr> seen;
  for (const auto& [pool, block_bytes] : pools(*cache)) {
    seen.insert(pool);
    std::vector<std::byte> last(block_bytes);
    EXPECT_TRUE(backend_->copy_d2h(last, pool.offset(9 * block_bytes)).has_value());
    EXPECT_ERRC(backend_->copy_d2h(last, pool.offset(9 * block_bytes + 1)), Errc::out_of_range);
  }
  EXPECT_EQ(seen.size(), 4u);
  EXPECT_EQ(backend_->live_alloc_count(), 4u);
  EXPECT_EQ(cache->size_bytes(), 10 * mixed_layout().bytes_per_block());
  EXPECT_EQ(backend_->live_bytes(), cache->size_bytes());
  EXPECT_EQ(cache->k_pool(2), DevicePtr{});
  EXPECT_EQ(cache->num_blocks(), 10u);
  EXPECT_EQ(cache->num_free_blocks(), 10u);
  for (const Allocation& block : backend_->live_allocations()) EXPECT_EQ(block.owner, "kv cache");
}

TEST_P(KvCacheTest, CreateRefusesWrongLayoutsAndCounts) {
  EXPECT_ERRC(PagedKvCache::create(*backend_, KvLayout{}, 1), Errc::invalid_argument);
  EXPECT_ERRC(PagedKvCache::create(*backend_, mixed_layout(), 0), Errc::invalid_argument);
  EXPECT_ERRC(PagedKvCache::create(*backend_, mixed_layout(), 0x8000'0000u), Errc::invalid_argument);
  EXPECT_EQ(backend_->live_alloc_count(), 0u);
}

TEST_P(KvCacheTest, LastFreedIsTakenFirst) {
  const auto cache = make(4);
  EXPECT_EQ(*cache->alloc_block(), 0u);
  EXPECT_EQ(*cache->alloc_block(), 1u);
  EXPECT_EQ(*cache->alloc_block(), 2u);
  ASSERT_OK(cache->drop_ref(0));
  ASSERT_OK(cache->drop_ref(2));
  EXPECT_EQ(*cache->alloc_block(), 2u);
  EXPECT_EQ(*cache->alloc_block(), 0u);
  EXPECT_EQ(*cache->alloc_block(), 3u);
}

TEST_P(KvCacheTest, BlockIsFreeOnlyWhenItsLastReferenceGoes) {
  const auto cache = make(2);
  const std::uint32_t block = *cache->alloc_block();
  EXPECT_EQ(cache->ref_count(block), 1u);
  ASSERT_OK(cache->add_ref(block));
  EXPECT_EQ(cache->ref_count(block), 2u);
  ASSERT_OK(cache->drop_ref(block));
  EXPECT_EQ(cache->num_free_blocks(), 1u);
  ASSERT_OK(cache->drop_ref(block));
  EXPECT_EQ(cache->num_free_blocks(), 2u);
  EXPECT_EQ(cache->ref_count(block), 0u);
}

TEST_P(KvCacheTest, EmptyCacheSaysSo) {
  const auto cache = make(1);
  ASSERT_OK(cache->alloc_block());
  const Result<std::uint32_t> none = cache->alloc_block();
  EXPECT_ERRC(none, Errc::out_of_memory);
  EXPECT_THAT(none.error().message(), HasSubstr("none of 1 blocks of 4 tokens"));
  EXPECT_EQ(cache->try_alloc_block(), std::nullopt);
}

TEST_P(KvCacheTest, DroppingAFreeBlockNamesItAndChangesNothing) {
  const auto cache = make(8);
  for (int i = 0; i < 8; ++i) ASSERT_OK(cache->alloc_block());
  ASSERT_OK(cache->drop_ref(7));
  const Result<> twice = cache->drop_ref(7);
  EXPECT_ERRC(twice, Errc::invalid_argument);
  EXPECT_THAT(twice.error().message(), HasSubstr("kv block 7"));
  EXPECT_EQ(cache->num_free_blocks(), 1u) << "not on the free list twice";
  EXPECT_EQ(*cache->alloc_block(), 7u);
  EXPECT_EQ(cache->try_alloc_block(), std::nullopt);
  EXPECT_ERRC(cache->drop_ref(8), Errc::out_of_range);
  EXPECT_ERRC(cache->add_ref(8), Errc::out_of_range);
  EXPECT_EQ(cache->ref_count(8), 0u);
}

TEST_P(KvCacheTest, AddingAReferenceToAFreeBlockIsRefused) {
  const auto cache = make(2);
  EXPECT_ERRC(cache->add_ref(0), Errc::invalid_argument);
  EXPECT_EQ(cache->num_free_blocks(), 2u);
  EXPECT_EQ(cache->ref_count(0), 0u);
}

TEST_P(KvCacheTest, ZeroBlockClearsOneBlockInEveryPoolAndNoOther) {
  const auto cache = make(3);
  for (const auto& [pool, block_bytes] : pools(*cache)) ASSERT_OK(backend_->memset(pool, 0x77, 3 * block_bytes));
  ASSERT_OK(cache->zero_block(1, backend_->default_stream()));
  for (const auto& [pool, block_bytes] : pools(*cache)) {
    EXPECT_THAT(read(pool, 0, block_bytes), Each(std::byte{0x77}));
    EXPECT_THAT(read(pool, 1, block_bytes), Each(std::byte{0}));
    EXPECT_THAT(read(pool, 2, block_bytes), Each(std::byte{0x77}));
  }
  EXPECT_ERRC(cache->zero_block(3, backend_->default_stream()), Errc::out_of_range);
  EXPECT_ERRC(cache->zero_block(0, {}), Errc::invalid_argument);
}

TEST_P(KvCacheTest, PoisonIsNotANumber) {
  const auto cache = make(1);
  ASSERT_OK(cache->poison_block(0, backend_->default_stream()));
  for (const auto& [pool, block_bytes] : pools(*cache)) EXPECT_THAT(read(pool, 0, block_bytes), Each(std::byte{0xFF}));
  float f32 = 0;
  const std::uint32_t bits = 0xFFFF'FFFF;
  std::memcpy(&f32, &bits, sizeof(f32));
  EXPECT_TRUE(std::isnan(f32));
}

TEST_P(KvCacheTest, PoisonSwitchFillsFreedBlocksOnly) {
  const auto cache = make(2, {.poison = true, .trace = false});
  const std::uint32_t block = *cache->alloc_block();
  ASSERT_OK(cache->zero_block(0, backend_->default_stream()));
  ASSERT_OK(cache->zero_block(1, backend_->default_stream()));
  ASSERT_OK(cache->add_ref(block));
  ASSERT_OK(cache->drop_ref(block));
  EXPECT_THAT(read(cache->k_pool(0), block, 4 * 2 * 8 * 2), Each(std::byte{0})) << "still referenced";
  ASSERT_OK(cache->drop_ref(block));
  for (const auto& [pool, block_bytes] : pools(*cache)) {
    EXPECT_THAT(read(pool, block, block_bytes), Each(std::byte{0xFF}));
    EXPECT_THAT(read(pool, 1 - block, block_bytes), Each(std::byte{0}));
  }
}

TEST_P(KvCacheTest, PoisonIsOrderedOnItsStreamAndLeavesACaptureAlone) {
  const Stream stream = std::move(*Stream::create(*backend_));
  const auto cache = make(1, {.poison = true, .trace = false, .poison_stream = stream.handle()});
  const std::uint32_t block = *cache->alloc_block();
  ASSERT_OK(cache->zero_block(block, stream.handle()));
  CaptureScope capture = std::move(*CaptureScope::begin(*backend_, stream.handle()));
  ASSERT_OK(cache->drop_ref(block));
  const Graph graph = std::move(*capture.end());
  ASSERT_OK(graph.launch(stream.handle()));
  ASSERT_OK(stream.synchronize());
  EXPECT_THAT(read(cache->k_pool(0), block, 4 * 2 * 8 * 2), Each(std::byte{0}));
  ASSERT_OK(cache->alloc_block());
  ASSERT_OK(cache->drop_ref(block));
  ASSERT_OK(stream.synchronize());
  EXPECT_THAT(read(cache->k_pool(0), block, 4 * 2 * 8 * 2), Each(std::byte{0xFF}));
}

TEST_P(KvCacheTest, TraceTellsWhoChangedAReference) {
  const auto cache = make(2, {.poison = false, .trace = true});
  const std::uint32_t block = *cache->alloc_block();
  ASSERT_OK(cache->add_ref(block));
  ASSERT_OK(cache->drop_ref(block));
  ASSERT_OK(cache->drop_ref(block));
  const std::string history = cache->history(block);
  EXPECT_THAT(history, testing::MatchesRegex("alloc -> 1 references \\(.*kv_cache_test.cpp:[0-9]+\\)\n"
                                             "add -> 2 references .*\ndrop -> 1 references .*\ndrop -> 0 references .*\n"));
  EXPECT_THAT(cache->drop_ref(block).error().message(), HasSubstr("add -> 2 references"));
  EXPECT_EQ(cache->history(1 - block), "");
  for (int i = 0; i < 100; ++i) {
    ASSERT_OK(cache->alloc_block());
    ASSERT_OK(cache->drop_ref(block));
  }
  const std::string long_history = cache->history(block);
  EXPECT_EQ(std::count(long_history.begin(), long_history.end(), '\n'), 64);
  EXPECT_EQ(make(1)->history(0), "");
}

TEST_P(KvCacheTest, ReleaseFreesEveryPoolAndLaterAllocFails) {
  const auto cache = make(4);
  ASSERT_OK(cache->alloc_block());
  ASSERT_OK(cache->release(*backend_));
  EXPECT_EQ(backend_->live_alloc_count(), 0u);
  EXPECT_EQ(cache->size_bytes(), 0u);
  EXPECT_EQ(cache->num_blocks(), 0u);
  EXPECT_EQ(cache->k_pool(0), DevicePtr{});
  const Result<std::uint32_t> late = cache->alloc_block();
  EXPECT_ERRC(late, Errc::out_of_memory);
  EXPECT_THAT(late.error().message(), HasSubstr("released"));
  EXPECT_ERRC(cache->drop_ref(0), Errc::out_of_range);
  ASSERT_OK(cache->release(*backend_));
}

TEST_P(KvCacheTest, ReleaseOnAnotherBackendDoesNothing) {
  const auto other = test::make_mock();
  const auto cache = make(4);
  EXPECT_ERRC(cache->release(*other), Errc::invalid_argument);
  EXPECT_EQ(cache->num_blocks(), 4u);
  EXPECT_EQ(backend_->live_alloc_count(), 4u);
}

TEST_P(KvCacheTest, PoolThatAGraphNamesIsKeptForTheNextRelease) {
  const Stream stream = std::move(*Stream::create(*backend_));
  const auto cache = make(4);
  CaptureScope capture = std::move(*CaptureScope::begin(*backend_, stream.handle()));
  ASSERT_OK(backend_->memset_async(cache->v_pool(1), 0, 4, stream.handle()));
  Graph graph = std::move(*capture.end());
  const Result<> released = cache->release(*backend_);
  EXPECT_ERRC(released, Errc::in_use);
  EXPECT_THAT(released.error().to_string(), HasSubstr("values of layer 1"));
  EXPECT_EQ(backend_->live_alloc_count(), 1u);
  ASSERT_OK(graph.release());
  ASSERT_OK(cache->release(*backend_));
  EXPECT_EQ(backend_->live_alloc_count(), 0u);
}

TEST(KvCacheFailureTest, NothingIsLeftWhicheverAllocationFails) {
  for (std::uint64_t n = 1; n <= 4; ++n) {
    const auto backend = test::make_mock();
    mock::control(*backend).fail_nth(Op::alloc, n, Errc::out_of_memory);
    mock::control(*backend).fail_nth(Op::alloc, n + 1, Errc::out_of_memory);  // the retry
    const auto cache = PagedKvCache::create(*backend, mixed_layout(), 10);
    ASSERT_FALSE(cache.has_value()) << n;
    EXPECT_THAT(cache.error().to_string(), HasSubstr(n > 2 ? "layer 1" : "layer 0"));
    EXPECT_THAT(cache.error().to_string(), HasSubstr(n % 2 == 1 ? "keys" : "values"));
    EXPECT_EQ(backend->live_alloc_count(), 0u) << n;
  }
}

TEST(KvCacheFailureTest, ReleaseGoesOnAfterARefusedFree) {
  for (std::uint64_t n = 1; n <= 4; ++n) {
    const auto backend = test::make_mock();
    const auto cache = std::move(*PagedKvCache::create(*backend, mixed_layout(), 10));
    mock::control(*backend).fail_nth(Op::free, n);
    EXPECT_ERRC(cache->release(*backend), Errc::internal);
    EXPECT_EQ(mock::control(*backend).num_calls(Op::free), 4u);
    EXPECT_EQ(backend->live_alloc_count(), 0u);
    ASSERT_OK(cache->release(*backend));
  }
}

TEST(KvCacheFailureTest, PoisonThatFailsIsLoggedAndTheReferenceHasGone) {
  const auto backend = test::make_mock();
  const auto cache = std::move(*PagedKvCache::create(*backend, mixed_layout(), 2, {.poison = true}));
  const std::uint32_t block = *cache->alloc_block();
  test::LogLines log;
  mock::control(*backend).fail_nth(Op::memset_async, 1);
  ASSERT_OK(cache->drop_ref(block));
  EXPECT_EQ(cache->num_free_blocks(), 2u);
  EXPECT_THAT(log.text(), HasSubstr("kv block 0 was freed and not poisoned"));
}

}  // namespace
}  // namespace metrale
