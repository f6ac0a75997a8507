// SPDX-License-Identifier: Apache-2.0
//
// Graphs name the memory they replay into: what names it, what that refuses, and until when.
#include <algorithm>
#include <array>
#include <functional>

#include "conformance/case.h"

namespace metrale::conformance {
namespace {

class GraphMemory : public CaseNeeding<memory, copies, streams, events, graphs> {
 protected:
  GraphHandle record(const std::function<void(StreamHandle)>& body, Site site = Site::current()) {
    const StreamHandle s = stream(site);
    must(gpu().begin_capture(s, site), site);
    body(s);
    return must(gpu().end_capture(s), site);
  }
  std::vector<DevicePtr> named(GraphHandle graph) {
    std::vector<DevicePtr> bases;
    for (const Allocation& a : must(gpu().graph_memory(graph))) bases.push_back(a.base);
    std::sort(bases.begin(), bases.end());
    return bases;
  }
  static std::vector<DevicePtr> sorted(std::vector<DevicePtr> bases) {
    std::sort(bases.begin(), bases.end());
    return bases;
  }
};

// ---- what names memory ----

TEST_F(GraphMemory, CopiesAndFillsNameBothEnds) {
  const DevicePtr a = block(256), b = block(256), c = block(256), d = block(256), e = block(256), f = block(256), g = block(256);
  const DevicePtr unused = block(256);
  const GraphHandle graph = record([&](StreamHandle s) {
    must(gpu().memset_async(a, 1, 64, s));
    must(gpu().copy_d2d_async(b, c.offset(100), 64, s));
    must(gpu().copy_d2d_2d_async({d, e, 16, 16, 8, 4}, s));
    must(gpu().copy_h2d_async(f.offset(255), std::vector<std::byte>(1), s));
    const CopyDesc copy{.dst = g, .src = a, .bytes = 8};
    must(gpu().copy_batch_async({&copy, 1}, s));
  });
  EXPECT_EQ(named(graph), sorted({a, b, c, d, e, f, g}));
  for (const DevicePtr ptr : {a, b, c, d, e, f, g}) EXPECT_TRUE(refused(gpu().free(ptr), Errc::in_use));
  EXPECT_TRUE(ok(gpu().free(unused)));
}

TEST_F(GraphMemory, KernelArgumentsNameTheirBlocks) {
  need({kernels});
  const DevicePtr y = block(256), x = block(256), unused = block(256);
  const KernelHandle k = kernel(kAxpy);
  const GraphHandle graph = record([&](StreamHandle s) {
    launch(k, s, {KernelArg::buffer(y.offset(4)), KernelArg::buffer(x.offset(8)), KernelArg::value(1.0f), KernelArg::value(2u)});
  });
  EXPECT_EQ(named(graph), sorted({x, y}));
  EXPECT_TRUE(refused(gpu().free(x), Errc::in_use));
  EXPECT_TRUE(refused(gpu().free(y), Errc::in_use));
  EXPECT_TRUE(ok(gpu().free(unused)));
}

TEST_F(GraphMemory, CaptureUsesNamesPointersInsideTables) {
  const DevicePtr table = block(64), target = block(256);
  const GraphHandle graph = record([&](StreamHandle s) {
    must(gpu().memset_async(table, 1, 64, s));
    must(gpu().capture_uses(s, target.offset(200)));
  });
  EXPECT_EQ(named(graph), sorted({table, target}));
  EXPECT_TRUE(refused(gpu().free(target), Errc::in_use));
}

TEST_F(GraphMemory, CaptureUsesOutsideACaptureDoesNothing) {
  const DevicePtr ptr = block(64);
  const StreamHandle s = stream();
  EXPECT_TRUE(ok(gpu().capture_uses(s, ptr)));
  EXPECT_TRUE(ok(gpu().free(ptr)));
}

TEST_F(GraphMemory, CaptureUsesRefusesUnknownMemory) {
  const DevicePtr ptr = block(64);
  const StreamHandle s = stream();
  must(gpu().begin_capture(s));
  EXPECT_TRUE(refused(gpu().capture_uses(s, ptr.offset(64)), Errc::out_of_range));
  EXPECT_TRUE(refused(gpu().capture_uses(s, {}), Errc::out_of_range));
  EXPECT_TRUE(ok(gpu().end_capture(s)));
}

TEST_F(GraphMemory, JoinedStreamsNameMemoryToo) {
  const DevicePtr ptr = block(64);
  const StreamHandle b = stream();
  const EventHandle fork = event();
  const EventHandle join = event();
  const GraphHandle graph = record([&](StreamHandle a) {
    must(gpu().record_event(fork, a));
    must(gpu().stream_wait_event(b, fork));
    must(gpu().memset_async(ptr, 1, 64, b));
    must(gpu().record_event(join, b));
    must(gpu().stream_wait_event(a, join));
  });
  EXPECT_EQ(named(graph), sorted({ptr}));
  EXPECT_TRUE(refused(gpu().free(ptr), Errc::in_use));
}

TEST_F(GraphMemory, WorkOutsideTheCaptureNamesNothing) {
  const DevicePtr ptr = block(64), other = block(64);
  const StreamHandle outside = stream();
  const GraphHandle graph = record([&](StreamHandle s) {
    must(gpu().memset_async(ptr, 1, 64, s));
    must(gpu().memset_async(other, 1, 64, outside));
  });
  EXPECT_EQ(named(graph), sorted({ptr}));
  settle(outside);
  EXPECT_TRUE(ok(gpu().free(other)));
}

// ---- what naming refuses ----

TEST_F(GraphMemory, FreeingANamedBlockIsInUseWithThreeSites) {
  const DevicePtr ptr = must(gpu().alloc(64));
  const std::string alloc_site = line_above();
  const StreamHandle s = stream();
  must(gpu().begin_capture(s));
  const std::string capture_site = line_above();
  must(gpu().memset_async(ptr, 1, 64, s));
  must(gpu().end_capture(s));
  const Result<> freed = gpu().free(ptr);
  const std::string free_site = line_above();
  EXPECT_TRUE(refused(freed, Errc::in_use, {alloc_site, capture_site, free_site}));
}

TEST_F(GraphMemory, ARefusedFreeChangesNothing) {
  const DevicePtr ptr = block(64);
  const StreamHandle s = stream();
  const GraphHandle graph = record([&](StreamHandle c) { must(gpu().memset_async(ptr, 0x05, 64, c)); });
  EXPECT_TRUE(refused(gpu().free(ptr), Errc::in_use));
  EXPECT_EQ(gpu().live_bytes(), 64u);
  must(gpu().launch_graph(graph, s));
  settle(s);
  EXPECT_TRUE(holds(ptr, 64, 0x05));
}

TEST_F(GraphMemory, EveryKindOfMemoryIsNamed) {
  const DevicePtr managed = must(gpu().alloc_managed(64));
  const DevicePtr arena = must(gpu().alloc_arena(64));
  GraphHandle graph = record([&](StreamHandle c) {
    must(gpu().memset_async(managed, 1, 64, c));
    must(gpu().memset_async(arena, 1, 64, c));
  });
  EXPECT_TRUE(refused(gpu().free(managed), Errc::in_use));
  EXPECT_TRUE(refused(gpu().free_arena(arena), Errc::in_use));
  must(gpu().destroy_graph(graph));
  EXPECT_TRUE(ok(gpu().free(managed)));
  EXPECT_TRUE(ok(gpu().free_arena(arena)));
}

TEST_F(GraphMemory, PooledBlocksAreNamed) {
  need({pooled_memory});
  const StreamHandle s = stream();
  const DevicePtr pooled = must(gpu().alloc_async(64, s));
  const GraphHandle graph = record([&](StreamHandle c) { must(gpu().memset_async(pooled, 1, 64, c)); });
  EXPECT_TRUE(refused(gpu().free_async(pooled, s), Errc::in_use));
  EXPECT_EQ(gpu().live_bytes(), 64u);
  must(gpu().destroy_graph(graph));
  EXPECT_TRUE(ok(gpu().free_async(pooled, s)));
}

TEST_F(GraphMemory, PinnedMemoryIsNamedByItsHostEnd) {
  need({pinned_memory});
  const DevicePtr ptr = block(64);
  const auto in = must(gpu().alloc_host_pinned(64));
  const auto out = must(gpu().alloc_host_pinned(64));
  const GraphHandle graph = record([&](StreamHandle s) {
    must(gpu().copy_h2d_async_retained(ptr, in.subspan(10, 4), s));
    must(gpu().copy_d2h_async(out.subspan(10, 4), ptr, s));
  });
  EXPECT_EQ(must(gpu().graph_memory(graph)).size(), 3u);
  EXPECT_TRUE(refused(gpu().free_host_pinned(in.data(), 64), Errc::in_use));
  EXPECT_TRUE(refused(gpu().free_host_pinned(out.data(), 64), Errc::in_use));
  EXPECT_TRUE(gpu().is_pinned(in));
  must(gpu().destroy_graph(graph));
  EXPECT_TRUE(ok(gpu().free_host_pinned(in.data(), 64)));
  EXPECT_TRUE(ok(gpu().free_host_pinned(out.data(), 64)));
}

TEST_F(GraphMemory, PinnedMemoryIsNamedByItsAlias) {
  need({pinned_memory, host_alias});
  const auto memory = must(gpu().alloc_host_pinned(64));
  const DevicePtr alias = must(gpu().host_ptr_to_device(memory.data()));
  const GraphHandle graph = record([&](StreamHandle s) { must(gpu().memset_async(alias.offset(5), 1, 4, s)); });
  EXPECT_TRUE(refused(gpu().free_host_pinned(memory.data(), 64), Errc::in_use));
  must(gpu().destroy_graph(graph));
  EXPECT_TRUE(ok(gpu().free_host_pinned(memory.data(), 64)));
}

TEST_F(GraphMemory, RegisteredMemoryIsNamed) {
  need({host_registration});
  std::vector<std::byte> mine(4096);
  must(gpu().register_host(mine));
  const DevicePtr ptr = block(64);
  const GraphHandle graph = record([&](StreamHandle s) { must(gpu().copy_d2h_async(std::span(mine).first(64), ptr, s)); });
  EXPECT_TRUE(refused(gpu().unregister_host(mine.data()), Errc::in_use));
  must(gpu().destroy_graph(graph));
  EXPECT_TRUE(ok(gpu().unregister_host(mine.data())));
}

TEST_F(GraphMemory, AdoptedMemoryIsNamed) {
  const DevicePtr theirs = foreign_memory(256);
  must(gpu().adopt(theirs, 256, "another library"));
  const StreamHandle s = stream();
  must(gpu().begin_capture(s));
  must(gpu().capture_uses(s, theirs.offset(100)));
  const GraphHandle graph = must(gpu().end_capture(s));
  EXPECT_TRUE(refused(gpu().disown(theirs), Errc::in_use));
  must(gpu().destroy_graph(graph));
  EXPECT_TRUE(ok(gpu().disown(theirs)));
}

// ---- until when ----

TEST_F(GraphMemory, IsFreeAgainOnceTheGraphIsDestroyed) {
  const DevicePtr ptr = block(64);
  const GraphHandle graph = record([&](StreamHandle s) { must(gpu().memset_async(ptr, 1, 64, s)); });
  EXPECT_TRUE(refused(gpu().free(ptr), Errc::in_use));
  must(gpu().destroy_graph(graph));
  EXPECT_TRUE(ok(gpu().free(ptr)));
}

TEST_F(GraphMemory, StaysNamedUntilTheLastReplayIsDone) {
  need({host_callbacks});
  const DevicePtr ptr = block(64);
  fill(ptr, 0, 64);
  const GraphHandle graph = record([&](StreamHandle s) { must(gpu().memset_async(ptr, 0x05, 64, s)); });
  const StreamHandle s = stream();
  {
    Gate gate(gpu(), s);
    must(gpu().launch_graph(graph, s));
    must(gpu().destroy_graph(graph));
    EXPECT_TRUE(refused(gpu().free(ptr), Errc::in_use)) << "a replay in flight still writes there";
  }
  settle(s);
  EXPECT_TRUE(holds(ptr, 64, 0x05));
  EXPECT_TRUE(eventually([&] { return gpu().free(ptr).has_value(); }));
}

TEST_F(GraphMemory, StaysNamedUntilTheLastReplayOnEveryStreamIsDone) {
  need({host_callbacks});
  const DevicePtr ptr = block(64);
  const GraphHandle graph = record([&](StreamHandle s) { must(gpu().memset_async(ptr, 0x05, 64, s)); });
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  must(gpu().launch_graph(graph, b));
  settle(b);
  {
    Gate gate(gpu(), a);
    must(gpu().launch_graph(graph, a));
    must(gpu().destroy_stream(a));
    must(gpu().destroy_graph(graph));
    EXPECT_TRUE(refused(gpu().free(ptr), Errc::in_use)) << "a replay on a destroyed stream is still in flight";
  }
  EXPECT_TRUE(eventually([&] { return gpu().free(ptr).has_value(); }));
}

TEST_F(GraphMemory, StaysNamedByEachOfSeveralGraphs) {
  const DevicePtr ptr = block(64);
  const auto body = [&](StreamHandle s) {
    must(gpu().memset_async(ptr, 1, 64, s));
    must(gpu().memset_async(ptr.offset(32), 2, 32, s));
  };
  const GraphHandle a = record(body);
  const GraphHandle b = record(body);
  EXPECT_EQ(must(gpu().graph_memory(a)).size(), 1u) << "a block named twice is listed once";
  EXPECT_EQ(must(gpu().graph_memory(a)).front().graph_refs, 2u);
  must(gpu().destroy_graph(a));
  EXPECT_TRUE(refused(gpu().free(ptr), Errc::in_use));
  must(gpu().destroy_graph(b));
  EXPECT_TRUE(ok(gpu().free(ptr)));
}

TEST_F(GraphMemory, AnOpenCaptureNamesMemoryAlready) {
  const DevicePtr ptr = block(64);
  const StreamHandle s = stream();
  must(gpu().begin_capture(s));
  must(gpu().memset_async(ptr, 1, 64, s));
  on_thread([&] { EXPECT_TRUE(refused(gpu().free(ptr), Errc::in_use)); });
  must(gpu().abort_capture_if_active(s));
  EXPECT_TRUE(ok(gpu().free(ptr)));
}

TEST_F(GraphMemory, AReplayHoldsItsMemoryWhenItsStreamIsCapturedThroughAWrap) {
  need({foreign_streams, host_callbacks});
  const DevicePtr ptr = block(64);
  const GraphHandle graph = record([&](StreamHandle s) { must(gpu().memset_async(ptr, 1, 64, s)); });
  const StreamHandle s = stream();
  const StreamHandle wrapped = must(gpu().wrap_stream(must(gpu().native_stream(s))));
  Gate gate(gpu(), s);
  must(gpu().launch_graph(graph, s));
  must(gpu().begin_capture(wrapped));
  must(gpu().destroy_graph(graph));
  on_thread([&] { EXPECT_TRUE(refused(gpu().free(ptr), Errc::in_use)) << "a replay in flight was forgotten"; });
  must(gpu().destroy_graph(must(gpu().end_capture(wrapped))));
  gate.open();
  settle(s);
  EXPECT_TRUE(ok(gpu().free(ptr)));
}

TEST_F(GraphMemory, APartlyRefusedBatchNamesWhatItRecorded) {
  // Unchecked, so that a backend which knows its addresses refuses the second copy when the first is in the graph.
  CreateOptions options;
  options.face.unchecked_copies = true;
  remake(options);
  const DevicePtr ptr = block(64), gone = block(64);
  must(gpu().free(gone));
  const std::array<CopyDesc, 2> list{CopyDesc{.dst = ptr, .src = ptr.offset(32), .bytes = 8},
                                     CopyDesc{.dst = gone, .src = gone.offset(32), .bytes = 8}};
  const StreamHandle s = stream();
  must(gpu().begin_capture(s));
  static_cast<void>(gpu().copy_batch_async(list, s).has_value());
  const GraphHandle graph = must(gpu().end_capture(s));
  EXPECT_EQ(named(graph), sorted({ptr}));
  EXPECT_TRUE(refused(gpu().free(ptr), Errc::in_use));
}

TEST_F(GraphMemory, ListsBlocksWithTheirGeneration) {
  const DevicePtr ptr = block(64);
  const std::uint64_t generation = gpu().live_allocations().front().generation;
  const GraphHandle graph = record([&](StreamHandle s) { must(gpu().memset_async(ptr, 1, 64, s)); });
  const auto blocks = must(gpu().graph_memory(graph));
  ASSERT_EQ(blocks.size(), 1u);
  EXPECT_EQ(blocks[0].base, ptr);
  EXPECT_EQ(blocks[0].generation, generation);
  EXPECT_EQ(blocks[0].bytes, 64u);
}

TEST_F(GraphMemory, ALaterBlockAtTheSameAddressIsNotNamed) {
  // Generations tell blocks apart: a destroyed graph must not hold whoever comes to its address next.
  for (int i = 0; i < 10; ++i) {
    const DevicePtr ptr = block(512);
    const GraphHandle graph = record([&](StreamHandle s) { must(gpu().memset_async(ptr, 1, 512, s)); });
    must(gpu().destroy_graph(graph));
    ASSERT_TRUE(ok(gpu().free(ptr))) << "round " << i;
  }
  EXPECT_EQ(gpu().live_bytes(), 0u);
}

}  // namespace
}  // namespace metrale::conformance
