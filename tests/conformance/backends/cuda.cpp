// SPDX-License-Identifier: Apache-2.0
#include "metrale/backends/cuda.h"

#include "backends/cuda/driver.h"
#include "conformance/backend_under_test.h"
#include "conformance/backends/cuda_kernels.h"

namespace metrale::conformance {

namespace {

/// Keeps the device's context for the whole run: making one takes a fifth of a second, and every case makes a backend.
void keep_context() {
  static const auto& kept = *new Result<std::unique_ptr<GpuBackend>>(cuda::create());
  static_cast<void>(kept.has_value());
}

DevicePtr foreign_memory(std::uint64_t bytes) {
  const auto driver = cuda::load_driver();
  CUdevice device = 0;
  CUcontext context = nullptr;
  CUdeviceptr ptr = 0;
  if (!driver || (*driver)->cuDeviceGet_(&device, 0) != CUDA_SUCCESS ||
      (*driver)->cuDevicePrimaryCtxRetain_(&context, device) != CUDA_SUCCESS ||
      (*driver)->cuCtxSetCurrent_(context) != CUDA_SUCCESS || (*driver)->cuMemAlloc_(&ptr, bytes) != CUDA_SUCCESS) {
    return {};
  }
  return {ptr};
}

}  // namespace

BackendUnderTest cuda_under_test() {
  BackendUnderTest backend;
  backend.name = "cuda";
  backend.create = [](const CreateOptions& options) {
    keep_context();
    cuda::Options made;
    made.face = options.face;
    made.modules.assign(cuda_test_modules().begin(), cuda_test_modules().end());
    return cuda::create(std::move(made));
  };
  backend.packs_chunks = true;
  backend.foreign_memory = foreign_memory;
  return backend;
}

}  // namespace metrale::conformance
