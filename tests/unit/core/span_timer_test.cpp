// SPDX-License-Identifier: Apache-2.0
#include "metrale/span_timer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "metrale/graph.h"
#include "metrale/stream.h"
#include "unit/core/two_backends.h"

namespace metrale {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

class SpanTimerTest : public test::OnBothBackends {
 protected:
  SpanTimer& timer_ = backend_->timing();
  Stream stream_ = std::move(*Stream::create(*backend_));
};
METRALE_ON_BOTH_BACKENDS(SpanTimerTest);

TEST_P(SpanTimerTest, OffUntilItIsArmed) {
  EXPECT_FALSE(timer_.armed());
  EXPECT_FALSE(timer_.begin("step", stream_.handle()));
  timer_.end({});
  EXPECT_THAT(timer_.harvest(), IsEmpty());
  EXPECT_EQ(timer_.counts().num_begun, 0u);
  ASSERT_OK(timer_.release());
}

TEST_P(SpanTimerTest, SpansComeBackInTheOrderTheyWereBegun) {
  ASSERT_OK(timer_.arm());
  const SpanTimer::Token outer = timer_.begin("outer", stream_.handle());
  ASSERT_TRUE(outer);
  {
    const TimedScope inner(timer_, "inner", stream_.handle());
    ASSERT_OK(backend_->enqueue_host(stream_.handle(), [] { std::this_thread::sleep_for(5ms); }));
  }
  timer_.end(outer);
  ASSERT_OK(stream_.synchronize());
  const std::vector<SpanTimer::Span> spans = timer_.harvest();
  ASSERT_THAT(spans, SizeIs(2));
  EXPECT_EQ(spans[0].name, "outer");
  EXPECT_EQ(spans[1].name, "inner");
  EXPECT_EQ(spans[0].stream, stream_.handle());
  EXPECT_LT(spans[0].index, spans[1].index);
  EXPECT_GE(spans[0].elapsed_ns, spans[1].elapsed_ns);
  EXPECT_GE(spans[1].elapsed_ns, 0);
  if (GetParam() == std::string_view("host")) {
    EXPECT_GE(spans[1].elapsed_ns, 4'000'000);
  }
  EXPECT_THAT(timer_.harvest(), IsEmpty());
  EXPECT_EQ(timer_.counts().num_harvested, 2u);
}

TEST_P(SpanTimerTest, HarvestNeverWaitsAndKeepsWhatIsNotDone) {
  ASSERT_OK(timer_.arm());
  std::atomic<bool> go{false};
  {
    const TimedScope scope(timer_, "busy", stream_.handle());
    ASSERT_OK(backend_->enqueue_host(stream_.handle(), [&] {
      while (!go.load()) std::this_thread::yield();
    }));
  }
  EXPECT_THAT(timer_.harvest(), IsEmpty());
  go = true;
  ASSERT_OK(stream_.synchronize());
  EXPECT_THAT(timer_.harvest(), SizeIs(1));
}

TEST_P(SpanTimerTest, FullRingDropsAndCounts) {
  ASSERT_OK(timer_.arm());
  for (std::size_t i = 0; i < SpanTimer::kCapacity; ++i) {
    const SpanTimer::Token token = timer_.begin("step", stream_.handle());
    ASSERT_TRUE(token) << i;
    timer_.end(token);
  }
  EXPECT_FALSE(timer_.begin("one too many", stream_.handle()));
  EXPECT_EQ(timer_.counts().num_dropped, 1u);
  ASSERT_OK(stream_.synchronize());
  EXPECT_THAT(timer_.harvest(), SizeIs(SpanTimer::kCapacity));
  const SpanTimer::Token token = timer_.begin("again", stream_.handle());
  EXPECT_TRUE(token);
  timer_.end(token);
  EXPECT_EQ(timer_.counts().num_begun, SpanTimer::kCapacity + 1);
}

TEST_P(SpanTimerTest, CapturingStreamIsLeftAlone) {
  ASSERT_OK(timer_.arm());
  const SpanTimer::Token open = timer_.begin("ends inside", stream_.handle());
  CaptureScope capture = std::move(*CaptureScope::begin(*backend_, stream_.handle()));
  EXPECT_FALSE(timer_.begin("inside", stream_.handle()));
  timer_.end(open);
  const Graph graph = std::move(*capture.end());
  ASSERT_OK(graph.launch(stream_.handle()));
  ASSERT_OK(stream_.synchronize());
  EXPECT_THAT(timer_.harvest(), IsEmpty());
  EXPECT_EQ(timer_.counts().num_skipped, 2u);
  EXPECT_EQ(timer_.counts().num_failed, 0u);
}

TEST_P(SpanTimerTest, EndingTwiceCountsOnce) {
  ASSERT_OK(timer_.arm());
  const SpanTimer::Token token = timer_.begin("step", stream_.handle());
  timer_.end(token);
  timer_.end(token);
  ASSERT_OK(stream_.synchronize());
  EXPECT_THAT(timer_.harvest(), SizeIs(1));
  timer_.end(token);
  EXPECT_THAT(timer_.harvest(), IsEmpty());
}

TEST_P(SpanTimerTest, OldTokenDoesNotEndTheNextSpanOfItsSlot) {
  ASSERT_OK(timer_.arm());
  const SpanTimer::Token old = timer_.begin("old", stream_.handle());
  timer_.end(old);
  for (std::size_t i = 1; i < SpanTimer::kCapacity; ++i) timer_.end(timer_.begin("fill", stream_.handle()));
  ASSERT_OK(stream_.synchronize());
  ASSERT_THAT(timer_.harvest(), SizeIs(SpanTimer::kCapacity));
  const SpanTimer::Token fresh = timer_.begin("same slot", stream_.handle());
  ASSERT_EQ((fresh.value - old.value) % SpanTimer::kCapacity, 0u);
  timer_.end(old);
  ASSERT_OK(stream_.synchronize());
  EXPECT_THAT(timer_.harvest(), IsEmpty());
  timer_.end(fresh);
  ASSERT_OK(stream_.synchronize());
  EXPECT_THAT(timer_.harvest(), SizeIs(1));
}

TEST_P(SpanTimerTest, DisarmedTimerStillHarvestsAndArmsAgain) {
  ASSERT_OK(timer_.arm());
  const SpanTimer::Token token = timer_.begin("step", stream_.handle());
  timer_.disarm();
  EXPECT_FALSE(timer_.begin("late", stream_.handle()));
  timer_.end(token);
  ASSERT_OK(stream_.synchronize());
  EXPECT_THAT(timer_.harvest(), SizeIs(1));
  ASSERT_OK(timer_.release());
  ASSERT_OK(timer_.release());
  ASSERT_OK(timer_.arm());
  EXPECT_TRUE(timer_.begin("step", stream_.handle()));
}

TEST_P(SpanTimerTest, ThreadsTimeTheirStreamsWhileOneHarvests) {
  ASSERT_OK(timer_.arm());
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> num_seen{0};
  std::thread harvester([&] {
    while (!stop.load()) {
      for (const SpanTimer::Span& span : timer_.harvest()) {
        EXPECT_GE(span.elapsed_ns, 0);
        ++num_seen;
      }
    }
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      const Result<Stream> stream = Stream::create(*backend_);
      for (int i = 0; i < 500; ++i) timer_.end(timer_.begin("step", stream->handle()));
      EXPECT_TRUE(stream->synchronize().has_value());
    });
  }
  for (std::thread& t : threads) t.join();
  stop = true;
  harvester.join();
  num_seen += timer_.harvest().size();
  const SpanTimer::Counts counts = timer_.counts();
  EXPECT_EQ(counts.num_begun, num_seen.load());
  EXPECT_EQ(counts.num_begun + counts.num_dropped, 1500u);
  EXPECT_EQ(counts.num_failed, 0u);
}

TEST(SpanTimerFailureTest, WithoutTimedEventsArmingIsUnsupportedAndTheRestDoesNothing) {
  mock::Options options;
  options.without = {Capability::timed_events};
  const auto backend = test::make_mock(options);
  const Result<> armed = backend->timing().arm();
  EXPECT_ERRC(armed, Errc::unsupported);
  EXPECT_THAT(armed.error().message(), HasSubstr("mock"));
  const std::uint64_t before = mock::control(*backend).counts().hook_calls;
  backend->timing().end(backend->timing().begin("step", backend->default_stream()));
  EXPECT_THAT(backend->timing().harvest(), IsEmpty());
  EXPECT_EQ(mock::control(*backend).counts().hook_calls, before);
}

TEST(SpanTimerFailureTest, ArmThatFailsKeepsNoEvent) {
  for (const std::uint64_t n : {1u, 2u, 3u, 4000u, 8192u}) {
    const auto backend = test::make_mock();
    mock::MockControl& control = mock::control(*backend);
    control.reset();
    control.fail_nth(Op::create_event, n);
    EXPECT_ERRC(backend->timing().arm(), Errc::internal);
    EXPECT_FALSE(backend->timing().armed());
    EXPECT_EQ(control.num_calls(Op::destroy_event), n - 1);
    ASSERT_OK(backend->timing().arm());
    ASSERT_OK(backend->timing().release());
    EXPECT_EQ(control.num_calls(Op::destroy_event), n - 1 + 2 * SpanTimer::kCapacity);
  }
}

TEST(SpanTimerFailureTest, RefusedEventsAreCountedAndTheSlotIsFreeAgain) {
  const auto backend = test::make_mock();
  mock::MockControl& control = mock::control(*backend);
  SpanTimer& timer = backend->timing();
  const StreamHandle stream = backend->default_stream();
  ASSERT_OK(timer.arm());
  control.fail_nth(Op::record_event, 1);
  EXPECT_FALSE(timer.begin("start refused", stream));
  control.fail_nth(Op::record_event, 2);
  timer.end(timer.begin("end refused", stream));
  timer.end(timer.begin("query refused", stream));
  control.fail_nth(Op::event_query, 1);
  ASSERT_OK(backend->synchronize(stream));
  EXPECT_THAT(timer.harvest(), IsEmpty());
  EXPECT_EQ(timer.counts().num_failed, 3u);
  timer.end(timer.begin("fine", stream));
  ASSERT_OK(backend->synchronize(stream));
  EXPECT_THAT(timer.harvest(), SizeIs(1));
}

TEST(SpanTimerFailureTest, SpanOfAStreamThatHasGoneIsLeftOut) {
  const auto backend = test::make_mock();
  ASSERT_OK(backend->timing().arm());
  Stream stream = std::move(*Stream::create(*backend));
  const StreamHandle handle = stream.handle();
  const SpanTimer::Token open = backend->timing().begin("step", handle);
  ASSERT_OK(stream.release());
  backend->timing().end(open);
  EXPECT_FALSE(backend->timing().begin("step", handle));
  EXPECT_THAT(backend->timing().harvest(), IsEmpty());
}

}  // namespace
}  // namespace metrale
