// SPDX-License-Identifier: Apache-2.0
//
// The CUTLASS bridge on a device, against products in float64 and packing on the host.
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "gpu/cutlass_case.h"
#include "gpu/gpu_fixture.h"
#include "metrale/bridges/cutlass.h"
#include "metrale/bridges/nvfp4.h"
#include "metrale/device_buffer.h"
#include "metrale/graph.h"
#include "metrale/op_cache.h"
#include "metrale/stream.h"

namespace metrale::test {
namespace {

using cutlass::Bridge;
using Shape = CutlassShape;
using Case = CutlassCase;

class CutlassOnDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    METRALE_NEEDS_DEVICE();
    if (!cutlass::status().is_available) GTEST_SKIP() << cutlass::status().text;
    if (device_name() != "cuda") GTEST_SKIP() << "CUTLASS runs on CUDA alone";
    backend = must(open_device());
    bridge = must(Bridge::create(*backend));
    stream = must(Stream::create(*backend));
  }
  void TearDown() override {
    if (!backend) return;
    stream = {};
    bridge.reset();
    must(backend->op_cache().release(*backend));
    EXPECT_EQ(backend->live_bytes(), 0U) << backend->alloc_report();
  }
  void needs_hopper() {
    if (bridge && bridge->kernels() != "sm_90a") GTEST_SKIP() << "the device uses the kernels for every chip";
  }

  std::unique_ptr<GpuBackend> backend;
  std::unique_ptr<Bridge> bridge;
  Stream stream;
};

std::string name_of(const Shape& s) {
  std::int64_t rows = 0;
  for (const std::int32_t count : s.counts) rows += count;
  return fmt::format("{}, {} experts, {} rows of {}, n {}, k {}", cutlass::to_string(s.precision), s.counts.size(), rows, s.tokens,
                     s.n, s.k);
}

// The smallest; ragged in each dimension; one tile and a row more; more tiles than processors; padded rows.
const std::vector<Shape> kDenseShapes{{.counts = {1}, .n = 8, .k = 16},
                                      {.counts = {7}, .n = 72, .k = 48, .act_pad = 16, .out_pad = 24, .alpha = 0.5F},
                                      {.counts = {129}, .n = 264, .k = 208},
                                      {.counts = {300}, .n = 520, .k = 1040, .out_pad = 8},
                                      {.counts = {1100}, .n = 4104, .k = 80}};

TEST_F(CutlassOnDevice, DenseProductsAreThoseOfFloat64) {
  for (const Precision precision : {Precision::bf16, Precision::fp8_block}) {
    if (precision == Precision::fp8_block && bridge->kernels() != "sm_90a") continue;
    for (Shape shape : kDenseShapes) {
      shape.precision = precision;
      Case data(*backend, shape, 11);
      must(bridge->dense(data.dense(), stream.handle()));
      data.expect_right(stream.handle(), name_of(shape));
    }
  }
}

TEST_F(CutlassOnDevice, TheKernelForEveryChipGivesDenseProductsOfFloat64) {
  auto common = Bridge::create(*backend, {.common_kernels = true});
  if (!common) GTEST_SKIP() << common.error().to_string();
  EXPECT_EQ((*common)->kernels(), "common");
  for (const Shape& shape : kDenseShapes) {
    Case data(*backend, shape, 12);
    must((*common)->dense(data.dense(), stream.handle()));
    data.expect_right(stream.handle(), name_of(shape));
  }
  Case fp8(*backend, {.precision = Precision::fp8_block, .counts = {4}, .n = 8, .k = 16}, 1);
  EXPECT_EQ((*common)->dense(fp8.dense(), stream.handle()).error().code(), Errc::unsupported);
  EXPECT_EQ((*common)->grouped(fp8.grouped(), stream.handle()).error().code(), Errc::unsupported);
}

std::vector<Shape> grouped_shapes() {
  std::vector<std::int32_t> many(150);
  for (std::size_t i = 0; i < many.size(); ++i) many[i] = static_cast<std::int32_t>(i * 7 % 11);
  return {{.counts = {5}, .n = 8, .k = 16},
          {.counts = {0, 0, 3, 0}, .n = 72, .k = 48, .tokens = 2},
          {.counts = {64, 65, 0, 127, 128, 129, 1},
           .n = 200,
           .k = 336,
           .tokens = 90,
           .act_pad = 16,
           .out_pad = 8,
           .spare_rows = 9,
           .alpha = 2},
          {.counts = {300, 0, 17}, .n = 264, .k = 128},
          {.counts = many, .n = 264, .k = 144, .tokens = 33},
          {.counts = {0, 0, 0}, .n = 64, .k = 64, .spare_rows = 4}};
}

TEST_F(CutlassOnDevice, GroupedProductsAreThoseOfFloat64) {
  needs_hopper();
  for (const Precision precision : {Precision::bf16, Precision::fp8_block}) {
    for (Shape shape : grouped_shapes()) {
      shape.precision = precision;
      Case data(*backend, shape, 21);
      must(bridge->grouped(data.grouped(), stream.handle()));
      data.expect_right(stream.handle(), name_of(shape));
      data.poison();
      GroupedCall call = data.grouped();
      call.offsets = {};
      call.host_offsets = data.offsets();
      must(bridge->grouped(call, stream.handle()));
      data.expect_right(stream.handle(), name_of(shape) + ", host offsets");
    }
  }
}

TEST_F(CutlassOnDevice, HostileOffsetsOnTheDeviceWriteNothingOutsideTheOutput) {
  needs_hopper();
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min();
  Case data(*backend, {.counts = {40, 40, 40, 40}, .n = 136, .k = 64, .tokens = 20, .out_pad = 8}, 31);
  for (const std::vector<std::int32_t>& offsets : {std::vector<std::int32_t>{5, -3, 100'000, 7, kMost},
                                                   {kMost, kMost, kMost, kMost, kMost},
                                                   {kLeast, 50, kLeast, kMost, 0},
                                                   {-1, -1, -1, -1, -1},
                                                   {160, 0, 0, 0, 0}}) {
    data.poison();
    data.set_offsets(offsets);
    must(bridge->grouped(data.grouped(), stream.handle()));
    data.expect_right(stream.handle(), "hostile offsets");
  }
}

TEST_F(CutlassOnDevice, TokensThatDoNotExistReadAsZeros) {
  needs_hopper();
  for (const Precision precision : {Precision::bf16, Precision::fp8_block}) {
    Case data(*backend, {.precision = precision, .counts = {30, 100}, .n = 64, .k = 96, .tokens = 20}, 32);
    std::vector<std::int32_t> index(data.rows());
    for (std::size_t i = 0; i < index.size(); ++i) {
      constexpr std::array<std::int32_t, 5> kTokens{3, -1, 20, std::numeric_limits<std::int32_t>::max(),
                                                    std::numeric_limits<std::int32_t>::min()};
      index[i] = kTokens[i % kTokens.size()];
    }
    data.set_index(index);
    must(bridge->grouped(data.grouped(), stream.handle()));
    data.expect_right(stream.handle(), "tokens that do not exist");
  }
}

TEST_F(CutlassOnDevice, OperandsOutsideTheirMemoryAreRefused) {
  Case data(*backend, {.counts = {16}, .n = 64, .k = 64}, 33);
  DenseCall call = data.dense();
  call.m = 17;
  EXPECT_EQ(bridge->dense(call, stream.handle()).error().code(), Errc::out_of_range);
  must(backend->synchronize(stream.handle()));
}

TEST_F(CutlassOnDevice, AGraphReplaysWithTheOffsetsOfTheMoment) {
  needs_hopper();
  Case data(*backend, {.counts = {40, 0, 200, 16}, .n = 264, .k = 128, .tokens = 70}, 41);
  Case fixed(*backend, {.precision = Precision::fp8_block, .counts = {9, 70}, .n = 64, .k = 128}, 42);
  Case dense(*backend, {.counts = {33}, .n = 72, .k = 80}, 43);
  GroupedCall from_host = fixed.grouped();
  from_host.offsets = {};
  from_host.host_offsets = fixed.offsets();
  {
    CaptureScope capture = must(CaptureScope::begin(*backend, stream.handle()));
    EXPECT_EQ(bridge->grouped(data.grouped(), stream.handle()).error().code(), Errc::capture_unsafe) << "there is no scratch yet";
    must(capture.abort());
  }
  must(bridge->prepare(stream.handle()));
  CaptureScope capture = must(CaptureScope::begin(*backend, stream.handle()));
  must(bridge->grouped(data.grouped(), stream.handle()));
  must(bridge->grouped(from_host, stream.handle()));
  must(bridge->dense(dense.dense(), stream.handle()));
  Graph graph = must(capture.end());
  for (const std::vector<std::int32_t>& offsets :
       {std::vector<std::int32_t>{0, 40, 40, 240, 256}, {0, 0, 256, 256, 256}, {0, 100, 101, 102, 103}}) {
    for (Case* one : {&data, &fixed, &dense}) one->poison();
    data.set_offsets(offsets);
    must(graph.launch(stream.handle()));
    data.expect_right(stream.handle(), "replayed");
    fixed.expect_right(stream.handle(), "replayed, offsets of the host");
    dense.expect_right(stream.handle(), "replayed, dense");
  }
}

TEST_F(CutlassOnDevice, Nvfp4HasTheBitsOfTheHost) {
  std::mt19937 random(61);
  std::normal_distribution<float> normal(0, 1);
  for (const auto& [rows, cols] : {std::pair<std::uint32_t, std::uint32_t>{1, 16}, {130, 80}, {257, 1040}}) {
    std::vector<float> values(std::size_t{rows} * cols);
    std::vector<std::uint16_t> plain(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      // Groups of all sizes, down to scales that are below the least and to zeros.
      plain[i] = to_bf16(std::ldexp(normal(random), -static_cast<int>(i / 16 % 24)) * (i / 16 % 7 == 3 ? 0.0F : 1.0F));
      values[i] = from_bf16(plain[i]);
    }
    const auto want = must(cutlass::pack_nvfp4(values, rows, cols));
    const DeviceBuffer plain_memory = must(DeviceBuffer::create(*backend, plain.size() * 2));
    const DeviceBuffer values_memory = must(DeviceBuffer::create(*backend, want.values.size()));
    for (const bool tiled : {false, true}) {
      const auto want_scales = tiled ? must(cutlass::tile_nvfp4_scales(want.scales, rows, cols)) : want.scales;
      const DeviceBuffer scales_memory = must(DeviceBuffer::create(*backend, want_scales.size()));
      must(backend->memset(values_memory.ptr(), 0xFF, values_memory.size_bytes()));
      must(backend->memset(scales_memory.ptr(), 0xFF, scales_memory.size_bytes()));
      must(backend->copy_h2d(plain_memory.ptr(), std::as_bytes(std::span(plain))));
      const cutlass::Nvfp4Call call{.rows = rows,
                                    .cols = cols,
                                    .plain = plain_memory.ptr(),
                                    .values = values_memory.ptr(),
                                    .scales = scales_memory.ptr(),
                                    .tiled_scales = tiled,
                                    .alpha = want.alpha};
      must(bridge->pack(call, stream.handle()));
      std::vector<std::uint8_t> got_values(want.values.size());
      std::vector<std::uint8_t> got_scales(want_scales.size());
      must(backend->copy_d2h_on_stream(std::as_writable_bytes(std::span(got_values)), values_memory.ptr(), stream.handle()));
      must(backend->copy_d2h_on_stream(std::as_writable_bytes(std::span(got_scales)), scales_memory.ptr(), stream.handle()));
      EXPECT_TRUE(got_values == want.values) << rows << " by " << cols;
      EXPECT_TRUE(got_scales == want_scales) << rows << " by " << cols << (tiled ? ", tiled" : "");
      must(backend->memset(plain_memory.ptr(), 0xFF, plain_memory.size_bytes()));
      must(bridge->unpack(call, stream.handle()));
      std::vector<std::uint16_t> back(plain.size());
      must(backend->copy_d2h_on_stream(std::as_writable_bytes(std::span(back)), plain_memory.ptr(), stream.handle()));
      const auto want_back = must(cutlass::unpack_nvfp4(want));
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < back.size(); ++i) wrong += back[i] != to_bf16(want_back[i]);
      EXPECT_EQ(wrong, 0U) << rows << " by " << cols;
    }
  }
}

TEST_F(CutlassOnDevice, Nvfp4ProductsAreUnsupportedOnHopperWithTheReason) {
  needs_hopper();
  const DeviceBuffer memory = must(DeviceBuffer::create(*backend, 1U << 20));
  const auto at = [&](std::uint64_t bytes) { return memory.ptr().offset(bytes); };
  const auto answer = bridge->dense_nvfp4({.m = 8,
                                           .n = 64,
                                           .k = 64,
                                           .act = at(0),
                                           .act_scales = at(0x10000),
                                           .weight = at(0x20000),
                                           .weight_scales = at(0x30000),
                                           .out = at(0x40000)},
                                          stream.handle());
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), Errc::unsupported);
  EXPECT_NE(answer.error().message().find("compute capability 9.0"), std::string::npos) << answer.error().message();
}

TEST_F(CutlassOnDevice, TwoStreamsAtOnceDoNotDisturbEachOther) {
  needs_hopper();
  const Stream other = must(Stream::create(*backend));
  Case first(*backend, {.counts = {300, 20, 90}, .n = 264, .k = 512, .tokens = 100}, 51);
  Case second(*backend, {.precision = Precision::fp8_block, .counts = {7, 260}, .n = 264, .k = 512, .tokens = 60}, 52);
  const auto run = [&](const Case& data, const Stream& on) {
    for (int i = 0; i < 200; ++i) must(bridge->grouped(data.grouped(), on.handle()));
  };
  std::thread beside([&] { run(second, other); });
  run(first, stream);
  beside.join();
  first.expect_right(stream.handle(), "first stream");
  second.expect_right(other.handle(), "second stream");
}

}  // namespace
}  // namespace metrale::test
