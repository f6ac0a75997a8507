// SPDX-License-Identifier: Apache-2.0
#include "metrale/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "metrale/device_buffer.h"
#include "support/heap_counter.h"
#include "unit/core/two_backends.h"

namespace metrale {
namespace {

using testing::HasSubstr;

struct Params {
  std::uint32_t rows;
  std::uint64_t stride;
  std::uint8_t flag;
};

class LaunchTest : public testing::Test {
 protected:
  std::unique_ptr<GpuBackend> backend_ = test::make_mock();
  mock::MockControl& control_ = mock::control(*backend_);
  KernelHandle kernel_ = *backend_->kernel("norm", "rms");
  StreamHandle stream_ = backend_->default_stream();
};

TEST_F(LaunchTest, ArgumentsArriveInOrderAtTheirTrueWidth) {
  const DeviceBuffer buffer = *DeviceBuffer::create(*backend_, 64);
  std::array<std::byte, kTensorMapBytes> map{};
  for (std::size_t i = 0; i < map.size(); ++i) map[i] = static_cast<std::byte>(i);
  ASSERT_OK(Launch(*backend_, kernel_)
                .grid({4, 3, 2})
                .block({128})
                .shared(1024)
                .arg_ptr(buffer.ptr())
                .arg_tensormap(map)
                .arg_u32(7)
                .arg_i32(-7)
                .arg_u64(1ull << 40)
                .arg_f32(0.5F)
                .arg_struct(Params{1, 2, 3})
                .arg_struct(std::uint16_t{9})
                .launch(stream_));
  const std::vector<mock::LaunchRecord> launches = control_.launches();
  ASSERT_EQ(launches.size(), 1u);
  const mock::LaunchRecord& seen = launches[0];
  EXPECT_EQ(seen.function, "rms");
  EXPECT_EQ(seen.grid, (Dim3{4, 3, 2}));
  EXPECT_EQ(seen.block, (Dim3{128, 1, 1}));
  EXPECT_EQ(seen.shared_bytes, 1024u);
  ASSERT_EQ(seen.args.size(), 8u);
  EXPECT_TRUE(seen.args[0].is_buffer);
  EXPECT_EQ(seen.args[0].ptr, buffer.ptr());
  EXPECT_FALSE(seen.args[1].is_buffer);
  EXPECT_THAT(seen.args[1].bytes, testing::ElementsAreArray(map));
  EXPECT_EQ(seen.args[2].bytes.size(), 4u);
  EXPECT_EQ(seen.args[2].as<std::uint32_t>(), 7u);
  EXPECT_EQ(seen.args[3].bytes.size(), 4u);
  EXPECT_EQ(seen.args[3].as<std::int32_t>(), -7);
  EXPECT_EQ(seen.args[4].as<std::uint64_t>(), 1ull << 40);
  EXPECT_EQ(seen.args[5].as<float>(), 0.5F);
  EXPECT_EQ(seen.args[6].bytes.size(), sizeof(Params));
  EXPECT_EQ(seen.args[6].as<Params>().stride, 2u);
  EXPECT_EQ(seen.args[7].bytes.size(), 2u);
}

TEST_F(LaunchTest, DefaultsAreOneThreadWithoutArguments) {
  ASSERT_OK(Launch(*backend_, kernel_).launch(stream_));
  const mock::LaunchRecord seen = control_.launches().at(0);
  EXPECT_EQ(seen.grid, (Dim3{1, 1, 1}));
  EXPECT_EQ(seen.block, (Dim3{1, 1, 1}));
  EXPECT_EQ(seen.shared_bytes, 0u);
  EXPECT_TRUE(seen.args.empty());
  EXPECT_FALSE(seen.attributes.any());
}

TEST_F(LaunchTest, LargeArgumentsAreCopiedWhenTheyAreAdded) {
  Launch launch(*backend_, kernel_);
  {
    std::vector<std::byte> temporary(100, std::byte{0x5A});
    launch.arg_bytes(temporary);
    std::fill(temporary.begin(), temporary.end(), std::byte{0});
  }
  ASSERT_OK(launch.launch(stream_));
  EXPECT_THAT(control_.launches().at(0).args.at(0).bytes, testing::Each(std::byte{0x5A}));
}

TEST_F(LaunchTest, BuilderLaunchesAgainAndTakesNewArguments) {
  Launch launch(*backend_, kernel_);
  launch.grid({2}).arg_u32(1);
  ASSERT_OK(launch.launch(stream_));
  ASSERT_OK(launch.grid({3}).launch(stream_));
  ASSERT_OK(launch.clear_args().arg_u32(2).arg_u32(3).launch(stream_));
  const std::vector<mock::LaunchRecord> seen = control_.launches();
  ASSERT_EQ(seen.size(), 3u);
  EXPECT_EQ(seen[1].grid.x, 3u);
  EXPECT_EQ(seen[1].args.at(0).as<std::uint32_t>(), 1u);
  ASSERT_EQ(seen[2].args.size(), 2u);
  EXPECT_EQ(seen[2].args[0].as<std::uint32_t>(), 2u);
  EXPECT_EQ(seen[2].grid.x, 3u) << "geometry stays";
}

TEST_F(LaunchTest, AttributesArePassedOn) {
  Launch launch(*backend_, kernel_);
  launch.cluster({2, 1, 1}).cooperative();
  const Result<> launched = launch.launch(stream_);
  const Capabilities& can = backend_->capabilities();
  if (can.has(Capability::cluster_launch) && can.has(Capability::cooperative_launch)) {
    ASSERT_OK(launched);
    EXPECT_EQ(control_.launches().at(0).attributes.cluster.x, 2u);
    EXPECT_TRUE(control_.launches().at(0).attributes.cooperative);
  } else {
    EXPECT_ERRC(launched, Errc::unsupported);
  }
}

TEST_F(LaunchTest, AsManyArgumentsAsALaunchMayHaveFit) {
  Launch many(*backend_, kernel_);
  for (std::uint32_t i = 0; i < kMaxKernelArgs; ++i) many.arg_u32(i);
  ASSERT_OK(many.launch(stream_));
  EXPECT_EQ(control_.launches().at(0).args.back().as<std::uint32_t>(), kMaxKernelArgs - 1);

  // The worst case for the builder's store: every argument is padded.
  Launch odd(*backend_, kernel_);
  std::array<std::byte, 31> value{};
  for (std::uint32_t i = 0; i < kMaxKernelArgs; ++i) {
    value.fill(static_cast<std::byte>(i));
    odd.arg_bytes(value);
  }
  ASSERT_OK(odd.launch(stream_));
  const mock::LaunchRecord seen = control_.launches().at(1);
  ASSERT_EQ(seen.args.size(), kMaxKernelArgs);
  for (std::uint32_t i = 0; i < kMaxKernelArgs; ++i) EXPECT_THAT(seen.args[i].bytes, testing::Each(static_cast<std::byte>(i)));
}

TEST_F(LaunchTest, TooManyArgumentsOrBytesAreRefusedAndNothingIsLaunched) {
  Launch many(*backend_, kernel_);
  for (std::size_t i = 0; i <= kMaxKernelArgs; ++i) many.arg_u32(1);
  const Result<> refused = many.launch(stream_);
  EXPECT_ERRC(refused, Errc::invalid_argument);
  EXPECT_THAT(refused.error().message(), HasSubstr("norm.rms"));
  ASSERT_OK(many.clear_args().arg_u32(1).launch(stream_));

  Launch large(*backend_, kernel_);
  const std::vector<std::byte> bytes(kMaxKernelArgBytes + 1);
  EXPECT_ERRC(large.arg_bytes(bytes).launch(stream_), Errc::invalid_argument);
  const std::vector<std::byte> huge(1 << 20);
  EXPECT_ERRC(large.clear_args().arg_bytes(huge).launch(stream_), Errc::invalid_argument);
  EXPECT_EQ(control_.counts().launches, 1u);
}

TEST_F(LaunchTest, BuildingAndLaunchingTouchNoHeap) {
  if (!test::kCountsHeapAllocations) GTEST_SKIP() << "a sanitizer owns operator new in this build";
  const DeviceBuffer buffer = *DeviceBuffer::create(*backend_, 64);
  const std::array<std::byte, kTensorMapBytes> map{};
  control_.set_recording(false);
  const auto run = [&] {
    return Launch(*backend_, kernel_)
        .grid({4})
        .block({64})
        .arg_ptr(buffer.ptr())
        .arg_tensormap(map)
        .arg_struct(Params{1, 2, 3})
        .arg_u32(1)
        .arg_f32(2)
        .launch(stream_);
  };
  ASSERT_OK(run());
  ASSERT_OK(backend_->synchronize(stream_));
  const std::uint64_t before = test::num_heap_allocations();
  const Result<> launched = run();
  EXPECT_EQ(test::num_heap_allocations(), before);
  ASSERT_OK(launched);
}

// The same builder in front of a kernel that runs.
void add_one(const host::BlockContext& block) {
  auto* const x = block.ptr<float>(0);
  const auto n = block.arg<std::uint32_t>(1);
  const auto scale = block.arg<Params>(2);
  const std::uint32_t begin = block.index.x * block.block.x;
  for (std::uint32_t i = begin; i < begin + block.block.x && i < n; ++i) x[i] += static_cast<float>(scale.stride);
}
constexpr std::array<std::uint32_t, 3> kAddParams{8, 4, sizeof(Params)};
constexpr std::array kTable{host::HostKernel{.module = "test", .function = "add", .fn = add_one, .param_bytes = kAddParams}};

TEST(LaunchOnHostTest, KernelSeesItsArguments) {
  host::Options options;
  options.kernels = {kTable};
  const auto backend = test::make_host(options);
  const KernelHandle kernel = *backend->kernel("test", "add");
  const DeviceBuffer x = *DeviceBuffer::create(*backend, 100 * sizeof(float));
  std::array<float, 100> values{};
  ASSERT_OK(backend->copy_h2d(x.ptr(), std::as_bytes(std::span(values))));
  ASSERT_OK(Launch(*backend, kernel)
                .grid({static_cast<std::uint32_t>(div_ceil(100, 32))})
                .block({32})
                .arg_ptr(x.ptr())
                .arg_u32(100)
                .arg_struct(Params{0, 5, 0})
                .launch(backend->default_stream()));
  ASSERT_OK(backend->copy_d2h(std::as_writable_bytes(std::span(values)), x.ptr()));
  EXPECT_THAT(values, testing::Each(5.0F));
  EXPECT_ERRC(Launch(*backend, kernel).arg_ptr(x.ptr()).arg_u64(100).arg_struct(Params{}).launch(backend->default_stream()),
              Errc::invalid_argument);
}

}  // namespace
}  // namespace metrale
