// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/cuda_backend.h"
#include "gpu/gpu_fixture.h"
#include "metrale/switches.h"

namespace metrale::test {

Result<std::unique_ptr<GpuBackend>> open_without_batched_copies(const BackendOptions& options) {
  const cuda::Driver* driver = METRALE_TRY(cuda::load_driver());
  static const cuda::Driver without = [&] {
    cuda::Driver table = *driver;
    table.cuMemcpyBatchAsync_ = nullptr;
    return table;
  }();
  cuda::Options cuda;
  cuda.face = options.face;
  cuda.ordinal = options.cuda_device.value_or(static_cast<int>(switches().cuda_device));
  cuda.modules = options.cuda_modules;
  return cuda::create_with_driver(without, std::move(cuda));
}

}  // namespace metrale::test
