// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include "host_kernels.h"
#include "support.h"

namespace metrale::test {
namespace {

using std::chrono::milliseconds;

class HostStream : public testing::Test {
 protected:
  std::unique_ptr<GpuBackend> b_ = take(host::create(host_options()));
  StreamHandle s_ = take(b_->create_stream());
  StreamHandle other_ = take(b_->create_stream());
};

TEST_F(HostStream, RunsHostFunctionsInTheOrderOfTheCalls) {
  std::vector<int> order;
  for (int i = 0; i < 1000; ++i) take(b_->enqueue_host(s_, [&order, i] { order.push_back(i); }));
  ASSERT_OK(b_->synchronize(s_));
  ASSERT_EQ(order.size(), 1000u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST_F(HostStream, KeepsTheOrderOfManyProducers) {
  constexpr int kPerThread = 500;
  std::vector<std::pair<int, int>> order;
  std::vector<std::thread> producers;
  for (int t = 0; t < 4; ++t) {
    producers.emplace_back([&, t] {
      for (int i = 0; i < kPerThread; ++i) take(b_->enqueue_host(s_, [&order, t, i] { order.emplace_back(t, i); }));
    });
  }
  for (std::thread& producer : producers) producer.join();
  ASSERT_OK(b_->synchronize(s_));
  ASSERT_EQ(order.size(), 4u * kPerThread);
  std::array<int, 4> next{};
  for (const auto& [t, i] : order) EXPECT_EQ(i, next[t]++);
}

TEST_F(HostStream, RunsWhileAnotherStreamBlocksInAHostFunction) {
  std::promise<void> ready;
  take(b_->enqueue_host(s_, [done = ready.get_future().share()] { done.wait(); }));
  take(b_->enqueue_host(other_, [&] { ready.set_value(); }));
  EXPECT_OK(b_->synchronize(other_));
  EXPECT_OK(b_->synchronize(s_));
}

TEST_F(HostStream, QueryTellsWithoutWaiting) {
  Gate gate(*b_, s_);
  EXPECT_FALSE(take(b_->query(s_)));
  EXPECT_TRUE(take(b_->query(other_)));
  gate.open();
  take(b_->synchronize(s_));
  EXPECT_TRUE(take(b_->query(s_)));
}

TEST_F(HostStream, SynchronizeForGivesUpAndCanBeCalledAgain) {
  Gate gate(*b_, s_);
  EXPECT_ERRC(b_->synchronize_for(s_, milliseconds(5)), Errc::timeout);
  EXPECT_ERRC(b_->synchronize_for(s_, milliseconds(0)), Errc::timeout);
  gate.open();
  EXPECT_OK(b_->synchronize_for(s_, std::chrono::nanoseconds::max()));
}

TEST_F(HostStream, SynchronizeDeviceWaitsForAllStreamsAndDestroyedOnes) {
  std::atomic<int> ran{0};
  for (const StreamHandle stream : {s_, other_}) {
    take(b_->enqueue_host(stream, [&] {
      std::this_thread::sleep_for(milliseconds(20));
      ++ran;
    }));
  }
  take(b_->destroy_stream(other_));
  ASSERT_OK(b_->synchronize_device());
  EXPECT_EQ(ran, 2);
}

TEST_F(HostStream, DestroyReturnsAtOnceAndPendingWorkCompletes) {
  std::atomic<bool> ran{false};
  {
    Gate gate(*b_, s_);
    take(b_->enqueue_host(s_, [&] { ran = true; }));
    ASSERT_OK(b_->destroy_stream(s_));
    EXPECT_FALSE(ran);
  }
  ASSERT_OK(b_->synchronize_device());
  EXPECT_TRUE(ran);
}

TEST_F(HostStream, ADestroyedStreamWithWorkIsNotHandedOutAgain) {
  Gate gate(*b_, s_);
  take(b_->destroy_stream(s_));
  const StreamHandle fresh = take(b_->create_stream());
  EXPECT_TRUE(take(b_->query(fresh)));
  EXPECT_OK(b_->synchronize(fresh));
}

TEST_F(HostStream, AStagedSourceMayChangeAtReturn) {
  for (const std::size_t num_words : {std::size_t{8}, std::size_t{1} << 20}) {  // in the record, and behind it
    const DevicePtr dst = take(b_->alloc(num_words * 4));
    Gate gate(*b_, s_);
    std::vector<std::uint32_t> src(num_words, 7);
    take(b_->copy_h2d_async(dst, bytes_of(std::as_const(src)), s_));
    std::fill(src.begin(), src.end(), 0);
    gate.open();
    EXPECT_EQ(read_words(*b_, dst, num_words, s_), std::vector<std::uint32_t>(num_words, 7));
    take(b_->free(dst));
  }
}

TEST_F(HostStream, ARetainedSourceIsReadWhenTheStreamComesToIt) {
  const DevicePtr dst = take(b_->alloc(16));
  std::vector<std::uint32_t> src(4, 1);
  Gate gate(*b_, s_);
  take(b_->copy_h2d_async_retained(dst, bytes_of(std::as_const(src)), s_));
  std::fill(src.begin(), src.end(), 2);
  gate.open();
  EXPECT_EQ(read_words(*b_, dst, 4, s_), std::vector<std::uint32_t>(4, 2));
}

TEST_F(HostStream, CopiesOfEverySizeStayInOrder) {
  // Small copies on an idle stream run in the caller and large ones on a worker: they must not overtake each other.
  constexpr std::size_t kWords = 1 << 18;
  const DevicePtr a = take(b_->alloc(kWords * 4));
  const DevicePtr c = take(b_->alloc(kWords * 4));
  for (std::uint32_t round = 0; round < 20; ++round) {
    std::vector<std::uint32_t> value(1, round);
    take(b_->memset_async(a, static_cast<std::uint8_t>(round), kWords * 4, s_));
    take(b_->copy_h2d_async(a.offset(kWords * 4 - 4), bytes_of(std::as_const(value)), s_));
    take(b_->copy_d2d_async(c, a, kWords * 4, s_));
    std::vector<std::uint32_t> out(2);
    take(b_->copy_d2h_async(bytes_of(out), c.offset(kWords * 4 - 8), s_));
    take(b_->synchronize(s_));
    EXPECT_EQ(out[0], round * 0x0101'0101u);
    EXPECT_EQ(out[1], round);
  }
}

TEST_F(HostStream, TwoDimensionalCopyTakesRowsAndLeavesTheRest) {
  const DevicePtr src = take(b_->alloc(64));
  const DevicePtr dst = take(b_->alloc(64));
  std::vector<std::uint32_t> words(16);
  for (std::uint32_t i = 0; i < 16; ++i) words[i] = i;
  take(b_->copy_h2d(src, bytes_of(std::as_const(words))));
  take(b_->memset(dst, 0, 64));
  take(b_->copy_d2d_2d_async({dst, src, 12, 16, 8, 4}, s_));  // two words of four from each row, to rows of three
  const std::vector<std::uint32_t> want{0, 1, 0, 4, 5, 0, 8, 9, 0, 12, 13, 0, 0, 0, 0, 0};
  EXPECT_EQ(read_words(*b_, dst, 16, s_), want);
}

TEST_F(HostStream, WrapsOnlyItsOwnLiveStreams) {
  const std::uint64_t native = take(b_->native_stream(s_));
  const StreamHandle wrapped = take(b_->wrap_stream(native));
  EXPECT_EQ(take(b_->native_stream(wrapped)), native);
  EXPECT_ERRC(b_->wrap_stream(0x1234), Errc::invalid_argument);
  take(b_->destroy_stream(wrapped));
  EXPECT_OK(b_->synchronize(s_));
  take(b_->destroy_stream(s_));
  EXPECT_ERRC(b_->wrap_stream(native), Errc::invalid_argument);
}

TEST_F(HostStream, CopiesBetweenTwoHostBackends) {
  auto peer = take(host::create(host_options()));
  const DevicePtr src = take(peer->alloc(16));
  const DevicePtr dst = take(b_->alloc(16));
  std::vector<std::uint32_t> words{1, 2, 3, 4};
  take(peer->copy_h2d(src, bytes_of(std::as_const(words))));
  ASSERT_OK(b_->copy_peer_async(dst, *peer, src, 16, s_));
  EXPECT_EQ(read_words(*b_, dst, 4, s_), words);
}

TEST_F(HostStream, AHostFunctionThatThrowsLosesTheDevice) {
  take(b_->enqueue_host(s_, [] { throw std::runtime_error("no"); }));
  EXPECT_ERRC(b_->synchronize(s_), Errc::device_lost);
  EXPECT_ERRC(b_->create_stream(), Errc::device_lost);
}

TEST_F(HostStream, ManyStreamsComeAndGo) {
  std::atomic<int> ran{0};
  for (int i = 0; i < 200; ++i) {
    const StreamHandle stream = take(b_->create_stream());
    for (int j = 0; j < 5; ++j) take(b_->enqueue_host(stream, [&] { ++ran; }));
    take(b_->destroy_stream(stream));
  }
  ASSERT_OK(b_->synchronize_device());
  EXPECT_EQ(ran, 1000);
}

// ---- events ----

TEST_F(HostStream, AnEventHoldsTheStreamAndNotTheHost) {
  const EventHandle event = take(b_->create_event());
  std::atomic<bool> first{false};
  std::atomic<bool> seen{false};
  Gate gate(*b_, s_);
  take(b_->enqueue_host(s_, [&] { first = true; }));
  take(b_->record_event(event, s_));
  take(b_->stream_wait_event(other_, event));
  take(b_->enqueue_host(other_, [&] { seen = first.load(); }));
  EXPECT_FALSE(take(b_->query(other_)));
  EXPECT_FALSE(take(b_->event_query(event)));
  gate.open();
  ASSERT_OK(b_->synchronize(other_));
  EXPECT_TRUE(seen);
}

TEST_F(HostStream, EventSynchronizeWaitsForWhatCameBeforeAndNothingElse) {
  const EventHandle event = take(b_->create_event());
  take(b_->enqueue_host(s_, [] {}));
  take(b_->record_event(event, s_));
  Gate gate(*b_, s_);
  EXPECT_OK(b_->event_synchronize(event));
  EXPECT_TRUE(take(b_->event_query(event)));
}

TEST_F(HostStream, AWaitKeepsItsMarkWhenTheEventIsRecordedAgainOrDestroyed) {
  const EventHandle event = take(b_->create_event());
  take(b_->enqueue_host(s_, [] {}));
  take(b_->record_event(event, s_));
  Gate gate(*b_, s_);  // behind the mark
  take(b_->stream_wait_event(other_, event));
  take(b_->record_event(event, s_));
  take(b_->destroy_event(event));
  EXPECT_OK(b_->synchronize_for(other_, std::chrono::seconds(10)));
}

TEST_F(HostStream, AnEventOutlivesItsStream) {
  const EventHandle event = take(b_->create_event());
  std::atomic<bool> ran{false};
  Gate gate(*b_, s_);
  take(b_->enqueue_host(s_, [&] { ran = true; }));
  take(b_->record_event(event, s_));
  take(b_->destroy_stream(s_));
  EXPECT_FALSE(take(b_->event_query(event)));
  gate.open();
  ASSERT_OK(b_->event_synchronize(event));
  EXPECT_TRUE(ran);
}

TEST_F(HostStream, TimedEventsMeasureWorkBetweenThem) {
  const EventHandle start = take(b_->create_timed_event());
  const EventHandle end = take(b_->create_timed_event());
  take(b_->record_event(start, s_));
  take(b_->enqueue_host(s_, [] { std::this_thread::sleep_for(milliseconds(20)); }));
  take(b_->record_event(end, s_));
  EXPECT_ERRC(b_->event_elapsed_ns(start, end), Errc::busy);
  take(b_->event_synchronize(end));
  const std::int64_t elapsed = take(b_->event_elapsed_ns(start, end));
  EXPECT_GE(elapsed, 20'000'000);
  EXPECT_LT(elapsed, 10'000'000'000);
}

TEST_F(HostStream, AStampOfAnEarlierRecordingIsVoid) {
  const EventHandle start = take(b_->create_timed_event());
  const EventHandle end = take(b_->create_timed_event());
  Gate gate(*b_, s_);
  take(b_->record_event(end, s_));  // stamped late
  take(b_->record_event(start, other_));
  take(b_->record_event(end, other_));
  const std::int64_t before = take(b_->event_elapsed_ns(start, end));
  gate.open();
  take(b_->synchronize(s_));
  EXPECT_EQ(take(b_->event_elapsed_ns(start, end)), before);
}

}  // namespace
}  // namespace metrale::test
