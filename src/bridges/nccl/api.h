// SPDX-License-Identifier: Apache-2.0
//
// NCCL's functions, found at run time. Constant after loading; any thread.
#pragma once

#include <nccl.h>

#include <string>
#include <string_view>

#include "metrale/result.h"

namespace metrale::nccl {

struct Api {
  decltype(&::ncclGetVersion) get_version = nullptr;
  decltype(&::ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&::ncclCommInitRankConfig) init = nullptr;
  decltype(&::ncclCommFinalize) finalize = nullptr;
  decltype(&::ncclCommDestroy) destroy = nullptr;
  decltype(&::ncclCommAbort) abort = nullptr;
  decltype(&::ncclCommGetAsyncError) async_error = nullptr;
  decltype(&::ncclGetErrorString) error_string = nullptr;
  decltype(&::ncclGetLastError) last_error = nullptr;
  decltype(&::ncclGroupStart) group_start = nullptr;
  decltype(&::ncclGroupEnd) group_end = nullptr;
  decltype(&::ncclAllReduce) all_reduce = nullptr;
  decltype(&::ncclAllGather) all_gather = nullptr;
  decltype(&::ncclReduceScatter) reduce_scatter = nullptr;
  decltype(&::ncclBroadcast) broadcast = nullptr;
  decltype(&::ncclSend) send = nullptr;
  decltype(&::ncclRecv) receive = nullptr;

  std::string file;     ///< Under which name it was found.
  std::string version;  ///< "2.28.9"

  /// What NCCL says of a code that is neither success nor in progress.
  Error error(ncclResult_t code, std::string_view what, ncclComm_t comm = nullptr) const;
  Result<> check(ncclResult_t code, std::string_view what, ncclComm_t comm = nullptr) const {
    if (code == ncclSuccess || code == ncclInProgress) return {};
    return error(code, what, comm);
  }
};

/// Loads the library once. Errors: unsupported (not there, too old, lacks a function).
Result<const Api*> api();

}  // namespace metrale::nccl
