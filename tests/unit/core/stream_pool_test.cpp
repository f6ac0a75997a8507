// SPDX-License-Identifier: Apache-2.0
#include "core/stream_pool.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

namespace metrale::detail {
namespace {

/// A driver that only counts, with as many streams as a test makes.
class StreamPoolTest : public ::testing::Test {
 protected:
  StreamPoolTest() {
    pool_.set_driver({
        .alloc_slab = [this](std::uint64_t bytes) -> Result<DevicePtr> {
          if (held_ + bytes > capacity_) return Error(Errc::out_of_memory, "full");
          held_ += bytes;
          next_ += bytes;
          return DevicePtr{next_ - bytes};
        },
        .free_slab = [this](DevicePtr, std::uint64_t bytes) -> Result<> {
          held_ -= bytes;
          return {};
        },
        .other_streams =
            [this](PoolLists* self, const std::function<bool(NativeStream, PoolLists&)>& visit) {
              for (auto& [id, lists] : streams_) {
                if (&lists != self && visit(NativeStream{id}, lists)) return;
              }
            },
        .is_idle = [this](NativeStream stream) { return !busy_.contains(stream.value); },
        .order_after = [this](NativeStream, NativeStream) -> Result<> {
          ++num_orderings_;
          return {};
        },
        .mark_work = [](NativeStream stream) -> Result<std::optional<NativeEvent>> { return NativeEvent{stream.value}; },
        .event_done = [this](NativeEvent event) { return !busy_.contains(event.value); },
        .drop_event = [](NativeEvent) {},
    });
  }

  DevicePtr take(std::uint64_t bytes, std::uint64_t stream) { return pool_.take(bytes, {stream}, streams_[stream]).value(); }
  void give(DevicePtr ptr, std::uint64_t bytes, std::uint64_t stream) { pool_.give(ptr, bytes, streams_[stream]); }

  StreamPool pool_;
  std::map<std::uint64_t, PoolLists> streams_;
  std::set<std::uint64_t> busy_;
  std::uint64_t capacity_ = 1u << 30;
  std::uint64_t held_ = 0;
  std::uint64_t next_ = 0x10000000;
  int num_orderings_ = 0;
};

TEST(StreamPoolClasses, EveryRequestFitsItsClassAndLosesAtMostAnEighth) {
  std::size_t last = 0;
  for (std::uint64_t bytes = 1; bytes < (std::uint64_t{1} << 36); bytes += bytes / 97 + 1) {
    const std::size_t index = StreamPool::class_of(bytes);
    ASSERT_LT(index, kNumPoolClasses);
    ASSERT_GE(index, last);
    last = index;
    ASSERT_GE(StreamPool::class_bytes(index), bytes);
    if (index > 0) {
      ASSERT_LT(StreamPool::class_bytes(index - 1), bytes);
    }
    ASSERT_LE(StreamPool::class_bytes(index) - bytes, bytes / 8 + 256);
  }
}

TEST_F(StreamPoolTest, ABlockComesBackAtOnceOnItsOwnStream) {
  busy_ = {1, 2};
  const DevicePtr first = take(1000, 1);
  give(first, 1000, 1);
  EXPECT_EQ(take(1000, 1), first);
  EXPECT_EQ(num_orderings_, 0);
}

TEST_F(StreamPoolTest, ABlockOfABusyStreamIsNotTakenWhileThereIsMemory) {
  const DevicePtr first = take(4u << 20, 1);
  give(first, 4u << 20, 1);
  busy_ = {1};
  EXPECT_NE(take(4u << 20, 2), first);
}

TEST_F(StreamPoolTest, ADeviceThatIsFullAfterTrimmingRefuses) {
  capacity_ = 4u << 20;
  const DevicePtr first = take(4u << 20, 1);
  give(first, 4u << 20, 1);
  busy_ = {1};
  capacity_ = 0;
  // trim returns the idle slab, but the driver has no room for one of another size.
  EXPECT_FALSE(pool_.take(5u << 20, {2}, streams_[2]));
  EXPECT_EQ(held_, 0u);
}

TEST_F(StreamPoolTest, FullDeviceTakesAnotherStreamsBlockBeforeItTrims) {
  // What trim gives back may not be there before the busy stream's work is done; the block itself is, behind an event.
  capacity_ = 4u << 20;
  const DevicePtr first = take(4u << 20, 1);
  give(first, 4u << 20, 1);
  busy_ = {1};
  EXPECT_EQ(take(4u << 20, 2), first);
  EXPECT_EQ(num_orderings_, 1);
}

TEST_F(StreamPoolTest, FullDeviceTakesAnotherStreamsBlockBehindAnEvent) {
  capacity_ = 2u << 20;
  const DevicePtr kept = take(256 << 10, 1);
  const DevicePtr freed = take(256 << 10, 1);
  for (int i = 0; i < 6; ++i) take(256 << 10, 1);  // the slab is used up
  give(freed, 256 << 10, 1);
  busy_ = {1};
  EXPECT_EQ(take(256 << 10, 2), freed);
  EXPECT_EQ(num_orderings_, 1);
  give(kept, 256 << 10, 1);
}

TEST_F(StreamPoolTest, TrimReturnsOnlySlabsWithoutALiveBlock) {
  const DevicePtr a = take(1 << 20, 1);
  const DevicePtr b = take(3u << 20, 1);
  give(a, 1 << 20, 1);
  EXPECT_EQ(pool_.trim(), 1u << 20);
  EXPECT_EQ(pool_.reserved_bytes(), StreamPool::class_bytes(StreamPool::class_of(3u << 20)));
  give(b, 3u << 20, 1);
  pool_.trim();
  EXPECT_EQ(held_, 0u);
  EXPECT_EQ(pool_.reserved_bytes(), 0u);
  const DevicePtr c = take(1 << 20, 1);  // the lists hold nothing of what went back
  EXPECT_NE(c, a);
}

TEST_F(StreamPoolTest, BlocksOfADestroyedStreamWaitForItsWork) {
  const DevicePtr first = take(4u << 20, 1);
  give(first, 4u << 20, 1);
  busy_ = {1};
  pool_.retire({1}, streams_[1]);
  streams_.erase(1);
  EXPECT_NE(take(4u << 20, 2), first);
  busy_.clear();
  EXPECT_EQ(take(4u << 20, 2), first);
}

TEST_F(StreamPoolTest, BlocksDoNotOverlap) {
  std::map<std::uint64_t, std::uint64_t> live;
  for (std::uint64_t i = 1; i < 400; ++i) {
    const std::uint64_t bytes = i * 1237 % 700'000 + 1;
    const DevicePtr ptr = take(bytes, i % 3 + 1);
    auto next = live.lower_bound(ptr.address);
    ASSERT_TRUE(next == live.end() || next->first >= ptr.address + bytes);
    ASSERT_TRUE(next == live.begin() || std::prev(next)->first + std::prev(next)->second <= ptr.address);
    live[ptr.address] = bytes;
    if (i % 4 == 0) {
      const auto [address, size] = *live.begin();
      live.erase(live.begin());
      give({address}, size, i % 3 + 1);
    }
  }
}

}  // namespace
}  // namespace metrale::detail
