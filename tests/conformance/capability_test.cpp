// SPDX-License-Identifier: Apache-2.0
//
// capabilities() tells the truth: what is absent answers unsupported with the reason given beforehand, what is present does not.
#include <algorithm>
#include <array>
#include <functional>
#include <ostream>

#include "conformance/case.h"
#include "metrale/span_timer.h"

namespace metrale::conformance {
namespace {

using Call = std::function<Result<>(GpuBackend&)>;

struct Rule {
  Capability capability;
  std::vector<std::pair<const char*, Call>> calls;  ///< Each is unsupported where the capability is absent, with whatever handles.
  Call works;                                       ///< The least that succeeds where it is present.
  std::vector<Capability> with;                     ///< What `works` needs beside it.
};

template <class T>
Result<> drop(Result<T> result) {
  if (!result) return Error(std::move(result).error());
  return {};
}

std::array<std::byte, 64>& host() {
  static std::array<std::byte, 64> bytes;
  return bytes;
}

const DevicePtr kPtr{0x1000};
const StreamHandle kStream{1};
const EventHandle kEvent{1};
const GraphHandle kGraph{1};
const KernelHandle kKernel{1};

/// Launches with `attributes` and waits; without kernels, with whatever handles.
Result<> launch_with(GpuBackend& b, std::string_view function, Dim3 grid, const LaunchAttributes& attributes) {
  if (!b.capabilities().has(kernels)) return b.launch_typed(kKernel, {}, {}, 0, kStream, {});
  const DevicePtr log = METRALE_TRY(b.alloc(64));
  METRALE_TRY(b.memset(log, 0, 64));
  const std::array args{KernelArg::buffer(log), KernelArg::value(1u)};
  const std::size_t num_args = function == kWaiter ? 2 : 1;
  const KernelHandle k = METRALE_TRY(b.kernel(kModule, function));
  METRALE_TRY(b.launch_typed(k, grid, {}, 0, b.default_stream(), std::span(args).first(num_args), attributes));
  return b.synchronize(b.default_stream());
}
Result<> launch_cooperative(GpuBackend& b) { return launch_with(b, kTiled, {}, {.cooperative = true}); }
Result<> launch_cluster(GpuBackend& b) { return launch_with(b, kTiled, {2, 1, 1}, {.cluster = {2, 1, 1}}); }
Result<> launch_dependent(GpuBackend& b) { return launch_with(b, kWaiter, {}, {.dependent_launch = true}); }

const std::vector<Rule>& rules() {
  static const std::vector<Rule> all{
      {memory,
       {{"alloc", [](GpuBackend& b) { return drop(b.alloc(64)); }},
        {"alloc_managed", [](GpuBackend& b) { return drop(b.alloc_managed(64)); }},
        {"alloc_arena", [](GpuBackend& b) { return drop(b.alloc_arena(64)); }},
        {"adopt", [](GpuBackend& b) { return b.adopt(kPtr, 64, "label"); }},
        {"memset", [](GpuBackend& b) { return b.memset(kPtr, 0, 64); }},
        {"memset_async", [](GpuBackend& b) { return b.memset_async(kPtr, 0, 64, kStream); }},
        {"total_memory", [](GpuBackend& b) { return drop(b.total_memory()); }},
        {"free_memory", [](GpuBackend& b) { return drop(b.free_memory()); }},
        {"device_free_memory", [](GpuBackend& b) { return drop(b.device_free_memory()); }}},
       [](GpuBackend& b) -> Result<> { return b.free(METRALE_TRY(b.alloc(64))); },
       {}},
      {managed_memory, {}, [](GpuBackend& b) -> Result<> { return b.free(METRALE_TRY(b.alloc_managed(64))); }, {memory}},
      {pinned_memory,
       {{"alloc_host_pinned", [](GpuBackend& b) { return drop(b.alloc_host_pinned(64)); }}},
       [](GpuBackend& b) -> Result<> { return b.free_host_pinned(METRALE_TRY(b.alloc_host_pinned(64)).data(), 64); },
       {}},
      {host_registration,
       {{"register_host", [](GpuBackend& b) { return b.register_host(host()); }}},
       [](GpuBackend& b) -> Result<> {
         METRALE_TRY(b.register_host(host()));
         return b.unregister_host(host().data());
       },
       {}},
      {host_alias,
       {{"host_ptr_to_device", [](GpuBackend& b) { return drop(b.host_ptr_to_device(host().data())); }}},
       [](GpuBackend& b) -> Result<> { return drop(b.host_ptr_to_device(METRALE_TRY(b.alloc_host_pinned(64)).data())); },
       {pinned_memory}},
      {pooled_memory,
       {{"alloc_async", [](GpuBackend& b) { return drop(b.alloc_async(64, kStream)); }}},
       [](GpuBackend& b) -> Result<> {
         return b.free_async(METRALE_TRY(b.alloc_async(64, b.default_stream())), b.default_stream());
       },
       {streams}},
      {copies,
       {{"copy_h2d", [](GpuBackend& b) { return b.copy_h2d(kPtr, host()); }},
        {"copy_d2h", [](GpuBackend& b) { return b.copy_d2h(host(), kPtr); }},
        {"copy_d2d", [](GpuBackend& b) { return b.copy_d2d(kPtr, kPtr, 8); }},
        {"copy_d2h_on_stream", [](GpuBackend& b) { return b.copy_d2h_on_stream(host(), kPtr, kStream); }},
        {"copy_h2d_async", [](GpuBackend& b) { return b.copy_h2d_async(kPtr, host(), kStream); }},
        {"copy_h2d_async_retained", [](GpuBackend& b) { return b.copy_h2d_async_retained(kPtr, host(), kStream); }},
        {"copy_d2h_async", [](GpuBackend& b) { return b.copy_d2h_async(host(), kPtr, kStream); }},
        {"copy_d2d_async", [](GpuBackend& b) { return b.copy_d2d_async(kPtr, kPtr, 8, kStream); }},
        {"copy_d2d_2d_async", [](GpuBackend& b) { return b.copy_d2d_2d_async({kPtr, kPtr, 8, 8, 8, 1}, kStream); }},
        {"copy_batch_async",
         [](GpuBackend& b) {
           const CopyDesc copy{.dst = kPtr, .src = kPtr, .bytes = 8};
           return b.copy_batch_async({&copy, 1}, kStream);
         }},
        {"copy_peer_async", [](GpuBackend& b) { return b.copy_peer_async(kPtr, b, kPtr, 8, kStream); }}},
       [](GpuBackend& b) -> Result<> {
         const DevicePtr ptr = METRALE_TRY(b.alloc(64));
         METRALE_TRY(b.copy_h2d(ptr, host()));
         METRALE_TRY(b.copy_d2h(host(), ptr));
         METRALE_TRY(b.copy_d2d(ptr, ptr.offset(32), 8));
         METRALE_TRY(b.copy_d2d_2d_async({ptr, ptr.offset(32), 8, 8, 4, 2}, b.default_stream()));
         return b.synchronize(b.default_stream());
       },
       {memory, streams}},
      {peer_copies,
       {{"copy_peer_async", [](GpuBackend& b) { return b.copy_peer_async(kPtr, b, kPtr, 8, kStream); }}},
       [](GpuBackend& b) -> Result<> {
         const DevicePtr ptr = METRALE_TRY(b.alloc(64));
         METRALE_TRY(b.copy_peer_async(ptr, b, ptr.offset(32), 8, b.default_stream()));
         return b.synchronize(b.default_stream());
       },
       {memory, copies, streams}},
      {streams,
       {{"create_stream", [](GpuBackend& b) { return drop(b.create_stream()); }},
        {"synchronize", [](GpuBackend& b) { return b.synchronize(kStream); }},
        {"synchronize_for", [](GpuBackend& b) { return b.synchronize_for(kStream, milliseconds(1)); }},
        {"synchronize_device", [](GpuBackend& b) { return b.synchronize_device(); }},
        {"query", [](GpuBackend& b) { return drop(b.query(kStream)); }},
        {"memset_async", [](GpuBackend& b) { return b.memset_async(kPtr, 0, 64, kStream); }},
        {"copy_d2h_on_stream", [](GpuBackend& b) { return b.copy_d2h_on_stream(host(), kPtr, kStream); }},
        {"alloc_async", [](GpuBackend& b) { return drop(b.alloc_async(64, kStream)); }},
        {"enqueue_host", [](GpuBackend& b) { return b.enqueue_host(kStream, [] {}); }},
        {"begin_capture", [](GpuBackend& b) { return b.begin_capture(kStream); }}},
       [](GpuBackend& b) -> Result<> {
         const StreamHandle s = METRALE_TRY(b.create_stream());
         METRALE_TRY(b.synchronize(s));
         METRALE_TRY(b.synchronize_device());
         return b.destroy_stream(s);
       },
       {}},
      {stream_priorities, {}, [](GpuBackend& b) -> Result<> { return drop(b.create_stream(1)); }, {streams}},
      {foreign_streams,
       {{"wrap_stream", [](GpuBackend& b) { return drop(b.wrap_stream(0x1000)); }}},
       [](GpuBackend& b) -> Result<> {
         const StreamHandle s = METRALE_TRY(b.create_stream());
         const std::uint64_t native = METRALE_TRY(b.native_stream(s));
         return b.destroy_stream(METRALE_TRY(b.wrap_stream(native)));
       },
       {streams}},
      {native_work,
       {{"enqueue_native",
         [](GpuBackend& b) { return b.enqueue_native("test", kStream, {}, [](std::uint64_t) { return Result<>(); }); }}},
       [](GpuBackend& b) -> Result<> {
         const StreamHandle s = METRALE_TRY(b.create_stream());
         METRALE_TRY(b.enqueue_native("test", s, {}, [](std::uint64_t) { return Result<>(); }));
         return b.destroy_stream(s);
       },
       {streams}},
      {events,
       {{"create_event", [](GpuBackend& b) { return drop(b.create_event()); }},
        {"create_timed_event", [](GpuBackend& b) { return drop(b.create_timed_event()); }},
        {"record_event", [](GpuBackend& b) { return b.record_event(kEvent, kStream); }},
        {"stream_wait_event", [](GpuBackend& b) { return b.stream_wait_event(kStream, kEvent); }},
        {"event_synchronize", [](GpuBackend& b) { return b.event_synchronize(kEvent); }},
        {"event_query", [](GpuBackend& b) { return drop(b.event_query(kEvent)); }}},
       [](GpuBackend& b) -> Result<> {
         const EventHandle e = METRALE_TRY(b.create_event());
         METRALE_TRY(b.record_event(e, b.default_stream()));
         METRALE_TRY(b.stream_wait_event(b.default_stream(), e));
         METRALE_TRY(b.event_synchronize(e));
         return b.destroy_event(e);
       },
       {streams}},
      {timed_events,
       {{"create_timed_event", [](GpuBackend& b) { return drop(b.create_timed_event()); }},
        {"event_elapsed_ns", [](GpuBackend& b) { return drop(b.event_elapsed_ns(kEvent, kEvent)); }},
        {"timing().arm", [](GpuBackend& b) { return b.timing().arm(); }}},
       [](GpuBackend& b) -> Result<> {
         const EventHandle e = METRALE_TRY(b.create_timed_event());
         METRALE_TRY(b.record_event(e, b.default_stream()));
         METRALE_TRY(b.event_synchronize(e));
         return drop(b.event_elapsed_ns(e, e));
       },
       {streams}},
      {host_callbacks,
       {{"enqueue_host", [](GpuBackend& b) { return b.enqueue_host(kStream, [] {}); }}},
       [](GpuBackend& b) -> Result<> {
         METRALE_TRY(b.enqueue_host(b.default_stream(), [] {}));
         return b.synchronize(b.default_stream());
       },
       {streams}},
      {graphs,
       {{"begin_capture", [](GpuBackend& b) { return b.begin_capture(kStream); }},
        {"end_capture", [](GpuBackend& b) { return drop(b.end_capture(kStream)); }},
        {"launch_graph", [](GpuBackend& b) { return b.launch_graph(kGraph, kStream); }}},
       [](GpuBackend& b) -> Result<> {
         const StreamHandle s = METRALE_TRY(b.create_stream());
         METRALE_TRY(b.begin_capture(s));
         const GraphHandle graph = METRALE_TRY(b.end_capture(s));
         METRALE_TRY(b.launch_graph(graph, s));
         METRALE_TRY(b.synchronize(s));
         return b.destroy_graph(graph);
       },
       {streams}},
      {kernels,
       {{"kernel", [](GpuBackend& b) { return drop(b.kernel(kModule, kFill)); }},
        {"has_module", [](GpuBackend& b) { return drop(b.has_module(kModule)); }},
        {"launch_typed", [](GpuBackend& b) { return b.launch_typed(kKernel, {}, {}, 0, kStream, {}); }},
        {"launch", [](GpuBackend& b) { return b.launch(kKernel, {}, {}, 0, kStream, nullptr); }}},
       [](GpuBackend& b) { return drop(b.kernel(kModule, kFill)); },
       {}},
      {raw_launch,
       {{"launch", [](GpuBackend& b) { return b.launch(kKernel, {}, {}, 0, kStream, nullptr); }}},
       [](GpuBackend& b) -> Result<> {
         DevicePtr ptr = METRALE_TRY(b.alloc(64));
         void* param = &ptr;
         const KernelHandle k = METRALE_TRY(b.kernel(kModule, kTiled));
         METRALE_TRY(b.launch(k, {}, {}, 0, b.default_stream(), &param));
         return b.synchronize(b.default_stream());
       },
       {memory, streams, kernels}},
      {cooperative_launch, {{"launch_typed", launch_cooperative}}, launch_cooperative, {memory, streams, kernels}},
      {cluster_launch, {{"launch_typed", launch_cluster}}, launch_cluster, {memory, streams, kernels}},
      {dependent_launch, {{"launch_typed", launch_dependent}}, launch_dependent, {memory, streams, kernels}},
      {device_symbols,
       {{"device_symbol",
         [](GpuBackend& b) -> Result<> {
           KernelRegistry* registry = b.kernel_registry();
           // Without a module set there is nobody to ask.
           if (registry == nullptr) return Error(Errc::unsupported, std::string(b.capabilities().why_not(device_symbols)));
           return drop(registry->device_symbol(kModule, kSymbol));
         }}},
       [](GpuBackend& b) { return drop(b.kernel_registry()->device_symbol(kModule, kSymbol)); },
       {kernels}},
      {tensor_maps,
       {{"tensor_map", [](GpuBackend& b) { return drop(b.tensor_map({})); }}},
       [](GpuBackend& b) -> Result<> {
         const DevicePtr ptr = METRALE_TRY(b.alloc(512));
         return drop(b.tensor_map(
             {.address = ptr, .dtype = DType::f32, .rows = 8, .cols = 16, .row_stride_bytes = 64, .box_rows = 4, .box_cols = 8}));
       },
       {memory}},
      {processor_count,
       {{"sm_count", [](GpuBackend& b) { return drop(b.sm_count()); }}},
       [](GpuBackend& b) { return drop(b.sm_count()); },
       {}},
      {computes,
       {},
       [](GpuBackend& b) -> Result<> {
         const DevicePtr ptr = METRALE_TRY(b.alloc(64));
         METRALE_TRY(b.memset(ptr, 0, 64));
         const std::array args{KernelArg::buffer(ptr), KernelArg::value(0x01010101u), KernelArg::value(std::uint64_t{16})};
         const KernelHandle k = METRALE_TRY(b.kernel(kModule, kFill));
         METRALE_TRY(b.launch_typed(k, {}, {}, 0, b.default_stream(), args));
         std::array<std::byte, 64> seen{};
         METRALE_TRY(b.copy_d2h(seen, ptr));
         if (std::count(seen.begin(), seen.end(), std::byte{1}) == 64) return {};
         return Error(Errc::internal, "a kernel was launched and computed nothing");
       },
       {memory, copies, streams, kernels}},
  };
  return all;
}

class CapabilityRules : public Case, public ::testing::WithParamInterface<std::size_t> {
 protected:
  const Rule& rule() const { return rules()[GetParam()]; }
};

TEST_P(CapabilityRules, AbsentOnesAnswerUnsupported) {
  if (gpu().capabilities().has(rule().capability)) {
    // Present: a backend that can be made without it shows what happens then.
    need(under_test().drops_capabilities, "it has this, and cannot be made without");
    remake({.without = {rule().capability}});
    ASSERT_FALSE(gpu().capabilities().has(rule().capability));
  }
  const std::string reason(gpu().capabilities().why_not(rule().capability));
  ASSERT_FALSE(reason.empty());
  EXPECT_EQ(reason.find('\n'), std::string::npos);
  for (const auto& [name, call] : rule().calls) {
    const Result<> answer = call(gpu());
    EXPECT_TRUE(refused(answer, Errc::unsupported, {reason})) << name;
  }
  EXPECT_TRUE(gpu().live_allocations().size() <= 1) << "a refused call left memory behind";
}

TEST_P(CapabilityRules, PresentOnesWork) {
  need({rule().capability});
  EXPECT_TRUE(gpu().capabilities().why_not(rule().capability).empty());
  for (const Capability c : rule().with) ASSERT_TRUE(gpu().capabilities().has(c)) << "of no use without " << to_string(c);
  EXPECT_TRUE(ok(rule().works(gpu())));
}

INSTANTIATE_TEST_SUITE_P(Each, CapabilityRules, ::testing::Range(std::size_t{0}, kNumCapabilities),
                         [](const auto& number) { return std::string(to_string(rules()[number.param].capability)); });

class CapabilityTable : public Case {};

TEST_F(CapabilityTable, EveryCapabilityIsPresentOrHasAReason) {
  for (std::size_t i = 0; i < kNumCapabilities; ++i) {
    const auto c = static_cast<Capability>(i);
    EXPECT_NE(gpu().capabilities().has(c), !gpu().capabilities().why_not(c).empty()) << to_string(c);
  }
}

TEST_F(CapabilityTable, EveryCapabilityHasARule) {
  ASSERT_EQ(rules().size(), kNumCapabilities);
  for (std::size_t i = 0; i < kNumCapabilities; ++i) {
    const auto c = static_cast<Capability>(i);
    EXPECT_EQ(std::count_if(rules().begin(), rules().end(), [&](const Rule& r) { return r.capability == c; }), 1) << to_string(c);
  }
}

TEST_F(CapabilityTable, WithoutManagedMemoryTheCallIsAsAlloc) {
  need({memory});
  need(!gpu().capabilities().has(managed_memory), "it has managed memory");
  const DevicePtr ptr = must(gpu().alloc_managed(64));
  EXPECT_EQ(gpu().live_allocations().front().kind, MemoryKind::managed) << "marked all the same";
  EXPECT_TRUE(ok(gpu().free(ptr)));
}

TEST_F(CapabilityTable, WithoutStreamsThereIsNoDefaultStream) {
  EXPECT_EQ(bool(gpu().default_stream()), gpu().capabilities().has(streams));
}

TEST_F(CapabilityTable, WhatNeedsNoCapabilityWorksEverywhere) {
  EXPECT_TRUE(ok(gpu().health()));
  EXPECT_TRUE(ok(gpu().bind_to_thread()));
  EXPECT_EQ(gpu().live_bytes(), 0u);
  EXPECT_FALSE(gpu().alloc_report().empty());
  EXPECT_EQ(must(gpu().sweep_unreleased()), 0u);
  EXPECT_EQ(must(gpu().scan_redzones()), 0u);
  EXPECT_TRUE(ok(gpu().free({})));
  EXPECT_TRUE(ok(gpu().destroy_stream({})));
  EXPECT_TRUE(ok(gpu().destroy_event({})));
  EXPECT_TRUE(ok(gpu().destroy_graph({})));
  EXPECT_FALSE(gpu().is_pinned(host()));
  EXPECT_EQ(gpu().live_graph_count(), 0u);
  EXPECT_TRUE(ok(gpu().shutdown()));
}

}  // namespace
}  // namespace metrale::conformance
