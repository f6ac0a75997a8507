// SPDX-License-Identifier: Apache-2.0
#include "bridges/nccl/api.h"

#include <fmt/format.h>

#include <cstdlib>

#include "core/shared_library.h"
#include "metrale/bridges/nccl.h"

namespace metrale::nccl {
namespace {

constexpr const char* kNames[] = {"libnccl.so.2", "/usr/local/cuda/lib64/libnccl.so.2", "/usr/lib/x86_64-linux-gnu/libnccl.so.2",
                                  "libnccl.so"};

std::string version_text(int code) { return fmt::format("{}.{}.{}", code / 10000, code / 100 % 100, code % 100); }

Result<Api> load() {
  // Multicast can put every device of a host out of service when a program ends in the middle of it.
  ::setenv("NCCL_NVLS_ENABLE", "0", 0);
  const detail::SharedLibrary library = METRALE_TRY(detail::SharedLibrary::open("NCCL", kNames));
  Api a;
  a.file = library.name();
  std::string missing;
  library.find("ncclGetVersion", a.get_version, missing);
  int version = 0;
  if (a.get_version == nullptr || a.get_version(&version) != ncclSuccess)
    return Error(Errc::unsupported, fmt::format("{} does not say which NCCL it is", a.file));
  a.version = version_text(version);
  if (version < kMinVersion) {
    return Error(Errc::unsupported,
                 fmt::format("{} is NCCL {}; {} is the oldest that is used", a.file, a.version, version_text(kMinVersion)));
  }
  library.find("ncclGetUniqueId", a.get_unique_id, missing);
  library.find("ncclCommInitRankConfig", a.init, missing);
  library.find("ncclCommFinalize", a.finalize, missing);
  library.find("ncclCommDestroy", a.destroy, missing);
  library.find("ncclCommAbort", a.abort, missing);
  library.find("ncclCommGetAsyncError", a.async_error, missing);
  library.find("ncclGetErrorString", a.error_string, missing);
  library.find("ncclGetLastError", a.last_error, missing);
  library.find("ncclGroupStart", a.group_start, missing);
  library.find("ncclGroupEnd", a.group_end, missing);
  library.find("ncclAllReduce", a.all_reduce, missing);
  library.find("ncclAllGather", a.all_gather, missing);
  library.find("ncclReduceScatter", a.reduce_scatter, missing);
  library.find("ncclBroadcast", a.broadcast, missing);
  library.find("ncclSend", a.send, missing);
  library.find("ncclRecv", a.receive, missing);
  if (!missing.empty()) return Error(Errc::unsupported, fmt::format("{}, NCCL {}, lacks {}", a.file, a.version, missing));
  return a;
}

Errc code_of(ncclResult_t code) {
  switch (code) {
    case ncclInvalidArgument:
    case ncclInvalidUsage: return Errc::invalid_argument;
    case ncclSystemError:
    case ncclRemoteError: return Errc::io;
    default: return Errc::internal;
  }
}

}  // namespace

Error Api::error(ncclResult_t code, std::string_view what, ncclComm_t comm) const {
  const char* text = error_string(code);
  const char* last = last_error(comm);
  std::string message = fmt::format("{}: {}", what, text == nullptr ? "an unknown code" : text);
  if (last != nullptr && *last != '\0') message += fmt::format(": {}", last);
  for (char& c : message) {
    if (c == '\n') c = ' ';
  }
  return Error(code_of(code), std::move(message)).with_native(code, "ncclResult_t");
}

Result<const Api*> api() {
  static const Result<Api> loaded = load();
  if (!loaded) return loaded.error();
  return &*loaded;
}

}  // namespace metrale::nccl
