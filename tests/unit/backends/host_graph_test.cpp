// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <thread>

#include "host_kernels.h"
#include "support.h"

namespace metrale::test {
namespace {

class HostGraph : public testing::Test {
 protected:
  std::unique_ptr<GpuBackend> b_ = take(host::create(host_options()));
  StreamHandle s_ = take(b_->create_stream());
  StreamHandle side_ = take(b_->create_stream());
  EventHandle fork_ = take(b_->create_event());
  EventHandle join_ = take(b_->create_event());
};

TEST_F(HostGraph, RecordsAndReplaysInOrderAndRunsNothingMeanwhile) {
  std::vector<int> order;
  take(b_->begin_capture(s_));
  for (int i = 0; i < 3; ++i) take(b_->enqueue_host(s_, [&order, i] { order.push_back(i); }));
  const GraphHandle graph = take(b_->end_capture(s_));
  take(b_->synchronize(s_));
  EXPECT_TRUE(order.empty());
  for (int i = 0; i < 2; ++i) take(b_->launch_graph(graph, s_));
  take(b_->synchronize(s_));
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 0, 1, 2}));
}

TEST_F(HostGraph, ReplaysLaunchesCopiesAndFillsWithTheirArguments) {
  const KernelHandle store = take(b_->kernel("test", "store"));
  const DevicePtr a = take(b_->alloc(16));
  const DevicePtr c = take(b_->alloc(16));
  take(b_->begin_capture(s_));
  take(b_->memset_async(a, 0, 16, s_));
  {
    std::uint32_t value = 5;
    const KernelArg args[] = {KernelArg::buffer(a.offset(4)), KernelArg::value(value)};
    take(b_->launch_typed(store, {}, {}, 0, s_, args));
    std::vector<std::uint32_t> frozen(1, 6);
    take(b_->copy_h2d_async(a.offset(8), bytes_of(std::as_const(frozen)), s_));
    frozen[0] = 0;  // the graph keeps the bytes
  }
  take(b_->copy_d2d_async(c, a, 16, s_));
  const GraphHandle graph = take(b_->end_capture(s_));
  for (int i = 0; i < 2; ++i) {
    take(b_->memset_async(c, 0xFF, 16, s_));
    take(b_->launch_graph(graph, s_));
    EXPECT_EQ(read_words(*b_, c, 4, s_), (std::vector<std::uint32_t>{0, 5, 6, 0}));
  }
}

TEST_F(HostGraph, JoinedStreamsAreReplayedBehindWhatTheyWaitedFor) {
  std::vector<char> order;
  take(b_->begin_capture(s_));
  take(b_->enqueue_host(s_, [&] { order.push_back('a'); }));
  take(b_->record_event(fork_, s_));
  take(b_->stream_wait_event(side_, fork_));
  take(b_->enqueue_host(side_, [&] { order.push_back('b'); }));
  take(b_->record_event(join_, side_));
  take(b_->stream_wait_event(s_, join_));
  take(b_->enqueue_host(s_, [&] { order.push_back('c'); }));
  const GraphHandle graph = take(b_->end_capture(s_));
  // The joined stream is free again, and its ordinary work runs.
  std::atomic<bool> ran{false};
  take(b_->enqueue_host(side_, [&] { ran = true; }));
  take(b_->synchronize(side_));
  EXPECT_TRUE(ran);
  take(b_->launch_graph(graph, s_));
  take(b_->synchronize(s_));
  EXPECT_EQ(order, (std::vector<char>{'a', 'b', 'c'}));
}

TEST_F(HostGraph, WorkBehindTheJoinLeavesTheStreamUnjoined) {
  take(b_->begin_capture(s_));
  take(b_->record_event(fork_, s_));
  take(b_->stream_wait_event(side_, fork_));
  take(b_->record_event(join_, side_));
  take(b_->enqueue_host(side_, [] {}));  // not covered by the event
  take(b_->stream_wait_event(s_, join_));
  EXPECT_ERRC(b_->end_capture(s_), Errc::invalid_argument);
  EXPECT_OK(b_->synchronize(s_));
  EXPECT_OK(b_->synchronize(side_));
  EXPECT_EQ(b_->live_graph_count(), 0u);
}

TEST_F(HostGraph, AStreamThatJoinedWithoutWorkMustBeJoinedBackToo) {
  take(b_->begin_capture(s_));
  take(b_->record_event(fork_, s_));
  take(b_->stream_wait_event(side_, fork_));
  EXPECT_ERRC(b_->end_capture(s_), Errc::invalid_argument);
}

TEST_F(HostGraph, AStreamMayBeJoinedByWayOfAThird) {
  const StreamHandle third = take(b_->create_stream());
  const EventHandle relay = take(b_->create_event());
  take(b_->begin_capture(s_));
  take(b_->record_event(fork_, s_));
  take(b_->stream_wait_event(side_, fork_));
  take(b_->enqueue_host(side_, [] {}));
  take(b_->record_event(relay, side_));
  take(b_->stream_wait_event(third, relay));
  take(b_->record_event(join_, third));
  take(b_->stream_wait_event(s_, join_));  // has seen side_ through third
  EXPECT_OK(b_->end_capture(s_));
}

TEST_F(HostGraph, AbortDiscardsAndTheStreamRunsAgain) {
  bool captured_ran = false;
  bool ran = false;
  take(b_->begin_capture(s_));
  take(b_->enqueue_host(s_, [&] { captured_ran = true; }));
  ASSERT_OK(b_->abort_capture_if_active(s_));
  take(b_->enqueue_host(s_, [&] { ran = true; }));
  take(b_->synchronize(s_));
  EXPECT_TRUE(ran);
  EXPECT_FALSE(captured_ran);
}

TEST_F(HostGraph, TheCaptureBeginsBehindWorkInFlight) {
  std::atomic<int> ran{0};
  Gate gate(*b_, s_);
  take(b_->enqueue_host(s_, [&] { ++ran; }));
  take(b_->begin_capture(s_));
  take(b_->enqueue_host(s_, [&] { ran += 10; }));
  const GraphHandle graph = take(b_->end_capture(s_));
  gate.open();
  take(b_->launch_graph(graph, s_));
  take(b_->synchronize(s_));
  EXPECT_EQ(ran, 11);
}

TEST_F(HostGraph, ReplaysOnTwoStreamsDoNotOverlap) {
  std::atomic<int> inside{0};
  std::atomic<bool> overlapped{false};
  take(b_->begin_capture(s_));
  take(b_->enqueue_host(s_, [&] {
    if (++inside != 1) overlapped = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    --inside;
  }));
  const GraphHandle graph = take(b_->end_capture(s_));
  for (int i = 0; i < 4; ++i) {
    take(b_->launch_graph(graph, s_));
    take(b_->launch_graph(graph, side_));
  }
  take(b_->synchronize_device());
  EXPECT_FALSE(overlapped);
}

TEST_F(HostGraph, DestroyDuringAReplayCompletesIt) {
  auto alive = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = alive;
  Gate gate(*b_, s_);
  take(b_->begin_capture(side_));
  take(b_->enqueue_host(side_, [alive] { ++*alive; }));
  const GraphHandle graph = take(b_->end_capture(side_));
  take(b_->launch_graph(graph, s_));
  ASSERT_OK(b_->destroy_graph(graph));
  EXPECT_EQ(*alive, 0);
  gate.open();
  take(b_->synchronize(s_));
  EXPECT_EQ(*alive, 1);
  alive.reset();
  take(b_->synchronize_device());  // lets go of what was waiting for the replay
  EXPECT_TRUE(watch.expired());
}

TEST_F(HostGraph, ALongGraphSpansManyChunks) {
  const KernelHandle count = take(b_->kernel("test", "count_blocks"));
  const DevicePtr counter = take(b_->alloc(4));
  take(b_->memset(counter, 0, 4));
  take(b_->begin_capture(s_));
  for (int i = 0; i < 3000; ++i) {
    const KernelArg args[] = {KernelArg::buffer(counter)};
    take(b_->launch_typed(count, {3}, {}, 0, s_, args));
  }
  const GraphHandle graph = take(b_->end_capture(s_));
  for (int i = 0; i < 3; ++i) take(b_->launch_graph(graph, s_));
  EXPECT_EQ(read_words(*b_, counter, 1, s_)[0], 27000u);
}

}  // namespace
}  // namespace metrale::test
