// SPDX-License-Identifier: Apache-2.0
//
// The bridge in a build without FlashInfer's headers.
#include "metrale/bridges/flashinfer.h"

namespace metrale::flashinfer {
namespace {

constexpr const char* kWhyNot =
    "this build was made without FlashInfer: run scripts/fetch_headers, or set METRALE_FLASHINFER_ROOT, with nvcc in reach";

}  // namespace

BridgeStatus status() { return {.library = "FlashInfer", .is_available = false, .text = kWhyNot}; }

Result<std::unique_ptr<Bridge>> Bridge::create(GpuBackend&, std::source_location site) {
  return Error(Errc::unsupported, std::string("flashinfer: ") + kWhyNot, site);
}

}  // namespace metrale::flashinfer
