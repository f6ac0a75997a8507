// SPDX-License-Identifier: Apache-2.0
//
// Captures against the driver's own rules, where those are narrower than what every backend promises.
#include "cuda_fixture.h"
#include "metrale/log.h"

namespace metrale::test {
namespace {

class CudaCapture : public CudaCase {
 protected:
  explicit CudaCapture(fake_cuda::Options options = {}) : CudaCase(std::move(options)) {}

  bool runs_work(StreamHandle s, DevicePtr ptr) {
    take(on().memset_async(ptr, 0x11, 64, s));
    return read_words(on(), ptr, 1, s)[0] == 0x11111111U;
  }
};

TEST_F(CudaCapture, AnotherThreadMayAllocateFreeAndWait) {
  const StreamHandle s = stream();
  const StreamHandle other = stream();
  const DevicePtr ptr = block(64);
  take(on().begin_capture(s));
  std::thread([&] {
    for (int i = 0; i < 20; ++i) {
      const DevicePtr mine = take(on().alloc(1000));
      take(on().memset_async(mine, 1, 1000, other));
      take(on().free(mine));
      take(on().synchronize(other));
    }
    take(on().free_host_pinned(take(on().alloc_host_pinned(64)).data(), 64));
  }).join();
  take(on().memset_async(ptr, 0x22, 64, s));
  const GraphHandle graph = take(on().end_capture(s));
  take(on().launch_graph(graph, s));
  EXPECT_EQ(read_words(on(), ptr, 1, s)[0], 0x22222222U);
  take(on().destroy_graph(graph));
}

// The driver reads through null when a capture is asked after while the thread that holds it ends it.
TEST_F(CudaCapture, OthersDoNotAskAfterACaptureThatItsThreadMayEnd) {
  const StreamHandle s = stream();
  const StreamHandle other = stream();
  const GraphHandle unused = [&] {
    take(on().begin_capture(other));
    return take(on().end_capture(other));
  }();
  take(on().memset_async(block(64), 1, 64, s));  // so that only the driver can tell whether the stream is idle
  take(on().begin_capture(s));
  const std::uint64_t asked = fake.num_calls("cuStreamGetCaptureInfo");
  std::thread([&] {
    take(on().free(take(on().alloc(std::uint64_t{4} << 20))));
    take(on().destroy_graph(unused));
    take(on().synchronize(other));
    take(on().trim());
  }).join();
  EXPECT_EQ(fake.num_calls("cuStreamGetCaptureInfo"), asked);
  take(on().destroy_graph(take(on().end_capture(s))));
}

TEST_F(CudaCapture, ACaptureOfALibraryAfterOursIsNotTakenForOurs) {
  const StreamHandle s = stream();
  take(on().begin_capture(s));
  take(on().destroy_graph(take(on().end_capture(s))));
  const auto theirs = reinterpret_cast<CUstream>(take(on().native_stream(s)));
  ASSERT_EQ(fake.driver().cuStreamBeginCapture_(theirs, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), CUDA_SUCCESS);
  const auto waited = on().synchronize_device();
  ASSERT_FALSE(waited);
  EXPECT_EQ(waited.error().code(), Errc::capture_unsafe) << waited.error().to_string();
  CUgraph graph = nullptr;
  ASSERT_EQ(fake.driver().cuStreamEndCapture_(theirs, &graph), CUDA_SUCCESS);
  ASSERT_EQ(fake.driver().cuGraphDestroy_(graph), CUDA_SUCCESS);
  EXPECT_OK(on().synchronize_device());
}

TEST_F(CudaCapture, WhatAnotherLibraryBreaksEndsWithAnError) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  take(on().begin_capture(s));
  // Another library allocates on this thread, and the driver ends the capture badly.
  CUdeviceptr theirs = 0;
  ASSERT_EQ(fake.driver().cuMemAlloc_(&theirs, 64), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_FALSE(on().memset_async(ptr, 1, 64, s));
  const auto ended = on().end_capture(s);
  ASSERT_FALSE(ended);
  EXPECT_NE(ended.error().to_string().find("cuStreamEndCapture"), std::string::npos) << ended.error().to_string();
  EXPECT_FALSE(on().stream_is_capturing(s));
  EXPECT_TRUE(runs_work(s, ptr));
  EXPECT_OK(on().health());
  take(on().free(ptr));
}

TEST_F(CudaCapture, AFailedStatusQueryCountsAsCapturing) {
  const StreamHandle s = stream();
  fake.fail_call("cuStreamIsCapturing", 1, CUDA_ERROR_UNKNOWN);
  EXPECT_TRUE(on().stream_is_capturing(s));
  EXPECT_FALSE(on().stream_is_capturing(s));
}

TEST_F(CudaCapture, AnEndThatTheDriverRefusesOnceStillEnds) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  take(on().begin_capture(s));
  take(on().memset_async(ptr, 1, 64, s));
  fake.fail_call("cuStreamEndCapture", 1, CUDA_ERROR_UNKNOWN);
  EXPECT_ERRC(on().end_capture(s), Errc::internal);
  EXPECT_TRUE(runs_work(s, ptr));
  EXPECT_EQ(fake.live().graphs, 0U);
}

TEST_F(CudaCapture, AGraphThatCannotBeInstantiatedLeavesNothing) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  take(on().begin_capture(s));
  take(on().memset_async(ptr, 1, 64, s));
  fake.fail_call("cuGraphInstantiateWithFlags", 1, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_ERRC(on().end_capture(s), Errc::out_of_memory);
  EXPECT_EQ(fake.live().graphs, 0U);
  EXPECT_EQ(on().live_graph_count(), 0U);
  EXPECT_TRUE(runs_work(s, ptr));
  EXPECT_OK(on().free(ptr));
}

// Their events went with the context before, which others may keep.
TEST_F(CudaCapture, AGraphDestroyedWhileItReplaysLeavesNothingAtShutdown) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  take(on().begin_capture(s));
  take(on().memset_async(ptr, 1, 64, s));
  const GraphHandle graph = take(on().end_capture(s));
  {
    Gate gate(on(), s);
    take(on().launch_graph(graph, s));
    take(on().destroy_graph(graph));
  }
  take(on().synchronize(s));
}

TEST_F(CudaCapture, AHostFunctionOfAGraphGoesWithIt) {
  const StreamHandle s = stream();
  auto owned = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = owned;
  take(on().begin_capture(s));
  take(on().enqueue_host(s, [owned = std::move(owned)] { ++*owned; }));
  const GraphHandle graph = take(on().end_capture(s));
  for (int i = 0; i < 3; ++i) take(on().launch_graph(graph, s));
  take(on().synchronize(s));
  {
    const auto count = watch.lock();
    ASSERT_NE(count, nullptr);
    EXPECT_EQ(*count, 3);
  }
  take(on().destroy_graph(graph));
  EXPECT_TRUE(eventually([&] { return watch.expired(); }));
}

TEST_F(CudaCapture, AnAbortedCaptureDropsItsHostFunctions) {
  const StreamHandle s = stream();
  auto owned = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = owned;
  take(on().begin_capture(s));
  take(on().enqueue_host(s, [owned = std::move(owned)] {}));
  take(on().abort_capture_if_active(s));
  EXPECT_TRUE(eventually([&] { return watch.expired(); }));
}

// A library records kernels on a stream that was wrapped, with pointers this library never saw.
void expect_library_launch_names_its_memory(GpuBackend& on, fake_cuda::FakeGpu& fake, const cuda::ModuleImage& module) {
  const cuda::Driver& driver = fake.driver();
  CUmodule theirs = nullptr;
  CUfunction store = nullptr;
  ASSERT_EQ(driver.cuModuleLoadDataEx_(&theirs, module.image.data(), 0, nullptr, nullptr), CUDA_SUCCESS);
  ASSERT_EQ(driver.cuModuleGetFunction_(&store, theirs, "store"), CUDA_SUCCESS);
  const StreamHandle s = take(on.create_stream());
  const DevicePtr ptr = take(on.alloc(64));
  take(on.begin_capture(s));
  std::uint64_t inside = ptr.address + 8;
  std::uint32_t value = 6;
  void* params[] = {&inside, &value};
  ASSERT_EQ(
      driver.cuLaunchKernel_(store, 1, 1, 1, 1, 1, 1, 0, reinterpret_cast<CUstream>(take(on.native_stream(s))), params, nullptr),
      CUDA_SUCCESS);
  const GraphHandle graph = take(on.end_capture(s));
  const auto named = take(on.graph_memory(graph));
  ASSERT_EQ(named.size(), 1U);
  EXPECT_EQ(named[0].base, ptr);
  EXPECT_ERRC(on.free(ptr), Errc::in_use);
  take(on.destroy_graph(graph));
  take(on.free(ptr));
  ASSERT_EQ(driver.cuModuleUnload_(theirs), CUDA_SUCCESS);
}

TEST_F(CudaCapture, LaunchesOfLibrariesNameTheirMemory) { expect_library_launch_names_its_memory(on(), fake, module); }

TEST_F(CudaCapture, GraphsThatLibrariesReplayInsideNameTheirMemory) {
  const cuda::Driver& driver = fake.driver();
  const StreamHandle theirs = stream();
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  const auto native = [&](StreamHandle handle) { return reinterpret_cast<CUstream>(take(on().native_stream(handle))); };
  CUmodule loaded = nullptr;
  CUfunction store = nullptr;
  ASSERT_EQ(driver.cuModuleLoadDataEx_(&loaded, module.image.data(), 0, nullptr, nullptr), CUDA_SUCCESS);
  ASSERT_EQ(driver.cuModuleGetFunction_(&store, loaded, "store"), CUDA_SUCCESS);
  // A library records a graph of its own, and launches it on a stream that is captured.
  std::uint64_t inside = ptr.address + 8;
  std::uint32_t value = 6;
  void* params[] = {&inside, &value};
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  ASSERT_EQ(driver.cuStreamBeginCapture_(native(theirs), CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  ASSERT_EQ(driver.cuLaunchKernel_(store, 1, 1, 1, 1, 1, 1, 0, native(theirs), params, nullptr), CUDA_SUCCESS);
  ASSERT_EQ(driver.cuStreamEndCapture_(native(theirs), &graph), CUDA_SUCCESS);
  ASSERT_EQ(driver.cuGraphInstantiateWithFlags_(&exec, graph, 0), CUDA_SUCCESS);
  take(on().begin_capture(s));
  ASSERT_EQ(driver.cuGraphLaunch_(exec, native(s)), CUDA_SUCCESS);
  const GraphHandle ours = take(on().end_capture(s));
  const auto named = take(on().graph_memory(ours));
  ASSERT_EQ(named.size(), 1U);
  EXPECT_EQ(named[0].base, ptr);
  take(on().destroy_graph(ours));
  ASSERT_EQ(driver.cuGraphExecDestroy_(exec), CUDA_SUCCESS);
  ASSERT_EQ(driver.cuGraphDestroy_(graph), CUDA_SUCCESS);
  ASSERT_EQ(driver.cuModuleUnload_(loaded), CUDA_SUCCESS);
}

TEST_F(CudaCapture, AnotherBackendOnTheThreadDoesNotBreakIt) {
  const auto other = make();
  const DevicePtr theirs = take(other->alloc(64));
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  take(on().begin_capture(s));
  take(on().memset_async(ptr, 0x22, 64, s));
  EXPECT_OK(other->alloc(64));
  EXPECT_OK(other->alloc_managed(64));
  EXPECT_OK(other->alloc_host_pinned(64));
  EXPECT_OK(other->memset(theirs, 1, 64));
  EXPECT_OK(other->free(theirs));
  EXPECT_OK(other->create_event());
  EXPECT_OK(other->synchronize_device());
  EXPECT_OK(other->unload_modules());
  const GraphHandle graph = take(on().end_capture(s));
  take(on().launch_graph(graph, s));
  EXPECT_EQ(read_words(on(), ptr, 1, s)[0], 0x22222222U);
  take(on().destroy_graph(graph));
}

TEST_F(CudaCapture, ABackendThatComesAndGoesOnTheThreadDoesNotBreakIt) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  take(on().begin_capture(s));
  take(on().memset_async(ptr, 0x22, 64, s));
  EXPECT_OK(make()->health());
  const GraphHandle graph = take(on().end_capture(s));
  take(on().launch_graph(graph, s));
  EXPECT_EQ(read_words(on(), ptr, 1, s)[0], 0x22222222U);
  take(on().destroy_graph(graph));
}

TEST_F(CudaCapture, ParametersThatCannotBeReadAreWarnedOf) {
  const StreamHandle s = stream();
  const KernelHandle store = take(on().kernel("test", "store"));
  const std::array args{KernelArg::buffer(block(64)), KernelArg::value(std::uint32_t{5})};
  std::string logged;
  take(on().begin_capture(s));
  take(on().launch_typed(store, {}, {}, 0, s, args));
  set_log_sink([&](LogLevel, std::string_view line) { logged += line; });
  fake.fail_call("cuFuncGetParamInfo", 1, CUDA_ERROR_UNKNOWN);
  const auto graph = on().end_capture(s);
  set_log_sink({});
  EXPECT_THAT(logged, ::testing::HasSubstr("cuFuncGetParamInfo"));
  take(on().destroy_graph(take(graph)));
}

class CudaCaptureKernelNodes : public CudaCapture {
 protected:
  CudaCaptureKernelNodes() : CudaCapture({.nodes_have_kernels = true}) {}
};

TEST_F(CudaCaptureKernelNodes, LaunchesOfLibraryKernelsNameTheirMemory) {
  expect_library_launch_names_its_memory(on(), fake, module);
}

class CudaCaptureStrict : public CudaCapture {
 protected:
  CudaCaptureStrict() : CudaCapture({.idle_forks_count = true}) {}
};

TEST_F(CudaCaptureStrict, AForkWithoutWorkThatTheDriverRefusesIsRefused) {
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const EventHandle fork = take(on().create_event());
  const DevicePtr ptr = block(64);
  take(on().begin_capture(a));
  take(on().record_event(fork, a));
  take(on().stream_wait_event(b, fork));
  EXPECT_ERRC(on().end_capture(a), Errc::invalid_argument);
  EXPECT_TRUE(runs_work(a, ptr));
  EXPECT_TRUE(runs_work(b, ptr));
}

TEST_F(CudaCapture, ALookUpThatWouldLoadModulesIsRefusedOnACapturingThread) {
  const StreamHandle s = stream();
  take(on().unload_modules());
  take(on().begin_capture(s));
  EXPECT_ERRC(on().kernel("test", "store"), Errc::capture_unsafe);
  EXPECT_ERRC(on().kernel_registry()->entries(), Errc::capture_unsafe);
  EXPECT_TRUE(on().stream_is_capturing(s));
  take(on().abort_capture_if_active(s));
  take(on().kernel("test", "store"));
}

}  // namespace
}  // namespace metrale::test
