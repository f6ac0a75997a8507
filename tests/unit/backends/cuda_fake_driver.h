// SPDX-License-Identifier: Apache-2.0
//
// The fake CUDA driver with a context that is current, for the tests of its own rules.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "support/fake_cuda/fake_gpu.h"

namespace metrale::fake_cuda {

inline void write_word(const host::BlockContext& c) { *c.ptr<std::uint32_t>(0) = c.arg<std::uint32_t>(1); }
inline void break_it(const host::BlockContext& c) { *c.fault = "broken"; }

inline constexpr std::uint32_t kWriteBytes[] = {8, 4};
inline constexpr std::uint32_t kOddBytes[] = {1, 8, 2, 12};
inline constexpr host::HostKernel kKernels[] = {
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
    Hold(const cuda::Driver& d, CUstream s) {
      const auto run = [](void* flag) {
        while (!static_cast<std::atomic<bool>*>(flag)->load()) std::this_thread::yield();
      };
      EXPECT_EQ(d.cuLaunchHostFunc_(s, run, &open), CUDA_SUCCESS);
    }
    ~Hold() { open = true; }
    std::atomic<bool>& open = make_flag();

   private:
    // As long as the process: the function may run after the test's scope, and on a lost device never.
    static std::atomic<bool>& make_flag() {
      static auto& all = *new std::deque<std::atomic<bool>>;
      static std::mutex mutex;
      const std::lock_guard lock(mutex);
      return all.emplace_back(false);
    }
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

}  // namespace metrale::fake_cuda
