// SPDX-License-Identifier: Apache-2.0
//
// cuBLASLt, found at run time, as a peer: one row times a bf16 matrix. It uses the context that is current. One thread at a time.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <memory>

#include "metrale/result.h"

namespace metrale::bench {

class CublasLt {
 public:
  static constexpr std::uint64_t kWorkspaceBytes = std::uint64_t{64} << 20;

  /// What the library chose for a shape: its first heuristic. Owned by the library's object.
  struct Plan {
    void* operation = nullptr;
    void* weights = nullptr;
    void* x = nullptr;
    void* y = nullptr;
    std::array<std::uint64_t, 8> algorithm{};
  };

  /// Errors: unsupported (the library is not here; an entry point is missing), internal (its own refusal).
  static Result<std::unique_ptr<CublasLt>> load();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;
  ~CublasLt();

  /// y [n] = W [n, k] · x [k], all bf16, summed in f32. Errors: unsupported (no algorithm), internal.
  Result<Plan> plan(std::uint32_t n, std::uint32_t k);
  Result<> run(const Plan& plan, CUdeviceptr weights, CUdeviceptr x, CUdeviceptr y, CUdeviceptr workspace, CUstream stream);

 private:
  struct Api;
  CublasLt();
  std::unique_ptr<Api> api_;
  void* handle_ = nullptr;
};

}  // namespace metrale::bench
