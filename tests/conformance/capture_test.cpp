// SPDX-License-Identifier: Apache-2.0
//
// Capture: what is recorded, who may end it, joining, aborting. Which calls are refused meanwhile is in capture_matrix_test.cpp.
#include <algorithm>
#include <array>
#include <atomic>

#include "conformance/case.h"
#include "metrale/graph.h"

namespace metrale::conformance {
namespace {

class Capture : public CaseNeeding<memory, copies, streams, events, graphs> {
 protected:
  /// Replays a graph once and waits for it.
  void replay(GraphHandle graph, Site site = Site::current()) {
    const StreamHandle s = stream(site);
    must(gpu().launch_graph(graph, s), site);
    settle(s, site);
    must(gpu().destroy_stream(s), site);
  }
  /// Whether a stream takes and runs work like any other.
  ::testing::AssertionResult runs_work(StreamHandle s, Site site = Site::current()) {
    if (gpu().stream_is_capturing(s)) return ::testing::AssertionFailure() << "still capturing";
    const DevicePtr ptr = block(64, site);
    fill(ptr, 0, 64, site);
    must(gpu().memset_async(ptr, 0x7E, 64, s), site);
    settle(s, site);
    return holds(ptr, 64, 0x7E, site);
  }
};

TEST_F(Capture, RecordsWorkInsteadOfRunningIt) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(256);
  fill(ptr, 0x01, 256);
  must(gpu().begin_capture(s));
  must(gpu().memset_async(ptr, 0x02, 256, s));
  const GraphHandle graph = must(gpu().end_capture(s));
  settle(s);
  EXPECT_TRUE(holds(ptr, 256, 0x01)) << "recorded work ran";
  replay(graph);
  EXPECT_TRUE(holds(ptr, 256, 0x02));
}

TEST_F(Capture, ReplaysEveryKindOfWorkInOrder) {
  need({pinned_memory, host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr a = block(64);
  const DevicePtr b = block(64);
  const auto out = must(gpu().alloc_host_pinned(64));
  const auto in = must(gpu().alloc_host_pinned(64));
  std::fill(in.begin(), in.end(), std::byte{0x05});
  std::atomic<int> calls{0};
  std::byte seen_by_host{};
  must(gpu().begin_capture(s));
  must(gpu().memset_async(a, 0x01, 64, s));
  must(gpu().copy_d2d_async(b, a, 64, s));
  must(gpu().memset_async(a, 0x02, 64, s));
  must(gpu().copy_d2d_2d_async({b, a, 16, 16, 4, 2}, s));
  must(gpu().copy_h2d_async(b.offset(40), std::vector<std::byte>(4, std::byte{0x03}), s));
  must(gpu().copy_h2d_async_retained(b.offset(44), in.first(4), s));
  const std::array<CopyDesc, 1> batch{CopyDesc{.dst = b.offset(60), .src = a, .bytes = 4}};
  must(gpu().copy_batch_async(batch, s));
  must(gpu().copy_d2h_async(out, b, s));
  must(gpu().enqueue_host(s, [&] {
    ++calls;
    seen_by_host = out[0];
  }));
  must(gpu().memset_async(b, 0x09, 64, s));
  const GraphHandle graph = must(gpu().end_capture(s));
  EXPECT_EQ(calls, 0);
  for (int round = 1; round <= 3; ++round) {
    std::fill(out.begin(), out.end(), std::byte{0});
    replay(graph);
    for (std::size_t i = 0; i < 64; ++i) {
      const bool in_rectangle = i < 32 && i % 16 < 4;
      const int expected = in_rectangle || i >= 60 ? 0x02 : i >= 40 && i < 44 ? 0x03 : i >= 44 && i < 48 ? 0x05 : 0x01;
      ASSERT_EQ(out[i], static_cast<std::byte>(expected)) << "byte " << i << " of replay " << round;
    }
    EXPECT_EQ(calls, round) << "a host function runs at every replay";
    EXPECT_EQ(seen_by_host, std::byte{0x02});
    EXPECT_TRUE(holds(b, 64, 0x09));
  }
}

TEST_F(Capture, ReplaysKernelsInOrder) {
  need({kernels, computes});
  const StreamHandle s = stream();
  const DevicePtr log = make_log(64);
  must(gpu().begin_capture(s));
  for (std::uint32_t i = 0; i < 10; ++i) append(log, i, s);
  const GraphHandle graph = must(gpu().end_capture(s));
  EXPECT_TRUE(read_log(log, 64).empty());
  replay(graph);
  replay(graph);
  std::vector<std::uint32_t> expected;
  for (std::uint32_t i = 0; i < 20; ++i) expected.push_back(i % 10);
  EXPECT_EQ(read_log(log, 64), expected);
}

TEST_F(Capture, FreezesTheBytesOfCopiesToTheDevice) {
  const StreamHandle s = stream();
  for (const std::size_t bytes : {1, 64, 5000, 300'000}) {
    const DevicePtr ptr = block(bytes);
    const auto sent = pattern(bytes, 17);
    GraphHandle graph;
    {
      auto source = sent;
      must(gpu().begin_capture(s));
      must(gpu().copy_h2d_async(ptr, source, s));
      std::fill(source.begin(), source.end(), std::byte{0xDD});
      graph = must(gpu().end_capture(s));
    }
    for (int round = 0; round < 2; ++round) {
      fill(ptr, 0, bytes);
      replay(graph);
      EXPECT_EQ(read(ptr, bytes), sent) << bytes << " bytes, replay " << round;
    }
  }
}

TEST_F(Capture, FreezesKernelArguments) {
  need({kernels, computes});
  const StreamHandle s = stream();
  const DevicePtr out = block(17 * 8);
  GraphHandle graph;
  {
    Wide value;
    value.words.fill(0x2222);
    must(gpu().begin_capture(s));
    launch(kernel(kEcho), s,
           {KernelArg::buffer(out), KernelArg::bytes(std::as_bytes(std::span(&value, 1))), KernelArg::value(std::uint32_t{5})});
    value.words.fill(0xDDDD);
    graph = must(gpu().end_capture(s));
  }
  fill(out, 0, 17 * 8);
  replay(graph);
  const auto seen = read<std::uint64_t>(out, 17);
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 0x2222u), 16);
  EXPECT_EQ(seen[16], 5u);
}

TEST_F(Capture, RetainedSourcesAreReadAtEachReplay) {
  need({pinned_memory});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  const auto source = must(gpu().alloc_host_pinned(64));
  must(gpu().begin_capture(s));
  must(gpu().copy_h2d_async_retained(ptr, source, s));
  const GraphHandle graph = must(gpu().end_capture(s));
  for (const std::uint8_t value : {1, 2}) {
    std::fill(source.begin(), source.end(), std::byte{value});
    replay(graph);
    EXPECT_TRUE(holds(ptr, 64, value));
  }
}

TEST_F(Capture, TakesPinnedHostEndsOnly) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  std::vector<std::byte> pageable(64);
  must(gpu().begin_capture(s));
  EXPECT_TRUE(refused(gpu().copy_h2d_async_retained(ptr, pageable, s), Errc::capture_unsafe, {"pinned"}));
  EXPECT_TRUE(refused(gpu().copy_d2h_async(pageable, ptr, s), Errc::capture_unsafe, {"pinned"}));
  const CopyDesc to_host{.dst = {}, .src = ptr, .host_dst = pageable.data(), .bytes = 64};
  EXPECT_TRUE(refused(gpu().copy_batch_async({&to_host, 1}, s), Errc::capture_unsafe, {"pinned"}));
  must(gpu().memset_async(ptr, 0x03, 64, s));
  const GraphHandle graph = must(gpu().end_capture(s));
  replay(graph);
  EXPECT_TRUE(holds(ptr, 64, 0x03)) << "the capture did not survive a refused copy";
}

TEST_F(Capture, MayBeEmpty) {
  const StreamHandle s = stream();
  must(gpu().begin_capture(s));
  const GraphHandle graph = must(gpu().end_capture(s));
  EXPECT_TRUE(graph);
  replay(graph);
  EXPECT_TRUE(runs_work(s));
}

TEST_F(Capture, MayBeBegunAgainAndAgain) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  for (std::uint8_t round = 1; round <= 20; ++round) {
    must(gpu().begin_capture(s));
    must(gpu().memset_async(ptr, round, 64, s));
    const GraphHandle graph = must(gpu().end_capture(s));
    must(gpu().launch_graph(graph, s));
    settle(s);
    ASSERT_TRUE(holds(ptr, 64, round));
    must(gpu().destroy_graph(graph));
  }
}

// ---- who may do what ----

TEST_F(Capture, DefaultStreamCannotBeCaptured) {
  EXPECT_TRUE(refused(gpu().begin_capture(gpu().default_stream()), Errc::invalid_argument));
  EXPECT_FALSE(gpu().stream_is_capturing(gpu().default_stream()));
  EXPECT_TRUE(ok(gpu().alloc(64))) << "a refused begin left a capture open";
}

TEST_F(Capture, BeginTwiceIsRefused) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  must(gpu().begin_capture(s));
  EXPECT_TRUE(refused(gpu().begin_capture(s), Errc::invalid_argument));
  must(gpu().memset_async(ptr, 0x01, 64, s));
  const GraphHandle graph = must(gpu().end_capture(s));
  replay(graph);
  EXPECT_TRUE(holds(ptr, 64, 0x01)) << "the first capture did not survive";
}

TEST_F(Capture, EndWithoutBeginIsRefused) {
  const StreamHandle s = stream();
  EXPECT_TRUE(refused(gpu().end_capture(s), Errc::invalid_argument));
  EXPECT_TRUE(runs_work(s));
}

TEST_F(Capture, OnlyTheThreadThatBeganMayEnd) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  must(gpu().begin_capture(s));
  must(gpu().memset_async(ptr, 0x01, 64, s));
  on_thread([&] { EXPECT_TRUE(refused(gpu().end_capture(s), Errc::invalid_argument)); });
  const GraphHandle graph = must(gpu().end_capture(s));
  replay(graph);
  EXPECT_TRUE(holds(ptr, 64, 0x01));
}

TEST_F(Capture, TellsWhetherAStreamIsCapturing) {
  const StreamHandle s = stream();
  const StreamHandle other = stream();
  EXPECT_FALSE(gpu().stream_is_capturing(s));
  must(gpu().begin_capture(s));
  EXPECT_TRUE(gpu().stream_is_capturing(s));
  EXPECT_FALSE(gpu().stream_is_capturing(other));
  on_thread([&] { EXPECT_TRUE(gpu().stream_is_capturing(s)); });
  must(gpu().end_capture(s));
  EXPECT_FALSE(gpu().stream_is_capturing(s));
}

TEST_F(Capture, FailedQueryCountsAsCapturing) {
  EXPECT_TRUE(gpu().stream_is_capturing({}));
  EXPECT_TRUE(gpu().stream_is_capturing({999}));
}

TEST_F(Capture, OtherThreadsGoOn) {
  const StreamHandle s = stream();
  const DevicePtr mine = block(4096);
  must(gpu().begin_capture(s));
  must(gpu().memset_async(mine, 0x01, 4096, s));
  on_thread([&] {
    for (int i = 0; i < 10; ++i) {
      const DevicePtr ptr = block(4096);
      const StreamHandle t = stream();
      fill(ptr, 0x02, 4096);
      must(gpu().memset_async(ptr, 0x03, 4096, t));
      settle(t);
      EXPECT_TRUE(holds(ptr, 4096, 0x03));
      must(gpu().destroy_stream(t));
      must(gpu().free(ptr));
    }
  });
  must(gpu().memset_async(mine.offset(1), 0x04, 4095, s));
  const GraphHandle graph = must(gpu().end_capture(s));
  replay(graph);
  EXPECT_TRUE(holds(mine, 1, 0x01));
  EXPECT_TRUE(holds(mine.offset(1), 4095, 0x04));
}

TEST_F(Capture, ThreadsCaptureAtTheSameTime) {
  constexpr std::size_t kThreads = 4;
  const DevicePtr ptr = block(kThreads * 256);
  fill(ptr, 0, kThreads * 256);
  on_threads(kThreads, [&](std::size_t t) {
    const StreamHandle s = must(gpu().create_stream());
    for (std::uint8_t round = 0; round < 20; ++round) {
      must(gpu().begin_capture(s));
      const auto value = static_cast<std::uint8_t>(t * 32 + round + 1);
      must(gpu().memset_async(ptr.offset(t * 256), value, 256, s));
      const GraphHandle graph = must(gpu().end_capture(s));
      must(gpu().launch_graph(graph, s));
      std::vector<std::byte> seen(256);
      must(gpu().copy_d2h_on_stream(seen, ptr.offset(t * 256), s));
      if (seen != std::vector<std::byte>(256, std::byte{value})) fail(Site::current(), "a capture took another thread's work");
      must(gpu().destroy_graph(graph));
    }
  });
}

// ---- joining ----

TEST_F(Capture, EventWaitsJoinFurtherStreams) {
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

TEST_F(Capture, EndWithUnjoinedStreamsIsRefusedAndDiscards) {
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

TEST_F(Capture, AnUnjoinedStreamWithoutWorkIsRefusedToo) {
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const EventHandle fork = event();
  must(gpu().begin_capture(a));
  must(gpu().record_event(fork, a));
  must(gpu().stream_wait_event(b, fork));
  EXPECT_TRUE(refused(gpu().end_capture(a), Errc::invalid_argument));
  EXPECT_TRUE(runs_work(b));
}

TEST_F(Capture, JoiningBackTooEarlyIsRefused) {
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

TEST_F(Capture, JoinedStreamCannotEndIt) {
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

TEST_F(Capture, WaitingInsideForAnEventRecordedOutsideIsRefused) {
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

TEST_F(Capture, WaitingInsideForANeverRecordedEventDoesNothing) {
  const StreamHandle s = stream();
  const EventHandle e = event();
  must(gpu().begin_capture(s));
  EXPECT_TRUE(ok(gpu().stream_wait_event(s, e)));
  EXPECT_TRUE(ok(gpu().end_capture(s)));
}

TEST_F(Capture, DefaultStreamCannotJoin) {
  const StreamHandle s = stream();
  const EventHandle e = event();
  must(gpu().begin_capture(s));
  must(gpu().record_event(e, s));
  EXPECT_FALSE(gpu().stream_wait_event(gpu().default_stream(), e).has_value());
  EXPECT_FALSE(gpu().stream_is_capturing(gpu().default_stream()));
  EXPECT_TRUE(ok(gpu().end_capture(s)));
}

TEST_F(Capture, EventsOfAnEndedCaptureMarkNothing) {
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

// ---- aborting ----

TEST_F(Capture, AbortDiscardsAndTheStreamRunsWorkAgain) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  fill(ptr, 0, 64);
  must(gpu().begin_capture(s));
  must(gpu().memset_async(ptr, 0x02, 64, s));
  must(gpu().abort_capture_if_active(s));
  EXPECT_TRUE(runs_work(s));
  EXPECT_TRUE(holds(ptr, 64, 0)) << "discarded work ran";
  EXPECT_EQ(gpu().live_graph_count(), 0u);
  EXPECT_TRUE(refused(gpu().end_capture(s), Errc::invalid_argument));
  EXPECT_TRUE(ok(gpu().free(ptr))) << "a discarded capture names memory";
}

TEST_F(Capture, AbortOutsideACaptureDoesNothing) {
  const StreamHandle s = stream();
  EXPECT_TRUE(ok(gpu().abort_capture_if_active(s)));
  EXPECT_TRUE(ok(gpu().abort_capture_if_active(gpu().default_stream())));
  EXPECT_TRUE(runs_work(s));
}

TEST_F(Capture, AbortOnAJoinedStreamEndsItAll) {
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const EventHandle fork = event();
  must(gpu().begin_capture(a));
  must(gpu().record_event(fork, a));
  must(gpu().stream_wait_event(b, fork));
  must(gpu().abort_capture_if_active(b));
  EXPECT_TRUE(runs_work(a));
  EXPECT_TRUE(runs_work(b));
}

TEST_F(Capture, AbortFromAnotherThreadMarksItAndTheOwnersEndFails) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  must(gpu().begin_capture(s));
  must(gpu().memset_async(ptr, 0x02, 64, s));
  on_thread([&] { must(gpu().abort_capture_if_active(s)); });
  EXPECT_TRUE(refused(gpu().end_capture(s), Errc::capture_unsafe));
  EXPECT_EQ(gpu().live_graph_count(), 0u);
  EXPECT_TRUE(runs_work(s));
  EXPECT_TRUE(ok(gpu().free(ptr)));
}

TEST_F(Capture, AbortFromAnotherThreadIsEndedByTheOwnersNextCall) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  fill(ptr, 0, 64);
  must(gpu().begin_capture(s));
  on_thread([&] { must(gpu().abort_capture_if_active(s)); });
  EXPECT_TRUE(refused(gpu().memset_async(ptr, 0x02, 64, s), Errc::capture_unsafe));
  EXPECT_TRUE(runs_work(s)) << "the owner's call did not end the capture";
  EXPECT_TRUE(holds(ptr, 64, 0));
  EXPECT_TRUE(ok(gpu().alloc(64)));
}

TEST_F(Capture, AbortFromAnotherThreadLetsTheOwnerBeginAgain) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  must(gpu().begin_capture(s));
  on_thread([&] { must(gpu().abort_capture_if_active(s)); });
  must(gpu().begin_capture(s));
  must(gpu().memset_async(ptr, 0x02, 64, s));
  const GraphHandle graph = must(gpu().end_capture(s));
  replay(graph);
  EXPECT_TRUE(holds(ptr, 64, 0x02));
}

TEST_F(Capture, ScopeAbortsWhenAnErrorUnwinds) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  const auto leaves = [&]() -> Result<Graph> {
    CaptureScope scope = METRALE_TRY(CaptureScope::begin(gpu(), s));
    METRALE_TRY(gpu().memset_async(ptr, 1, 64, s));
    METRALE_TRY(gpu().memset_async(ptr, 1, 65, s));  // leaves its block
    return scope.end();
  };
  EXPECT_TRUE(refused(leaves(), Errc::out_of_range));
  EXPECT_TRUE(runs_work(s));
  EXPECT_TRUE(ok(gpu().free(ptr)));
}

TEST_F(Capture, ScopeMakesAGraphThatOwnsItself) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  {
    CaptureScope scope = must(CaptureScope::begin(gpu(), s));
    must(gpu().memset_async(ptr, 0x05, 64, s));
    const Graph graph = must(scope.end());
    EXPECT_EQ(gpu().live_graph_count(), 1u);
    must(graph.launch(s));
    settle(s);
  }
  EXPECT_TRUE(holds(ptr, 64, 0x05));
  EXPECT_EQ(gpu().live_graph_count(), 0u);
}

TEST_F(Capture, DebugSyncSkipsCapturingStreams) {
  need({kernels, computes});
  CreateOptions options;
  options.face.debug_sync_kernels = true;
  remake(options);
  const StreamHandle s = stream();
  const DevicePtr log = make_log(4);
  const KernelHandle k = kernel(kAppend);
  must(gpu().begin_capture(s));
  EXPECT_TRUE(ok(gpu().launch_typed(k, {}, {}, 0, s, std::array{KernelArg::buffer(log), KernelArg::value(3u)})));
  const GraphHandle graph = must(gpu().end_capture(s));
  replay(graph);
  EXPECT_EQ(read_log(log, 4), std::vector<std::uint32_t>{3});
}

}  // namespace
}  // namespace metrale::conformance
