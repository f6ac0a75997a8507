// SPDX-License-Identifier: Apache-2.0
//
// Graphs: replay and destruction. The memory they name is in graph_memory_test.cpp.
#include <atomic>
#include <functional>

#include "conformance/case.h"
#include "metrale/graph.h"

namespace metrale::conformance {
namespace {

class Graphs : public CaseNeeding<memory, copies, streams, events, graphs> {
 protected:
  /// Records what `body` enqueues on a stream of its own.
  GraphHandle record(const std::function<void(StreamHandle)>& body, Site site = Site::current()) {
    const StreamHandle s = stream(site);
    must(gpu().begin_capture(s), site);
    body(s);
    const GraphHandle graph = must(gpu().end_capture(s), site);
    must(gpu().destroy_stream(s), site);
    return graph;
  }
};

TEST_F(Graphs, ReplayAsOftenAsLaunched) {
  need({host_callbacks});
  std::atomic<int> count{0};
  const GraphHandle graph = record([&](StreamHandle s) { must(gpu().enqueue_host(s, [&] { ++count; })); });
  const StreamHandle s = stream();
  EXPECT_EQ(count, 0);
  for (int i = 1; i <= 25; ++i) {
    must(gpu().launch_graph(graph, s));
    settle(s);
    ASSERT_EQ(count, i);
  }
  for (int i = 0; i < 25; ++i) must(gpu().launch_graph(graph, s));
  settle(s);
  EXPECT_EQ(count, 50);
}

TEST_F(Graphs, ReplayInStreamOrder) {
  need({host_callbacks});
  const DevicePtr ptr = block(64);
  fill(ptr, 0x01, 64);
  const DevicePtr kept = block(64);
  const GraphHandle graph = record([&](StreamHandle s) { must(gpu().memset_async(ptr, 0x02, 64, s)); });
  const StreamHandle s = stream();
  {
    Gate gate(gpu(), s);
    must(
        gpu().launch_graph(graph, s));  // running or waiting in the caller would last until the gate gives up, which fails the case
    must(gpu().copy_d2d_async(kept, ptr, 64, s));
    must(gpu().memset_async(ptr, 0x03, 64, s));
    EXPECT_TRUE(is_held(s));
    EXPECT_TRUE(holds(ptr, 64, 0x01)) << "ran ahead of its stream";
  }
  settle(s);
  EXPECT_TRUE(holds(kept, 64, 0x02));
  EXPECT_TRUE(holds(ptr, 64, 0x03));
}

TEST_F(Graphs, KeepTheOrderOfTheirWork) {
  constexpr int kSteps = 12;
  const DevicePtr ptr = block(kSteps);
  // Each step shifts what the one before wrote, so any other order leaves other bytes.
  const GraphHandle graph = record([&](StreamHandle s) {
    must(gpu().memset_async(ptr, 0, kSteps, s));
    for (int i = 1; i < kSteps; ++i) {
      must(gpu().memset_async(ptr, static_cast<std::uint8_t>(i), 1, s));
      must(gpu().copy_d2d_async(ptr.offset(static_cast<std::uint64_t>(i)), ptr, 1, s));
    }
  });
  const StreamHandle s = stream();
  for (int round = 0; round < 3; ++round) {
    fill(ptr, 0xFF, kSteps);
    must(gpu().launch_graph(graph, s));
    settle(s);
    const auto seen = read(ptr, kSteps);
    for (int i = 1; i < kSteps; ++i) ASSERT_EQ(seen[static_cast<std::size_t>(i)], static_cast<std::byte>(i)) << "replay " << round;
  }
}

TEST_F(Graphs, SynchronizeCoversReplays) {
  const DevicePtr ptr = block(4 << 20);
  const GraphHandle graph = record([&](StreamHandle s) {
    for (std::uint8_t i = 1; i <= 4; ++i) must(gpu().memset_async(ptr, i, 4 << 20, s));
  });
  const StreamHandle s = stream();
  for (int i = 0; i < 5; ++i) {
    fill(ptr, 0, 4 << 20);
    must(gpu().launch_graph(graph, s));
    must(gpu().synchronize(s));
    ASSERT_TRUE(holds(ptr.offset((4 << 20) - 64), 64, 4));
  }
}

TEST_F(Graphs, EventsOrderReplaysLikeOtherWork) {
  need({host_callbacks});
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const EventHandle e = event();
  const DevicePtr ptr = block(64);
  const DevicePtr kept = block(64);
  fill(ptr, 0x01, 64);
  const GraphHandle graph = record([&](StreamHandle s) { must(gpu().memset_async(ptr, 0x02, 64, s)); });
  {
    Gate gate(gpu(), a);
    must(gpu().launch_graph(graph, a));
    must(gpu().record_event(e, a));
    must(gpu().stream_wait_event(b, e));
    must(gpu().copy_d2d_async(kept, ptr, 64, b));
  }
  settle(b);
  EXPECT_TRUE(holds(kept, 64, 0x02));
}

TEST_F(Graphs, MayBeLaunchedOnSeveralStreamsAndThreads) {
  need({host_callbacks});
  std::atomic<int> count{0};
  std::atomic<int> inside{0};
  std::atomic<bool> overlapped{false};
  const GraphHandle graph = record([&](StreamHandle s) {
    must(gpu().enqueue_host(s, [&] {
      if (++inside > 1) overlapped = true;
      std::this_thread::yield();
      --inside;
      ++count;
    }));
  });
  on_threads(4, [&](std::size_t) {
    const StreamHandle s = must(gpu().create_stream());
    for (int i = 0; i < 10; ++i) must(gpu().launch_graph(graph, s));
    must(gpu().synchronize_for(s, kPatience));
  });
  EXPECT_EQ(count, 40);
  EXPECT_FALSE(overlapped) << "two replays of one graph ran at the same time over the same memory";
}

TEST_F(Graphs, OutliveTheStreamTheyWereRecordedOn) {
  const DevicePtr ptr = block(64);
  const GraphHandle graph = record([&](StreamHandle s) { must(gpu().memset_async(ptr, 0x02, 64, s)); });
  for (int i = 0; i < 8; ++i) stream();  // may get what the recorded stream had
  must(gpu().launch_graph(graph, gpu().default_stream()));
  settle(gpu().default_stream());
  EXPECT_TRUE(holds(ptr, 64, 0x02));
}

TEST_F(Graphs, ReplayTogetherWithWorkOnOtherStreams) {
  need({host_callbacks});
  const DevicePtr ptr = block(64);
  const GraphHandle graph = record([&](StreamHandle s) { must(gpu().memset_async(ptr, 0x02, 64, s)); });
  Gate gate(gpu(), stream());
  const StreamHandle s = stream();
  must(gpu().launch_graph(graph, s));
  settle(s);  // passes while another stream is held
  EXPECT_TRUE(holds(ptr, 64, 0x02));
}

TEST_F(Graphs, LaunchOnACapturedStreamIsRefusedAndTheCaptureSurvives) {
  const DevicePtr ptr = block(64);
  const GraphHandle graph = record([&](StreamHandle s) { must(gpu().memset_async(ptr, 0x02, 64, s)); });
  const StreamHandle s = stream();
  must(gpu().begin_capture(s));
  EXPECT_TRUE(refused(gpu().launch_graph(graph, s), Errc::capture_unsafe));
  must(gpu().memset_async(ptr, 0x03, 64, s));
  const GraphHandle outer = must(gpu().end_capture(s));
  must(gpu().launch_graph(outer, s));
  settle(s);
  EXPECT_TRUE(holds(ptr, 64, 0x03));
}

// ---- handles ----

TEST_F(Graphs, AreCounted) {
  EXPECT_EQ(gpu().live_graph_count(), 0u);
  const GraphHandle a = record([](StreamHandle) {});
  const GraphHandle b = record([](StreamHandle) {});
  EXPECT_NE(a, b);
  EXPECT_EQ(gpu().live_graph_count(), 2u);
  must(gpu().destroy_graph(a));
  EXPECT_EQ(gpu().live_graph_count(), 1u);
  must(gpu().destroy_graph(b));
  EXPECT_EQ(gpu().live_graph_count(), 0u);
}

TEST_F(Graphs, DestroyedAndNullHandlesAreRefused) {
  const StreamHandle s = stream();
  const GraphHandle graph = record([](StreamHandle) {});
  must(gpu().destroy_graph(graph));
  for (const GraphHandle bad : {graph, GraphHandle{}}) {
    EXPECT_TRUE(refused(gpu().launch_graph(bad, s), Errc::invalid_argument));
    EXPECT_TRUE(refused(gpu().graph_memory(bad), Errc::invalid_argument));
  }
  EXPECT_TRUE(refused(gpu().destroy_graph(graph), Errc::invalid_argument));
  EXPECT_TRUE(ok(gpu().destroy_graph({}))) << "null is a no-op";
  EXPECT_TRUE(refused(gpu().launch_graph(record([](StreamHandle) {}), {}), Errc::invalid_argument));
}

TEST_F(Graphs, DestroyLetsReplaysInFlightComplete) {
  need({host_callbacks});
  const DevicePtr ptr = block(64);
  fill(ptr, 0x01, 64);
  const GraphHandle graph =
      record([&](StreamHandle s) { must(gpu().copy_h2d_async(ptr, std::vector<std::byte>(64, std::byte{0x02}), s)); });
  const StreamHandle s = stream();
  {
    Gate gate(gpu(), s);
    must(gpu().launch_graph(graph, s));
    must(gpu().destroy_graph(graph));  // waiting would last until the gate gives up, which fails the case
    EXPECT_TRUE(holds(ptr, 64, 0x01));
  }
  settle(s);
  EXPECT_TRUE(holds(ptr, 64, 0x02)) << "the replay was dropped with its graph";
}

TEST_F(Graphs, LetGoOfTheirHostFunctions) {
  need({host_callbacks});
  auto owned = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = owned;
  const GraphHandle graph = record([&](StreamHandle s) { must(gpu().enqueue_host(s, [owned] { ++*owned; })); });
  const StreamHandle s = stream();
  must(gpu().launch_graph(graph, s));
  settle(s);
  EXPECT_EQ(*owned, 2);
  owned.reset();
  EXPECT_FALSE(watch.expired()) << "a live graph keeps its function";
  must(gpu().destroy_graph(graph));
  EXPECT_TRUE(eventually([&] {
    settle(s);
    return watch.expired();
  }));
}

TEST_F(Graphs, MayBeMadeAndDestroyedManyTimes) {
  const DevicePtr ptr = block(64);
  const StreamHandle s = stream();
  for (std::uint8_t i = 0; i < 100; ++i) {
    must(gpu().begin_capture(s));
    must(gpu().memset_async(ptr, i, 64, s));
    const GraphHandle graph = must(gpu().end_capture(s));
    must(gpu().launch_graph(graph, s));
    must(gpu().destroy_graph(graph));
  }
  settle(s);
  EXPECT_TRUE(holds(ptr, 64, 99));
  EXPECT_TRUE(ok(gpu().free(ptr)));
}

TEST_F(Graphs, OwnerDestroysWhatItHolds) {
  {
    const Graph graph(gpu(), record([](StreamHandle) {}));
    EXPECT_EQ(gpu().live_graph_count(), 1u);
  }
  EXPECT_EQ(gpu().live_graph_count(), 0u);
}

}  // namespace
}  // namespace metrale::conformance
