// SPDX-License-Identifier: Apache-2.0
#include "bench/cuda/cublaslt.h"

#include <dlfcn.h>

#include <string_view>
#include <vector>

#include <fmt/format.h>

namespace metrale::bench {
namespace {

// Of cublasLt.h, so that a build needs no more of the toolkit than cuda.h.
constexpr int kCompute32F = 68;
constexpr int kReal32F = 0;
constexpr int kReal16BF = 14;
constexpr int kTransposeA = 3;  // CUBLASLT_MATMUL_DESC_TRANSA
constexpr std::int32_t kTransposed = 1;
constexpr int kMaxWorkspace = 1;  // CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES

struct Heuristic {
  std::array<std::uint64_t, 8> algorithm;
  std::size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

constexpr const char* kNames[] = {"libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13", "libcublasLt.so.12",
                                  "libcublasLt.so"};

Result<> check(int status, std::string_view what) {
  if (status == 0) return {};
  return Error(Errc::internal, fmt::format("{} answers {}", what, status)).with_native(status, "cublasStatus_t");
}

}  // namespace

struct CublasLt::Api {
  int (*create)(void**) = nullptr;
  int (*destroy)(void*) = nullptr;
  int (*make_operation)(void**, int, int) = nullptr;
  int (*set_operation)(void*, int, const void*, std::size_t) = nullptr;
  int (*free_operation)(void*) = nullptr;
  int (*make_layout)(void**, int, std::uint64_t, std::uint64_t, std::int64_t) = nullptr;
  int (*free_layout)(void*) = nullptr;
  int (*make_preference)(void**) = nullptr;
  int (*set_preference)(void*, int, const void*, std::size_t) = nullptr;
  int (*free_preference)(void*) = nullptr;
  int (*heuristic)(void*, void*, void*, void*, void*, void*, void*, int, Heuristic*, int*) = nullptr;
  int (*matmul)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*, void*,
                const void*, void*, std::size_t, CUstream) = nullptr;
  std::vector<Plan> plans;
};

CublasLt::CublasLt() : api_(std::make_unique<Api>()) {}

CublasLt::~CublasLt() {
  for (const Plan& plan : api_->plans) {
    for (void* layout : {plan.weights, plan.x, plan.y}) {
      if (layout != nullptr) api_->free_layout(layout);
    }
    if (plan.operation != nullptr) api_->free_operation(plan.operation);
  }
  if (handle_ != nullptr) api_->destroy(handle_);
}

Result<std::unique_ptr<CublasLt>> CublasLt::load() {
  void* library = nullptr;
  std::string tried;
  for (const char* name : kNames) {
    library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);  // stays loaded, as the driver does
    if (library != nullptr) break;
    tried += fmt::format("{}{}: {}", tried.empty() ? "" : "; ", name, ::dlerror());
  }
  if (library == nullptr) return Error(Errc::unsupported, "no cuBLASLt: " + tried);
  std::unique_ptr<CublasLt> blas(new CublasLt());
  Api& a = *blas->api_;
  std::string missing;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    if (function == nullptr) missing += fmt::format(" {}", name);
  };
  find(a.create, "cublasLtCreate");
  find(a.destroy, "cublasLtDestroy");
  find(a.make_operation, "cublasLtMatmulDescCreate");
  find(a.set_operation, "cublasLtMatmulDescSetAttribute");
  find(a.free_operation, "cublasLtMatmulDescDestroy");
  find(a.make_layout, "cublasLtMatrixLayoutCreate");
  find(a.free_layout, "cublasLtMatrixLayoutDestroy");
  find(a.make_preference, "cublasLtMatmulPreferenceCreate");
  find(a.set_preference, "cublasLtMatmulPreferenceSetAttribute");
  find(a.free_preference, "cublasLtMatmulPreferenceDestroy");
  find(a.heuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(a.matmul, "cublasLtMatmul");
  if (!missing.empty()) return Error(Errc::unsupported, "cuBLASLt lacks" + missing);
  METRALE_TRY(check(a.create(&blas->handle_), "cublasLtCreate"));
  return blas;
}

Result<CublasLt::Plan> CublasLt::plan(std::uint32_t n, std::uint32_t k) {
  // Column-major there: W [n, k] by rows is a [k, n] matrix to be transposed.
  Plan& plan = api_->plans.emplace_back();
  METRALE_TRY(check(api_->make_operation(&plan.operation, kCompute32F, kReal32F), "cublasLtMatmulDescCreate"));
  METRALE_TRY(
      check(api_->set_operation(plan.operation, kTransposeA, &kTransposed, sizeof(kTransposed)), "cublasLtMatmulDescSetAttribute"));
  METRALE_TRY(check(api_->make_layout(&plan.weights, kReal16BF, k, n, k), "cublasLtMatrixLayoutCreate"));
  METRALE_TRY(check(api_->make_layout(&plan.x, kReal16BF, k, 1, k), "cublasLtMatrixLayoutCreate"));
  METRALE_TRY(check(api_->make_layout(&plan.y, kReal16BF, n, 1, n), "cublasLtMatrixLayoutCreate"));
  void* preference = nullptr;
  METRALE_TRY(check(api_->make_preference(&preference), "cublasLtMatmulPreferenceCreate"));
  std::uint64_t workspace = kWorkspaceBytes;
  int status = api_->set_preference(preference, kMaxWorkspace, &workspace, sizeof(workspace));
  Heuristic found{};
  int count = 0;
  if (status == 0) {
    status = api_->heuristic(handle_, plan.operation, plan.weights, plan.x, plan.y, plan.y, preference, 1, &found, &count);
  }
  api_->free_preference(preference);
  METRALE_TRY(check(status, "cublasLtMatmulAlgoGetHeuristic"));
  if (count == 0) return Error(Errc::unsupported, fmt::format("cuBLASLt has no algorithm for one row x {}x{}", n, k));
  plan.algorithm = found.algorithm;
  return plan;
}

Result<> CublasLt::run(const Plan& plan, CUdeviceptr weights, CUdeviceptr x, CUdeviceptr y, CUdeviceptr workspace,
                       CUstream stream) {
  const auto at = [](CUdeviceptr address) { return reinterpret_cast<void*>(address); };
  const float one = 1;
  const float zero = 0;
  return check(api_->matmul(handle_, plan.operation, &one, at(weights), plan.weights, at(x), plan.x, &zero, at(y), plan.y, at(y),
                            plan.y, plan.algorithm.data(), at(workspace), kWorkspaceBytes, stream),
               "cublasLtMatmul");
}

}  // namespace metrale::bench
