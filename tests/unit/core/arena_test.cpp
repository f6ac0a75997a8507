// SPDX-License-Identifier: Apache-2.0
#include "metrale/arena.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "metrale/graph.h"
#include "metrale/stream.h"
#include "unit/core/two_backends.h"

namespace metrale {
namespace {

using testing::HasSubstr;

// A different size for each buffer, so that a mix-up shows.
ArenaSizes distinct_sizes() {
  ArenaSizes sizes;
  for (std::size_t i = 0; i < kNumArenaBuffers; ++i) sizes[static_cast<ArenaBuffer>(i)] = 100 + i;
  return sizes;
}

class ArenaTest : public test::OnBothBackends {};
METRALE_ON_BOTH_BACKENDS(ArenaTest);

TEST_P(ArenaTest, EveryBufferIsItsOwnBlockOfExactlyItsSize) {
  const ArenaSizes sizes = distinct_sizes();
  const auto arena = BufferArena::create(*backend_, sizes);
  ASSERT_OK(arena);
  std::set<DevicePtr> seen;
  for (std::size_t i = 0; i < kNumArenaBuffers; ++i) {
    const auto id = static_cast<ArenaBuffer>(i);
    EXPECT_TRUE((**arena)[id]) << to_string(id);
    EXPECT_EQ((*arena)->size_bytes(id), sizes[id]) << to_string(id);
    seen.insert((**arena)[id]);
  }
  EXPECT_EQ(seen.size(), kNumArenaBuffers);
  EXPECT_EQ(backend_->live_alloc_count(), kNumArenaBuffers);
  EXPECT_EQ(backend_->live_bytes(), sizes.total_bytes());
  EXPECT_EQ((*arena)->total_bytes(), sizes.total_bytes());
  for (const Allocation& block : backend_->live_allocations()) EXPECT_EQ(block.owner, "buffer arena");
}

TEST_P(ArenaTest, GatedBuffersAreNull) {
  const auto arena = BufferArena::create(*backend_, distinct_sizes().only({ArenaBuffer::logits, ArenaBuffer::scratch}));
  ASSERT_OK(arena);
  EXPECT_EQ(backend_->live_alloc_count(), 2u);
  for (std::size_t i = 0; i < kNumArenaBuffers; ++i) {
    const auto id = static_cast<ArenaBuffer>(i);
    EXPECT_EQ(static_cast<bool>((**arena)[id]), id == ArenaBuffer::logits || id == ArenaBuffer::scratch) << to_string(id);
  }
}

TEST_P(ArenaTest, UnitNormWeightIsZeroFilled) {
  const auto arena = BufferArena::create(*backend_, distinct_sizes());
  ASSERT_OK(arena);
  std::vector<std::byte> seen((*arena)->size_bytes(ArenaBuffer::norm_unit_w), std::byte{1});
  ASSERT_OK(backend_->copy_d2h(seen, (**arena)[ArenaBuffer::norm_unit_w]));
  EXPECT_THAT(seen, testing::Each(std::byte{0}));
}

TEST_P(ArenaTest, ReleaseFreesAllAndAgainDoesNothing) {
  const auto arena = BufferArena::create(*backend_, distinct_sizes());
  ASSERT_OK(arena);
  ASSERT_OK((*arena)->release(*backend_));
  EXPECT_EQ(backend_->live_alloc_count(), 0u);
  EXPECT_EQ((*arena)->total_bytes(), 0u);
  for (std::size_t i = 0; i < kNumArenaBuffers; ++i) EXPECT_FALSE((**arena)[static_cast<ArenaBuffer>(i)]);
  ASSERT_OK((*arena)->release(*backend_));
}

TEST_P(ArenaTest, ReleaseOnAnotherBackendDoesNothing) {
  const auto other = test::make_mock();
  const auto arena = BufferArena::create(*backend_, distinct_sizes());
  ASSERT_OK(arena);
  EXPECT_ERRC((*arena)->release(*other), Errc::invalid_argument);
  EXPECT_EQ(backend_->live_alloc_count(), kNumArenaBuffers);
}

TEST_P(ArenaTest, BufferThatAGraphNamesIsKeptForTheNextRelease) {
  const Stream stream = *Stream::create(*backend_);
  const auto arena = BufferArena::create(*backend_, distinct_sizes());
  ASSERT_OK(arena);
  CaptureScope capture = std::move(*CaptureScope::begin(*backend_, stream.handle()));
  ASSERT_OK(backend_->memset_async((**arena)[ArenaBuffer::logits], 0, 8, stream.handle()));
  Graph graph = std::move(*capture.end());
  const Result<> released = (*arena)->release(*backend_);
  EXPECT_ERRC(released, Errc::in_use);
  EXPECT_THAT(released.error().to_string(), HasSubstr("arena buffer logits"));
  EXPECT_EQ(backend_->live_alloc_count(), 1u);
  ASSERT_OK(graph.release());
  ASSERT_OK((*arena)->release(*backend_));
  EXPECT_EQ(backend_->live_alloc_count(), 0u);
}

TEST_P(ArenaTest, ReportNamesBuffersLargestFirst) {
  ArenaSizes sizes;
  sizes[ArenaBuffer::logits] = 5000;
  sizes[ArenaBuffer::residual] = 70'000;
  const auto arena = BufferArena::create(*backend_, sizes);
  ASSERT_OK(arena);
  EXPECT_EQ((*arena)->report(), "         70000  residual\n          5000  logits\n         75000  total, 2 buffers\n");
}

TEST(ArenaFailureTest, NothingIsLeftWhicheverCallFails) {
  const ArenaSizes sizes = distinct_sizes();
  // Every allocation, then the fill of the unit weight.
  for (std::uint64_t n = 1; n <= kNumArenaBuffers + 1; ++n) {
    const auto backend = test::make_mock();
    mock::control(*backend).fail_any_nth(n);
    const auto arena = BufferArena::create(*backend, sizes);
    ASSERT_FALSE(arena.has_value()) << n;
    EXPECT_EQ(backend->live_alloc_count(), 0u) << n;
  }
}

TEST(ArenaFailureTest, OutOfMemoryNamesTheBuffer) {
  const auto backend = test::make_mock();
  ArenaSizes sizes;
  sizes[ArenaBuffer::logits] = 1 << 20;
  mock::control(*backend).set_max_allocation_bytes(1 << 19);
  const auto arena = BufferArena::create(*backend, sizes);
  EXPECT_ERRC(arena, Errc::out_of_memory);
  EXPECT_THAT(arena.error().to_string(), HasSubstr("arena buffer logits of 1048576 bytes"));
}

TEST(ArenaFailureTest, ReleaseGoesOnAfterARefusedFree) {
  const auto backend = test::make_mock();
  const auto arena = BufferArena::create(*backend, distinct_sizes());
  ASSERT_OK(arena);
  const std::uint64_t before = mock::control(*backend).num_calls(Op::free);
  mock::control(*backend).fail_nth(Op::free, 3);
  const Result<> released = (*arena)->release(*backend);
  EXPECT_ERRC(released, Errc::internal);
  EXPECT_THAT(released.error().to_string(), HasSubstr("arena buffer norm_output"));
  EXPECT_EQ(mock::control(*backend).num_calls(Op::free) - before, kNumArenaBuffers);
  EXPECT_EQ(backend->live_alloc_count(), 0u);
  ASSERT_OK((*arena)->release(*backend));
}

}  // namespace
}  // namespace metrale
