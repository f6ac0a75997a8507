// SPDX-License-Identifier: Apache-2.0
#include "bridges/cutlass/foreign.h"

#include <fmt/format.h>

namespace metrale::cutlass {
namespace {

// Of cuda_runtime_api.h and cutlass.h, which host code here does without.
constexpr int kCudaOutOfMemory = 2;
constexpr int kCudaInvalidDeviceFunction = 98;
constexpr int kCudaNoKernelImage = 209;
constexpr int kCudaNotSupported = 801;
constexpr int kCutlassMisaligned = 1;
constexpr int kCutlassInvalidProblem = 3;
constexpr int kCutlassNotSupported = 4;
constexpr int kCutlassArchMismatch = 8;

Errc code_of(const Foreign& foreign) noexcept {
  if (foreign.origin == Foreign::Origin::cuda) {
    switch (foreign.code) {
      case kCudaOutOfMemory: return Errc::out_of_memory;
      case kCudaInvalidDeviceFunction:
      case kCudaNoKernelImage:
      case kCudaNotSupported: return Errc::unsupported;
      default: return Errc::internal;
    }
  }
  switch (foreign.code) {
    case kCutlassMisaligned:
    case kCutlassInvalidProblem: return Errc::invalid_argument;
    case kCutlassNotSupported:
    case kCutlassArchMismatch: return Errc::unsupported;
    default: return Errc::internal;
  }
}

}  // namespace

Result<> translate(const Foreign& foreign, std::source_location site) {
  if (foreign.ok()) return {};
  const char* library = foreign.origin == Foreign::Origin::cuda ? "the CUDA runtime" : "CUTLASS";
  return Error(code_of(foreign), fmt::format("{} refuses {}", library, foreign.call), site)
      .with_native(foreign.code, foreign.text != nullptr ? foreign.text : "");
}

}  // namespace metrale::cutlass
