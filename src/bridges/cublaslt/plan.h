// SPDX-License-Identifier: Apache-2.0
//
// A plan: the descriptors and the algorithm for one shape, and the table that finds it.
#pragma once

#include <cublasLt.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <source_location>
#include <vector>

#include "bridges/cublaslt/api.h"
#include "metrale/bridges/cublaslt.h"

namespace metrale::cublaslt {

/// Which rows a plan serves.
enum class Rows : std::uint8_t {
  in_class,  ///< Those of one `m_class`.
  any,       ///< All: the row-invariant plan of a shape.
  exact,     ///< One m that the plan above refused.
};

/// What plans are told apart by.
struct Key {
  std::array<std::uint64_t, 10> words{};
  friend bool operator==(const Key&, const Key&) = default;
  std::uint64_t hash() const noexcept;
};
/// `call` has passed `check_shape`; of its addresses only whether they are null counts. `row_invariant` tells the plans of both
/// modes apart where they serve one m.
Key key_of(const Call& call, Rows rows, bool row_invariant) noexcept;

/// Immutable once it is in the table, but for the flag.
struct Plan {
  Key key;
  std::uint32_t rows = 0;    ///< What the layouts say; a call with others changes copies.
  bool provisional = false;  ///< Made without measuring, which is to come.
  bool is_usable = true;     ///< False: no algorithm serves all rows, and each m has an exception.
  std::uint64_t workspace_bytes = 0;
  cublasLtMatmulDescOpaque_t operation{};
  cublasLtMatrixLayoutOpaque_t weight{};
  cublasLtMatrixLayoutOpaque_t act{};
  cublasLtMatrixLayoutOpaque_t residual{};
  cublasLtMatrixLayoutOpaque_t out{};
  cublasLtMatmulAlgo_t algorithm{};
  mutable std::atomic<bool> has_exceptions{false};  ///< Some m have plans of their own.

  Plan() = default;
  Plan(const Plan& other) noexcept { *this = other; }
  Plan& operator=(const Plan& other) noexcept;
};

/// Sets the descriptors of `plan` for `rows` rows of `call`'s shape. Errors: those of the library.
Result<> describe(const Api& api, const Call& call, std::uint32_t rows, Plan& plan, std::source_location site);

/// The library's candidates, most promising first; none is an empty list.
Result<std::vector<cublasLtMatmulHeuristicResult_t>> candidates(const Api& api, cublasLtHandle_t handle, const Plan& plan,
                                                                std::uint32_t most, std::uint64_t workspace_bytes, bool unsplit,
                                                                std::source_location site);
/// Whether all of k is added up by one block, in one order.
bool is_unsplit(const Api& api, const cublasLtMatmulAlgo_t& algorithm) noexcept;
/// The workspace that the plan's algorithm needs for `rows` rows; nullopt where it cannot run.
std::optional<std::uint64_t> workspace_of(const Api& api, cublasLtHandle_t handle, const Plan& plan, std::uint32_t rows) noexcept;

/// Calls the library. `rows`: of `act` and `out`, as the library is told. `scales`: of `act`, as the library wants them.
cublasStatus_t launch(const Api& api, cublasLtHandle_t handle, const Plan& plan, const Call& call, std::uint32_t rows,
                      DevicePtr scales, DevicePtr workspace, std::uint64_t native_stream) noexcept;

/// Plans by key. Any thread may look up while one thread at a time inserts; plans live until `clear`.
class PlanTable {
 public:
  PlanTable();
  const Plan* find(const Key& key) const noexcept {
    const Slots* slots = slots_.load(std::memory_order_acquire);
    for (std::uint64_t i = key.hash();; ++i) {
      const Plan* plan = slots->at[i & slots->mask].load(std::memory_order_acquire);
      if (plan == nullptr || plan->key == key) return plan;
    }
  }
  /// Takes the place of a plan of the same key, which stays alive.
  const Plan* insert(std::unique_ptr<Plan> plan);
  /// With no look-up at the same time, and no plan in use.
  void clear();

 private:
  struct Slots {
    explicit Slots(std::size_t size) : mask(size - 1), at(std::make_unique<std::atomic<const Plan*>[]>(size)) {}
    std::uint64_t mask;
    std::unique_ptr<std::atomic<const Plan*>[]> at;
  };
  static void put(Slots& slots, const Plan* plan) noexcept;

  std::atomic<const Slots*> slots_{nullptr};
  std::vector<std::unique_ptr<Slots>> all_slots_;  ///< Outgrown ones too: a look-up may be in them.
  std::vector<std::unique_ptr<Plan>> plans_;
};

}  // namespace metrale::cublaslt
