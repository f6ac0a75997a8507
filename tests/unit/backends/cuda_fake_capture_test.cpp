// SPDX-License-Identifier: Apache-2.0
//
// The rules of the fake CUDA driver itself: captures, graphs, modules and launches.
#include "cuda_fake_driver.h"

namespace metrale::fake_cuda {
namespace {

// ---- capture ----

TEST_F(FakeDriver, UnsafeCallsEndACaptureOfTheirThreadUnlessItIsRelaxed) {
  const CUstream s = stream();
  CUdeviceptr ptr = 0;
  const CUdeviceptr before = block(64);
  begin(s, CU_STREAM_CAPTURE_MODE_RELAXED);
  EXPECT_EQ(d.cuMemAlloc_(&ptr, 64), CUDA_SUCCESS);
  EXPECT_EQ(end(s), CUDA_SUCCESS);
  begin(s);
  elsewhere([&] {
    must(d.cuCtxSetCurrent_(context));
    EXPECT_EQ(d.cuMemAlloc_(&ptr, 64), CUDA_SUCCESS) << "thread-local: other threads are free";
  });
  EXPECT_EQ(status(s), CU_STREAM_CAPTURE_STATUS_ACTIVE);
  EXPECT_EQ(d.cuMemAlloc_(&ptr, 64), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_EQ(status(s), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
  EXPECT_EQ(d.cuMemsetD8Async_(before, 0, 64, s), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_EQ(end(s), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_EQ(status(s), CU_STREAM_CAPTURE_STATUS_NONE);
}

TEST_F(FakeDriver, AThreadMayAskForRelaxedRules) {
  const CUstream s = stream();
  begin(s);
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  must(d.cuThreadExchangeStreamCaptureMode_(&mode));
  EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_GLOBAL) << "what it was before";
  block(64);
  must(d.cuThreadExchangeStreamCaptureMode_(&mode));
  EXPECT_EQ(end(s), CUDA_SUCCESS);
}

TEST_F(FakeDriver, AGlobalCaptureForbidsUnsafeCallsEverywhere) {
  const CUstream s = stream();
  begin(s, CU_STREAM_CAPTURE_MODE_GLOBAL);
  elsewhere([&] {
    must(d.cuCtxSetCurrent_(context));
    EXPECT_EQ(d.cuEventQuery_(event()), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  });
  EXPECT_EQ(end(s), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

TEST_F(FakeDriver, WaitingForACapturedStreamOrForTheContextEndsTheCapture) {
  const CUstream s = stream();
  const CUevent e = event();
  for (int i = 0; i < 4; ++i) {
    begin(s, CU_STREAM_CAPTURE_MODE_RELAXED);
    must(d.cuEventRecord_(e, s));
    const CUresult code = i == 0   ? d.cuStreamSynchronize_(s)
                          : i == 1 ? d.cuStreamQuery_(s)
                          : i == 2 ? d.cuCtxSynchronize_()
                                   : d.cuEventQuery_(e);
    EXPECT_EQ(code, i == 3 ? CUDA_ERROR_CAPTURED_EVENT : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) << i;
    EXPECT_EQ(end(s), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) << i;
  }
}

TEST_F(FakeDriver, ACaptureIsEndedOnItsThreadAndItsStream) {
  const CUstream s = stream(), other = stream();
  const CUevent e = event();
  begin(s);
  elsewhere([&] {
    must(d.cuCtxSetCurrent_(context));
    EXPECT_EQ(end(s), CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  });
  EXPECT_EQ(d.cuStreamBeginCapture_(s, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_EQ(end(s), CUDA_SUCCESS);
  EXPECT_EQ(end(s), CUDA_ERROR_ILLEGAL_STATE);
  begin(s);
  must(d.cuEventRecord_(e, s));
  must(d.cuStreamWaitEvent_(other, e, 0));
  EXPECT_EQ(end(other), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  EXPECT_EQ(end(s), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

TEST_F(FakeDriver, JoinedStreamsMustBeJoinedBack) {
  const CUstream s = stream(), other = stream();
  const CUevent fork = event(), join = event();
  const CUdeviceptr ptr = block(64);
  for (const bool joined : {false, true}) {
    begin(s);
    must(d.cuEventRecord_(fork, s));
    must(d.cuStreamWaitEvent_(other, fork, 0));
    EXPECT_EQ(status(other), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    must(d.cuMemsetD8Async_(ptr, 1, 64, other));
    if (joined) {
      must(d.cuEventRecord_(join, other));
      must(d.cuStreamWaitEvent_(s, join, 0));
    }
    EXPECT_EQ(end(s), joined ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    EXPECT_EQ(status(other), CU_STREAM_CAPTURE_STATUS_NONE);
  }
}

class StrictForks : public FakeDriver {
 protected:
  StrictForks() : FakeDriver({.idle_forks_count = true}) {}
};

TEST_F(StrictForks, AreJoinedBackThroughOthers) {
  const CUstream s = stream(), b = stream(), c = stream();
  const CUevent e = event();
  for (const bool joined : {false, true}) {
    begin(s);
    must(d.cuEventRecord_(e, s));
    must(d.cuStreamWaitEvent_(b, e, 0));
    must(d.cuEventRecord_(e, b));
    must(d.cuStreamWaitEvent_(c, e, 0));
    must(d.cuEventRecord_(e, joined ? c : b));
    must(d.cuStreamWaitEvent_(s, e, 0));
    EXPECT_EQ(end(s), joined ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
  }
}

TEST_F(FakeDriver, CapturesDoNotTouchWhatIsOutside) {
  const CUstream s = stream(), other = stream();
  const CUevent outside = event(), inside = event();
  {
    const Hold hold(d, other);
    must(d.cuEventRecord_(outside, other));
    begin(s);
    EXPECT_EQ(d.cuStreamWaitEvent_(s, outside, 0), CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    EXPECT_EQ(end(s), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  }
  begin(s);
  must(d.cuEventRecord_(inside, s));
  begin(other);
  EXPECT_EQ(d.cuStreamWaitEvent_(other, inside, 0), CUDA_ERROR_STREAM_CAPTURE_MERGE);
  EXPECT_EQ(end(s), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_EQ(end(other), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  const CUstream blocking = stream(CU_STREAM_DEFAULT);
  begin(blocking);
  const CUdeviceptr ptr = gpu.foreign_memory(64);
  EXPECT_EQ(d.cuMemsetD8Async_(ptr, 0, 64, nullptr), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  EXPECT_EQ(end(blocking), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

TEST_F(FakeDriver, PageableMemoryAndBatchesAreNotCaptured) {
  const CUstream s = stream();
  CUdeviceptr ptr = block(64), from = block(64);
  std::vector<std::byte> pageable(64);
  begin(s);
  EXPECT_EQ(d.cuMemcpyHtoDAsync_(ptr, pageable.data(), 64, s), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_EQ(end(s), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  begin(s);
  std::size_t size = 64, first = 0;
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  EXPECT_NE(d.cuMemcpyBatchAsync_(&ptr, &from, &size, 1, &attributes, &first, 1, s), CUDA_SUCCESS);
  EXPECT_EQ(end(s), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

// ---- graphs ----

TEST_F(FakeDriver, GraphsReplayAndTellTheirKernels) {
  const CUstream s = stream();
  const CUdeviceptr ptr = block(64);
  const CUfunction write = function(module(), "write");
  begin(s);
  must(d.cuMemsetD8Async_(ptr, 0, 64, s));
  CUdeviceptr to = ptr + 4;
  std::uint32_t value = 7;
  void* params[] = {&to, &value};
  must(launch(write, s, params));
  to = 0;
  CUgraph graph = nullptr;
  must(d.cuStreamEndCapture_(s, &graph));
  std::size_t count = 0;
  must(d.cuGraphGetNodes_(graph, nullptr, &count));
  std::vector<CUgraphNode> nodes(count);
  must(d.cuGraphGetNodes_(graph, nodes.data(), &count));
  ASSERT_EQ(count, 2U);
  CUgraphNodeType type{};
  must(d.cuGraphNodeGetType_(nodes[1], &type));
  ASSERT_EQ(type, CU_GRAPH_NODE_TYPE_KERNEL);
  CUDA_KERNEL_NODE_PARAMS found;
  must(d.cuGraphKernelNodeGetParams_(nodes[1], &found));
  EXPECT_EQ(found.func, write);
  EXPECT_EQ(*static_cast<CUdeviceptr*>(found.kernelParams[0]), ptr + 4);
  CUgraphExec exec = nullptr;
  must(d.cuGraphInstantiateWithFlags_(&exec, graph, 0));
  must(d.cuGraphDestroy_(graph));
  std::uint32_t seen[2];
  for (int i = 0; i < 2; ++i) {
    must(d.cuMemsetD8Async_(ptr, 0xFF, 64, s));
    must(d.cuGraphLaunch_(exec, s));
    must(d.cuMemcpyDtoHAsync_(seen, ptr, 8, s));
    EXPECT_THAT(seen, ::testing::ElementsAre(0, 7));
  }
  must(d.cuGraphExecDestroy_(exec));
  EXPECT_EQ(d.cuGraphLaunch_(exec, s), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(FakeDriver, UserObjectsGoWithTheLastReplay) {
  const CUstream s = stream();
  std::atomic<bool> destroyed{false};
  begin(s);
  CUgraph graph = nullptr;
  must(d.cuStreamEndCapture_(s, &graph));
  CUuserObject object = nullptr;
  const auto destroy = [](void* flag) { static_cast<std::atomic<bool>*>(flag)->store(true); };
  must(d.cuUserObjectCreate_(&object, &destroyed, destroy, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
  must(d.cuGraphRetainUserObject_(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE));
  EXPECT_EQ(gpu.live().user_objects, 0U);
  CUgraphExec exec = nullptr;
  must(d.cuGraphInstantiateWithFlags_(&exec, graph, 0));
  must(d.cuGraphDestroy_(graph));
  {
    const Hold hold(d, s);
    must(d.cuGraphLaunch_(exec, s));
    must(d.cuGraphExecDestroy_(exec));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_FALSE(destroyed) << "a replay in flight uses it";
  }
  must(d.cuStreamSynchronize_(s));
  for (int i = 0; i < 1000 && !destroyed; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(destroyed);
}

// ---- modules ----

TEST_F(FakeDriver, FunctionsTellTheirParametersAndPublishFacts) {
  const CUmodule m = module();
  const CUfunction odd = function(m, "odd");
  std::vector<std::size_t> offsets, sizes;
  std::size_t offset = 0, size = 0;
  for (std::size_t i = 0; d.cuFuncGetParamInfo_(odd, i, &offset, &size) == CUDA_SUCCESS; ++i) {
    offsets.push_back(offset);
    sizes.push_back(size);
  }
  EXPECT_THAT(sizes, ::testing::ElementsAre(1, 8, 2, 12));
  EXPECT_THAT(offsets, ::testing::ElementsAre(0, 8, 16, 20));
  CUdeviceptr tile = 0;
  must(d.cuModuleGetGlobal_(&tile, &size, m, "write_n_tile"));
  EXPECT_EQ(size, 4U);
  EXPECT_EQ(*reinterpret_cast<std::uint32_t*>(static_cast<std::uintptr_t>(tile)), 64U);
  must(d.cuModuleGetGlobal_(&tile, &size, m, "write_waits"));
  EXPECT_EQ(d.cuModuleGetGlobal_(&tile, &size, m, "write_a_e4m3"), CUDA_ERROR_NOT_FOUND);
  unsigned count = 0;
  must(d.cuModuleGetFunctionCount_(&count, m));
  EXPECT_EQ(count, 3U);
  must(d.cuModuleUnload_(m));
  EXPECT_EQ(d.cuModuleUnload_(m), CUDA_ERROR_INVALID_HANDLE);
  const char* name = nullptr;
  EXPECT_EQ(d.cuFuncGetName_(&name, odd), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(FakeDriver, ImagesForLaterDevicesAndDamagedOnesAreRefused) {
  CUmodule m = nullptr;
  const auto late = gpu.add_module("m", kKernels, {}, 120);
  EXPECT_EQ(d.cuModuleLoadDataEx_(&m, late.image.data(), 0, nullptr, nullptr), CUDA_ERROR_NO_BINARY_FOR_GPU);
  EXPECT_EQ(d.cuModuleLoadDataEx_(&m, "nonsense", 0, nullptr, nullptr), CUDA_ERROR_INVALID_IMAGE);
  EXPECT_EQ(d.cuModuleLoadDataEx_(&m, "// fake-cuda-module 1\nwhat is this\n", 0, nullptr, nullptr), CUDA_ERROR_INVALID_IMAGE);
  EXPECT_EQ(gpu.live().modules, 0U);
}

TEST_F(FakeDriver, LaunchesKeepTheLimits) {
  const CUstream s = stream();
  const CUfunction write = function(module(), "write");
  CUdeviceptr to = block(64);
  std::uint32_t value = 7;
  void* params[] = {&to, &value};
  EXPECT_EQ(d.cuLaunchKernel_(write, 1, 1, 1, 1025, 1, 1, 0, s, params, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(d.cuLaunchKernel_(write, 1, 65536, 1, 1, 1, 1, 0, s, params, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(launch(write, s, params, (48 << 10) + 1), CUDA_ERROR_INVALID_VALUE);
  must(d.cuFuncSetAttribute_(write, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 100 << 10));
  EXPECT_EQ(launch(write, s, params, 100 << 10), CUDA_SUCCESS);
  EXPECT_EQ(d.cuFuncSetAttribute_(write, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 228 << 10), CUDA_ERROR_INVALID_VALUE);
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  attribute.value.cooperative = 1;
  CUlaunchConfig config{};
  config.gridDimX = 1000;
  config.gridDimY = config.gridDimZ = config.blockDimX = config.blockDimY = config.blockDimZ = 1;
  config.hStream = s;
  config.attrs = &attribute;
  config.numAttrs = 1;
  EXPECT_EQ(d.cuLaunchKernelEx_(&config, write, params, nullptr), CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
  EXPECT_EQ(gpu.num_lazy_loads(), 1U);
  must(d.cuStreamSynchronize_(s));
}

}  // namespace
}  // namespace metrale::fake_cuda
