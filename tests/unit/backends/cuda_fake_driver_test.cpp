// SPDX-License-Identifier: Apache-2.0
//
// The rules of the fake CUDA driver itself, since everything that CI knows of the CUDA backend rests on them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "support/fake_cuda/fake_gpu.h"

namespace metrale::fake_cuda {
namespace {

using host::BlockContext;

void write_word(const BlockContext& c) { *c.ptr<std::uint32_t>(0) = c.arg<std::uint32_t>(1); }
void break_it(const BlockContext& c) { *c.fault = "broken"; }

constexpr std::uint32_t kWriteBytes[] = {8, 4};
constexpr std::uint32_t kOddBytes[] = {1, 8, 2, 12};
constexpr host::HostKernel kKernels[] = {
    {"m", "write", write_word, kWriteBytes, 64U, false, true},
    {"m", "break_it", break_it, {}, {}, false, false},
    {"m", "odd", break_it, kOddBytes, {}, false, false},
};

class FakeDriver : public ::testing::Test {
 protected:
  explicit FakeDriver(Options options = {}) : gpu(std::move(options)) {
    must(d.cuInit_(0));
    must(d.cuDevicePrimaryCtxRetain_(&context, 0));
    must(d.cuCtxSetCurrent_(context));
  }
  void TearDown() override {
    if (released) return;
    (void)d.cuCtxSetCurrent_(context);
    (void)d.cuDevicePrimaryCtxRelease_(0);
  }
  static void must(CUresult code) { ASSERT_EQ(code, CUDA_SUCCESS); }

  CUstream stream(unsigned flags = CU_STREAM_NON_BLOCKING) {
    CUstream made = nullptr;
    must(d.cuStreamCreateWithPriority_(&made, flags, 0));
    return made;
  }
  CUevent event(unsigned flags = CU_EVENT_DISABLE_TIMING) {
    CUevent made = nullptr;
    must(d.cuEventCreate_(&made, flags));
    return made;
  }
  CUdeviceptr block(std::size_t bytes) {
    CUdeviceptr made = 0;
    must(d.cuMemAlloc_(&made, bytes));
    return made;
  }
  CUmodule module() {
    CUmodule made = nullptr;
    must(d.cuModuleLoadDataEx_(&made, gpu.add_module("m", kKernels).image.data(), 0, nullptr, nullptr));
    return made;
  }
  CUfunction function(CUmodule of, const char* name) {
    CUfunction made = nullptr;
    must(d.cuModuleGetFunction_(&made, of, name));
    return made;
  }
  CUresult launch(CUfunction f, CUstream s, void** params, unsigned shared = 0) {
    return d.cuLaunchKernel_(f, 1, 1, 1, 1, 1, 1, shared, s, params, nullptr);
  }
  CUstreamCaptureStatus status(CUstream s) {
    CUstreamCaptureStatus found = CU_STREAM_CAPTURE_STATUS_NONE;
    must(d.cuStreamIsCapturing_(s, &found));
    return found;
  }
  void begin(CUstream s, CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) { must(d.cuStreamBeginCapture_(s, mode)); }
  CUresult end(CUstream s) {
    CUgraph graph = nullptr;
    const CUresult code = d.cuStreamEndCapture_(s, &graph);
    EXPECT_EQ(graph != nullptr, code == CUDA_SUCCESS);
    if (graph != nullptr) must(d.cuGraphDestroy_(graph));
    return code;
  }
  /// Holds a stream until its end.
  struct Hold {
    using Flag = std::shared_ptr<std::atomic<bool>>;  // shared: the function may outlive the test's scope
    Hold(const cuda::Driver& d, CUstream s) {
      const auto run = [](void* data) {
        const std::unique_ptr<Flag> flag(static_cast<Flag*>(data));
        while (!(*flag)->load()) std::this_thread::yield();
      };
      EXPECT_EQ(d.cuLaunchHostFunc_(s, run, new Flag(open)), CUDA_SUCCESS);
    }
    ~Hold() { *open = true; }
    Flag open = std::make_shared<std::atomic<bool>>(false);
  };
  template <class Fn>
  static void elsewhere(Fn&& fn) {
    std::thread(std::forward<Fn>(fn)).join();
  }

  FakeGpu gpu;
  const cuda::Driver& d = gpu.driver();
  CUcontext context = nullptr;
  bool released = false;
};

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
