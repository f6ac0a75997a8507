// SPDX-License-Identifier: Apache-2.0
//
// Events: order between streams, queries, times.
#include <chrono>

#include "conformance/case.h"

namespace metrale::conformance {
namespace {

class Events : public CaseNeeding<streams, events> {
 protected:
  EventHandle timed(Site site = Site::current()) { return must(gpu().create_timed_event(), site); }
};

TEST_F(Events, WaitHoldsTheStreamNotTheHost) {
  need({memory, copies, host_callbacks});
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const EventHandle e = event();
  const DevicePtr ptr = block(4096);
  fill(ptr, 0x01, 4096);
  {
    Gate gate(gpu(), a);
    must(gpu().record_event(e, a));
    must(gpu().stream_wait_event(b, e));  // holding the host would last until the gate gives up, which fails the case
    must(gpu().memset_async(ptr, 0x02, 4096, b));
    EXPECT_FALSE(must(gpu().query(b)));
    EXPECT_TRUE(is_held(b));
    EXPECT_TRUE(holds(ptr, 4096, 0x01)) << "the waiting stream ran ahead";
  }
  settle(b);
  EXPECT_TRUE(holds(ptr, 4096, 0x02));
}

TEST_F(Events, WaitOrdersWorkAcrossStreams) {
  need({memory, copies});
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const DevicePtr src = block(1 << 20);
  const DevicePtr dst = block(1 << 20);
  const EventHandle filled = event();
  const EventHandle copied = event();
  for (int round = 0; round < 30; ++round) {
    const auto value = static_cast<std::uint8_t>(round + 1);
    must(gpu().memset_async(src, value, 1 << 20, a));
    must(gpu().record_event(filled, a));
    must(gpu().stream_wait_event(b, filled));
    must(gpu().copy_d2d_async(dst, src, 1 << 20, b));
    must(gpu().record_event(copied, b));
    must(gpu().stream_wait_event(a, copied));
    std::vector<std::byte> last(16);
    must(gpu().copy_d2h_on_stream(last, dst.offset((1 << 20) - 16), b));
    ASSERT_EQ(last, std::vector<std::byte>(16, std::byte{value})) << "round " << round;
  }
}

TEST_F(Events, WaitOnANeverRecordedEventDoesNotWait) {
  const StreamHandle s = stream();
  const EventHandle e = event();
  must(gpu().stream_wait_event(s, e));
  settle(s);
}

TEST_F(Events, WaitTakesTheRecordThatWasLastAtTheCall) {
  need({host_callbacks});
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const EventHandle e = event();
  must(gpu().record_event(e, a));
  settle(a);
  must(gpu().stream_wait_event(b, e));
  Gate gate(gpu(), a);
  must(gpu().record_event(e, a));  // a later record does not hold who waited before
  settle(b);
}

TEST_F(Events, RecordingAgainMovesTheMark) {
  need({memory, copies, host_callbacks});
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const StreamHandle c = stream();
  const EventHandle e = event();
  must(gpu().record_event(e, a));
  settle(a);
  EXPECT_TRUE(must(gpu().event_query(e)));
  {
    Gate gate(gpu(), b);
    must(gpu().record_event(e, b));
    EXPECT_FALSE(must(gpu().event_query(e)));
    must(gpu().stream_wait_event(c, e));
    EXPECT_FALSE(must(gpu().query(c)));
  }
  settle(c);
  EXPECT_TRUE(must(gpu().event_query(e)));
}

TEST_F(Events, SeveralStreamsMayWaitForOne) {
  need({memory, copies, host_callbacks});
  const StreamHandle a = stream();
  const EventHandle e = event();
  const DevicePtr ptr = block(6 * 256);
  fill(ptr, 0x01, 6 * 256);
  std::vector<StreamHandle> waiting;
  {
    Gate gate(gpu(), a);
    must(gpu().record_event(e, a));
    for (std::uint64_t i = 0; i < 6; ++i) {
      waiting.push_back(stream());
      must(gpu().stream_wait_event(waiting.back(), e));
      must(gpu().memset_async(ptr.offset(i * 256), 0x02, 256, waiting.back()));
    }
    EXPECT_TRUE(holds(ptr, 6 * 256, 0x01));
  }
  for (const StreamHandle s : waiting) settle(s);
  EXPECT_TRUE(holds(ptr, 6 * 256, 0x02));
}

TEST_F(Events, OneStreamMayWaitForSeveral) {
  need({memory, copies, host_callbacks});
  const StreamHandle last = stream();
  const StreamHandle held = stream();
  const DevicePtr src = block(6 * 256);
  const DevicePtr dst = block(6 * 256);
  fill(src, 0x01, 6 * 256);
  {
    Gate gate(gpu(), held);
    for (std::uint64_t i = 0; i < 6; ++i) {
      const StreamHandle s = i == 3 ? held : stream();
      const EventHandle e = event();
      must(gpu().memset_async(src.offset(i * 256), 0x02, 256, s));
      must(gpu().record_event(e, s));
      must(gpu().stream_wait_event(last, e));
    }
    must(gpu().copy_d2d_async(dst, src, 6 * 256, last));
    EXPECT_TRUE(is_held(last));
  }
  settle(last);
  EXPECT_TRUE(holds(dst, 6 * 256, 0x02));
}

TEST_F(Events, ChainsAcrossManyStreamsKeepOrder) {
  need({memory, copies, kernels, computes});
  std::vector<StreamHandle> ring;
  for (int i = 0; i < 6; ++i) ring.push_back(stream());
  constexpr std::uint32_t kCount = 120;
  const DevicePtr log = make_log(kCount);
  std::vector<std::uint32_t> expected;
  const EventHandle e = event();
  for (std::uint32_t i = 0; i < kCount; ++i) {
    const StreamHandle s = ring[i % ring.size()];
    must(gpu().stream_wait_event(s, e));
    append(log, i, s);
    must(gpu().record_event(e, s));
    expected.push_back(i);
  }
  must(gpu().event_synchronize(e));
  EXPECT_EQ(read_log(log, kCount), expected);
}

// ---- on the host ----

TEST_F(Events, QueryNeverBlocksAndTellsWhetherTheMarkedWorkIsDone) {
  need({host_callbacks});
  const StreamHandle s = stream();
  const EventHandle e = event();
  EXPECT_TRUE(must(gpu().event_query(e))) << "never recorded";
  {
    Gate gate(gpu(), s);
    must(gpu().record_event(e, s));
    EXPECT_FALSE(must(gpu().event_query(e)));
  }
  settle(s);
  EXPECT_TRUE(must(gpu().event_query(e)));
}

TEST_F(Events, CompleteByThemselves) {
  need({memory});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(1 << 20);
  for (int i = 0; i < 50; ++i) {
    const EventHandle e = event();
    must(gpu().memset_async(ptr, 1, 1 << 20, s));
    must(gpu().record_event(e, s));
    ASSERT_TRUE(eventually([&] { return must(gpu().event_query(e)); })) << "an event was lost";
    must(gpu().destroy_event(e));
  }
}

TEST_F(Events, SynchronizeWaitsForTheMarkedWork) {
  need({memory, copies, host_callbacks});
  const StreamHandle s = stream();
  const EventHandle e = event();
  const DevicePtr ptr = block(4096);
  fill(ptr, 0x01, 4096);
  Gate gate(gpu(), s);
  must(gpu().memset_async(ptr, 0x02, 4096, s));
  must(gpu().record_event(e, s));
  EXPECT_FALSE(returns_before(gate, [&] { must(gpu().event_synchronize(e)); }));
  EXPECT_TRUE(holds(ptr, 4096, 0x02));
}

TEST_F(Events, SynchronizeWaitsOnlyForWhatCameBeforeTheRecord) {
  need({memory, copies, host_callbacks});
  const StreamHandle s = stream();
  const EventHandle e = event();
  const DevicePtr ptr = block(4096);
  must(gpu().memset_async(ptr, 0x02, 4096, s));
  must(gpu().record_event(e, s));
  Gate gate(gpu(), s);
  EXPECT_TRUE(ok(gpu().event_synchronize(e)));  // waiting for the gate would last until it gives up, which fails the case
  EXPECT_TRUE(must(gpu().event_query(e)));
  EXPECT_TRUE(holds(ptr, 4096, 0x02));
}

TEST_F(Events, SynchronizeOfANeverRecordedEventReturns) { EXPECT_TRUE(ok(gpu().event_synchronize(event()))); }

TEST_F(Events, MayBeRecordedOnTheDefaultStream) {
  const EventHandle e = event();
  must(gpu().record_event(e, gpu().default_stream()));
  EXPECT_TRUE(ok(gpu().event_synchronize(e)));
}

// ---- destroying ----

TEST_F(Events, DestroyingOneLeavesThoseWhoWaitWaiting) {
  need({memory, copies, host_callbacks});
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const DevicePtr ptr = block(4096);
  fill(ptr, 0x01, 4096);
  {
    Gate gate(gpu(), a);
    const EventHandle e = event();
    must(gpu().record_event(e, a));
    must(gpu().stream_wait_event(b, e));
    must(gpu().destroy_event(e));
    must(gpu().record_event(event(), gpu().default_stream()));  // may get what the destroyed one had
    must(gpu().memset_async(ptr, 0x02, 4096, b));
    EXPECT_TRUE(is_held(b));
    EXPECT_TRUE(holds(ptr, 4096, 0x01)) << "destroying the event let its waiter run";
  }
  settle(b);
  EXPECT_TRUE(holds(ptr, 4096, 0x02));
}

TEST_F(Events, DestroyedAndNullHandlesAreRefused) {
  const StreamHandle s = stream();
  const EventHandle e = event();
  must(gpu().destroy_event(e));
  for (const EventHandle bad : {e, EventHandle{}}) {
    EXPECT_TRUE(refused(gpu().record_event(bad, s), Errc::invalid_argument));
    EXPECT_TRUE(refused(gpu().stream_wait_event(s, bad), Errc::invalid_argument));
    EXPECT_TRUE(refused(gpu().event_query(bad), Errc::invalid_argument));
    EXPECT_TRUE(refused(gpu().event_synchronize(bad), Errc::invalid_argument));
  }
  EXPECT_TRUE(refused(gpu().destroy_event(e), Errc::invalid_argument));
  EXPECT_TRUE(ok(gpu().destroy_event({}))) << "null is a no-op";
  EXPECT_NE(event(), e) << "a handle was given again";
}

// ---- times ----

TEST_F(Events, ElapsedCoversTheWorkBetween) {
  need({timed_events, host_callbacks});
  const StreamHandle s = stream();
  const EventHandle start = timed();
  const EventHandle end = timed();
  const auto before = std::chrono::steady_clock::now();
  must(gpu().record_event(start, s));
  must(gpu().enqueue_host(s, [] { std::this_thread::sleep_for(milliseconds(5)); }));
  must(gpu().record_event(end, s));
  settle(s);
  const auto wall = std::chrono::steady_clock::now() - before;
  const std::int64_t elapsed = must(gpu().event_elapsed_ns(start, end));
  EXPECT_GE(elapsed, 5'000'000);
  EXPECT_LE(elapsed, std::chrono::duration_cast<std::chrono::nanoseconds>(wall).count() + 1'000'000);
}

TEST_F(Events, ElapsedIsTakenWhenTheStreamComesToTheEvent) {
  need({timed_events, host_callbacks});
  const StreamHandle s = stream();
  const EventHandle start = timed();
  const EventHandle held = timed();
  must(gpu().record_event(start, s));
  settle(s);
  Gate gate(gpu(), s);
  must(gpu().record_event(held, s));
  std::this_thread::sleep_for(milliseconds(5));
  gate.open();
  settle(s);
  EXPECT_GE(must(gpu().event_elapsed_ns(start, held)), 5'000'000) << "the time of the call was taken";
}

TEST_F(Events, ElapsedRefusesWhatHasNoTime) {
  need({timed_events});
  const StreamHandle s = stream();
  const EventHandle plain = event();
  const EventHandle a = timed();
  const EventHandle b = timed();
  must(gpu().record_event(plain, s));
  must(gpu().record_event(a, s));
  settle(s);
  EXPECT_TRUE(refused(gpu().event_elapsed_ns(a, plain), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().event_elapsed_ns(plain, a), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().event_elapsed_ns(a, b), Errc::invalid_argument)) << "never recorded";
  EXPECT_TRUE(refused(gpu().event_elapsed_ns(b, a), Errc::invalid_argument)) << "never recorded";
  EXPECT_TRUE(refused(gpu().event_elapsed_ns({}, a), Errc::invalid_argument));
}

TEST_F(Events, ElapsedIsBusyUntilBothAreDone) {
  need({timed_events, host_callbacks});
  const StreamHandle s = stream();
  const EventHandle start = timed();
  const EventHandle end = timed();
  must(gpu().record_event(start, s));
  {
    Gate gate(gpu(), s);
    must(gpu().record_event(end, s));
    EXPECT_TRUE(refused(gpu().event_elapsed_ns(start, end), Errc::busy));
  }
  settle(s);
  EXPECT_TRUE(ok(gpu().event_elapsed_ns(start, end)));
}

TEST_F(Events, TimedOnesOrderStreamsToo) {
  need({timed_events, memory, copies, host_callbacks});
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const EventHandle e = timed();
  {
    Gate gate(gpu(), a);
    must(gpu().record_event(e, a));
    must(gpu().stream_wait_event(b, e));
    EXPECT_FALSE(must(gpu().event_query(e)));
    EXPECT_FALSE(must(gpu().query(b)));
  }
  settle(b);
  EXPECT_TRUE(must(gpu().event_query(e)));
}

}  // namespace
}  // namespace metrale::conformance
