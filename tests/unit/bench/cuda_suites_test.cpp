// SPDX-License-Identifier: Apache-2.0
//
// The suites on the CUDA backend and the raw side on the same driver, which is a fake: what the raw side asks of a driver is legal,
// and all of it is given back, also when a call fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backends/cuda/cuda_backend.h"
#include "bench/cuda/raw_device.h"
#include "bench/suites.h"
#include "support/fake_cuda/fake_gpu.h"

namespace metrale::bench {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CudaSuites : public ::testing::Test {
 protected:
  std::unique_ptr<GpuBackend> backend() {
    cuda::Options options;
    options.modules = {module_};
    auto made = cuda::create_with_driver(fake_.driver(), options);
    EXPECT_TRUE(made.has_value()) << made.error().to_string();
    return std::move(*made);
  }
  Result<std::unique_ptr<CudaRawDevice>> raw() { return CudaRawDevice::create(fake_.driver(), 0, module_.image); }
  static Options options(std::vector<std::string> names) {
    return {.suites = std::move(names), .scale = Scale::small(), .model = {}};
  }
  void expect_clean() {
    EXPECT_THAT(fake_.misuses(), IsEmpty());
    EXPECT_THAT(fake_.dropped_with_context(), IsEmpty());
    EXPECT_EQ(fake_.live().total(), 0U) << fake_.live().to_string();
  }

  fake_cuda::FakeGpu fake_{{.devices = std::vector<fake_cuda::DeviceOptions>(2)}};
  cuda::ModuleImage module_ = fake_.add_module(kBenchModule, host_kernels());
};

TEST_F(CudaSuites, BothSidesRunAndGiveEverythingBack) {
  {
    const auto device = backend();
    const auto direct = raw();
    ASSERT_TRUE(direct.has_value()) << direct.error().to_string();
    const auto report = run_suites(*device, direct->get(), options({"launch", "alloc", "copy", "graph"}));
    ASSERT_TRUE(report.has_value()) << report.error().to_string();
    EXPECT_THAT(report->failures, IsEmpty());
    EXPECT_EQ(report->device, "Fake GPU");
    for (const Row& row : report->rows) {
      EXPECT_TRUE(row.theirs.has_value()) << row.name;
      EXPECT_TRUE(row.judged().has_value()) << row.name;
    }
    EXPECT_GE(report->rows.size(), 18U);
  }
  expect_clean();
}

TEST_F(CudaSuites, MarksTellTheTimeBetweenThem) {
  {
    const auto device = backend();
    const auto direct = std::move(*raw());
    const Stream stream = std::move(*Stream::create(*device));
    const std::uint64_t native = device->native_stream(stream.handle()).value();
    ASSERT_TRUE(direct->reset_marks(3).has_value());
    ASSERT_TRUE(direct->mark(native).has_value());
    ASSERT_TRUE(direct->hold(native, 2'000'000).has_value());
    ASSERT_TRUE(direct->mark(native).has_value());
    ASSERT_TRUE(direct->mark(native).has_value());
    EXPECT_FALSE(direct->mark(native).has_value()) << "there were three";
    const auto seconds = direct->mark_seconds();
    ASSERT_TRUE(seconds.has_value());
    ASSERT_EQ(seconds->size(), 2U);
    EXPECT_GE((*seconds)[0], 0.002);
    EXPECT_LT((*seconds)[1], (*seconds)[0]);
  }
  expect_clean();
}

TEST_F(CudaSuites, ACopyThatTheDriverRefusesFailsItsSuiteAlone) {
  {
    const auto device = backend();
    const auto direct = std::move(*raw());
    Options wanted = options({"graph", "launch"});
    fake_.fail_call("cuStreamBeginCapture", 1, CUDA_ERROR_NOT_SUPPORTED);
    const auto report = run_suites(*device, direct.get(), wanted);
    ASSERT_TRUE(report.has_value()) << report.error().to_string();
    ASSERT_EQ(report->failures.size(), 1U);
    EXPECT_THAT(report->failures[0], HasSubstr("graph: "));
    EXPECT_GT(report->rows.size(), 0U);
    EXPECT_EQ(report->rows.back().suite, "launch");
  }
  expect_clean();
}

// METRALE_CUDA_DEVICE once moved the backend alone.
TEST_F(CudaSuites, ARawSideOnAnotherDeviceThanTheBackendIsRefused) {
  {
    const auto device = backend();
    const auto same = std::move(*raw());
    EXPECT_TRUE(same->check_shares_device(*device).has_value());
    const auto other = std::move(*CudaRawDevice::create(fake_.driver(), 1, module_.image));
    const auto refused = other->check_shares_device(*device);
    ASSERT_FALSE(refused.has_value());
    EXPECT_EQ(refused.error().code(), Errc::invalid_argument);
  }
  expect_clean();
}

TEST_F(CudaSuites, OpeningTheRawSideGivesBackWhatItTookWhicheverCallFails) {
  ASSERT_EQ(fake_.driver().cuInit_(0), CUDA_SUCCESS);
  std::uint64_t calls = 0;
  {
    fake_.reset_counts();
    ASSERT_TRUE(raw().has_value());
    calls = fake_.num_calls();
  }
  expect_clean();
  std::uint64_t refused = 0;
  for (std::uint64_t nth = 1; nth <= calls; ++nth) {
    fake_.fail_call(nth, CUDA_ERROR_OUT_OF_MEMORY);
    const bool opened = raw().has_value();
    fake_.clear_failures();
    if (opened) break;  // the rest are the calls that close it
    ++refused;
    expect_clean();
  }
  EXPECT_GE(refused, 12U);
}

}  // namespace
}  // namespace metrale::bench
