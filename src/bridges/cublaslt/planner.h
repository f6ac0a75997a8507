// SPDX-License-Identifier: Apache-2.0
//
// Planner: finds the plan of a call, and makes those that are missing: from the file, by measuring, or as the library ranks them.
// Any thread; one at a time makes.
#pragma once

#include <atomic>
#include <mutex>
#include <source_location>
#include <string>
#include <vector>

#include "bridges/cublaslt/algorithm_file.h"
#include "bridges/cublaslt/plan.h"

namespace metrale {
class GpuBackend;
}

namespace metrale::cublaslt {

class Tuner;

class Planner {
 public:
  using Site = std::source_location;

  Planner(GpuBackend& backend, const Api& api, cublasLtHandle_t handle, const Options& options, const std::string& identity);

  /// Null where there is none yet.
  const Plan* find(const Call& call) const noexcept {
    const Plan* plan = table_.find(key_of(call, rows_, options_.row_invariant));
    if (plan == nullptr || !plan->has_exceptions.load(std::memory_order_acquire)) [[likely]]
      return plan;
    if (const Plan* exact = table_.find(key_of(call, Rows::exact, options_.row_invariant))) return exact;
    return plan->is_usable ? plan : nullptr;
  }

  /// Makes the plan of `call`, unless another thread has. Without `may_measure`, and where measuring is not possible because this
  /// thread holds a capture, it is provisional. Errors: unsupported (no algorithm), those of library and backend.
  Result<const Plan*> make(const Call& call, bool may_measure, Site site);

  /// Whether `error` says that the algorithm of `plan` does not serve this m, and another may.
  bool is_refusal(const Plan& plan, const Error& error) const noexcept;
  /// A plan for the m of `call` alone, which `plan` refused.
  Result<const Plan*> make_exception(const Plan& plan, const Call& call, Site site);

  Counts counts() const;
  /// With no other call at the same time.
  void clear();

 private:
  Result<const Plan*> make_locked(const Call& call, Rows rows, bool may_measure, Site site);
  Result<const Plan*> make_exception_locked(const Plan& plan, const Call& call, Site site);
  Result<std::vector<Plan>> list(const Call& call, const Plan& described, Rows rows, Site site) const;
  /// The best of `plans`. Errors: unsupported (none does what the mode asks for), those of the backend.
  Result<std::size_t> pick(const Call& call, std::uint32_t rows, std::span<const Plan> plans, Rows kind, Site site);
  Result<std::size_t> pick_for_all_rows(Tuner& tuner, std::span<const Plan> plans, Site site) const;
  /// Sets the workspace to what the rows that the plan serves need. False where it serves none.
  bool settle_workspace(Plan& plan, const Call& call, Rows rows) const;

  GpuBackend& backend_;
  const Api& api_;
  cublasLtHandle_t handle_;
  const Options options_;
  const Rows rows_;
  PlanTable table_;
  std::mutex making_;
  AlgorithmFile file_;
  std::atomic<std::uint64_t> num_plans_{0};
  std::atomic<std::uint64_t> num_measured_{0};
  std::atomic<std::uint64_t> num_from_file_{0};
  std::atomic<std::uint64_t> num_exceptions_{0};
};

}  // namespace metrale::cublaslt
