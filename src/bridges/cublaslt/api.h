// SPDX-License-Identifier: Apache-2.0
//
// cuBLASLt as it is found at run time: the table of its functions, and how its status becomes an error. Any thread.
#pragma once

#include <cublasLt.h>

#include <string>
#include <string_view>

#include "metrale/result.h"

namespace metrale::cublaslt {

/// What the bridge calls. Descriptors are values here, so nothing has to be destroyed but the handle.
struct Api {
  decltype(&::cublasLtGetVersion) get_version = nullptr;
  decltype(&::cublasLtGetStatusName) status_name = nullptr;
  decltype(&::cublasLtGetStatusString) status_string = nullptr;
  decltype(&::cublasLtCreate) create = nullptr;
  decltype(&::cublasLtDestroy) destroy = nullptr;
  decltype(&::cublasLtMatmulDescInit_internal) init_operation = nullptr;
  decltype(&::cublasLtMatmulDescSetAttribute) set_operation = nullptr;
  decltype(&::cublasLtMatrixLayoutInit_internal) init_layout = nullptr;
  decltype(&::cublasLtMatrixLayoutSetAttribute) set_layout = nullptr;
  decltype(&::cublasLtMatmulPreferenceInit_internal) init_preference = nullptr;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) set_preference = nullptr;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&::cublasLtMatmulAlgoConfigGetAttribute) get_config = nullptr;
  decltype(&::cublasLtMatmulAlgoCheck) check_algorithm = nullptr;
  decltype(&::cublasLtMatmul) matmul = nullptr;

  /// Ok for CUBLAS_STATUS_SUCCESS. The only place that knows which Errc a cublasStatus_t is. `what`: the library's function.
  Result<> check(cublasStatus_t status, std::string_view what, std::source_location site = std::source_location::current()) const {
    if (status == CUBLAS_STATUS_SUCCESS) [[likely]]
      return {};
    return error(status, what, site);
  }
  Error error(cublasStatus_t status, std::string_view what, std::source_location site) const;
};

struct Library {
  Api api;
  std::string version;  ///< "13.1.0 as libcublasLt.so.13"
  /// Loads it once a process. Errors: unsupported (names tried with the loader's words; functions missing; another major version
  /// than that of the header this was built with). Valid until the process ends.
  static Result<const Library*> load(std::source_location site = std::source_location::current());
};

/// "NVIDIA H200, 9.0, 132 processors, driver 13000" of the context that is current. Errors: those of the driver.
Result<std::string> describe_device(std::source_location site = std::source_location::current());

}  // namespace metrale::cublaslt
