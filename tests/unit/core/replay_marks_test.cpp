// SPDX-License-Identifier: Apache-2.0
//
// The marks that the face puts behind replays and pooled blocks, and what becomes of them when a driver refuses.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "scripted_backend.h"

namespace metrale {
namespace {

using test::Scripted;

Result<> refuse() { return Error(Errc::io, "refused"); }

class ReplayMarks : public testing::Test {
 protected:
  test::LogLines log_;
  std::unique_ptr<Scripted> b_ = Scripted::make_one();

  GraphHandle capture_fill(DevicePtr ptr) {
    const StreamHandle s = b_->create_stream().value();
    EXPECT_TRUE(b_->begin_capture(s).has_value());
    EXPECT_TRUE(b_->memset_async(ptr, 1, 64, s).has_value());
    return b_->end_capture(s).value();
  }
  /// Puts a function on `s` that ends a little later, and says when it has.
  std::shared_ptr<std::atomic<bool>> hold(StreamHandle s) {
    auto ended = std::make_shared<std::atomic<bool>>(false);
    EXPECT_TRUE(b_->enqueue_host(s, [ended] {
                    std::this_thread::sleep_for(std::chrono::milliseconds(30));
                    *ended = true;
                  }).has_value());
    return ended;
  }
};

TEST_F(ReplayMarks, PassingStreamsLeaveNoEvents) {
  const DevicePtr ptr = b_->alloc(64).value();
  const GraphHandle graph = capture_fill(ptr);
  const int before = b_->num_events;
  for (int i = 0; i < 20; ++i) {
    const StreamHandle s = b_->create_stream().value();
    ASSERT_OK(b_->launch_graph(graph, s));
    ASSERT_OK(b_->synchronize(s));
    ASSERT_OK(b_->destroy_stream(s));
  }
  EXPECT_LE(b_->num_events - before, 1) << "marks of replays that are done stay until the graph goes";
  ASSERT_OK(b_->destroy_graph(graph));
  EXPECT_EQ(b_->num_events, before);
  ASSERT_OK(b_->free(ptr));
}

TEST_F(ReplayMarks, ARefusedRecordLeaksNeitherEventNorSlab) {
  const DevicePtr ptr = b_->alloc(64).value();
  const GraphHandle graph = capture_fill(ptr);
  const StreamHandle first = b_->create_stream().value();
  const StreamHandle second = b_->create_stream().value();
  const int events = b_->num_events;
  b_->on_record_event = refuse;

  auto ended = hold(first);
  ASSERT_OK(b_->launch_graph(graph, first));
  ASSERT_OK(b_->destroy_stream(first));
  EXPECT_TRUE(*ended) << "a replay without a mark has to be waited for: its memory is named until then";
  EXPECT_EQ(b_->num_events, events);

  ended = hold(second);
  ASSERT_OK(b_->launch_graph(graph, second));
  ASSERT_OK(b_->destroy_graph(graph));
  EXPECT_TRUE(*ended);
  EXPECT_EQ(b_->num_events, events);

  constexpr std::uint64_t kBytes = 5u << 20;
  ended = hold(second);
  ASSERT_OK(b_->free_async(b_->alloc_async(kBytes, second).value(), second));
  ASSERT_OK(b_->destroy_stream(second));
  EXPECT_TRUE(*ended) << "the blocks of the stream are free when its work is done";
  EXPECT_EQ(b_->num_events, events);
  EXPECT_GE(b_->trim().value(), kBytes);
  EXPECT_EQ(b_->pool_reserved_bytes(), 0u);
  ASSERT_OK(b_->free(ptr));
}

TEST_F(ReplayMarks, ShutdownFreesSlabsWhoseBlocksNobodyCouldFollow) {
  const StreamHandle s = b_->create_stream().value();
  ASSERT_OK(b_->free_async(b_->alloc_async(5u << 20, s).value(), s));
  b_->on_record_event = refuse;
  b_->on_synchronize = refuse;
  ASSERT_OK(b_->destroy_stream(s));
  b_->on_record_event = nullptr;
  b_->on_synchronize = nullptr;
  ASSERT_OK(b_->shutdown());
  EXPECT_EQ(b_->num_free, b_->num_alloc);
  EXPECT_EQ(b_->pool_reserved_bytes(), 0u);
}

TEST_F(ReplayMarks, SweepGoesOnAfterAGraphThatWouldNotGo) {
  const DevicePtr ptr = b_->alloc(64).value();
  capture_fill(ptr);
  capture_fill(ptr);
  int refusals = 1;
  b_->on_destroy_graph = [&]() -> Result<> { return refusals-- > 0 ? refuse() : Result<>(); };
  EXPECT_ERRC(b_->sweep_unreleased(), Errc::io);
  EXPECT_EQ(b_->live_graph_count(), 0u);
  EXPECT_EQ(b_->live_alloc_count(), 0u);
  EXPECT_EQ(b_->sweep_unreleased().value(), 0u);
}

}  // namespace
}  // namespace metrale
