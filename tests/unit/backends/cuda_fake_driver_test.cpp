// SPDX-License-Identifier: Apache-2.0
//
// The rules of the fake CUDA driver itself, since everything that CI knows of the CUDA backend rests on them: contexts, memory,
// copies, streams and events.
#include "cuda_fake_driver.h"

#include <algorithm>
#include <cstring>

namespace metrale::fake_cuda {
namespace {

// ---- contexts ----

TEST_F(FakeDriver, NeedsACurrentContextOnEachThread) {
  elsewhere([&] {
    CUdeviceptr ptr = 0;
    EXPECT_EQ(d.cuMemAlloc_(&ptr, 64), CUDA_ERROR_INVALID_CONTEXT);
    EXPECT_EQ(d.cuCtxSetCurrent_(context), CUDA_SUCCESS);
    EXPECT_EQ(d.cuMemAlloc_(&ptr, 64), CUDA_SUCCESS);
    EXPECT_EQ(d.cuMemFree_(ptr), CUDA_SUCCESS);
  });
}

TEST_F(FakeDriver, TheLastReleaseDropsTheContextAndNamesWhatWasLeft) {
  block(64);
  stream();
  CUcontext again = nullptr;
  must(d.cuDevicePrimaryCtxRetain_(&again, 0));
  EXPECT_EQ(again, context);
  must(d.cuDevicePrimaryCtxRelease_(0));
  EXPECT_TRUE(gpu.dropped_with_context().empty());
  must(d.cuDevicePrimaryCtxRelease_(0));
  released = true;
  EXPECT_THAT(gpu.dropped_with_context(), ::testing::ElementsAre("1 streams", "1 blocks of memory"));
  EXPECT_EQ(gpu.live().total(), 0U) << gpu.live().to_string();
  EXPECT_EQ(d.cuCtxSynchronize_(), CUDA_ERROR_CONTEXT_IS_DESTROYED);
  EXPECT_EQ(d.cuDevicePrimaryCtxRelease_(0), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(gpu.misuses().size(), 1U);
}

TEST_F(FakeDriver, AFaultSticksToTheContextAndToTheDevice) {
  const CUstream s = stream();
  const CUstream other = stream();
  const Hold hold(d, other);
  must(launch(function(module(), "break_it"), s, nullptr));
  EXPECT_EQ(d.cuStreamSynchronize_(s), CUDA_ERROR_ILLEGAL_ADDRESS);
  CUdeviceptr ptr = 0;
  EXPECT_EQ(d.cuMemAlloc_(&ptr, 64), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(d.cuStreamSynchronize_(other), CUDA_ERROR_ILLEGAL_ADDRESS) << "a lost context does not wait";
  EXPECT_EQ(d.cuStreamDestroy_(other), CUDA_ERROR_ILLEGAL_ADDRESS);
  must(d.cuDevicePrimaryCtxRelease_(0));
  released = true;
  CUcontext again = nullptr;
  EXPECT_EQ(d.cuDevicePrimaryCtxRetain_(&again, 0), CUDA_ERROR_ILLEGAL_ADDRESS) << "the process stays lost";
  gpu.forget_faults();
  EXPECT_EQ(d.cuDevicePrimaryCtxRetain_(&again, 0), CUDA_SUCCESS);
  must(d.cuDevicePrimaryCtxRelease_(0));
}

// ---- memory ----

TEST_F(FakeDriver, MemoryIsLimitedAndNotZero) {
  gpu.set_total_memory(1 << 20);
  const CUdeviceptr ptr = block(1 << 19);
  const auto* bytes = reinterpret_cast<const unsigned char*>(static_cast<std::uintptr_t>(ptr));
  EXPECT_EQ(std::count(bytes, bytes + (1 << 19), 0), 0);
  CUdeviceptr more = 0;
  EXPECT_EQ(d.cuMemAlloc_(&more, (1 << 19) + 1), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(d.cuMemAlloc_(&more, 0), CUDA_ERROR_INVALID_VALUE);
  std::size_t free = 0, total = 0;
  must(d.cuMemGetInfo_(&free, &total));
  EXPECT_EQ(free, 1U << 19);
  EXPECT_EQ(total, 1U << 20);
  must(d.cuMemFree_(ptr));
}

TEST_F(FakeDriver, FreeTakesBasesOnce) {
  const CUdeviceptr ptr = block(64);
  EXPECT_EQ(d.cuMemFree_(ptr + 8), CUDA_ERROR_INVALID_VALUE);
  must(d.cuMemFree_(ptr));
  EXPECT_EQ(d.cuMemFree_(ptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(gpu.misuses().size(), 2U);
  EXPECT_EQ(d.cuMemFree_(0), CUDA_SUCCESS);
}

TEST_F(FakeDriver, FreeWaitsForTheWholeContext) {
  const CUdeviceptr ptr = block(64);
  const CUstream s = stream();
  std::atomic<bool> freed{false};
  std::thread freeing;
  {
    const Hold hold(d, s);
    freeing = std::thread([&] {
      must(d.cuCtxSetCurrent_(context));
      must(d.cuMemFree_(ptr));
      freed = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    EXPECT_FALSE(freed);
  }
  freeing.join();
  EXPECT_TRUE(freed);
}

TEST_F(FakeDriver, RegistersHostMemoryOnce) {
  std::vector<std::byte> mine(4096);
  must(d.cuMemHostRegister_(mine.data(), 4096, 0));
  EXPECT_EQ(d.cuMemHostRegister_(mine.data() + 100, 8, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  CUdeviceptr alias = 0;
  must(d.cuMemHostGetDevicePointer_(&alias, mine.data() + 8, 0));
  must(d.cuMemHostUnregister_(mine.data()));
  EXPECT_EQ(d.cuMemHostUnregister_(mine.data()), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  EXPECT_EQ(d.cuMemHostGetDevicePointer_(&alias, mine.data(), 0), CUDA_ERROR_INVALID_VALUE);
}

// ---- copies ----

TEST_F(FakeDriver, APageableSourceIsReadDuringTheCallAndAPinnedOneLater) {
  const CUstream s = stream();
  const CUdeviceptr ptr = block(8);
  void* pinned = nullptr;
  must(d.cuMemHostAlloc_(&pinned, 4, 0));
  std::vector<unsigned char> pageable(4, 1);
  std::memset(pinned, 1, 4);
  {
    const Hold hold(d, s);
    must(d.cuMemcpyHtoDAsync_(ptr, pageable.data(), 4, s));
    must(d.cuMemcpyHtoDAsync_(ptr + 4, pinned, 4, s));
    std::fill(pageable.begin(), pageable.end(), 2);
    std::memset(pinned, 2, 4);
  }
  must(d.cuStreamSynchronize_(s));
  unsigned char seen[8];
  must(d.cuMemcpyDtoHAsync_(seen, ptr, 8, s));  // pageable: waits
  EXPECT_THAT(seen, ::testing::ElementsAre(1, 1, 1, 1, 2, 2, 2, 2));
}

TEST_F(FakeDriver, CopiesStayInsideOneBlock) {
  const CUstream s = stream();
  const CUdeviceptr a = block(64), b = block(64);
  EXPECT_EQ(d.cuMemcpyDtoDAsync_(a, b, 65, s), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(d.cuMemsetD8Async_(a + 60, 0, 5, s), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(d.cuMemcpyDtoDAsync_(a, b, 64, s), CUDA_SUCCESS);
}

// ---- streams and events ----

TEST_F(FakeDriver, EventsOrderStreamsAndWaitsTakeTheLastRecord) {
  const CUstream a = stream(), b = stream();
  const CUevent e = event();
  EXPECT_EQ(d.cuEventQuery_(e), CUDA_SUCCESS);
  {
    const Hold hold(d, a);
    must(d.cuEventRecord_(e, a));
    EXPECT_EQ(d.cuEventQuery_(e), CUDA_ERROR_NOT_READY);
    must(d.cuStreamWaitEvent_(b, e, 0));
    EXPECT_EQ(d.cuStreamQuery_(b), CUDA_ERROR_NOT_READY);
    must(d.cuEventDestroy_(e));
    EXPECT_EQ(d.cuStreamQuery_(b), CUDA_ERROR_NOT_READY) << "whoever waits goes on waiting";
  }
  must(d.cuStreamSynchronize_(b));
}

TEST_F(FakeDriver, ElapsedTimeNeedsTimedRecordsThatAreDone) {
  const CUstream s = stream();
  const CUevent plain = event(), a = event(CU_EVENT_DEFAULT), b = event(CU_EVENT_DEFAULT);
  float ms = -1;
  must(d.cuEventRecord_(plain, s));
  must(d.cuEventRecord_(a, s));
  EXPECT_EQ(d.cuEventElapsedTime_(&ms, a, plain), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(d.cuEventElapsedTime_(&ms, a, b), CUDA_ERROR_INVALID_HANDLE);
  {
    const Hold hold(d, s);
    must(d.cuEventRecord_(b, s));
    EXPECT_EQ(d.cuEventElapsedTime_(&ms, a, b), CUDA_ERROR_NOT_READY);
  }
  must(d.cuStreamSynchronize_(s));
  must(d.cuEventElapsedTime_(&ms, a, b));
  EXPECT_GE(ms, 0);
}

TEST_F(FakeDriver, HostFunctionsMayNotCallTheDriver) {
  struct Seen {
    const cuda::Driver& d;
    CUresult code = CUDA_SUCCESS;
  } seen{d};
  const CUstream s = stream();
  must(d.cuLaunchHostFunc_(
      s,
      [](void* data) {
        auto& to = *static_cast<Seen*>(data);
        CUdeviceptr ptr = 0;
        to.code = to.d.cuMemAlloc_(&ptr, 64);
      },
      &seen));
  must(d.cuStreamSynchronize_(s));
  EXPECT_EQ(seen.code, CUDA_ERROR_NOT_PERMITTED);
}

TEST_F(FakeDriver, DestroyedHandlesAreNeverKnownAgain) {
  const CUstream s = stream();
  const CUevent e = event();
  must(d.cuStreamDestroy_(s));
  must(d.cuEventDestroy_(e));
  EXPECT_NE(stream(), s);
  EXPECT_EQ(d.cuStreamDestroy_(s), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(d.cuEventDestroy_(e), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(gpu.misuses().size(), 2U);
}

// ---- failures on request ----

TEST_F(FakeDriver, FailsTheCallThatWasAskedFor) {
  gpu.reset_counts();
  gpu.fail_call(2, CUDA_ERROR_UNKNOWN);
  const CUstream s = stream();
  CUdeviceptr ptr = 0;
  EXPECT_EQ(d.cuMemAlloc_(&ptr, 64), CUDA_ERROR_UNKNOWN);
  EXPECT_EQ(gpu.failed_function(), "cuMemAlloc");
  EXPECT_EQ(gpu.live().blocks, 0U) << "a failed call does nothing";
  EXPECT_EQ(gpu.num_calls(), 2U);
  gpu.fail_call("cuStreamDestroy", 1, CUDA_ERROR_UNKNOWN);
  EXPECT_EQ(d.cuStreamDestroy_(s), CUDA_ERROR_UNKNOWN);
  EXPECT_EQ(gpu.live().streams, 1U);
  gpu.fail_call(1, CUDA_ERROR_LAUNCH_FAILED);
  EXPECT_EQ(d.cuMemAlloc_(&ptr, 64), CUDA_ERROR_LAUNCH_FAILED);
  EXPECT_EQ(d.cuMemAlloc_(&ptr, 64), CUDA_ERROR_LAUNCH_FAILED) << "a sticky code stays";
  gpu.forget_faults();
}

TEST_F(FakeDriver, OptionalFunctionsCanBeTakenAway) {
  EXPECT_NE(d.cuMemcpyBatchAsync_, nullptr);
  EXPECT_EQ(gpu.driver_without({"cuMemcpyBatchAsync"}).cuMemcpyBatchAsync_, nullptr);
  EXPECT_THROW(gpu.driver_without({"cuNoSuchThing"}), std::invalid_argument);
}

}  // namespace
}  // namespace metrale::fake_cuda
