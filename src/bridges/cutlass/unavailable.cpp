// SPDX-License-Identifier: Apache-2.0
//
// The bridge of a build without CUTLASS.
#include "metrale/bridges/cutlass.h"

namespace metrale::cutlass {
namespace {

constexpr const char* kWhy =
    "this build has no CUTLASS: it needs the CUDA backend, nvcc, and METRALE_CUTLASS_ROOT, which scripts/fetch_headers fills";

}  // namespace

BridgeStatus status() { return {.library = "CUTLASS", .is_available = false, .text = kWhy}; }

Result<std::unique_ptr<Bridge>> Bridge::create(GpuBackend&, const BridgeOptions&, Site site) {
  return Error(Errc::unsupported, kWhy, site);
}

}  // namespace metrale::cutlass
