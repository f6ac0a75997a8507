// SPDX-License-Identifier: Apache-2.0
#include "bridges/cublaslt/api.h"

#include <cuda.h>

#include <array>

#include <fmt/format.h>

#include "core/shared_library.h"
#include "metrale/bridges/cublaslt.h"

namespace metrale::cublaslt {
namespace {

#define METRALE_TEXT_(x) #x
#define METRALE_TEXT(x) METRALE_TEXT_(x)
constexpr const char* kNames[] = {"libcublasLt.so." METRALE_TEXT(CUBLAS_VER_MAJOR),
                                  "/usr/local/cuda/lib64/libcublasLt.so." METRALE_TEXT(CUBLAS_VER_MAJOR)};
#undef METRALE_TEXT
#undef METRALE_TEXT_

Errc code_of(cublasStatus_t status) noexcept {
  switch (status) {
    case CUBLAS_STATUS_NOT_SUPPORTED:
    case CUBLAS_STATUS_ARCH_MISMATCH: return Errc::unsupported;
    case CUBLAS_STATUS_INVALID_VALUE: return Errc::invalid_argument;
    case CUBLAS_STATUS_ALLOC_FAILED: return Errc::out_of_memory;
    default: return Errc::internal;
  }
}

Result<Library> open(std::source_location site) {
  const auto found = detail::SharedLibrary::open("cuBLASLt", kNames);
  if (!found) return Error(found.error()).with_site(site);
  Library library;
  Api& a = library.api;
  std::string missing;
  found->find("cublasLtGetVersion", a.get_version, missing);
  found->find("cublasLtGetStatusName", a.status_name, missing);
  found->find("cublasLtGetStatusString", a.status_string, missing);
  found->find("cublasLtCreate", a.create, missing);
  found->find("cublasLtDestroy", a.destroy, missing);
  found->find("cublasLtMatmulDescInit_internal", a.init_operation, missing);
  found->find("cublasLtMatmulDescSetAttribute", a.set_operation, missing);
  found->find("cublasLtMatrixLayoutInit_internal", a.init_layout, missing);
  found->find("cublasLtMatrixLayoutSetAttribute", a.set_layout, missing);
  found->find("cublasLtMatmulPreferenceInit_internal", a.init_preference, missing);
  found->find("cublasLtMatmulPreferenceSetAttribute", a.set_preference, missing);
  found->find("cublasLtMatmulAlgoGetHeuristic", a.heuristic, missing);
  found->find("cublasLtMatmulAlgoConfigGetAttribute", a.get_config, missing);
  found->find("cublasLtMatmulAlgoCheck", a.check_algorithm, missing);
  found->find("cublasLtMatmul", a.matmul, missing);
  if (!missing.empty()) {
    return Error(Errc::unsupported, fmt::format("{} lacks {}; install cuBLAS {}", found->name(), missing, CUBLAS_VER_MAJOR), site);
  }
  const std::size_t version = a.get_version();
  library.version = fmt::format("{}.{}.{} as {}", version / 10000, version / 100 % 100, version % 100, found->name());
  if (version / 10000 != CUBLAS_VER_MAJOR) {
    return Error(Errc::unsupported,
                 fmt::format("cuBLASLt {}; this build was made for version {}", library.version, CUBLAS_VER_MAJOR), site);
  }
  return library;
}

}  // namespace

Error Api::error(cublasStatus_t status, std::string_view what, std::source_location site) const {
  const char* name = status_name(status);
  const char* text = status_string(status);
  return Error(code_of(status), fmt::format("{} answers {}", what, name != nullptr ? name : "a status without a name"), site)
      .with_native(status, text != nullptr ? text : "");
}

Result<const Library*> Library::load(std::source_location site) {
  static const Result<Library> library = open(site);
  if (!library) return Error(library.error()).with_site(site);
  return &*library;
}

Result<std::string> describe_device(std::source_location site) {
  constexpr const char* kDriver[] = {"libcuda.so.1"};
  const auto driver = detail::SharedLibrary::open("CUDA driver", kDriver);
  if (!driver) return Error(driver.error()).with_site(site);
  std::string missing;
  decltype(&::cuCtxGetDevice) get_device = nullptr;
  decltype(&::cuDeviceGetName) get_name = nullptr;
  decltype(&::cuDeviceGetAttribute) get_attribute = nullptr;
  decltype(&::cuDriverGetVersion) get_version = nullptr;
  driver->find("cuCtxGetDevice", get_device, missing);
  driver->find("cuDeviceGetName", get_name, missing);
  driver->find("cuDeviceGetAttribute", get_attribute, missing);
  driver->find("cuDriverGetVersion", get_version, missing);
  if (!missing.empty()) return Error(Errc::unsupported, fmt::format("the CUDA driver lacks {}", missing), site);
  CUdevice device = 0;
  std::array<char, 256> name{};
  int major = 0;
  int minor = 0;
  int processors = 0;
  int version = 0;
  for (const CUresult code :
       {get_device(&device), get_name(name.data(), static_cast<int>(name.size()) - 1, device),
        get_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device),
        get_attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device),
        get_attribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device), get_version(&version)}) {
    if (code != CUDA_SUCCESS) {
      return Error(Errc::internal, fmt::format("the driver does not describe the device: code {}", static_cast<int>(code)), site);
    }
  }
  return fmt::format("{}, {}.{}, {} processors, driver {}", name.data(), major, minor, processors, version);
}

BridgeStatus status() {
  const auto library = Library::load();
  if (!library) return {.library = "cuBLASLt", .is_available = false, .text = library.error().message()};
  return {.library = "cuBLASLt", .is_available = true, .text = (*library)->version};
}

}  // namespace metrale::cublaslt
