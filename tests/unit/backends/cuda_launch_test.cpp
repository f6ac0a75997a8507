// SPDX-License-Identifier: Apache-2.0
//
// Which calls of the driver launches become, and what a launch costs beside them.
#include <thread>

#include "cuda_fixture.h"
#include "metrale/observer.h"
#include "support/heap_counter.h"

namespace metrale::test {
namespace {

using ::testing::HasSubstr;

class CudaLaunch : public CudaCase {};

TEST_F(CudaLaunch, ALaunchIsOneCallOfTheDriver) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  const KernelHandle store = take(on().kernel("test", "store"));
  const std::array args{KernelArg::buffer(ptr), KernelArg::value(std::uint32_t{5})};
  const auto launch = [&] { take(on().launch_typed(store, {}, {}, 0, s, args)); };
  launch();
  EXPECT_EQ(calls(launch), 1U);
  EXPECT_EQ(read_words(on(), ptr, 1, s)[0], 5U);
  EXPECT_EQ(fake.num_lazy_loads(), 0U) << "a warm backend has loaded every kernel before its first launch";
}

TEST_F(CudaLaunch, ALaunchWorksUnderAContextThatAnotherLibraryMadeCurrent) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  const KernelHandle store = take(on().kernel("test", "store"));
  const std::array args{KernelArg::buffer(ptr), KernelArg::value(std::uint32_t{5})};
  take(on().launch_typed(store, {}, {}, 0, s, args));
  ASSERT_EQ(fake.driver().cuCtxSetCurrent_(nullptr), CUDA_SUCCESS);
  take(on().launch_typed(store, {}, {}, 0, s, args));
  take(on().synchronize(s));
}

TEST_F(CudaLaunch, WideClustersAreAllowedOnceForEachKernel) {
  const StreamHandle s = stream();
  const KernelHandle store = take(on().kernel("test", "store"));
  const std::array args{KernelArg::buffer(block(64)), KernelArg::value(std::uint32_t{5})};
  const auto launch = [&](std::uint32_t blocks) {
    return on().launch_typed(store, {blocks, 1, 1}, {}, 0, s, args, {.cluster = {blocks, 1, 1}});
  };
  EXPECT_EQ(calls("cuFuncSetAttribute", [&] { take(launch(8)); }), 0U) << "every device of its kind can run eight";
  EXPECT_EQ(calls("cuFuncSetAttribute",
                  [&] {
                    for (int i = 0; i < 3; ++i) take(launch(16));
                  }),
            1U);
  EXPECT_ERRC(launch(32), Errc::invalid_argument);
  EXPECT_OK(on().health());
}

TEST_F(CudaLaunch, ALaunchTouchesNoHeap) {
  if (!kCountsHeapAllocations) GTEST_SKIP() << "this sanitizer keeps operator new for itself";
  // The fake copies the arguments of a launch; one that does nothing leaves what the backend does.
  cuda::Driver driver = fake.driver();
  driver.cuLaunchKernel_ = [](auto...) { return CUDA_SUCCESS; };
  driver.cuLaunchKernelEx_ = [](auto...) { return CUDA_SUCCESS; };
  gpu = take(create(driver));
  const StreamHandle s = stream();
  const KernelHandle store = take(on().kernel("test", "store"));
  DevicePtr ptr = block(64);
  std::uint32_t value = 5;
  std::array<void*, 2> params{&ptr, &value};
  const std::array args{KernelArg::buffer(ptr), KernelArg::value(value)};
  const auto launch = [&] {
    take(on().launch_typed(store, {}, {}, 0, s, args));
    take(on().launch_typed(store, {2, 1, 1}, {}, 0, s, args, {.cluster = {2, 1, 1}}));
    take(on().launch(store, {}, {}, 0, s, params.data()));
  };
  launch();
  const std::uint64_t before = num_heap_allocations();
  for (int i = 0; i < 100; ++i) launch();
  EXPECT_EQ(num_heap_allocations(), before);
  gpu.reset();
}

TEST_F(CudaLaunch, SharedMemoryIsOptedInWhenAKernelIsLoadedAndNotAtItsLaunches) {
  const StreamHandle s = stream();
  const KernelHandle store = take(on().kernel("test", "store"));
  const std::array args{KernelArg::buffer(block(64)), KernelArg::value(std::uint32_t{5})};
  EXPECT_EQ(calls("cuFuncSetAttribute", [&] { take(on().launch_typed(store, {}, {}, 200 << 10, s, args)); }), 0U);
  const auto refused = on().launch_typed(store, {}, {}, 300 << 10, s, args);
  EXPECT_ERRC(refused, Errc::invalid_argument);
  EXPECT_THAT(refused.error().to_string(), HasSubstr(std::to_string(227 << 10))) << "what it may ask for";
}

/// Counts, and attaches another while it is shown the arguments of a launch.
struct AttachesAnother final : Observer {
  void on_op(const OpRecord& record) noexcept override { num_launches += record.op == Op::launch ? 1 : 0; }
  void on_launch_args(const OpRecord&, std::span<const KernelArg>) noexcept override {
    ++num_shown;
    if (another == nullptr) return;
    attaches = std::thread([this] { gpu->attach(*another); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until it waits for the observers' lock
  }
  GpuBackend* gpu = nullptr;
  AttachesAnother* another = nullptr;
  std::thread attaches;
  int num_launches = 0;
  int num_shown = 0;
};

TEST_F(CudaLaunch, AnObserverThatComesDuringALaunchSeesAllOfItOrNothing) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  AttachesAnother late;
  AttachesAnother first;
  first.gpu = &on();
  first.another = &late;
  const KernelHandle store = take(on().kernel("test", "store"));
  on().attach(first);
  const std::array args{KernelArg::buffer(ptr), KernelArg::value(std::uint32_t{5})};
  take(on().launch_typed(store, {}, {}, 0, s, args));
  first.attaches.join();
  EXPECT_EQ(first.num_launches, 1);
  EXPECT_EQ(first.num_shown, 1);
  EXPECT_EQ(late.num_launches, late.num_shown);
  on().detach(first);
  on().detach(late);
  take(on().synchronize(s));
  take(on().free(ptr));
}

}  // namespace
}  // namespace metrale::test
