// SPDX-License-Identifier: Apache-2.0
//
// Work of other libraries on CUDA streams: it counts as in flight, and a lost device is seen behind their own codes.
#include "cuda_fixture.h"
#include "metrale/native_work.h"

namespace metrale::test {
namespace {

class CudaNativeWork : public CudaCase {
 protected:
  const cuda::Driver& driver() { return fake.driver(); }
};

TEST_F(CudaNativeWork, MemoryStaysUntilWhatALibraryEnqueuedHasPassed) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(std::uint64_t{4} << 20);
  std::atomic<bool> open{false};
  const std::array uses{NativeUse{"block", ptr, 64}};
  take(on().enqueue_native("library_call", s, uses, [&](std::uint64_t native) -> Result<> {
    const auto wait = [](void* flag) {
      while (!static_cast<std::atomic<bool>*>(flag)->load()) std::this_thread::yield();
    };
    EXPECT_EQ(driver().cuLaunchHostFunc_(reinterpret_cast<CUstream>(native), wait, &open), CUDA_SUCCESS);
    return {};
  }));
  const std::uint64_t freed = fake.num_calls("cuMemFree");
  EXPECT_FALSE(take(on().query(s)));
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    EXPECT_EQ(fake.num_calls("cuMemFree"), freed);
    open = true;
  });
  take(on().free(ptr));
  opener.join();
  take(on().synchronize(s));
}

TEST_F(CudaNativeWork, ALibrarysCodeForALostDeviceIsTheDriversOwn) {
  loses_device = true;
  const StreamHandle s = stream();
  fake.fail_call("cuStreamQuery", 1, CUDA_ERROR_ILLEGAL_ADDRESS);
  const Result<> answer =
      on().enqueue_native("library_call", s, {}, [](std::uint64_t) -> Result<> { return Error(Errc::internal, "status 13"); });
  EXPECT_ERRC(answer, Errc::device_lost);
  EXPECT_NE(answer.error().to_string().find("status 13"), std::string::npos) << answer.error().to_string();
  EXPECT_ERRC(on().health(), Errc::device_lost);
}

TEST_F(CudaNativeWork, ALibrarysRefusalLeavesTheDeviceAndTheCaptureAlone) {
  const StreamHandle s = stream();
  const NativeWork refuse = [](std::uint64_t) -> Result<> { return Error(Errc::invalid_argument, "K is odd"); };
  EXPECT_ERRC(on().enqueue_native("library_call", s, {}, refuse), Errc::invalid_argument);
  take(on().begin_capture(s));
  EXPECT_ERRC(on().enqueue_native("library_call", s, {}, refuse), Errc::invalid_argument);
  take(on().destroy_graph(take(on().end_capture(s))));
  EXPECT_OK(on().health());
}

}  // namespace
}  // namespace metrale::test
