// SPDX-License-Identifier: Apache-2.0
//
// The bridge of a build without cuBLASLt.
#include "metrale/bridges/cublaslt.h"

namespace metrale::cublaslt {
namespace {

constexpr const char* kWhy =
    "this build has no cuBLASLt: it needs the CUDA backend, cublasLt.h beside cuda.h, and METRALE_WITH_CUBLASLT";

}  // namespace

BridgeStatus status() { return {.library = "cuBLASLt", .is_available = false, .text = kWhy}; }

Result<std::unique_ptr<CublasLt>> CublasLt::create(GpuBackend&, Options, Site site) { return Error(Errc::unsupported, kWhy, site); }

}  // namespace metrale::cublaslt
