// SPDX-License-Identifier: Apache-2.0
//
// Captures that end without a graph, and the owners that see to it.
#include "conformance/capture_case.h"
#include "metrale/graph.h"

namespace metrale::conformance {
namespace {

class CaptureAbort : public CaptureCase {};

TEST_F(CaptureAbort, AbortDiscardsAndTheStreamRunsWorkAgain) {
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

TEST_F(CaptureAbort, AbortOutsideACaptureDoesNothing) {
  const StreamHandle s = stream();
  EXPECT_TRUE(ok(gpu().abort_capture_if_active(s)));
  EXPECT_TRUE(ok(gpu().abort_capture_if_active(gpu().default_stream())));
  EXPECT_TRUE(runs_work(s));
}

TEST_F(CaptureAbort, AbortOnAJoinedStreamEndsItAll) {
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

TEST_F(CaptureAbort, AbortFromAnotherThreadMarksItAndTheOwnersEndFails) {
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

TEST_F(CaptureAbort, AbortFromAnotherThreadIsEndedByTheOwnersNextCall) {
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

TEST_F(CaptureAbort, AbortFromAnotherThreadLetsTheOwnerBeginAgain) {
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

TEST_F(CaptureAbort, ScopeAbortsWhenAnErrorUnwinds) {
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

TEST_F(CaptureAbort, ScopeMakesAGraphThatOwnsItself) {
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

}  // namespace
}  // namespace metrale::conformance
