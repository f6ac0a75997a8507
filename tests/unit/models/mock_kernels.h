// SPDX-License-Identifier: Apache-2.0
//
// A mock that claims to have the host's kernels, so that decoders can be made on it. It computes nothing.
#pragma once

#include <memory>

#include "metrale/backends/mock.h"
#include "model_fixture.h"

namespace metrale::test {

inline std::unique_ptr<GpuBackend> mock_backend_with_kernels(const mock::Options& options = {}, bool waits_for_dependency = false) {
  std::unique_ptr<GpuBackend> backend = ok(mock::create(options));
  for (const auto& table : host::kernel_tables()) {
    for (const host::HostKernel& kernel : table) {
      mock::control(*backend).set_kernel_facts(kernel.module, kernel.function,
                                               {.param_bytes = {kernel.param_bytes.begin(), kernel.param_bytes.end()},
                                                .n_tile = kernel.n_tile,
                                                .casts_a_to_e4m3 = kernel.casts_a_to_e4m3,
                                                .waits_for_dependency = waits_for_dependency});
    }
  }
  return backend;
}

}  // namespace metrale::test
