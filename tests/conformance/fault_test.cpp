// SPDX-License-Identifier: Apache-2.0
//
// Faults that lose the device. Each case runs in a process of its own: on a real device the loss is for the whole process.
#include <algorithm>
#include <array>

#include "conformance/case.h"

namespace metrale::conformance {
namespace {

class Faults : public CaseNeeding<memory, copies, streams, kernels, computes> {
 protected:
  /// Loses the device by a kernel on `s`, and gives the text of the first call that told.
  std::string lose(StreamHandle s, DevicePtr ptr, Site site = Site::current()) {
    launch(kernel(kFault, site), s, {KernelArg::buffer(ptr), KernelArg::value(0x2Au)}, {3, 1, 1}, {4, 1, 1}, site);
    const Result<> told = gpu().synchronize_for(s, kPatience);
    if (told) fail(site, "the fault was swallowed: synchronize answers ok");
    if (told.error().code() != Errc::device_lost) fail(site, "not device_lost: " + told.error().to_string());
    return told.error().message();
  }
};

TEST_F(Faults, LatchWithTheFirstReasonForEveryLaterCall) {
  if (isolated()) return;
  const StreamHandle s = stream();
  const StreamHandle other = stream();
  const DevicePtr ptr = block(64);
  const KernelHandle k = kernel(kTiled);
  EXPECT_TRUE(ok(gpu().health()));
  lose(s, ptr);
  const Result<> health = gpu().health();
  ASSERT_TRUE(refused(health, Errc::device_lost, {"fault"}));
  const std::string reason = health.error().message();
  std::vector<std::byte> host(64);
  const std::array<KernelArg, 1> args{KernelArg::buffer(ptr)};
  const auto same = [&](const auto& result, const char* call) {
    ASSERT_TRUE(refused(result, Errc::device_lost)) << call;
    EXPECT_EQ(result.error().message(), reason) << call;
  };
  same(gpu().alloc(64), "alloc");
  same(gpu().alloc_managed(64), "alloc_managed");
  same(gpu().alloc_arena(64), "alloc_arena");
  same(gpu().alloc_async(64, other), "alloc_async");
  same(gpu().alloc_host_pinned(64), "alloc_host_pinned");
  same(gpu().register_host(host), "register_host");
  same(gpu().memset(ptr, 0, 64), "memset");
  same(gpu().memset_async(ptr, 0, 64, other), "memset_async");
  same(gpu().copy_h2d(ptr, host), "copy_h2d");
  same(gpu().copy_d2h(host, ptr), "copy_d2h");
  same(gpu().copy_d2d(ptr, ptr, 8), "copy_d2d");
  same(gpu().copy_d2h_on_stream(host, ptr, other), "copy_d2h_on_stream");
  same(gpu().copy_h2d_async(ptr, host, other), "copy_h2d_async");
  same(gpu().copy_d2h_async(host, ptr, other), "copy_d2h_async");
  same(gpu().create_stream(), "create_stream");
  same(gpu().synchronize(other), "synchronize");
  same(gpu().synchronize_for(other, kPatience), "synchronize_for");
  same(gpu().synchronize_device(), "synchronize_device");
  same(gpu().query(other), "query");
  same(gpu().enqueue_host(other, [] {}), "enqueue_host");
  same(gpu().create_event(), "create_event");
  same(gpu().begin_capture(other), "begin_capture");
  same(gpu().kernel(kModule, kFill), "kernel");
  same(gpu().has_module(kModule), "has_module");
  same(gpu().kernel_facts(k), "kernel_facts");
  same(gpu().kernel_n_tile(k), "kernel_n_tile");
  same(gpu().kernel_casts_a_to_e4m3(k), "kernel_casts_a_to_e4m3");
  same(gpu().native_stream(other), "native_stream");
  same(gpu().bind_to_thread(), "bind_to_thread");
  same(gpu().launch_typed(k, {}, {}, 0, other, args), "launch_typed");
  same(gpu().sm_count(), "sm_count");
  same(gpu().free_memory(), "free_memory");
  same(gpu().total_memory(), "total_memory");
  same(gpu().scan_redzones(), "scan_redzones");
  same(gpu().trim(), "trim");
}

TEST_F(Faults, ReasonNamesTheKernel) {
  if (isolated()) return;
  const std::string text = lose(stream(), block(64));
  EXPECT_NE(text.find(kFault), std::string::npos) << text;
  EXPECT_TRUE(refused(gpu().health(), Errc::device_lost, {std::string(kModule) + "." + std::string(kFault)}));
}

TEST_F(Faults, LogNamesKernelArgumentsAndTheirBlocks) {
  if (isolated()) return;
  const DevicePtr ptr = must(gpu().alloc(1234));
  const std::string site = line_above();
  lose(stream(), ptr);
  std::string all;
  for (const std::string& line : log_lines()) all += line + "\n";
  EXPECT_NE(all.find(std::string(kModule) + "." + std::string(kFault)), std::string::npos) << all;
  EXPECT_NE(all.find(site), std::string::npos) << "the block of an argument is not named: " << all;
  EXPECT_NE(all.find("1234"), std::string::npos) << all;
}

TEST_F(Faults, ComeOutAtOnceOnStreamsThatWait) {
  if (isolated()) return;
  need({events, host_callbacks});
  const StreamHandle faulting = stream();
  const StreamHandle waiting = stream();
  const EventHandle e = event();
  const DevicePtr ptr = block(64);
  {
    Gate gate(gpu(), faulting);
    launch(kernel(kFault), faulting, {KernelArg::buffer(ptr), KernelArg::value(1u)});
    must(gpu().record_event(e, faulting));
    must(gpu().stream_wait_event(waiting, e));
    must(gpu().memset_async(ptr, 1, 64, waiting));
  }
  EXPECT_TRUE(refused(gpu().synchronize_for(waiting, kPatience), Errc::device_lost)) << "hung, or fine, behind a fault";
  EXPECT_TRUE(refused(gpu().event_synchronize(e), Errc::device_lost));
  EXPECT_TRUE(refused(gpu().event_query(e), Errc::device_lost));
}

TEST_F(Faults, LaterCallsDoNotWait) {
  if (isolated()) return;
  need({host_callbacks});
  const StreamHandle held = stream();
  const DevicePtr ptr = block(64);
  Gate gate(gpu(), held);
  lose(stream(), ptr);
  EXPECT_TRUE(
      refused(gpu().synchronize(held), Errc::device_lost));  // waiting would last until the gate gives up, which fails the case
  EXPECT_TRUE(refused(gpu().synchronize_device(), Errc::device_lost));
  EXPECT_TRUE(ok(gpu().free(ptr)));
}

TEST_F(Faults, ReleasingStillWorksAndCountsWhatIsAbandoned) {
  if (isolated()) return;
  const auto& caps = gpu().capabilities();
  const StreamHandle s = stream();
  const DevicePtr ptr = block(1000);
  const DevicePtr managed = must(gpu().alloc_managed(200));
  const DevicePtr arena = must(gpu().alloc_arena(30'000));
  const DevicePtr pooled = caps.has(pooled_memory) ? must(gpu().alloc_async(4000, s)) : DevicePtr{};
  const auto pinned = caps.has(pinned_memory) ? must(gpu().alloc_host_pinned(500)) : std::span<std::byte>{};
  const DevicePtr theirs = foreign_memory(4096);
  must(gpu().adopt(theirs, 4096, "torch"));
  std::vector<std::byte> mine(4096);
  if (caps.has(host_registration)) must(gpu().register_host(mine));
  const EventHandle e = event();
  GraphHandle graph;
  const StreamHandle capturing = stream();
  if (caps.has(graphs)) {
    must(gpu().begin_capture(s));
    must(gpu().memset_async(ptr, 1, 64, s));
    graph = must(gpu().end_capture(s));
    must(gpu().begin_capture(capturing));
  }
  // The thread that holds a capture cannot wait; another tells.
  on_thread([&] { lose(s, arena); });
  if (caps.has(graphs)) {
    EXPECT_TRUE(ok(gpu().abort_capture_if_active(capturing)));
    EXPECT_TRUE(ok(gpu().destroy_graph(graph)));
    EXPECT_EQ(gpu().live_graph_count(), 0u);
  }
  EXPECT_EQ(gpu().live_bytes(), 1200u + (pooled ? 4000u : 0u)) << "ledger reads work";
  EXPECT_TRUE(ok(gpu().free(ptr)));
  EXPECT_TRUE(ok(gpu().free(managed)));
  EXPECT_TRUE(ok(gpu().free_arena(arena)));
  EXPECT_TRUE(ok(gpu().free_async(pooled, s)));
  EXPECT_TRUE(ok(gpu().free_host_pinned(pinned.data(), pinned.size())));
  EXPECT_TRUE(ok(gpu().disown(theirs)));
  EXPECT_TRUE(ok(gpu().unregister_host(caps.has(host_registration) ? mine.data() : nullptr)));
  EXPECT_TRUE(ok(gpu().destroy_event(e)));
  EXPECT_TRUE(ok(gpu().destroy_stream(s)));
  EXPECT_EQ(gpu().live_bytes(), 0u);
  EXPECT_TRUE(gpu().live_allocations().empty()) << gpu().alloc_report();
  const std::uint64_t expected = 1000 + 200 + 30'000 + (pooled ? 4000u : 0u) + pinned.size();
  EXPECT_GE(gpu().abandoned_bytes(), expected);
  EXPECT_LE(gpu().abandoned_bytes(), expected + mine.size()) << "adopted memory is not ours to abandon";
}

TEST_F(Faults, FreeingMemoryAGraphNamesWorksAfterwards) {
  if (isolated()) return;
  need({graphs});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  must(gpu().begin_capture(s));
  must(gpu().memset_async(ptr, 1, 64, s));
  must(gpu().end_capture(s));
  lose(s, block(64));
  EXPECT_TRUE(ok(gpu().free(ptr)));
}

TEST_F(Faults, SweepDropsTheBookkeeping) {
  if (isolated()) return;
  const DevicePtr ptr = block(1000);
  must(gpu().alloc_arena(2000));
  lose(stream(), ptr);
  EXPECT_EQ(must(gpu().sweep_unreleased()), 2u);
  EXPECT_EQ(must(gpu().sweep_unreleased()), 0u);
  EXPECT_EQ(gpu().abandoned_bytes(), 3000u);
  EXPECT_TRUE(gpu().live_allocations().empty());
  EXPECT_TRUE(ok(gpu().free(ptr))) << "freed after the sweep: nothing to do";
}

TEST_F(Faults, ShutdownWorksAfterwards) {
  if (isolated()) return;
  lose(stream(), block(1000));
  EXPECT_TRUE(ok(gpu().shutdown()));
  EXPECT_TRUE(ok(gpu().shutdown()));
  EXPECT_TRUE(refused(gpu().alloc(64), Errc::device_lost));
}

TEST_F(Faults, DebugSyncReportsAtTheKernelThatCausedIt) {
  if (isolated()) return;
  CreateOptions options;
  options.face.debug_sync_kernels = true;
  remake(options);
  const StreamHandle s = stream();
  const DevicePtr ptr = block(1234);
  const KernelHandle fine = kernel(kTiled);
  const KernelHandle faulty = kernel(kFault);
  launch(fine, s, {KernelArg::buffer(ptr)});
  const std::array<KernelArg, 2> args{KernelArg::buffer(ptr.offset(100)), KernelArg::value(7u)};
  const Result<> told = gpu().launch_typed(faulty, {3, 2, 1}, {32, 4, 1}, 4096, s, args);
  const std::string line = line_above();
  EXPECT_TRUE(refused(told, Errc::device_lost, {"conformance.fault", "(3, 2, 1)", "(32, 4, 1)", "4096", "1234", line}));
}

TEST_F(Faults, DebugSyncReportsRawLaunchesToo) {
  if (isolated()) return;
  need({raw_launch});
  CreateOptions options;
  options.face.debug_sync_kernels = true;
  remake(options);
  const StreamHandle s = stream();
  DevicePtr at = block(1234).offset(100);
  std::uint32_t value = 7;
  const KernelHandle faulty = kernel(kFault);
  std::array<void*, 2> params{&at, &value};
  const Result<> told = gpu().launch(faulty, {3, 2, 1}, {32, 4, 1}, 4096, s, params.data());
  const std::string line = line_above();
  EXPECT_TRUE(
      refused(told, Errc::device_lost, {"conformance.fault", "(3, 2, 1)", "(32, 4, 1)", "4096", "+100 of 1234", "0x7", line}));
}

TEST_F(Faults, ThrowingHostFunctionsDoNotEndTheProcess) {
  if (isolated()) return;
  need({host_callbacks});
  const StreamHandle s = stream();
  must(gpu().enqueue_host(s, [] { throw 1; }));
  static_cast<void>(gpu().synchronize_for(s, kPatience).has_value());
  EXPECT_TRUE(ok(gpu().sweep_unreleased()));
}

}  // namespace
}  // namespace metrale::conformance
