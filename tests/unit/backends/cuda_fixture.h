// SPDX-License-Identifier: Apache-2.0
//
// A CUDA backend on the fake driver. Each case ends with the check that the driver got everything back and nothing twice.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string_view>
#include <vector>

#include "backends/cuda/cuda_backend.h"
#include "support.h"
#include "support/fake_cuda/fake_gpu.h"

namespace metrale::test {

inline void cuda_store(const host::BlockContext& c) { *c.ptr<std::uint32_t>(0) = c.arg<std::uint32_t>(1); }
inline void cuda_fault(const host::BlockContext& c) { *c.fault = "an illegal access"; }

inline constexpr std::array<std::uint32_t, 2> kCudaStoreBytes{8, 4};
inline constexpr std::array<host::HostKernel, 2> kCudaKernels{{
    {"test", "store", cuda_store, kCudaStoreBytes, {}, false, false},
    {"test", "fault", cuda_fault, {}, {}, false, false},
}};

class CudaCase : public ::testing::Test {
 protected:
  explicit CudaCase(fake_cuda::Options options = {}) : fake(std::move(options)) {
    EXPECT_EQ(fake.driver().cuInit_(0), CUDA_SUCCESS);
  }
  void TearDown() override {
    gpu.reset();
    EXPECT_THAT(fake.misuses(), ::testing::IsEmpty());
    if (loses_device) return;
    EXPECT_EQ(fake.live().total(), 0U) << fake.live().to_string();
    EXPECT_THAT(fake.dropped_with_context(), ::testing::IsEmpty());
  }

  Result<std::unique_ptr<GpuBackend>> create(const cuda::Driver& driver, int ordinal = 0) {
    cuda::Options options;
    options.ordinal = ordinal;
    options.modules = {module};
    return cuda::create_with_driver(driver, std::move(options));
  }
  std::unique_ptr<GpuBackend> make(int ordinal = 0) { return take(create(fake.driver(), ordinal)); }
  /// The backend of this case, made when first asked for.
  GpuBackend& on() {
    if (gpu == nullptr) gpu = make();
    return *gpu;
  }
  StreamHandle stream() { return take(on().create_stream()); }
  DevicePtr block(std::uint64_t bytes) { return take(on().alloc(bytes)); }
  /// Calls of a function of the driver that `body` makes.
  template <class Body>
  std::uint64_t calls(std::string_view function, Body&& body) {
    const std::uint64_t before = fake.num_calls(function);
    body();
    return fake.num_calls(function) - before;
  }
  template <class Body>
  std::uint64_t calls(Body&& body) {
    const std::uint64_t before = fake.num_calls();
    body();
    return fake.num_calls() - before;
  }
  /// Whether `done()` becomes true within a while.
  template <class Done>
  static bool eventually(Done&& done) {
    for (int i = 0; i < 2000; ++i) {
      if (done()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }

  fake_cuda::FakeGpu fake;
  const cuda::ModuleImage module = fake.add_module("test", kCudaKernels);
  bool loses_device = false;
  std::unique_ptr<GpuBackend> gpu;
};

}  // namespace metrale::test
