// SPDX-License-Identifier: Apache-2.0
//
// The services that every backend has: op_cache() for kernels and scratch, timing() for spans.
#include <algorithm>

#include "conformance/case.h"
#include "metrale/op_cache.h"
#include "metrale/span_timer.h"

namespace metrale::conformance {
namespace {

class OpCaches : public CaseNeeding<memory, copies, streams, events> {
 protected:
  DevicePtr scratch(std::string_view tag, StreamHandle s, std::uint64_t bytes, Site site = Site::current()) {
    return must(gpu().op_cache().scratch(tag, s, bytes, site), site);
  }
};

TEST_F(OpCaches, RememberKernels) {
  need({kernels});
  const OpCache::Kernel first = must(gpu().op_cache().kernel(kModule, kTiled));
  EXPECT_EQ(first.facts->n_tile, kTile);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(must(gpu().op_cache().kernel(kModule, kTiled)).handle, first.handle);
  EXPECT_EQ(gpu().kernel_audit().num_hits, 1u) << "remembered look-ups are not in the audit";
  EXPECT_TRUE(refused(gpu().op_cache().kernel(kModule, "absent"), Errc::not_found));
}

TEST_F(OpCaches, ForgetTheKernelsOfUnloadedModules) {
  need({kernels});
  const KernelHandle first = must(gpu().op_cache().kernel(kModule, kTiled)).handle;
  must(gpu().unload_modules());
  const OpCache::Kernel again = must(gpu().op_cache().kernel(kModule, kTiled));
  EXPECT_NE(again.handle, first);
  EXPECT_EQ(again.facts->n_tile, kTile);
  const DevicePtr out = block(64);
  launch(again.handle, gpu().default_stream(), {KernelArg::buffer(out)});
  settle(gpu().default_stream());
}

TEST_F(OpCaches, ScratchIsOnePerOperationAndStream) {
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const DevicePtr first = scratch("gemm", a, 1000);
  EXPECT_EQ(scratch("gemm", a, 1000), first);
  EXPECT_EQ(scratch("gemm", a, 10), first) << "it never shrinks";
  EXPECT_NE(scratch("gemm", b, 1000), first);
  EXPECT_NE(scratch("softmax", a, 1000), first);
}

TEST_F(OpCaches, ScratchGrowsBehindTheWorkThatUsesIt) {
  need({host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr kept = block(1000);
  const DevicePtr small = scratch("gemm", s, 1000);
  {
    Gate gate(gpu(), s);
    must(gpu().memset_async(small, 0x31, 1000, s));
    must(gpu().copy_d2d_async(kept, small, 1000, s));
    const DevicePtr large = scratch("gemm", s, 100'000);  // waiting would last until the gate gives up, which fails the case
    EXPECT_NE(large, small);
    must(gpu().memset_async(large, 0x32, 100'000, s));
    EXPECT_GT(gpu().op_cache().collect(), 0u) << "an outgrown block went before the work that uses it";
  }
  settle(s);
  EXPECT_TRUE(holds(kept, 1000, 0x31));
  EXPECT_TRUE(eventually([&] { return gpu().op_cache().collect() == 0; })) << "the outgrown block never came back";
}

TEST_F(OpCaches, OutgrownScratchStaysWhileAGraphNamesIt) {
  need({graphs});
  const StreamHandle s = stream();
  const DevicePtr small = scratch("gemm", s, 1000);
  must(gpu().begin_capture(s));
  must(gpu().memset_async(small, 0x31, 1000, s));
  const GraphHandle graph = must(gpu().end_capture(s));
  scratch("gemm", s, 100'000);
  settle(s);
  EXPECT_EQ(gpu().op_cache().collect(), 1u);
  must(gpu().launch_graph(graph, s));
  settle(s);
  EXPECT_TRUE(holds(small, 1000, 0x31));
  must(gpu().destroy_graph(graph));
  EXPECT_TRUE(eventually([&] { return gpu().op_cache().collect() == 0; }));
}

TEST_F(OpCaches, ScratchOfTheSameSizeServesACapture) {
  need({graphs});
  const StreamHandle s = stream();
  const DevicePtr ptr = scratch("gemm", s, 1000);
  must(gpu().begin_capture(s));
  EXPECT_EQ(scratch("gemm", s, 1000), ptr);
  EXPECT_TRUE(refused(gpu().op_cache().scratch("gemm", s, 1'000'000), Errc::capture_unsafe));
  EXPECT_EQ(scratch("gemm", s, 1000), ptr) << "a refused growth keeps the block";
  EXPECT_TRUE(ok(gpu().end_capture(s)));
}

TEST_F(OpCaches, ReleaseGivesEverythingBack) {
  const StreamHandle s = stream();
  scratch("gemm", s, 1000);
  scratch("gemm", s, 5000);
  scratch("softmax", s, 1000);
  settle(s);
  EXPECT_GT(gpu().op_cache().scratch_bytes(), 0u);
  must(gpu().op_cache().release(gpu()));
  EXPECT_EQ(gpu().op_cache().scratch_bytes(), 0u);
  EXPECT_TRUE(gpu().live_allocations().empty());
  EXPECT_TRUE(ok(gpu().op_cache().release(gpu()))) << "again: nothing to do";
}

TEST_F(OpCaches, SweepEmptiesTheCache) {
  constexpr std::uint64_t kBytes = 5u << 20;
  const StreamHandle s = stream();
  const DevicePtr first = scratch("gemm", s, kBytes);
  if (gpu().capabilities().has(graphs)) {
    must(gpu().begin_capture(s));
    must(gpu().memset_async(first, 0x31, 64, s));
    must(gpu().end_capture(s));
  }
  must(gpu().sweep_unreleased());
  EXPECT_EQ(gpu().op_cache().scratch_bytes(), 0u);
  EXPECT_TRUE(gpu().live_allocations().empty());
  const DevicePtr stranger = block(kBytes);
  const DevicePtr again = scratch("gemm", s, kBytes);
  EXPECT_NE(again, stranger) << "the cache handed out memory that the sweep had freed";
  must(gpu().memset_async(again, 0x32, kBytes, s));
  settle(s);
  must(gpu().op_cache().release(gpu()));
  EXPECT_EQ(gpu().live_alloc_count(), 1u) << "the cache freed another's block";
  EXPECT_TRUE(ok(gpu().free(stranger)));
}

TEST_F(OpCaches, RefuseEmptyScratchAndNullStreams) {
  EXPECT_TRUE(refused(gpu().op_cache().scratch("gemm", stream(), 0), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().op_cache().scratch("gemm", {}, 64), Errc::invalid_argument));
}

// ---- timing ----

class Timing : public CaseNeeding<streams, timed_events> {};

TEST_F(Timing, SpansCoverTheirWorkAndNeverWait) {
  need({host_callbacks});
  const StreamHandle s = stream();
  SpanTimer& timer = gpu().timing();
  must(timer.arm());
  {
    Gate gate(gpu(), s);
    const auto token = timer.begin("step", s);
    must(gpu().enqueue_host(s, [] { std::this_thread::sleep_for(milliseconds(3)); }));
    timer.end(token);
    EXPECT_TRUE(timer.harvest().empty()) << "not done yet";
  }
  settle(s);
  const auto spans = timer.harvest();
  ASSERT_EQ(spans.size(), 1u);
  EXPECT_EQ(spans[0].name, "step");
  EXPECT_EQ(spans[0].stream, s);
  EXPECT_GE(spans[0].elapsed_ns, 3'000'000);
  EXPECT_TRUE(timer.harvest().empty());
}

TEST_F(Timing, IsOffUntilArmed) {
  const StreamHandle s = stream();
  SpanTimer& timer = gpu().timing();
  EXPECT_FALSE(timer.armed());
  timer.end(timer.begin("step", s));
  settle(s);
  EXPECT_TRUE(timer.harvest().empty());
  must(timer.arm());
  timer.end(timer.begin("step", s));
  timer.disarm();
  timer.end(timer.begin("late", s));
  settle(s);
  EXPECT_EQ(timer.harvest().size(), 1u);
  EXPECT_TRUE(ok(timer.release()));
}

TEST_F(Timing, LeavesCapturedStreamsAlone) {
  need({graphs, memory, copies});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  SpanTimer& timer = gpu().timing();
  must(timer.arm());
  must(gpu().begin_capture(s));
  const auto token = timer.begin("step", s);
  must(gpu().memset_async(ptr, 0x06, 64, s));
  timer.end(token);
  const GraphHandle graph = must(gpu().end_capture(s));
  must(gpu().launch_graph(graph, s));
  settle(s);
  EXPECT_TRUE(holds(ptr, 64, 0x06));
  EXPECT_TRUE(timer.harvest().empty());
  EXPECT_EQ(timer.counts().num_skipped, 1u);
}

}  // namespace
}  // namespace metrale::conformance
