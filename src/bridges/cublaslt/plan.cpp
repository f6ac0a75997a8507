// SPDX-License-Identifier: Apache-2.0
#include "bridges/cublaslt/plan.h"

#include <algorithm>
#include <bit>

#include "bridges/cublaslt/shape.h"

namespace metrale::cublaslt {
namespace {

constexpr std::size_t kFirstSlots = 64;

// The library looks at the alignment of these, not at what is there, when it is asked for algorithms.
const void* const kAlignedAddress = reinterpret_cast<const void*>(std::uintptr_t{1} << 20);

template <class T>
cublasStatus_t set(const Api& api, cublasLtMatmulDescOpaque_t& operation, cublasLtMatmulDescAttributes_t attribute,
                   T value) noexcept {
  return api.set_operation(&operation, attribute, &value, sizeof(value));
}

template <class T>
cublasStatus_t set(const Api& api, cublasLtMatrixLayoutOpaque_t& layout, cublasLtMatrixLayoutAttribute_t attribute,
                   T value) noexcept {
  return api.set_layout(&layout, attribute, &value, sizeof(value));
}

cublasLtEpilogue_t epilogue_of(const Call& c) noexcept {
  switch (c.epilogue) {
    case Epilogue::relu: return c.bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    case Epilogue::gelu: return c.bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    case Epilogue::none: break;
  }
  return c.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

/// The first failure among steps that follow each other.
class Steps {
 public:
  Steps(const Api& api, std::source_location site) : api_(api), site_(site) {}
  void operator()(cublasStatus_t status, std::string_view what) {
    if (result_ && status != CUBLAS_STATUS_SUCCESS) result_ = api_.error(status, what, site_);
  }
  Result<> result() && { return std::move(result_); }

 private:
  const Api& api_;
  std::source_location site_;
  Result<> result_;
};

}  // namespace

Key key_of(const Call& c, Rows rows, bool row_invariant) noexcept {
  const Strides s = strides_of(c);
  const std::uint64_t m = rows == Rows::any ? 0 : rows == Rows::exact ? c.m : m_class(c.m);
  const bool batched = c.batch > 1;
  Key key;
  key.words = {static_cast<std::uint64_t>(c.precision) | static_cast<std::uint64_t>(c.out_type == DType::f32) << 2 |
                   static_cast<std::uint64_t>(c.epilogue) << 3 | static_cast<std::uint64_t>(static_cast<bool>(c.bias)) << 5 |
                   static_cast<std::uint64_t>(static_cast<bool>(c.residual)) << 6 | static_cast<std::uint64_t>(row_invariant) << 7 |
                   static_cast<std::uint64_t>(rows) << 8 | m << 32,
               c.n | std::uint64_t{c.k} << 32,
               c.batch,
               s.act,
               s.out,
               c.residual ? s.residual : 0,
               batched ? c.act_batch_stride : 0,
               batched ? c.weight_batch_stride : 0,
               batched ? c.out_batch_stride : 0,
               batched && c.residual ? c.residual_batch_stride : 0};
  return key;
}

std::uint64_t Key::hash() const noexcept {
  // Two lanes, so that the multiplications overlap.
  std::uint64_t a = 0x9E3779B97F4A7C15ULL;
  std::uint64_t b = 0xC2B2AE3D27D4EB4FULL;
  for (std::size_t i = 0; i < words.size(); i += 2) {
    a = (std::rotl(a, 29) ^ words[i]) * 0x9E3779B97F4A7C15ULL;
    b = (std::rotl(b, 31) ^ words[i + 1]) * 0xC2B2AE3D27D4EB4FULL;
  }
  const std::uint64_t h = a ^ std::rotl(b, 17);
  return h ^ h >> 32;
}

Plan& Plan::operator=(const Plan& other) noexcept {
  key = other.key;
  rows = other.rows;
  provisional = other.provisional;
  is_usable = other.is_usable;
  workspace_bytes = other.workspace_bytes;
  operation = other.operation;
  weight = other.weight;
  act = other.act;
  residual = other.residual;
  out = other.out;
  algorithm = other.algorithm;
  has_exceptions.store(other.has_exceptions.load(std::memory_order_relaxed), std::memory_order_relaxed);
  return *this;
}

Result<> describe(const Api& api, const Call& c, std::uint32_t rows, Plan& plan, std::source_location site) {
  // The library counts columns first: weight [n, k] by rows is its A, [k, n], to be transposed; act is its B, and out its D, [n,
  // m].
  Steps step(api, site);
  cublasLtMatmulDescOpaque_t& op = plan.operation;
  step(api.init_operation(&op, sizeof(op), CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescInit");
  constexpr const char* kSet = "cublasLtMatmulDescSetAttribute";
  step(set(api, op, CUBLASLT_MATMUL_DESC_TRANSA, static_cast<std::int32_t>(CUBLAS_OP_T)), kSet);
  step(set(api, op, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<std::uint32_t>(epilogue_of(c))), kSet);
  if (c.bias) step(set(api, op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, kAlignedAddress), kSet);
  if (c.precision != Precision::bf16) {
    const bool block = c.precision == Precision::fp8_block;
    const std::int32_t weight_mode =
        block ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F : CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    const std::int32_t act_mode = block ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F : CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    step(set(api, op, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, weight_mode), kSet);
    step(set(api, op, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, act_mode), kSet);
    step(set(api, op, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, kAlignedAddress), kSet);
    step(set(api, op, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, kAlignedAddress), kSet);
  }
  const Strides s = strides_of(c);
  const cudaDataType in_type = c.precision == Precision::bf16 ? CUDA_R_16BF : CUDA_R_8F_E4M3;
  const cudaDataType out_type = c.out_type == DType::f32 ? CUDA_R_32F : CUDA_R_16BF;
  const auto layout = [&](cublasLtMatrixLayoutOpaque_t& made, cudaDataType type, std::uint64_t columns, std::uint64_t count,
                          std::uint64_t stride, std::uint64_t batch_stride) {
    step(api.init_layout(&made, sizeof(made), type, columns, count, static_cast<std::int64_t>(stride)), "cublasLtMatrixLayoutInit");
    if (c.batch == 1) return;
    step(set(api, made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<std::int32_t>(c.batch)),
         "cublasLtMatrixLayoutSetAttribute");
    step(set(api, made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, static_cast<std::int64_t>(batch_stride)),
         "cublasLtMatrixLayoutSetAttribute");
  };
  layout(plan.weight, in_type, c.k, c.n, c.k, c.weight_batch_stride);
  layout(plan.act, in_type, c.k, rows, s.act, c.act_batch_stride);
  layout(plan.out, out_type, c.n, rows, s.out, c.out_batch_stride);
  if (c.residual) {
    layout(plan.residual, out_type, c.n, rows, s.residual, c.residual_batch_stride);
  } else {
    plan.residual = plan.out;
  }
  plan.rows = rows;
  return std::move(step).result();
}

Result<std::vector<cublasLtMatmulHeuristicResult_t>> candidates(const Api& api, cublasLtHandle_t handle, const Plan& plan,
                                                                std::uint32_t most, std::uint64_t workspace_bytes, bool unsplit,
                                                                std::source_location site) {
  Steps step(api, site);
  cublasLtMatmulPreferenceOpaque_t preference{};
  step(api.init_preference(&preference, sizeof(preference)), "cublasLtMatmulPreferenceInit");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    step(api.set_preference(&preference, attribute, &value, sizeof(value)), "cublasLtMatmulPreferenceSetAttribute");
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
  for (const auto attribute : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                               CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    prefer(attribute, static_cast<std::uint32_t>(kAlignment));
  }
  if (unsplit) prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
  METRALE_TRY(std::move(step).result());
  std::vector<cublasLtMatmulHeuristicResult_t> found(most);
  int count = 0;
  // Reads the descriptors only.
  Plan described = plan;
  const cublasStatus_t status = api.heuristic(handle, &described.operation, &described.weight, &described.act, &described.residual,
                                              &described.out, &preference, static_cast<int>(most), found.data(), &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED)
    count = 0;
  else
    METRALE_TRY(api.check(status, "cublasLtMatmulAlgoGetHeuristic", site));
  found.resize(static_cast<std::size_t>(std::clamp(count, 0, static_cast<int>(most))));
  std::erase_if(found, [&](const cublasLtMatmulHeuristicResult_t& r) {
    return r.state != CUBLAS_STATUS_SUCCESS || r.workspaceSize > workspace_bytes || (unsplit && !is_unsplit(api, r.algo));
  });
  return found;
}

bool is_unsplit(const Api& api, const cublasLtMatmulAlgo_t& algorithm) noexcept {
  std::int32_t parts = 0;
  std::uint32_t reduction = ~0U;
  std::size_t written = 0;
  return api.get_config(&algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof(parts), &written) == CUBLAS_STATUS_SUCCESS &&
         api.get_config(&algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &reduction, sizeof(reduction), &written) ==
             CUBLAS_STATUS_SUCCESS &&
         parts <= 1 && parts >= 0 && reduction == CUBLASLT_REDUCTION_SCHEME_NONE;
}

std::optional<std::uint64_t> workspace_of(const Api& api, cublasLtHandle_t handle, const Plan& plan, std::uint32_t rows) noexcept {
  Plan described = plan;
  for (cublasLtMatrixLayoutOpaque_t* layout : {&described.act, &described.residual, &described.out}) {
    if (set(api, *layout, CUBLASLT_MATRIX_LAYOUT_COLS, std::uint64_t{rows}) != CUBLAS_STATUS_SUCCESS) return std::nullopt;
  }
  cublasLtMatmulHeuristicResult_t result{};
  const cublasStatus_t status = api.check_algorithm(handle, &described.operation, &described.weight, &described.act,
                                                    &described.residual, &described.out, &described.algorithm, &result);
  if (status != CUBLAS_STATUS_SUCCESS || result.state != CUBLAS_STATUS_SUCCESS) return std::nullopt;
  return result.workspaceSize;
}

cublasStatus_t launch(const Api& api, cublasLtHandle_t handle, const Plan& plan, const Call& c, std::uint32_t rows,
                      DevicePtr scales, DevicePtr workspace, std::uint64_t native_stream) noexcept {
  // Descriptors that a call changes are copied: the plan is shared. The library takes them without const and changes none.
  auto* operation = const_cast<cublasLtMatmulDescOpaque_t*>(&plan.operation);
  auto* act = const_cast<cublasLtMatrixLayoutOpaque_t*>(&plan.act);
  auto* residual = const_cast<cublasLtMatrixLayoutOpaque_t*>(&plan.residual);
  auto* out = const_cast<cublasLtMatrixLayoutOpaque_t*>(&plan.out);
  const auto at = [](DevicePtr ptr) { return reinterpret_cast<void*>(ptr.address); };

  cublasLtMatmulDescOpaque_t own_operation;
  if (c.bias || c.precision != Precision::bf16) {
    own_operation = plan.operation;
    operation = &own_operation;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    const auto point = [&](cublasLtMatmulDescAttributes_t attribute, DevicePtr ptr) {
      const cublasStatus_t now = set(api, own_operation, attribute, static_cast<const void*>(at(ptr)));
      if (status == CUBLAS_STATUS_SUCCESS) status = now;
    };
    if (c.bias) point(CUBLASLT_MATMUL_DESC_BIAS_POINTER, c.bias);
    if (c.precision != Precision::bf16) {
      point(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, c.weight_scales);
      point(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scales);
    }
    if (status != CUBLAS_STATUS_SUCCESS) return status;
  }
  std::array<cublasLtMatrixLayoutOpaque_t, 3> own_layouts;
  if (rows != plan.rows) {
    own_layouts = {plan.act, plan.residual, plan.out};
    for (cublasLtMatrixLayoutOpaque_t& layout : own_layouts) {
      const cublasStatus_t status = set(api, layout, CUBLASLT_MATRIX_LAYOUT_COLS, std::uint64_t{rows});
      if (status != CUBLAS_STATUS_SUCCESS) return status;
    }
    act = &own_layouts[0];
    residual = &own_layouts[1];
    out = &own_layouts[2];
  }
  const float beta = c.residual ? c.beta : 0.0F;
  return api.matmul(handle, operation, &c.alpha, at(c.weight), const_cast<cublasLtMatrixLayoutOpaque_t*>(&plan.weight), at(c.act),
                    act, &beta, at(c.residual ? c.residual : c.out), residual, at(c.out), out, &plan.algorithm, at(workspace),
                    plan.workspace_bytes, reinterpret_cast<cudaStream_t>(native_stream));
}

PlanTable::PlanTable() { clear(); }

void PlanTable::clear() {
  auto slots = std::make_unique<Slots>(kFirstSlots);
  slots_.store(slots.get(), std::memory_order_release);
  all_slots_.clear();
  all_slots_.push_back(std::move(slots));
  plans_.clear();
}

void PlanTable::put(Slots& slots, const Plan* plan) noexcept {
  for (std::uint64_t i = plan->key.hash();; ++i) {
    std::atomic<const Plan*>& slot = slots.at[i & slots.mask];
    const Plan* there = slot.load(std::memory_order_relaxed);
    if (there != nullptr && !(there->key == plan->key)) continue;
    slot.store(plan, std::memory_order_release);
    return;
  }
}

const Plan* PlanTable::insert(std::unique_ptr<Plan> plan) {
  plans_.push_back(std::move(plan));
  const Plan* added = plans_.back().get();
  if (plans_.size() * 2 <= all_slots_.back()->mask + 1) {
    put(*all_slots_.back(), added);
    return added;
  }
  auto larger = std::make_unique<Slots>(2 * (all_slots_.back()->mask + 1));
  for (const auto& each : plans_) put(*larger, each.get());  // in order: the last of a key stays
  all_slots_.push_back(std::move(larger));
  slots_.store(all_slots_.back().get(), std::memory_order_release);
  return added;
}

}  // namespace metrale::cublaslt
