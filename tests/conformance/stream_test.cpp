// SPDX-License-Identifier: Apache-2.0
//
// Streams: independence, waiting, host functions.
#include <atomic>
#include <chrono>
#include <memory>
#include <set>

#include "conformance/case.h"

namespace metrale::conformance {
namespace {

class Streams : public CaseNeeding<streams> {};

TEST_F(Streams, DefaultStreamIsAStreamOfItsOwn) {
  EXPECT_TRUE(gpu().default_stream());
  EXPECT_EQ(gpu().default_stream(), gpu().default_stream());
  EXPECT_TRUE(ok(gpu().synchronize(gpu().default_stream())));
}

TEST_F(Streams, DefaultStreamHoldsNoOther) {
  need({memory, copies, host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(4096);
  Gate gate(gpu(), gpu().default_stream());
  must(gpu().memset_async(ptr, 0x01, 4096, s));
  settle(s);  // passes while the default stream is held
  std::vector<std::byte> seen(4096);
  must(gpu().copy_d2h_on_stream(seen, ptr, s));
  EXPECT_EQ(seen, std::vector<std::byte>(4096, std::byte{0x01}));
}

TEST_F(Streams, NoOtherHoldsTheDefaultStream) {
  need({memory, copies, host_callbacks});
  const DevicePtr ptr = block(4096);
  Gate gate(gpu(), stream());
  must(gpu().memset_async(ptr, 0x01, 4096, gpu().default_stream()));
  settle(gpu().default_stream());
  EXPECT_TRUE(holds(ptr, 4096, 0x01));
}

TEST_F(Streams, AreDistinct) {
  std::set<std::uint64_t> handles{gpu().default_stream().value};
  std::vector<StreamHandle> made;
  for (int i = 0; i < 64; ++i) {
    made.push_back(stream());
    EXPECT_TRUE(made.back());
    EXPECT_TRUE(handles.insert(made.back().value).second);
  }
  for (const StreamHandle s : made) EXPECT_TRUE(ok(gpu().destroy_stream(s)));
}

TEST_F(Streams, RunIndependently) {
  need({memory, copies, host_callbacks});
  const StreamHandle held = stream();
  Gate gate(gpu(), held);
  const DevicePtr ptr = block(8 * 4096);
  for (std::uint64_t i = 0; i < 8; ++i) {
    const StreamHandle s = stream();
    must(gpu().memset_async(ptr.offset(i * 4096), static_cast<std::uint8_t>(i), 4096, s));
    settle(s);  // passes while the first stream is held
  }
  for (std::uint64_t i = 0; i < 8; ++i) EXPECT_TRUE(holds(ptr.offset(i * 4096), 4096, static_cast<std::uint8_t>(i)));
  EXPECT_FALSE(must(gpu().query(held)));
}

TEST_F(Streams, RunKernelsIndependently) {
  need({memory, copies, kernels, computes, host_callbacks});
  Gate gate(gpu(), stream());
  const StreamHandle s = stream();
  const DevicePtr log = make_log(4);
  append(log, 7, s);
  settle(s);
  EXPECT_EQ(read_log(log, 4), std::vector<std::uint32_t>{7});
}

TEST_F(Streams, RunWorkInTheOrderItWasEnqueued) {
  need({memory, copies, kernels, computes});
  const StreamHandle s = stream();
  constexpr std::uint32_t kCount = 500;
  const DevicePtr log = make_log(kCount);
  std::vector<std::uint32_t> expected;
  const KernelHandle k = kernel(kAppend);
  for (std::uint32_t i = 0; i < kCount; ++i) {
    launch(k, s, {KernelArg::buffer(log), KernelArg::value(i)});
    expected.push_back(i);
  }
  settle(s);
  EXPECT_EQ(read_log(log, kCount), expected);
}

TEST_F(Streams, RunDifferentKindsOfWorkInOrder) {
  need({memory, copies, host_callbacks, pinned_memory});
  const StreamHandle s = stream();
  const DevicePtr a = block(64 << 10);
  const DevicePtr b = block(64 << 10);
  const auto seen = must(gpu().alloc_host_pinned(64 << 10));
  std::vector<std::byte> at_callback;
  must(gpu().memset_async(a, 0x01, 64 << 10, s));
  must(gpu().copy_d2d_async(b, a, 64 << 10, s));
  must(gpu().memset_async(a, 0x02, 64 << 10, s));
  must(gpu().copy_d2h_async(seen, b, s));
  must(gpu().enqueue_host(s, [&] { at_callback.assign(seen.begin(), seen.end()); }));
  must(gpu().memset_async(b, 0x03, 64 << 10, s));
  must(gpu().copy_d2h_async(seen, b, s));
  settle(s);
  EXPECT_EQ(at_callback, std::vector<std::byte>(64 << 10, std::byte{0x01}));
  EXPECT_EQ(std::vector<std::byte>(seen.begin(), seen.end()), std::vector<std::byte>(64 << 10, std::byte{0x03}));
}

TEST_F(Streams, TakeAnyPriority) {
  for (const int priority : {-5, -1, 0, 1, 5}) {
    const StreamHandle s = must(gpu().create_stream(priority));
    EXPECT_TRUE(ok(gpu().synchronize(s)));
    EXPECT_TRUE(ok(gpu().destroy_stream(s)));
  }
}

// ---- destroying ----

TEST_F(Streams, DestroyReturnsAtOnceAndPendingWorkCompletes) {
  need({memory, copies, host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(4096);
  const auto done = std::make_shared<std::atomic<bool>>(false);  // outlives a case that gives up waiting
  fill(ptr, 0x01, 4096);
  {
    Gate gate(gpu(), s);
    must(gpu().memset_async(ptr, 0x02, 4096, s));
    must(gpu().enqueue_host(s, [done] { *done = true; }));
    must(gpu().destroy_stream(s));  // waiting would last until the gate gives up, which fails the case
    EXPECT_TRUE(holds(ptr, 4096, 0x01));
  }
  // Told by the stream itself: no other stream's copy is ordered after it.
  EXPECT_TRUE(eventually([&] { return done->load(); })) << "the work of a destroyed stream was dropped";
  EXPECT_TRUE(holds(ptr, 4096, 0x02));
}

TEST_F(Streams, DestroyedHandlesAreRefused) {
  const StreamHandle s = stream();
  must(gpu().destroy_stream(s));
  EXPECT_TRUE(refused(gpu().synchronize(s), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().query(s), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().destroy_stream(s), Errc::invalid_argument));
  const StreamHandle next = stream();
  EXPECT_NE(next, s) << "a handle was given again";
}

TEST_F(Streams, DestroyOfNullDoesNothing) { EXPECT_TRUE(ok(gpu().destroy_stream({}))); }

TEST_F(Streams, DefaultStreamIsNotDestroyed) {
  EXPECT_TRUE(refused(gpu().destroy_stream(gpu().default_stream()), Errc::invalid_argument));
  EXPECT_TRUE(ok(gpu().synchronize(gpu().default_stream())));
}

TEST_F(Streams, StreamsMayBeMadeAndDestroyedManyTimes) {
  need({memory, copies});
  const DevicePtr ptr = block(256);
  for (int i = 0; i < 200; ++i) {
    const StreamHandle s = stream();
    must(gpu().memset_async(ptr, static_cast<std::uint8_t>(i), 256, s));
    settle(s);
    must(gpu().destroy_stream(s));
  }
  EXPECT_TRUE(holds(ptr, 256, 199));
}

// ---- waiting ----

TEST_F(Streams, SynchronizeWaitsForAllWorkBefore) {
  need({memory, copies, host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(4096);
  Gate gate(gpu(), s);
  must(gpu().memset_async(ptr, 0x02, 4096, s));
  EXPECT_FALSE(returns_before(gate, [&] { must(gpu().synchronize(s)); }));
  EXPECT_TRUE(holds(ptr, 4096, 0x02));
}

TEST_F(Streams, SynchronizeDoesNotWaitForOtherStreams) {
  need({host_callbacks});
  const StreamHandle s = stream();
  Gate gate(gpu(), stream());
  EXPECT_TRUE(ok(gpu().synchronize(s)));
}

TEST_F(Streams, SynchronizeForTimesOutAndTheWorkGoesOn) {
  need({memory, copies, host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(4096);
  {
    Gate gate(gpu(), s);
    must(gpu().memset_async(ptr, 0x02, 4096, s));
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_TRUE(refused(gpu().synchronize_for(s, milliseconds(20)), Errc::timeout));
    EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(20)) << "gave up early";
    EXPECT_TRUE(refused(gpu().synchronize_for(s, milliseconds(0)), Errc::timeout));
  }
  EXPECT_TRUE(ok(gpu().synchronize_for(s, kPatience)));
  EXPECT_TRUE(holds(ptr, 4096, 0x02));
}

TEST_F(Streams, SynchronizeForReturnsWhenTheWorkIsDone) {
  need({host_callbacks});
  const StreamHandle s = stream();
  const auto begin = std::chrono::steady_clock::now();
  Gate gate(gpu(), s);
  Background waiting([&] { must(gpu().synchronize_for(s, 100 * kPatience)); });
  gate.open();
  waiting.join();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kPatience);
}

TEST_F(Streams, SynchronizeForTakesAnyTimeout) {
  const StreamHandle s = stream();
  settle(s);
  EXPECT_TRUE(ok(gpu().synchronize_for(s, std::chrono::nanoseconds::max())));
  EXPECT_TRUE(ok(gpu().synchronize_for(s, milliseconds(0))));
  EXPECT_TRUE(refused(gpu().synchronize_for(s, milliseconds(-1)), Errc::invalid_argument));
}

TEST_F(Streams, SynchronizeDeviceWaitsForEveryStream) {
  need({memory, copies, host_callbacks});
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const DevicePtr ptr = block(8192);
  must(gpu().memset_async(ptr, 0x02, 4096, a));
  Gate gate(gpu(), b);
  must(gpu().memset_async(ptr.offset(4096), 0x02, 4096, b));
  EXPECT_FALSE(returns_before(gate, [&] { must(gpu().synchronize_device()); }));
  EXPECT_TRUE(must(gpu().query(a)));
  EXPECT_TRUE(must(gpu().query(b)));
  EXPECT_TRUE(holds(ptr, 8192, 0x02));
}

TEST_F(Streams, QueryNeverBlocksAndTellsWhetherAllIsDone) {
  need({memory, host_callbacks});
  const StreamHandle s = stream();
  EXPECT_TRUE(must(gpu().query(s)));
  {
    Gate gate(gpu(), s);
    EXPECT_FALSE(must(gpu().query(s)));
    const DevicePtr ptr = block(64);
    must(gpu().memset_async(ptr, 1, 64, s));
    EXPECT_FALSE(must(gpu().query(s)));
  }
  settle(s);
  EXPECT_TRUE(must(gpu().query(s)));
}

// ---- host functions ----

TEST_F(Streams, HostFunctionsRunInStreamOrder) {
  need({host_callbacks});
  const StreamHandle s = stream();
  std::vector<int> order;  // only the stream's functions touch it, one after the other
  for (int i = 0; i < 100; ++i) must(gpu().enqueue_host(s, [&order, i] { order.push_back(i); }));
  settle(s);
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
}

TEST_F(Streams, HostFunctionsDoNotRunInTheCaller) {
  need({host_callbacks});
  const StreamHandle s = stream();
  std::atomic<bool> inside{false};
  std::thread::id ran_on;
  Gate gate(gpu(), s);  // run in the caller, this would wait until the gate gives up, which fails the case
  must(gpu().enqueue_host(s, [&] {
    ran_on = std::this_thread::get_id();
    inside = true;
  }));
  EXPECT_FALSE(inside);
  gate.open();
  settle(s);
  EXPECT_TRUE(inside);
  EXPECT_NE(ran_on, std::this_thread::get_id());
}

TEST_F(Streams, HostFunctionsAreKeptUntilTheyRanAndThenLetGo) {
  need({host_callbacks});
  const StreamHandle s = stream();
  auto owned = std::make_shared<int>(41);
  const std::weak_ptr<int> watch = owned;
  int seen = 0;
  {
    Gate gate(gpu(), s);
    must(gpu().enqueue_host(s, [&seen, owned = std::move(owned)] { seen = *owned + 1; }));
    EXPECT_FALSE(watch.expired());
  }
  settle(s);
  EXPECT_EQ(seen, 42);
  EXPECT_TRUE(eventually([&] { return watch.expired(); }));
}

TEST_F(Streams, EmptyHostFunctionsAreRefused) {
  need({host_callbacks});
  EXPECT_TRUE(refused(gpu().enqueue_host(stream(), {}), Errc::invalid_argument));
}

// ---- streams of other libraries ----

TEST_F(Streams, NativeStreamGivesTheDriversHandle) {
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  EXPECT_NE(must(gpu().native_stream(a)), 0u);
  EXPECT_NE(must(gpu().native_stream(a)), must(gpu().native_stream(b)));
  EXPECT_TRUE(refused(gpu().native_stream({}), Errc::invalid_argument));
}

TEST_F(Streams, WrappedStreamsAreTheSameStream) {
  need({foreign_streams, memory, copies, host_callbacks});
  const StreamHandle theirs = stream();
  const StreamHandle wrapped = must(gpu().wrap_stream(must(gpu().native_stream(theirs))));
  EXPECT_NE(wrapped, theirs);
  const DevicePtr ptr = block(4096);
  fill(ptr, 0x01, 4096);
  {
    Gate gate(gpu(), theirs);
    must(gpu().memset_async(ptr, 0x02, 4096, wrapped));
    EXPECT_FALSE(must(gpu().query(wrapped)));
    EXPECT_TRUE(is_held(theirs));
    EXPECT_TRUE(holds(ptr, 4096, 0x01)) << "the wrapped stream ran ahead of the stream it wraps";
  }
  settle(wrapped);
  EXPECT_TRUE(holds(ptr, 4096, 0x02));
}

TEST_F(Streams, DestroyingAWrappedStreamLeavesTheStreamAlone) {
  need({foreign_streams, memory, copies});
  const StreamHandle theirs = stream();
  const StreamHandle wrapped = must(gpu().wrap_stream(must(gpu().native_stream(theirs))));
  must(gpu().destroy_stream(wrapped));
  EXPECT_TRUE(refused(gpu().synchronize(wrapped), Errc::invalid_argument));
  const DevicePtr ptr = block(256);
  must(gpu().memset_async(ptr, 0x02, 256, theirs));
  settle(theirs);
  EXPECT_TRUE(holds(ptr, 256, 0x02));
  // Its own object was not given to anyone else.
  EXPECT_NE(must(gpu().native_stream(stream())), must(gpu().native_stream(theirs)));
}

TEST_F(Streams, AWrappedStreamIsCapturedWithTheStreamItWraps) {
  need({foreign_streams, graphs, memory, copies});
  const StreamHandle own = stream();
  const StreamHandle wrapped = must(gpu().wrap_stream(must(gpu().native_stream(own))));
  const DevicePtr ptr = block(64);
  std::vector<std::byte> pageable(64);
  for (const auto& [first, second] : {std::pair(own, wrapped), std::pair(wrapped, own)}) {
    must(gpu().begin_capture(first));
    const StreamHandle late = must(gpu().wrap_stream(must(gpu().native_stream(first))));
    for (const StreamHandle s : {first, second, late}) {
      EXPECT_TRUE(gpu().stream_is_capturing(s));
      EXPECT_TRUE(refused(gpu().synchronize(s), Errc::capture_unsafe));
      EXPECT_TRUE(refused(gpu().query(s), Errc::capture_unsafe));
      EXPECT_TRUE(refused(gpu().copy_d2h_async(pageable, ptr, s), Errc::capture_unsafe));
      EXPECT_TRUE(refused(gpu().begin_capture(s), Errc::invalid_argument));
      EXPECT_TRUE(refused(gpu().destroy_stream(s), Errc::capture_unsafe));
    }
    must(gpu().memset_async(ptr, 0x07, 64, second));
    const GraphHandle graph = must(gpu().end_capture(second));
    for (const StreamHandle s : {first, second, late}) {
      EXPECT_FALSE(gpu().stream_is_capturing(s));
      EXPECT_TRUE(ok(gpu().synchronize(s)));
    }
    EXPECT_EQ(must(gpu().graph_memory(graph)).size(), 1u) << "what was captured through the other handle is not named";
    EXPECT_TRUE(refused(gpu().free(ptr), Errc::in_use));
    must(gpu().destroy_stream(late));
    must(gpu().destroy_graph(graph));
  }
}

TEST_F(Streams, ANativeStreamThatIsUsedAgainIsNotCaptured) {
  need({foreign_streams, graphs});
  // The wrap of a destroyed stream may name the stream that is made next: the two are then captured together or not at all.
  const StreamHandle gone = stream();
  const StreamHandle stale = must(gpu().wrap_stream(must(gpu().native_stream(gone))));
  must(gpu().destroy_stream(gone));
  const StreamHandle next = stream();
  const bool same = must(gpu().native_stream(next)) == must(gpu().native_stream(stale));
  must(gpu().begin_capture(next));
  EXPECT_EQ(refused(gpu().synchronize(stale), Errc::capture_unsafe), same);
  must(gpu().destroy_graph(must(gpu().end_capture(next))));
  must(gpu().destroy_stream(stale));
  EXPECT_TRUE(ok(gpu().synchronize(next)));
}

TEST_F(Streams, TheDefaultStreamIsNotCapturedThroughAWrap) {
  need({foreign_streams, events, graphs});
  const StreamHandle wrapped = must(gpu().wrap_stream(must(gpu().native_stream(gpu().default_stream()))));
  EXPECT_TRUE(refused(gpu().begin_capture(wrapped), Errc::invalid_argument, {"default stream"}));
  const StreamHandle s = stream();
  const EventHandle inside = event();
  must(gpu().begin_capture(s));
  must(gpu().record_event(inside, s));
  EXPECT_TRUE(refused(gpu().stream_wait_event(wrapped, inside), Errc::invalid_argument, {"default stream"}));
  must(gpu().destroy_graph(must(gpu().end_capture(s))));
  EXPECT_TRUE(ok(gpu().destroy_stream(wrapped))) << "the handle is ours to give back, the stream is not";
  EXPECT_TRUE(ok(gpu().synchronize(gpu().default_stream())));
}

TEST_F(Streams, WrapRefusesStreamZero) {
  need({foreign_streams});
  EXPECT_TRUE(refused(gpu().wrap_stream(0), Errc::invalid_argument));
}

// ---- handles ----

TEST_F(Streams, StreamZeroIsRefusedByEveryCall) {
  const StreamHandle null;
  const auto& caps = gpu().capabilities();
  EXPECT_TRUE(refused(gpu().synchronize(null), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().synchronize_for(null, milliseconds(1)), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().query(null), Errc::invalid_argument));
  if (caps.has(memory) && caps.has(copies)) {
    const DevicePtr a = block(64);
    std::vector<std::byte> host(64);
    const CopyDesc copy{.dst = a, .src = a, .bytes = 8};
    EXPECT_TRUE(refused(gpu().memset_async(a, 0, 64, null), Errc::invalid_argument));
    EXPECT_TRUE(refused(gpu().copy_d2h_on_stream(host, a, null), Errc::invalid_argument));
    EXPECT_TRUE(refused(gpu().copy_h2d_async(a, host, null), Errc::invalid_argument));
    EXPECT_TRUE(refused(gpu().copy_h2d_async_retained(a, host, null), Errc::invalid_argument));
    EXPECT_TRUE(refused(gpu().copy_d2h_async(host, a, null), Errc::invalid_argument));
    EXPECT_TRUE(refused(gpu().copy_d2d_async(a, a, 8, null), Errc::invalid_argument));
    EXPECT_TRUE(refused(gpu().copy_d2d_2d_async({a, a, 8, 8, 8, 1}, null), Errc::invalid_argument));
    EXPECT_TRUE(refused(gpu().copy_batch_async({&copy, 1}, null), Errc::invalid_argument));
    if (caps.has(peer_copies)) {
      auto other = make();
      const DevicePtr theirs = must(other->alloc(64));
      EXPECT_TRUE(refused(gpu().copy_peer_async(a, *other, theirs, 8, null), Errc::invalid_argument));
    }
  }
  if (caps.has(pooled_memory)) {
    EXPECT_TRUE(refused(gpu().alloc_async(64, null), Errc::invalid_argument));
    const DevicePtr pooled = must(gpu().alloc_async(64, gpu().default_stream()));
    EXPECT_TRUE(refused(gpu().free_async(pooled, null), Errc::invalid_argument));
  }
  if (caps.has(host_callbacks)) {
    EXPECT_TRUE(refused(gpu().enqueue_host(null, [] {}), Errc::invalid_argument));
  }
  if (caps.has(events)) {
    const EventHandle e = event();
    EXPECT_TRUE(refused(gpu().record_event(e, null), Errc::invalid_argument));
    EXPECT_TRUE(refused(gpu().stream_wait_event(null, e), Errc::invalid_argument));
  }
  if (caps.has(graphs)) {
    EXPECT_TRUE(refused(gpu().begin_capture(null), Errc::invalid_argument));
    EXPECT_TRUE(refused(gpu().end_capture(null), Errc::invalid_argument));
  }
}

}  // namespace
}  // namespace metrale::conformance
