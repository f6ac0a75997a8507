// SPDX-License-Identifier: Apache-2.0
#include "metrale/observer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <span>
#include <thread>
#include <vector>

namespace metrale {
namespace {

OpRecord record(std::uint64_t n) {
  OpRecord r;
  r.op = Op::copy_d2d_async;
  r.stream = {n};
  r.dst = n;
  r.src = n;
  r.bytes = n;
  r.time_ns = n;
  return r;
}

TEST(OpRecordTest, TextNamesKernelGeometryOutcomeAndSite) {
  OpRecord r;
  r.op = Op::launch;
  r.outcome = static_cast<std::uint8_t>(Errc::invalid_argument);
  r.num_args = 8;
  r.stream = {0x11};
  r.kernel = {0x22};
  r.grid = {4, 2, 1};
  r.block = {128, 1, 1};
  r.shared_bytes = 512;
  r.time_ns = 77;
  r.site = std::source_location::current();
  const std::string text = r.to_string();
  for (const char* part : {"77 ns", "launch", "stream 0x11", "kernel 0x22", "grid 4x2x1", "block 128x1x1", "shared 512", "args 8",
                           "-> invalid_argument", "observer_test.cpp:"}) {
    EXPECT_THAT(text, testing::HasSubstr(part));
  }
}

TEST(OpRecordTest, TextLeavesOutWhatDoesNotApply) {
  OpRecord r;
  r.op = Op::trim;
  EXPECT_THAT(r.to_string(),
              testing::Not(testing::AnyOf(testing::HasSubstr("kernel"), testing::HasSubstr("dst"), testing::HasSubstr("->"))));
}

TEST(FlightRecorderTest, KeepsTheLastRecordsOldestFirst) {
  FlightRecorder recorder;
  EXPECT_TRUE(recorder.snapshot().empty());
  for (std::uint64_t i = 1; i <= 3; ++i) recorder.on_op(record(i));
  ASSERT_EQ(recorder.snapshot().size(), 3u);
  EXPECT_EQ(recorder.snapshot().front().bytes, 1u);

  for (std::uint64_t i = 4; i <= FlightRecorder::kCapacity + 10; ++i) recorder.on_op(record(i));
  const std::vector<OpRecord> kept = recorder.snapshot();
  ASSERT_EQ(kept.size(), FlightRecorder::kCapacity);
  EXPECT_EQ(kept.front().bytes, 11u);
  EXPECT_EQ(kept.back().bytes, FlightRecorder::kCapacity + 10);
  EXPECT_EQ(recorder.num_seen(), FlightRecorder::kCapacity + 10);
  const std::string text = recorder.to_string();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), static_cast<std::ptrdiff_t>(FlightRecorder::kCapacity));
}

TEST(FlightRecorderTest, ALaterRecordShowsNothingOfTheOneItReplaces) {
  FlightRecorder recorder;
  OpRecord launch;
  launch.op = Op::launch;
  launch.num_args = kRecordedArgs;
  launch.kernel = {7};
  launch.grid = launch.block = {1, 2, 3};
  launch.shared_bytes = 4;
  launch.buffer_mask = 5;
  launch.args.fill(9);
  for (std::size_t i = 0; i < FlightRecorder::kCapacity; ++i) recorder.on_op(launch);
  EXPECT_EQ(recorder.snapshot().back().args, launch.args);
  launch.num_args = 1;
  recorder.on_op(launch);
  EXPECT_EQ(recorder.snapshot().back().args[0], 9U);
  EXPECT_EQ(recorder.snapshot().back().args[1], 0U);
  recorder.on_op(record(1));
  const OpRecord copy = recorder.snapshot().back();
  EXPECT_EQ(copy.op, Op::copy_d2d_async);
  EXPECT_EQ(copy.kernel, KernelHandle{});
  EXPECT_EQ(copy.grid.x + copy.block.x + copy.shared_bytes + copy.buffer_mask, 0U);
  EXPECT_EQ(copy.args[0], 0U);
}

TEST(FlightRecorderTest, ALaunchOrReplayFromItsPartsIsTheSameRecord) {
  const std::array<std::uint64_t, 2> large{0x1234, 0x5678};
  const std::array<KernelArg, 10> args{KernelArg::buffer({0xABC}),
                                       KernelArg::value(std::uint32_t{7}),
                                       KernelArg::bytes(std::as_bytes(std::span(large))),
                                       KernelArg::buffer({0xDEF}),
                                       KernelArg::value(std::uint8_t{1}),
                                       KernelArg::value(std::uint64_t{2}),
                                       KernelArg::value(1.0F),
                                       KernelArg::buffer({0x123}),
                                       KernelArg::buffer({0x456}),
                                       KernelArg::value(std::uint32_t{3})};
  const auto site = std::source_location::current();
  for (const std::size_t num_args : {std::size_t{0}, std::size_t{1}, kRecordedArgs, args.size()}) {
    FlightRecorder recorder;
    OpRecord filled;
    filled.args.fill(9);
    filled.dst = filled.src = filled.bytes = 9;  // of which nothing may be seen afterwards
    for (std::size_t i = 0; i < FlightRecorder::kCapacity; ++i) recorder.on_op(filled);
    recorder.fill_launch(recorder.claim(), 77, {0x11}, site, {0x22}, {4, 2, 1}, {128, 3, 5}, 512, std::span(args).first(num_args));
    const OpRecord launch = recorder.snapshot().back();
    EXPECT_EQ(launch.op, Op::launch);
    EXPECT_EQ(launch.outcome, 0U);
    EXPECT_EQ(launch.num_args, num_args);
    EXPECT_EQ(launch.stream, StreamHandle{0x11});
    EXPECT_EQ(launch.dst + launch.src + launch.bytes, 0U);
    EXPECT_EQ(launch.time_ns, 77U);
    EXPECT_EQ(launch.site.line(), site.line());
    EXPECT_EQ(launch.kernel, KernelHandle{0x22});
    EXPECT_EQ(launch.grid, (Dim3{4, 2, 1}));
    EXPECT_EQ(launch.block, (Dim3{128, 3, 5}));
    EXPECT_EQ(launch.shared_bytes, 512U);
    std::uint32_t buffers = 0;
    for (std::size_t i = 0; i < kRecordedArgs; ++i) {
      EXPECT_EQ(launch.args[i], i < num_args ? args[i].leading_word() : 0U) << i;
      if (i < num_args && args[i].is_buffer()) buffers |= 1U << i;
    }
    EXPECT_EQ(launch.buffer_mask, buffers);

    recorder.fill_replay(recorder.claim(), 78, {0x11}, site, {0x33});
    const OpRecord replay = recorder.snapshot().back();
    EXPECT_EQ(replay.op, Op::launch_graph);
    EXPECT_EQ(replay.outcome + replay.num_args, 0U);
    EXPECT_EQ(replay.stream, StreamHandle{0x11});
    EXPECT_EQ(replay.dst, 0x33U);
    EXPECT_EQ(replay.src + replay.bytes, 0U);
    EXPECT_EQ(replay.time_ns, 78U);
    EXPECT_EQ(replay.site.line(), site.line());
    EXPECT_EQ(replay.kernel, KernelHandle{});
  }
}

TEST(FlightRecorderTest, APlaceKeepsItsOrderAndIsEmptyUntilItIsFilled) {
  FlightRecorder recorder;
  const std::uint64_t place = recorder.claim();
  recorder.on_op(record(2));
  ASSERT_EQ(recorder.snapshot().size(), 1U);
  recorder.fill(place, record(1));
  ASSERT_EQ(recorder.snapshot().size(), 2U);
  EXPECT_EQ(recorder.snapshot().front().bytes, 1U);
  EXPECT_EQ(recorder.snapshot().back().bytes, 2U);
}

TEST(FlightRecorderTest, APlaceThatIsNotFilledInTimeCostsOneRecordOnly) {
  FlightRecorder recorder;
  const std::uint64_t place = recorder.claim();
  for (std::uint64_t i = 0; i < FlightRecorder::kCapacity; ++i) recorder.on_op(record(3));
  recorder.fill(place, record(1));  // its turn is over, and it leaves no trace
  for (const OpRecord& kept : recorder.snapshot()) EXPECT_EQ(kept.bytes, 3U);
  for (std::uint64_t i = 0; i < FlightRecorder::kCapacity; ++i) recorder.on_op(record(4));
  EXPECT_EQ(recorder.snapshot().size(), FlightRecorder::kCapacity);
}

TEST(FlightRecorderTest, NoRecordIsTornWhileFourThreadsWrite) {
  FlightRecorder recorder;
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (std::uint64_t t = 1; t <= 4; ++t) {
    writers.emplace_back([&, t] {
      for (std::uint64_t i = 0; !stop.load(std::memory_order_relaxed); ++i) recorder.on_op(record(t + 4 * i));
    });
  }
  std::uint64_t num_read = 0;
  while (num_read < 20'000) {
    for (const OpRecord& r : recorder.snapshot()) {
      ASSERT_TRUE(r.stream.value == r.dst && r.dst == r.src && r.src == r.bytes && r.bytes == r.time_ns);
      ++num_read;
    }
  }
  stop = true;
  for (std::thread& w : writers) w.join();
}

}  // namespace
}  // namespace metrale
