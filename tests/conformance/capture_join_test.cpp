// SPDX-License-Identifier: Apache-2.0
//
// Captures of several streams: event waits join them, and all must be joined back.
#include "conformance/capture_case.h"

namespace metrale::conformance {
namespace {

class CaptureJoin : public CaptureCase {};

TEST_F(CaptureJoin, EventWaitsJoinFurtherStreams) {
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const EventHandle fork = event();
  const EventHandle join = event();
  const DevicePtr ptr = block(3 * 64);
  fill(ptr, 0, 3 * 64);
  must(gpu().begin_capture(a));
  must(gpu().memset_async(ptr, 0x01, 64, a));
  must(gpu().record_event(fork, a));
  must(gpu().stream_wait_event(b, fork));
  EXPECT_TRUE(gpu().stream_is_capturing(b));
  must(gpu().copy_d2d_async(ptr.offset(64), ptr, 64, b));
  must(gpu().memset_async(ptr.offset(64), 0x02, 32, b));
  must(gpu().record_event(join, b));
  must(gpu().stream_wait_event(a, join));
  must(gpu().copy_d2d_async(ptr.offset(128), ptr.offset(64), 64, a));
  const GraphHandle graph = must(gpu().end_capture(a));
  EXPECT_FALSE(gpu().stream_is_capturing(b));
  EXPECT_TRUE(holds(ptr, 3 * 64, 0)) << "recorded work ran";
  for (int round = 0; round < 3; ++round) {
    fill(ptr, 0, 3 * 64);
    replay(graph);
    EXPECT_TRUE(holds(ptr, 64, 0x01));
    EXPECT_TRUE(holds(ptr.offset(64), 32, 0x02));
    EXPECT_TRUE(holds(ptr.offset(96), 32, 0x01));
    EXPECT_TRUE(holds(ptr.offset(128), 32, 0x02));
    EXPECT_TRUE(holds(ptr.offset(160), 32, 0x01));
  }
  EXPECT_TRUE(runs_work(a));
  EXPECT_TRUE(runs_work(b));
}

TEST_F(CaptureJoin, EndWithUnjoinedStreamsIsRefusedAndDiscards) {
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const EventHandle fork = event();
  const DevicePtr ptr = block(64);
  fill(ptr, 0, 64);
  must(gpu().begin_capture(a));
  must(gpu().record_event(fork, a));
  must(gpu().stream_wait_event(b, fork));
  must(gpu().memset_async(ptr, 0x02, 64, b));
  EXPECT_TRUE(refused(gpu().end_capture(a), Errc::invalid_argument));
  EXPECT_EQ(gpu().live_graph_count(), 0u);
  EXPECT_TRUE(runs_work(a));
  EXPECT_TRUE(runs_work(b));
  EXPECT_TRUE(holds(ptr, 64, 0)) << "discarded work ran";
  EXPECT_TRUE(ok(gpu().free(ptr))) << "a discarded capture names memory";
}

TEST_F(CaptureJoin, AnUnjoinedStreamWithoutWorkIsRefusedToo) {
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const EventHandle fork = event();
  must(gpu().begin_capture(a));
  must(gpu().record_event(fork, a));
  must(gpu().stream_wait_event(b, fork));
  EXPECT_TRUE(refused(gpu().end_capture(a), Errc::invalid_argument));
  EXPECT_TRUE(runs_work(b));
}

TEST_F(CaptureJoin, JoiningBackTooEarlyIsRefused) {
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const EventHandle fork = event();
  const EventHandle join = event();
  const DevicePtr ptr = block(64);
  must(gpu().begin_capture(a));
  must(gpu().record_event(fork, a));
  must(gpu().stream_wait_event(b, fork));
  must(gpu().record_event(join, b));
  must(gpu().stream_wait_event(a, join));
  must(gpu().memset_async(ptr, 0x02, 64, b));  // nobody waits for this
  EXPECT_TRUE(refused(gpu().end_capture(a), Errc::invalid_argument));
}

TEST_F(CaptureJoin, JoinedStreamCannotEndIt) {
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const EventHandle fork = event();
  const EventHandle join = event();
  must(gpu().begin_capture(a));
  must(gpu().record_event(fork, a));
  must(gpu().stream_wait_event(b, fork));
  EXPECT_TRUE(refused(gpu().end_capture(b), Errc::invalid_argument));
  must(gpu().record_event(join, b));
  must(gpu().stream_wait_event(a, join));
  EXPECT_TRUE(ok(gpu().end_capture(a)));
}

TEST_F(CaptureJoin, WaitingInsideForAnEventRecordedOutsideIsRefused) {
  const StreamHandle s = stream();
  const StreamHandle outside = stream();
  const EventHandle e = event();
  const DevicePtr ptr = block(64);
  must(gpu().record_event(e, outside));
  must(gpu().begin_capture(s));
  EXPECT_TRUE(refused(gpu().stream_wait_event(s, e), Errc::capture_unsafe));
  on_thread([&] { EXPECT_TRUE(refused(gpu().stream_wait_event(s, e), Errc::capture_unsafe)); });
  must(gpu().memset_async(ptr, 0x01, 64, s));
  const GraphHandle graph = must(gpu().end_capture(s));
  replay(graph);
  EXPECT_TRUE(holds(ptr, 64, 0x01)) << "the capture did not survive";
}

TEST_F(CaptureJoin, WaitingInsideForANeverRecordedEventDoesNothing) {
  const StreamHandle s = stream();
  const EventHandle e = event();
  must(gpu().begin_capture(s));
  EXPECT_TRUE(ok(gpu().stream_wait_event(s, e)));
  EXPECT_TRUE(ok(gpu().end_capture(s)));
}

TEST_F(CaptureJoin, DefaultStreamCannotJoin) {
  const StreamHandle s = stream();
  const EventHandle e = event();
  must(gpu().begin_capture(s));
  must(gpu().record_event(e, s));
  EXPECT_FALSE(gpu().stream_wait_event(gpu().default_stream(), e).has_value());
  EXPECT_FALSE(gpu().stream_is_capturing(gpu().default_stream()));
  EXPECT_TRUE(ok(gpu().end_capture(s)));
}

TEST_F(CaptureJoin, EventsOfAnEndedCaptureMarkNothing) {
  const StreamHandle s = stream();
  const EventHandle e = event();
  must(gpu().begin_capture(s));
  must(gpu().record_event(e, s));
  must(gpu().end_capture(s));
  EXPECT_TRUE(must(gpu().event_query(e)));
  EXPECT_TRUE(ok(gpu().event_synchronize(e)));
  EXPECT_TRUE(ok(gpu().stream_wait_event(s, e)));
  EXPECT_TRUE(runs_work(s));
  EXPECT_TRUE(ok(gpu().destroy_event(e)));
}

}  // namespace
}  // namespace metrale::conformance
