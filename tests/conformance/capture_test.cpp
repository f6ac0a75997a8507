// SPDX-License-Identifier: Apache-2.0
//
// Capture: what is recorded, and who may begin and end it. Joining and aborting have files of their own, and so has what is refused
// meanwhile: capture_matrix_test.cpp.
#include <algorithm>
#include <array>
#include <atomic>

#include "conformance/capture_case.h"

namespace metrale::conformance {
namespace {

class Capture : public CaptureCase {};

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
    auto source = sent;
    must(gpu().begin_capture(s));
    must(gpu().copy_h2d_async(ptr, source, s));
    std::fill(source.begin(), source.end(), std::byte{0xDD});
    const GraphHandle graph = must(gpu().end_capture(s));
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
