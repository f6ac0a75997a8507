// SPDX-License-Identifier: Apache-2.0
#include "metrale/launch_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <thread>

#include "metrale/backends/host.h"
#include "metrale/launch.h"

namespace metrale {
namespace {

using testing::HasSubstr;

struct Params {
  std::uint64_t first = 0;
  std::uint64_t second = 0;
};

void nothing(const host::BlockContext&) {}
constexpr std::array<std::uint32_t, 2> kStepBytes{8, sizeof(Params)};
constexpr std::array<host::HostKernel, 1> kKernels{{{"trace", "step", nothing, kStepBytes}}};

class LaunchTraceTest : public testing::Test {
 protected:
  void SetUp() override {
    host::Options options;
    options.kernels = {kKernels};
    backend = std::move(host::create(std::move(options))).value();
    kernel = backend->kernel("trace", "step").value();
    block = backend->alloc(1024).value();
    trace = std::make_unique<LaunchTrace>(*backend);
    backend->attach(*trace);
  }
  void TearDown() override {
    backend->detach(*trace);
    EXPECT_TRUE(backend->free(block));
  }
  void step(Params params, std::uint32_t grid = 1) {
    ASSERT_TRUE(Launch(*backend, kernel).grid({grid}).arg_ptr(block).arg_struct(params).launch(backend->default_stream()));
  }

  std::unique_ptr<GpuBackend> backend;
  std::unique_ptr<LaunchTrace> trace;
  KernelHandle kernel;
  DevicePtr block;
};

TEST_F(LaunchTraceTest, TheSameWorkDoesNotDiffer) {
  for (int pass = 0; pass < 3; ++pass) {
    trace->begin();
    step({1, 2});
    ASSERT_TRUE(backend->memset_async(block, 7, 64, backend->default_stream()));
    const auto differences = trace->end_and_diff();
    ASSERT_TRUE(differences);
    EXPECT_TRUE(differences->empty());
  }
}

TEST_F(LaunchTraceTest, NamesTheKernelAndTheWordThatChanged) {
  trace->begin();
  step({1, 2});
  step({1, 2});
  ASSERT_TRUE(trace->end_and_diff());
  trace->begin();
  step({1, 2});
  step({1, 9});
  const auto differences = trace->end_and_diff();
  ASSERT_TRUE(differences);
  ASSERT_EQ(differences->size(), 1u);
  EXPECT_EQ(differences->front().index, 1u);
  EXPECT_EQ(differences->front().what, "trace.step");
  EXPECT_EQ(differences->front().how, "argument 1, word 1: 0x2 became 0x9");
}

TEST_F(LaunchTraceTest, SeesGeometryCopiesAndWorkThatCameOrWent) {
  trace->begin();
  step({}, 2);
  ASSERT_TRUE(backend->copy_d2d_async(block, block.offset(512), 64, backend->default_stream()));
  step({});
  ASSERT_TRUE(trace->end_and_diff());
  trace->begin();
  step({}, 3);
  ASSERT_TRUE(backend->copy_d2d_async(block, block.offset(512), 128, backend->default_stream()));
  const auto differences = trace->end_and_diff();
  ASSERT_TRUE(differences);
  ASSERT_EQ(differences->size(), 3u);
  EXPECT_EQ((*differences)[0].how, "grid (2, 1, 1) became (3, 1, 1)");
  EXPECT_EQ((*differences)[1].what, "copy_d2d_async");
  EXPECT_THAT((*differences)[1].how, HasSubstr("0x40 became 0x80"));
  EXPECT_EQ((*differences)[2].how, "came before and does not now");
}

TEST_F(LaunchTraceTest, LeavesOutOtherThreadsAndWhatWasRefused) {
  trace->begin();
  ASSERT_TRUE(trace->end_and_diff());
  trace->begin();
  std::thread([&] { step({}); }).join();
  EXPECT_FALSE(backend->launch_typed(kernel, {1}, {1}, 0, backend->default_stream(), {}));
  const auto differences = trace->end_and_diff();
  ASSERT_TRUE(differences);
  EXPECT_TRUE(differences->empty());
}

TEST_F(LaunchTraceTest, EndingWithoutARegionIsRefused) {
  const auto differences = trace->end_and_diff();
  ASSERT_FALSE(differences);
  EXPECT_EQ(differences.error().code(), Errc::invalid_argument);
}

}  // namespace
}  // namespace metrale
