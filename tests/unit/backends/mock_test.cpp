// SPDX-License-Identifier: Apache-2.0
#include "metrale/backends/mock.h"

#include <algorithm>
#include <array>

#include "support.h"

namespace metrale::test {
namespace {

using mock::kBaseAddress;
using mock::kFillByte;

class Mock : public testing::Test {
 protected:
  std::uint64_t native(StreamHandle stream) { return take(b_->native_stream(stream)); }
  std::unique_ptr<GpuBackend> b_ = take(mock::create());
  mock::MockControl& c_ = mock::control(*b_);
  StreamHandle s_ = take(b_->create_stream());
  StreamHandle other_ = take(b_->create_stream());
};

// ---- memory ----

TEST_F(Mock, AddressesAreFakeAlignedFilledAndNeverReused) {
  const DevicePtr a = take(b_->alloc(100));
  EXPECT_GE(a.address, kBaseAddress);
  EXPECT_LT(a.address, kBaseAddress + (1 << 20));
  EXPECT_EQ(a.address % kDeviceAlignment, 0u);
  std::array<std::byte, 100> bytes{};
  take(b_->copy_d2h(bytes, a));
  EXPECT_TRUE(std::all_of(bytes.begin(), bytes.end(), [](std::byte v) { return v == std::byte{kFillByte}; }));
  take(b_->free(a));
  EXPECT_GT(take(b_->alloc(100)).address, a.address);
}

TEST_F(Mock, InteriorAddressesResolve) {
  const DevicePtr a = take(b_->alloc(64));
  const std::vector<std::uint32_t> words{1, 2};
  take(b_->copy_h2d(a.offset(8), bytes_of(words)));
  EXPECT_EQ(read_words(*b_, a.offset(12), 1, s_)[0], 2u);
  EXPECT_EQ(c_.host_view(a.offset(12)), c_.host_view(a) + 12);
  take(b_->free(a));
  EXPECT_EQ(c_.host_view(a), nullptr);
}

TEST_F(Mock, AStaleAddressIsFoundOutEvenWithoutTheFacesCheck) {
  mock::Options options;
  options.face.unchecked_copies = true;
  auto b = take(mock::create(options));
  const DevicePtr a = take(b->alloc(64));
  take(b->free(a));
  EXPECT_ERRC(b->memset(a, 0, 4), Errc::out_of_range);
  const DevicePtr c = take(b->alloc(64));
  EXPECT_ERRC(b->memset(c, 0, 65), Errc::out_of_range);
}

TEST_F(Mock, HugeAllocationsCostNothing) {
  const DevicePtr huge = take(b_->alloc(std::uint64_t{64} << 30));
  EXPECT_EQ(take(b_->device_free_memory()), std::uint64_t{56} << 30);
  EXPECT_ERRC(b_->alloc(std::uint64_t{60} << 30), Errc::out_of_memory);
  EXPECT_OK(b_->free(huge));
}

TEST_F(Mock, MemoryFiguresAndLimitsCanBeSet) {
  c_.set_memory(1000, 900);
  EXPECT_EQ(take(b_->total_memory()), 1000u);
  take(b_->alloc(100));
  EXPECT_EQ(take(b_->free_memory()), 800u);
  c_.set_integrated(5000);
  EXPECT_EQ(take(b_->free_memory()), 5000u);
  EXPECT_EQ(take(b_->device_free_memory()), 800u);
  c_.set_max_allocation_bytes(50);
  EXPECT_ERRC(b_->alloc(51), Errc::out_of_memory);
  EXPECT_OK(b_->alloc(50));
  c_.set_max_allocation_bytes(std::nullopt);
  EXPECT_OK(b_->alloc(51));
}

TEST_F(Mock, TheAliasOfPinnedMemoryIsADeviceAddress) {
  const std::span<std::byte> pinned = take(b_->alloc_host_pinned(64));
  const DevicePtr alias = take(b_->host_ptr_to_device(pinned.data() + 4));
  EXPECT_NE(alias.address, reinterpret_cast<std::uintptr_t>(pinned.data() + 4));
  take(b_->memset(alias, 7, 4));
  EXPECT_EQ(pinned[4], std::byte{7});
  EXPECT_EQ(c_.counts().pinned_allocs, 1u);
  take(b_->free_host_pinned(pinned.data(), pinned.size()));
  EXPECT_EQ(c_.host_view(alias), nullptr);
}

// ---- records and counts ----

TEST_F(Mock, RecordsLaunchesWithOwnedArguments) {
  const KernelHandle kernel = take(b_->kernel("m", "f"));
  const DevicePtr buffer = take(b_->alloc(16));
  {
    std::array<std::uint64_t, 16> wide{};
    wide[15] = 9;
    const KernelArg args[] = {KernelArg::buffer(buffer.offset(8)), KernelArg::value(std::uint32_t{5}),
                              KernelArg::bytes(std::as_bytes(std::span(wide)))};
    LaunchAttributes attributes;
    attributes.cooperative = true;
    take(b_->launch_typed(kernel, {2, 3, 4}, {5, 6, 7}, 8, s_, args, attributes));
  }
  const auto launches = c_.launches();
  ASSERT_EQ(launches.size(), 1u);
  const mock::LaunchRecord& launch = launches[0];
  EXPECT_EQ(launch.module, "m");
  EXPECT_EQ(launch.function, "f");
  EXPECT_EQ(launch.grid, (Dim3{2, 3, 4}));
  EXPECT_EQ(launch.block, (Dim3{5, 6, 7}));
  EXPECT_EQ(launch.shared_bytes, 8u);
  EXPECT_EQ(launch.stream.value, native(s_));
  EXPECT_TRUE(launch.attributes.cooperative);
  ASSERT_EQ(launch.args.size(), 3u);
  EXPECT_TRUE(launch.args[0].is_buffer);
  EXPECT_EQ(launch.args[0].ptr, buffer.offset(8));
  EXPECT_FALSE(launch.args[1].is_buffer);
  EXPECT_EQ(launch.args[1].as<std::uint32_t>(), 5u);
  ASSERT_EQ(launch.args[2].bytes.size(), 128u);
  EXPECT_EQ((launch.args[2].as<std::array<std::uint64_t, 16>>()[15]), 9u);
}

TEST_F(Mock, RecordsRawLaunchesByTheKernelsFacts) {
  c_.set_kernel_facts("m", "f", {.param_bytes = {4, 8}});
  const KernelHandle kernel = take(b_->kernel("m", "f"));
  std::uint32_t a = 1;
  std::uint64_t c = 2;
  void* params[] = {&a, &c};
  take(b_->launch(kernel, {}, {}, 0, s_, params));
  const auto launches = c_.launches();
  ASSERT_EQ(launches.size(), 1u);
  EXPECT_TRUE(launches[0].raw);
  ASSERT_EQ(launches[0].args.size(), 2u);
  EXPECT_EQ(launches[0].args[1].as<std::uint64_t>(), 2u);
}

TEST_F(Mock, CountsAGatherAsCopiesAndOneSync) {
  constexpr int kChunks = 7;
  const DevicePtr src = take(b_->alloc(kChunks * 16));
  std::vector<std::uint32_t> dst(kChunks * 4);
  c_.reset();
  for (int i = 0; i < kChunks; ++i) {
    take(b_->copy_d2h_async(bytes_of(dst).subspan(i * 16, 16), src.offset(i * 16), i % 2 == 0 ? s_ : other_));
  }
  take(b_->synchronize(s_));
  EXPECT_EQ(c_.counts().d2h_async, 7u);
  EXPECT_EQ(c_.counts().d2h_blocking, 0u);
  EXPECT_EQ(c_.counts().syncs, 1u);
  const auto syncs = c_.syncs();
  ASSERT_EQ(syncs.size(), 1u);
  EXPECT_EQ(syncs[0].stream.value, native(s_));
  EXPECT_EQ(syncs[0].num_d2h_async, 7u);
  const auto streams = c_.streams_of(Op::copy_d2h_async);
  ASSERT_EQ(streams.size(), 7u);
  EXPECT_EQ(streams[0].value, native(s_));
  EXPECT_EQ(streams[1].value, native(other_));
}

TEST_F(Mock, CountsEachKindOfCopy) {
  const DevicePtr a = take(b_->alloc(64));
  const DevicePtr b = take(b_->alloc(64));
  std::vector<std::uint32_t> words(4);
  c_.reset();
  take(b_->copy_h2d(a, bytes_of(std::as_const(words))));
  take(b_->copy_h2d_async(a, bytes_of(std::as_const(words)), s_));
  take(b_->copy_d2h(bytes_of(words), a));
  take(b_->copy_d2h_on_stream(bytes_of(words), a, s_));
  take(b_->copy_d2d(b, a, 16));
  take(b_->copy_d2d_async(b, a, 16, s_));
  take(b_->copy_d2d_2d_async({b, a, 16, 16, 8, 4}, s_));
  const mock::Counts counts = c_.counts();
  EXPECT_EQ(counts.h2d, 2u);
  EXPECT_EQ(counts.h2d_bytes, 32u);
  EXPECT_EQ(counts.d2h_blocking, 2u);
  EXPECT_EQ(counts.d2h_async, 0u);
  EXPECT_EQ(counts.d2d, 2u);
  EXPECT_EQ(counts.copies_2d, 1u);
  EXPECT_EQ(counts.hook_calls, 7u);
  EXPECT_EQ(c_.calls().size(), 7u);
  EXPECT_EQ(c_.calls()[4].dst, b.address);
  EXPECT_EQ(c_.calls()[4].src, a.address);
}

TEST_F(Mock, LogsRecordWaitAndDestroyInOrder) {
  const EventHandle event = take(b_->create_event());
  c_.reset();
  take(b_->record_event(event, s_));
  take(b_->stream_wait_event(other_, event));
  take(b_->destroy_event(event));
  const auto calls = c_.calls();
  ASSERT_EQ(calls.size(), 3u);
  EXPECT_EQ(calls[0].op, Op::record_event);
  EXPECT_EQ(calls[0].stream.value, native(s_));
  EXPECT_EQ(calls[1].op, Op::stream_wait_event);
  EXPECT_EQ(calls[1].stream.value, native(other_));
  EXPECT_EQ(calls[1].event, calls[0].event);
  EXPECT_EQ(calls[2].op, Op::destroy_event);
}

TEST_F(Mock, WithoutRecordingItOnlyCounts) {
  const KernelHandle kernel = take(b_->kernel("m", "f"));
  c_.reset();
  c_.set_recording(false);
  take(b_->launch_typed(kernel, {}, {}, 0, s_, {}));
  take(b_->synchronize(s_));
  EXPECT_EQ(c_.counts().launches, 1u);
  EXPECT_EQ(c_.counts().syncs, 1u);
  EXPECT_TRUE(c_.launches().empty());
  EXPECT_TRUE(c_.calls().empty());
  EXPECT_TRUE(c_.syncs().empty());
}

TEST_F(Mock, AGraphReplaysCopiesFillsFunctionsAndLaunchRecords) {
  const KernelHandle kernel = take(b_->kernel("m", "f"));
  const DevicePtr a = take(b_->alloc(16));
  const DevicePtr b = take(b_->alloc(16));
  int ran = 0;
  take(b_->begin_capture(s_));
  take(b_->memset_async(a, 3, 16, s_));
  take(b_->copy_d2d_async(b, a, 16, s_));
  take(b_->launch_typed(kernel, {9}, {}, 0, s_, {}));
  take(b_->enqueue_host(s_, [&] { ++ran; }));
  const GraphHandle graph = take(b_->end_capture(s_));
  EXPECT_TRUE(c_.launches().empty());
  for (int i = 0; i < 2; ++i) {
    take(b_->memset(b, 0, 16));
    take(b_->launch_graph(graph, other_));
    EXPECT_EQ(read_words(*b_, b, 1, other_)[0], 0x0303'0303u);
  }
  EXPECT_EQ(ran, 2);
  const auto launches = c_.launches();
  ASSERT_EQ(launches.size(), 2u);
  EXPECT_TRUE(launches[0].replayed);
  EXPECT_EQ(launches[0].grid, Dim3{9});
}

TEST_F(Mock, StreamsRunIndependently) {
  std::promise<void> ready;
  take(b_->enqueue_host(s_, [done = ready.get_future().share()] { done.wait(); }));
  EXPECT_FALSE(take(b_->query(s_)));
  take(b_->enqueue_host(other_, [&] { ready.set_value(); }));
  EXPECT_OK(b_->synchronize(other_));
  EXPECT_OK(b_->synchronize(s_));
}

// ---- kernels ----

TEST_F(Mock, KernelsResolveToHandlesOfTheirOwnUnlessDenied) {
  c_.mark_module_absent("gone");
  c_.deny_kernel("m", "denied");
  c_.reset();
  const KernelHandle f = take(b_->kernel("m", "f"));
  const KernelHandle g = take(b_->kernel("m", "g"));
  EXPECT_NE(f, g);
  EXPECT_ERRC(b_->kernel("m", "denied"), Errc::not_found);
  EXPECT_ERRC(b_->kernel("gone", "f"), Errc::not_found);
  EXPECT_TRUE(take(b_->has_module("m")));
  EXPECT_FALSE(take(b_->has_module("gone")));
  const auto lookups = c_.lookups();
  ASSERT_EQ(lookups.size(), 4u);
  EXPECT_EQ(lookups[1].function, "g");
  EXPECT_TRUE(lookups[1].found);
  EXPECT_EQ(lookups[2].function, "denied");
  EXPECT_FALSE(lookups[2].found);
  EXPECT_EQ(b_->kernel_registry(), nullptr);
}

TEST_F(Mock, PublishesTheFactsItWasGiven) {
  c_.set_kernel_facts("m", "f", {.param_bytes = {8}, .n_tile = 64, .casts_a_to_e4m3 = true, .waits_for_dependency = false});
  const KernelHandle kernel = take(b_->kernel("m", "f"));
  EXPECT_EQ(take(b_->kernel_n_tile(kernel)), 64u);
  EXPECT_TRUE(take(b_->kernel_casts_a_to_e4m3(kernel)));
  EXPECT_ERRC(b_->launch_typed(kernel, {}, {}, 0, s_, {}), Errc::invalid_argument);  // one argument is missing
  EXPECT_EQ(c_.counts().launches, 0u);
}

// ---- failures ----

TEST_F(Mock, FailsTheNthCallOfAKindAndNoOther) {
  c_.fail_nth(Op::alloc, 2, Errc::io);
  EXPECT_OK(b_->alloc(16));
  EXPECT_OK(b_->synchronize(s_));
  const std::uint64_t before = b_->live_bytes();
  EXPECT_ERRC(b_->alloc(16), Errc::io);
  EXPECT_EQ(b_->live_bytes(), before);
  EXPECT_OK(b_->alloc(16));
}

TEST_F(Mock, ClearedFailuresNeverHappen) {
  c_.fail_nth(Op::synchronize, 1);
  c_.fail_any_nth(1);
  c_.clear_failures();
  EXPECT_OK(b_->synchronize(s_));
}

TEST_F(Mock, EveryHookOfASequenceCanBeMadeToFail) {
  const auto sequence = [](GpuBackend& b) -> Result<> {
    const StreamHandle s = METRALE_TRY(b.create_stream());
    const EventHandle e = METRALE_TRY(b.create_event());
    const DevicePtr p = METRALE_TRY(b.alloc(64));
    METRALE_TRY(b.memset_async(p, 1, 64, s));
    METRALE_TRY(b.record_event(e, s));
    METRALE_TRY(b.stream_wait_event(b.default_stream(), e));
    const KernelHandle k = METRALE_TRY(b.kernel("m", "f"));
    METRALE_TRY(b.launch_typed(k, {}, {}, 0, s, {}));
    METRALE_TRY(b.synchronize(s));
    METRALE_TRY(b.free(p));
    METRALE_TRY(b.destroy_event(e));
    return b.destroy_stream(s);
  };
  c_.reset();
  ASSERT_OK(sequence(*b_));
  const std::uint64_t num_hooks = c_.counts().hook_calls;
  EXPECT_GE(num_hooks, 12u);
  for (std::uint64_t n = 1; n <= num_hooks; ++n) {
    auto b = take(mock::create());
    mock::control(*b).fail_any_nth(n, Errc::busy);
    EXPECT_ERRC(sequence(*b), Errc::busy);
    mock::control(*b).clear_failures();
  }
}

TEST_F(Mock, ALostDeviceStaysLost) {
  c_.lose_device("it caught fire");
  const auto lost = b_->alloc(16);
  ASSERT_FALSE(lost.has_value());
  EXPECT_EQ(lost.error().code(), Errc::device_lost);
  EXPECT_NE(lost.error().message().find("it caught fire"), std::string::npos);
  EXPECT_ERRC(b_->synchronize(s_), Errc::device_lost);
  EXPECT_ERRC(b_->health(), Errc::device_lost);
  EXPECT_OK(take(mock::create())->health());
}

TEST_F(Mock, LacksWhatItWasToldToLack) {
  mock::Options options;
  options.without = {Capability::graphs};
  auto b = take(mock::create(options));
  EXPECT_FALSE(b->capabilities().has(Capability::graphs));
  EXPECT_FALSE(b->capabilities().has(Capability::computes));
  EXPECT_ERRC(b->begin_capture(take(b->create_stream())), Errc::unsupported);
}

// ---- held-back work ----

TEST_F(Mock, DeferredCopiesHappenAtTheNextSynchronisation) {
  const DevicePtr a = take(b_->alloc(16));
  take(b_->memset(a, 0, 16));
  c_.defer_copies(true);
  std::vector<std::uint32_t> src(4, 1);
  std::vector<std::uint32_t> dst(4, 9);
  take(b_->copy_h2d_async_retained(a, bytes_of(std::as_const(src)), s_));
  take(b_->copy_d2h_async(bytes_of(dst), a, s_));
  EXPECT_EQ(dst[0], 9u);
  std::fill(src.begin(), src.end(), 2);  // too early
  take(b_->synchronize(s_));
  EXPECT_EQ(dst[0], 2u) << "the change of a retained source must show";
}

TEST_F(Mock, ADeferredStagedCopyTookItsSourceDuringTheCall) {
  const DevicePtr a = take(b_->alloc(16));
  c_.defer_copies(true);
  std::vector<std::uint32_t> src(4, 1);
  take(b_->copy_h2d_async(a, bytes_of(std::as_const(src)), s_));
  std::fill(src.begin(), src.end(), 2);
  EXPECT_EQ(read_words(*b_, a, 1, s_)[0], 1u);
}

TEST_F(Mock, SynchronizingAnotherStreamDoesNotRunDeferredWork) {
  const DevicePtr a = take(b_->alloc(16));
  take(b_->memset(a, 0, 16));
  c_.defer_copies(true);
  take(b_->memset_async(a, 1, 16, s_));
  take(b_->synchronize(other_));
  EXPECT_EQ(*c_.host_view(a), std::byte{0});
  take(b_->synchronize(s_));
  EXPECT_EQ(*c_.host_view(a), std::byte{1});
}

TEST_F(Mock, AnEventWaitOrdersDeferredWork) {
  const DevicePtr a = take(b_->alloc(16));
  const EventHandle event = take(b_->create_event());
  c_.defer_copies(true);
  take(b_->memset_async(a, 1, 16, s_));
  take(b_->record_event(event, s_));
  take(b_->memset_async(a, 2, 16, s_));  // behind the mark: stays
  take(b_->stream_wait_event(other_, event));
  std::vector<std::uint32_t> seen(1);
  take(b_->copy_d2h_async(bytes_of(seen), a, other_));
  take(b_->synchronize(other_));
  EXPECT_EQ(seen[0], 0x0101'0101u);
  take(b_->synchronize(s_));
  EXPECT_EQ(*c_.host_view(a), std::byte{2});
}

TEST_F(Mock, PollingADeferredStreamComesToAnEnd) {
  const DevicePtr a = take(b_->alloc(16));
  const EventHandle event = take(b_->create_event());
  c_.defer_copies(true);
  take(b_->memset_async(a, 1, 16, s_));
  take(b_->record_event(event, s_));
  take(b_->memset_async(a, 2, 16, other_));
  const auto poll = [](auto&& is_done) {
    for (int i = 0; i < 10'000; ++i) {
      if (take(is_done())) return true;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return false;
  };
  EXPECT_TRUE(poll([&] { return b_->event_query(event); }));
  EXPECT_TRUE(poll([&] { return b_->query(other_); }));
}

TEST_F(Mock, FreedMemoryStaysUntilDeferredWorkHasUsedIt) {
  // Under the address sanitizer a block handed back too early is caught here.
  const DevicePtr a = take(b_->alloc(1 << 16));
  c_.defer_copies(true);
  take(b_->memset_async(a, 1, 1 << 16, s_));
  take(b_->free(a));
  EXPECT_OK(b_->synchronize(s_));
}

TEST_F(Mock, TurnedOffItRunsWorkAtOnceAgain) {
  const DevicePtr a = take(b_->alloc(16));
  c_.defer_copies(true);
  take(b_->memset_async(a, 1, 16, s_));
  c_.defer_copies(false);
  take(b_->memset_async(a, 2, 16, s_));  // lets the earlier one run, in order
  take(b_->synchronize(s_));
  EXPECT_EQ(*c_.host_view(a), std::byte{2});
  take(b_->memset_async(a, 3, 16, s_));
  EXPECT_EQ(*c_.host_view(a), std::byte{3});
}

TEST_F(Mock, DeferredWorkOfADestroyedStreamCompletes) {
  const DevicePtr a = take(b_->alloc(16));
  c_.defer_copies(true);
  take(b_->memset_async(a, 1, 16, s_));
  take(b_->destroy_stream(s_));
  take(b_->synchronize_device());
  EXPECT_EQ(*c_.host_view(a), std::byte{1});
}

TEST_F(Mock, AnAbortToldToFailStillEndsTheCapture) {
  const DevicePtr ptr = take(b_->alloc(64));
  take(b_->memset(ptr, 0, 64));
  take(b_->begin_capture(s_));
  c_.fail_nth(Op::abort_capture, 1);
  EXPECT_FALSE(b_->abort_capture_if_active(s_));
  EXPECT_FALSE(b_->stream_is_capturing(s_));
  take(b_->memset_async(ptr, 9, 64, s_));
  take(b_->synchronize(s_));
  std::array<std::byte, 64> bytes{};
  take(b_->copy_d2h(bytes, ptr));
  EXPECT_EQ(bytes[63], std::byte{9}) << "work went into a capture that nobody can end";
  take(b_->begin_capture(s_));
  take(b_->end_capture(s_));
}

}  // namespace
}  // namespace metrale::test
