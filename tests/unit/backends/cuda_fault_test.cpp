// SPDX-License-Identifier: Apache-2.0
//
// Errors of the driver: what they are called, which of them lose the device, and what is still done then.
#include "cuda_fixture.h"
#include "metrale/log.h"

namespace metrale::test {
namespace {

class CudaFault : public CudaCase {};

TEST_F(CudaFault, AnErrorNamesTheCallItsNumberAndTheDriversWords) {
  static_cast<void>(on());
  fake.fail_call("cuMemAlloc", 1, CUDA_ERROR_NOT_SUPPORTED);
  const auto refused = on().alloc(64);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::unsupported);
  EXPECT_EQ(refused.error().native_code(), CUDA_ERROR_NOT_SUPPORTED);
  const std::string text = refused.error().to_string();
  EXPECT_THAT(text, ::testing::HasSubstr("cuMemAlloc"));
  EXPECT_THAT(text, ::testing::HasSubstr("CUDA_ERROR_NOT_SUPPORTED"));
  EXPECT_THAT(text, ::testing::HasSubstr("operation not supported"));
  EXPECT_OK(on().health());
  EXPECT_OK(on().alloc(64));
  take(on().sweep_unreleased());
}

TEST_F(CudaFault, ACodeTheDriverCannotNameIsStillAnError) {
  static_cast<void>(on());
  fake.fail_call("cuMemAlloc", 1, static_cast<CUresult>(987));
  const auto refused = on().alloc(64);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().to_string(), ::testing::HasSubstr("987"));
}

TEST_F(CudaFault, AKernelsFaultIsReportedWithTheDriversLog) {
  loses_device = true;
  const StreamHandle s = stream();
  take(on().launch_typed(take(on().kernel("test", "fault")), {}, {}, 0, s, {}));
  const Result<> told = on().synchronize(s);
  ASSERT_FALSE(told);
  EXPECT_EQ(told.error().code(), Errc::device_lost);
  EXPECT_EQ(told.error().native_code(), CUDA_ERROR_ILLEGAL_ADDRESS);
  const std::string text = told.error().to_string();
  EXPECT_THAT(text, ::testing::HasSubstr("test.fault"));
  EXPECT_THAT(text, ::testing::HasSubstr("a kernel faulted")) << "what the driver logged";
  EXPECT_EQ(text.find('\n'), std::string::npos);
}

TEST_F(CudaFault, WhatLoadingAndCapturingAskTheDriverInVainIsNotInItsLog) {
  loses_device = true;
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  const std::array args{KernelArg::buffer(ptr), KernelArg::value(std::uint32_t{5})};
  take(on().begin_capture(s));
  take(on().launch_typed(take(on().kernel("test", "store")), {}, {}, 0, s, args));
  take(on().destroy_graph(take(on().end_capture(s))));
  fake.lose();
  const Result<> told = on().synchronize(s);
  ASSERT_FALSE(told);
  const std::string text = told.error().to_string();
  EXPECT_THAT(text, ::testing::HasSubstr("the device was lost, as a test asked"));
  EXPECT_THAT(text, ::testing::Not(::testing::HasSubstr("asked for")));
}

TEST_F(CudaFault, ALostDeviceIsNotCalledAgain) {
  loses_device = true;
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  fake.lose();
  EXPECT_ERRC(on().synchronize(s), Errc::device_lost);
  EXPECT_EQ(calls([&] {
              EXPECT_ERRC(on().alloc(64), Errc::device_lost);
              EXPECT_ERRC(on().memset_async(ptr, 1, 64, s), Errc::device_lost);
              EXPECT_OK(on().free(ptr));
              EXPECT_OK(on().destroy_stream(s));
            }),
            0U);
  EXPECT_EQ(on().abandoned_bytes(), 64U);
  EXPECT_OK(on().shutdown());
}

TEST_F(CudaFault, TheProcessStaysLost) {
  loses_device = true;
  fake.lose();
  static_cast<void>(on());
  fake.lose();
  EXPECT_ERRC(on().alloc(64), Errc::device_lost);
  gpu.reset();
  const auto again = create(fake.driver());
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code(), Errc::device_lost) << again.error().to_string();
}

TEST_F(CudaFault, ADeviceLostByBeginningACaptureIsReported) {
  loses_device = true;
  const StreamHandle s = stream();
  fake.fail_call("cuStreamBeginCapture", 1, CUDA_ERROR_LAUNCH_FAILED);
  EXPECT_ERRC(on().begin_capture(s), Errc::device_lost);  // once hung: naming the kernels took a lock that was held
}

TEST_F(CudaFault, ADeviceLostByAWaitInACaptureIsReported) {
  loses_device = true;
  const StreamHandle s = stream();
  const StreamHandle other = stream();
  const EventHandle fork = take(on().create_event());
  take(on().begin_capture(s));
  take(on().record_event(fork, s));
  fake.fail_call("cuStreamWaitEvent", 1, CUDA_ERROR_LAUNCH_FAILED);
  EXPECT_ERRC(on().stream_wait_event(other, fork), Errc::device_lost);
  static_cast<void>(on().abort_capture_if_active(s).has_value());
}

TEST_F(CudaFault, HostFunctionsThatNeverRunAreDropped) {
  loses_device = true;
  const StreamHandle s = stream();
  auto owned = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = owned;
  Gate gate(on(), s);
  take(on().enqueue_host(s, [owned = std::move(owned)] {}));
  fake.lose();
  EXPECT_ERRC(on().synchronize(s), Errc::device_lost);
  gate.open();
  gpu.reset();
  EXPECT_TRUE(eventually([&] { return watch.expired(); }));
}

TEST_F(CudaFault, ACreationThatFailsLeavesNothing) {
  const std::uint64_t needed = calls([&] { make().reset(); });
  for (std::uint64_t n = 1; n <= needed; ++n) {
    fake.fail_call(n, CUDA_ERROR_UNKNOWN);
    const auto made = create(fake.driver());
    if (!made) {
      EXPECT_THAT(made.error().to_string(), ::testing::HasSubstr(fake.failed_function())) << n;
    }
    EXPECT_THAT(fake.dropped_with_context(), ::testing::IsEmpty()) << n << " " << fake.failed_function();
    ASSERT_FALSE(HasFailure()) << fake.failed_function();
    fake.clear_failures();
  }
}

// Static objects may be destroyed after the driver: then its functions answer CUDA_ERROR_DEINITIALIZED, whatever is asked.
TEST(CudaExit, WhatIsReleasedAfterTheDriverHasGoneIsNoFailure) {
  auto fake = std::make_unique<fake_cuda::FakeGpu>();
  ASSERT_EQ(fake->driver().cuInit_(0), CUDA_SUCCESS);
  auto gpu = take(cuda::create_with_driver(fake->driver(), {}));
  const StreamHandle s = take(gpu->create_stream());
  const EventHandle event = take(gpu->create_event());
  const DevicePtr ptr = take(gpu->alloc(64));
  const auto pinned = take(gpu->alloc_host_pinned(64));
  take(gpu->begin_capture(s));
  take(gpu->memset_async(ptr, 1, 64, s));
  const GraphHandle graph = take(gpu->end_capture(s));
  take(gpu->alloc(64));  // for the sweep
  fake.reset();
  std::string logged;
  set_log_sink([&](LogLevel level, std::string_view line) {
    if (level == LogLevel::error) logged += line;
  });
  EXPECT_OK(gpu->destroy_graph(graph));
  EXPECT_OK(gpu->free(ptr));
  EXPECT_OK(gpu->free_host_pinned(pinned.data(), pinned.size()));
  EXPECT_OK(gpu->destroy_event(event));
  EXPECT_OK(gpu->destroy_stream(s));
  gpu.reset();
  set_log_sink({});
  EXPECT_EQ(logged, "");
}

}  // namespace
}  // namespace metrale::test
