// SPDX-License-Identifier: Apache-2.0
#include "bridges/cublaslt/planner.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "bridges/cublaslt/shape.h"
#include "bridges/cublaslt/tuner.h"
#include "metrale/backend.h"
#include "metrale/log.h"

namespace metrale::cublaslt {
namespace {

// Where the algorithm for all rows is looked for, and by which rows it is judged.
constexpr std::uint32_t kManyRows = 2048;
constexpr std::uint32_t kFewRows = 64;
constexpr std::uint32_t kJudgedRows[] = {16, 256, kManyRows};
constexpr std::uint32_t kServedRows[] = {1, 16, 64, 256, 1024, 4096, 16384};
// A later candidate has to be this much faster: the library's order is worth something, and times scatter.
constexpr double kFaster = 0.99;

std::uint32_t whole_rows(const Call& call, std::uint32_t rows) noexcept {
  return call.precision == Precision::fp8_block ? static_cast<std::uint32_t>(round_up(rows, kBlockRows)) : rows;
}

std::uint32_t rows_of(const Call& call, Rows kind) noexcept {
  if (kind == Rows::any) return kManyRows;
  return whole_rows(call, kind == Rows::exact ? call.m : m_class(call.m));
}

std::string describe_shape(const Call& c) {
  return fmt::format("{} x [{}, {}] · [{}, {}]ᵀ {} to {}", c.batch, c.m, c.k, c.n, c.k, to_string(c.precision),
                     to_string(c.out_type));
}

}  // namespace

Planner::Planner(GpuBackend& backend, const Api& api, cublasLtHandle_t handle, const Options& options, const std::string& identity)
    : backend_(backend), api_(api), handle_(handle), options_(options), rows_(options.row_invariant ? Rows::any : Rows::in_class) {
  if (options.cache_folder && !options.cache_folder->empty() && !identity.empty()) {
    file_ = AlgorithmFile(*options.cache_folder, identity);
  }
}

Result<const Plan*> Planner::make(const Call& call, bool may_measure, Site site) {
  const std::lock_guard lock(making_);
  const Plan* plan = METRALE_TRY(make_locked(call, rows_, may_measure && options_.measure, site));
  if (plan->is_usable) return plan;
  return make_exception_locked(*plan, call, site);
}

bool Planner::is_refusal(const Plan& plan, const Error& error) const noexcept {
  const auto rows = static_cast<Rows>(plan.key.words[0] >> 8 & 3);
  return rows != Rows::exact &&
         (error.native_code() == CUBLAS_STATUS_NOT_SUPPORTED || error.native_code() == CUBLAS_STATUS_INVALID_VALUE);
}

Result<const Plan*> Planner::make_exception(const Plan& plan, const Call& call, Site site) {
  const std::lock_guard lock(making_);
  return make_exception_locked(plan, call, site);
}

Result<const Plan*> Planner::make_exception_locked(const Plan& plan, const Call& call, Site site) {
  if (const Plan* there = table_.find(key_of(call, Rows::exact, options_.row_invariant))) return there;
  const Plan* made = METRALE_TRY(make_locked(call, Rows::exact, options_.measure, site));
  plan.has_exceptions.store(true, std::memory_order_release);
  num_exceptions_.fetch_add(1, std::memory_order_relaxed);
  if (options_.row_invariant) {
    log(LogLevel::warning,
        fmt::format("cuBLASLt: {} has an algorithm of its own; its rows may differ in bits from those of other m",
                    describe_shape(call)));
  }
  return made;
}

Result<const Plan*> Planner::make_locked(const Call& call, Rows rows, bool may_measure, Site site) {
  const Key key = key_of(call, rows, options_.row_invariant);
  if (const Plan* there = table_.find(key); there != nullptr && !(there->provisional && may_measure)) return there;
  auto plan = std::make_unique<Plan>();
  METRALE_TRY(describe(api_, call, rows_of(call, rows), *plan, site));
  plan->key = key;
  const auto keep = [&] {
    num_plans_.fetch_add(1, std::memory_order_relaxed);
    return table_.insert(std::move(plan));
  };
  if (const auto known = file_.find(key)) {
    plan->algorithm = *known;
    if (settle_workspace(*plan, call, rows)) {
      num_from_file_.fetch_add(1, std::memory_order_relaxed);
      return keep();
    }
    log(LogLevel::warning,
        fmt::format("{}: the library refuses the algorithm for {}", file_.path().string(), describe_shape(call)));
  }
  const std::vector<Plan> plans = METRALE_TRY(list(call, *plan, rows, site));
  std::size_t chosen = 0;
  bool measured = false;
  bool usable = !plans.empty();
  if (usable && may_measure && (plans.size() > 1 || rows == Rows::any)) {
    const Result<std::size_t> picked = pick(call, plan->rows, plans, rows, site);
    if (picked) {
      chosen = *picked;
      measured = true;
    } else if (picked.error().code() == Errc::capture_unsafe) {
      plan->provisional = true;
    } else if (picked.error().code() == Errc::unsupported && rows == Rows::any) {
      usable = false;
    } else {
      METRALE_TRY(backend_.health(site));
      log(LogLevel::warning, fmt::format("cuBLASLt: {} is not measured, and the library's first choice is taken: {}",
                                         describe_shape(call), picked.error().to_string()));
    }
  } else {
    plan->provisional = options_.measure && plans.size() > 1 && !may_measure;
  }
  if (usable) {
    plan->algorithm = plans[chosen].algorithm;
    usable = settle_workspace(*plan, call, rows);
  }
  if (!usable && rows != Rows::any) {
    return Error(Errc::unsupported,
                 fmt::format("cuBLASLt has no algorithm for {} within a workspace of {} bytes", describe_shape(call),
                             options_.workspace_bytes),
                 site);
  }
  if (!usable) {
    plan->is_usable = false;
    plan->has_exceptions.store(true, std::memory_order_relaxed);
  }
  if (measured && usable) {
    num_measured_.fetch_add(1, std::memory_order_relaxed);
    file_.add(key, plan->algorithm);
  }
  return keep();
}

Result<std::vector<Plan>> Planner::list(const Call& call, const Plan& described, Rows rows, Site site) const {
  std::vector<Plan> plans;
  const auto add = [&](const Plan& shape) -> Result<> {
    for (const auto& found : METRALE_TRY(
             candidates(api_, handle_, shape, options_.candidates, options_.workspace_bytes, options_.row_invariant, site))) {
      const auto same = [&](const Plan& p) { return std::memcmp(&p.algorithm, &found.algo, sizeof(found.algo)) == 0; };
      if (std::ranges::any_of(plans, same)) continue;
      plans.push_back(described);
      plans.back().algorithm = found.algo;
      plans.back().workspace_bytes = options_.workspace_bytes;
    }
    return {};
  };
  METRALE_TRY(add(described));
  if (rows == Rows::any) {
    Plan few;
    METRALE_TRY(describe(api_, call, kFewRows, few, site));
    METRALE_TRY(add(few));
  }
  return plans;
}

Result<std::size_t> Planner::pick(const Call& call, std::uint32_t rows, std::span<const Plan> plans, Rows kind, Site site) {
  Tuner tuner = METRALE_TRY(Tuner::create(backend_, api_, handle_, call, rows, options_.workspace_bytes, site));
  if (kind == Rows::any) return pick_for_all_rows(tuner, plans, site);
  const std::vector<double> seconds = METRALE_TRY(tuner.measure(plans, rows));
  std::size_t best = 0;
  for (std::size_t i = 1; i < seconds.size(); ++i) {
    if (!std::isfinite(seconds[best]) || seconds[i] < kFaster * seconds[best]) best = i;
  }
  if (!std::isfinite(seconds[best])) return Error(Errc::unsupported, "the library refuses each of its candidates", site);
  return best;
}

Result<std::size_t> Planner::pick_for_all_rows(Tuner& tuner, std::span<const Plan> plans, Site site) const {
  std::vector<double> scores(plans.size(), 0);
  for (const std::uint32_t rows : kJudgedRows) {
    const std::vector<double> seconds = METRALE_TRY(tuner.measure(plans, rows));
    const double fastest = *std::ranges::min_element(seconds);
    for (std::size_t i = 0; i < plans.size(); ++i) scores[i] += seconds[i] / fastest;
  }
  std::vector<std::size_t> order(plans.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::sort(order, {}, [&](std::size_t i) { return std::pair(scores[i], i); });
  for (const std::size_t i : order) {
    if (std::isfinite(scores[i]) && METRALE_TRY(tuner.is_row_invariant(plans[i]))) return i;
  }
  return Error(Errc::unsupported, "no candidate gives a row the same bits whatever the number of rows", site);
}

bool Planner::settle_workspace(Plan& plan, const Call& call, Rows rows) const {
  std::vector<std::uint32_t> served;
  if (rows == Rows::any) {
    for (const std::uint32_t m : kServedRows) served.push_back(whole_rows(call, m));
  } else {
    served = {plan.rows, whole_rows(call, call.m)};
  }
  bool serves = false;
  plan.workspace_bytes = 0;
  for (const std::uint32_t m : served) {
    const auto bytes = workspace_of(api_, handle_, plan, m);
    if (!bytes || *bytes > options_.workspace_bytes) continue;
    serves = true;
    plan.workspace_bytes = std::max(plan.workspace_bytes, *bytes);
  }
  return serves;
}

Counts Planner::counts() const {
  return {.plans = num_plans_.load(std::memory_order_relaxed),
          .measured = num_measured_.load(std::memory_order_relaxed),
          .from_file = num_from_file_.load(std::memory_order_relaxed),
          .exceptions = num_exceptions_.load(std::memory_order_relaxed)};
}

void Planner::clear() {
  const std::lock_guard lock(making_);
  table_.clear();
}

}  // namespace metrale::cublaslt
