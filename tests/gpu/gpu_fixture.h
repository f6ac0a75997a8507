// SPDX-License-Identifier: Apache-2.0
//
// What the tests of a real GPU share: the backend under test, and what happens on a machine without one. METRALE_TEST_BACKEND names
// another backend than cuda; with "host" the tests try themselves. METRALE_REQUIRE_BACKENDS turns a missing device into a failure.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

#include "metrale/backends.h"
#include "metrale/backends/cuda_kernels.h"
#include "metrale/backends/host_kernels.h"

namespace metrale::test {

inline std::string device_name() {
  const char* name = std::getenv("METRALE_TEST_BACKEND");
  return name != nullptr && *name != '\0' ? name : "cuda";
}

/// The CUDA backend over this machine's driver as if it had no batched copies. Absent from builds without that backend.
Result<std::unique_ptr<GpuBackend>> open_without_batched_copies(const BackendOptions& options);

/// The backend under test with the kernels of this build. METRALE_TEST_NO_BATCHED_COPIES=1 takes batched copies from CUDA's driver:
/// compute-sanitizer does not see what they write, and its initcheck would call the weights uninitialised.
inline Result<std::unique_ptr<GpuBackend>> open_device(BackendOptions options = {}) {
  options.host_kernels = host::kernel_tables();
  const auto modules = cuda::kernel_modules();
  options.cuda_modules = {modules.begin(), modules.end()};
#ifdef METRALE_WITH_CUDA
  const char* set = std::getenv("METRALE_TEST_NO_BATCHED_COPIES");
  if (device_name() == "cuda" && set != nullptr && std::string_view(set) == "1") return open_without_batched_copies(options);
#endif
  return create_backend(device_name(), options);
}

/// Whether a missing device is to fail instead of being skipped.
inline bool device_is_required() {
  const char* list = std::getenv("METRALE_REQUIRE_BACKENDS");
  return list != nullptr && fmt::format(",{},", list).find(fmt::format(",{},", device_name())) != std::string::npos;
}

/// Why no test of this program can run; empty when they can. Asked once.
inline const std::string& why_no_device() {
  static const std::string reason = [] {
    const BackendInfo* row = find_backend(device_name());
    if (row == nullptr) return fmt::format("backend {} is not built", device_name());
    if (const auto unavailable = row->unavailable()) return *unavailable;
    if (device_name() == "cuda" && cuda::kernel_modules().empty()) return std::string("this build has no CUDA kernels");
    return std::string();
  }();
  return reason;
}

/// First line of a test or SetUp.
#define METRALE_NEEDS_DEVICE()                                                               \
  do {                                                                                       \
    if (!::metrale::test::why_no_device().empty()) {                                         \
      if (::metrale::test::device_is_required()) FAIL() << ::metrale::test::why_no_device(); \
      GTEST_SKIP() << ::metrale::test::why_no_device();                                      \
    }                                                                                        \
  } while (false)

}  // namespace metrale::test
