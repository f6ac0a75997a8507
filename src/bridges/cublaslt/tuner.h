// SPDX-License-Identifier: Apache-2.0
//
// Measuring algorithms on the device: with random operands that together are larger than its cache, as graphs, so that the host's
// share does not count, the candidates in turn, so that a change of clocks meets them alike. It waits, and gives back all memory.
#pragma once

#include <cstdint>
#include <source_location>
#include <span>
#include <vector>

#include "bridges/cublaslt/plan.h"
#include "metrale/device_buffer.h"
#include "metrale/event.h"
#include "metrale/stream.h"

namespace metrale {
class GpuBackend;
}

namespace metrale::cublaslt {

inline constexpr std::string_view kBridgeModule = "bridge";

class Tuner {
 public:
  /// Makes operands for up to `rows` rows of the shape of `call`. Errors: those of the backend; capture_unsafe on a thread that
  /// holds a capture; not_found (the backend lacks module "bridge").
  static Result<Tuner> create(GpuBackend& backend, const Api& api, cublasLtHandle_t handle, const Call& call, std::uint32_t rows,
                              std::uint64_t workspace_bytes, std::source_location site);

  /// Seconds of one product of `rows` rows with each plan; infinite where the library refuses. Errors: those of the backend.
  Result<std::vector<double>> measure(std::span<const Plan> plans, std::uint32_t rows);

  /// Whether rows have the same bits however many are computed with them, by example.
  Result<bool> is_row_invariant(const Plan& plan);

 private:
  Tuner(GpuBackend& backend, const Api& api, cublasLtHandle_t handle, std::source_location site)
      : backend_(&backend), api_(&api), handle_(handle), site_(site) {}
  Result<> fill(DevicePtr ptr, std::uint64_t bytes, bool fp8);
  Result<> enqueue(const Plan& plan, std::uint32_t rows, std::size_t set);
  Result<std::vector<std::byte>> output_of(const Plan& plan, std::uint32_t rows, std::uint32_t kept_rows);

  GpuBackend* backend_;
  const Api* api_;
  cublasLtHandle_t handle_;
  std::source_location site_;
  Stream stream_;
  Event start_;
  Event end_;
  DeviceBuffer memory_;
  DeviceBuffer workspace_;
  std::vector<Call> sets_;  ///< The same product on operands of its own.
  std::uint32_t rows_ = 0;
  std::uint32_t seed_ = 0;
};

}  // namespace metrale::cublaslt
