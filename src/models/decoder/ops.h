// SPDX-License-Identifier: Apache-2.0
//
// Ops: the operations of a decoder as launches on one stream. Each method fills in the kernel's arguments, asks the plans for its
// geometry and enqueues; none allocates or waits, so all may run during a capture. Holds its backend by reference. One thread
// at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "metrale/backend.h"
#include "metrale/models/decoder_kernels.h"
#include "metrale/models/matmul_kernels.h"
#include "metrale/result.h"
#include "models/decoder/launch_plans.h"

namespace metrale::models {

/// A weight matrix [n, k] on the device. Null `ptr`: absent.
struct Matrix {
  DevicePtr ptr;
  std::uint32_t n = 0;
  std::uint32_t k = 0;
  DType dtype = DType::f32;
  bool packed = false;
};

/// Rows that enter matrix products, with the norm that is applied on the way in. A null `norm`: none.
struct Rows {
  DevicePtr x;
  std::uint32_t m = 0;
  std::uint32_t k = 0;
  DevicePtr norm;
  float norm_eps = 0;
};

/// One product of some rows: y = rows · weightᵀ + bias + residual, rows of y `weight.n` apart.
struct Product {
  const Matrix* weight = nullptr;
  DevicePtr bias;
  DevicePtr residual;
  DevicePtr y;
};

class Ops {
 public:
  /// Finds every kernel. `prepared` is room for `LaunchPlans::prepared_bytes` of the most rows and columns, and may be set later.
  /// Errors: not_found (a kernel is missing), and those of `launch_plans`.
  static Result<Ops> create(GpuBackend& backend, StreamHandle stream, Precision precision);

  const LaunchPlans& plans() const noexcept { return *plans_; }
  Precision precision() const noexcept { return precision_; }
  StreamHandle stream() const noexcept { return stream_; }
  void set_prepared(DevicePtr prepared) noexcept { prepared_ = prepared; }

  Result<> repack(Matrix& weight) const;
  Result<> gather(DevicePtr ids, const Matrix& weight, std::uint32_t m, DevicePtr y) const;
  /// Up to kMaxLinearMatrices products of the same rows, in as few launches as their types allow. Only a single one may
  /// have a residual.
  Result<> linear(const Rows& rows, std::span<const Product> products) const;
  /// y = silu(rows · gateᵀ) * (rows · upᵀ). Errors: unsupported (types that cannot share prepared rows).
  Result<> swiglu(const Rows& rows, const Matrix& gate, const Matrix& up, DevicePtr y) const;

  Result<> widen(DevicePtr from, DevicePtr to, const WidenParams& params) const;
  Result<> rotary(DevicePtr step, DevicePtr inverse_frequencies, DevicePtr table, const RotaryParams& params) const;

  struct Cache {
    DevicePtr keys;
    DevicePtr values;
    DevicePtr step;
    DevicePtr block_table;
  };
  struct RotateStore {
    DevicePtr q;
    DevicePtr k;
    DevicePtr v;
    DevicePtr q_norm;
    DevicePtr k_norm;
    DevicePtr rotary;
  };
  Result<> rotate_store(const RotateStore& tensors, const Cache& cache, const RotateStoreParams& params) const;
  /// By `attend_one` when m is 1.
  Result<> attend(DevicePtr q, const Cache& cache, DevicePtr out, const AttendParams& params) const;

  Result<> conv(DevicePtr x, DevicePtr weight, DevicePtr state, DevicePtr step, const ConvParams& params) const;
  struct Delta {
    DevicePtr qkv;
    DevicePtr z;
    DevicePtr a;
    DevicePtr b;
    DevicePtr decay;
    DevicePtr dt_bias;
    DevicePtr norm;
    DevicePtr state;
    DevicePtr step;
    DevicePtr out;
  };
  Result<> delta(const Delta& tensors, const DeltaParams& params) const;
  Result<> argmax(DevicePtr logits, DevicePtr ids, const RowsParams& params) const;
  Result<> score(DevicePtr logits, DevicePtr targets, DevicePtr scores, const RowsParams& params) const;

 private:
  Ops(GpuBackend& backend, StreamHandle stream, Precision precision, std::unique_ptr<LaunchPlans> plans)
      : backend_(&backend), stream_(stream), precision_(precision), plans_(std::move(plans)) {}

  template <class... Args>
  Result<> launch(KernelHandle kernel, const LaunchShape& shape, const Args&... args) const;
  /// The rows as the next launch reads them: prepared when there are many.
  Result<LinearParams> begin(const Rows& rows, DType weights, DevicePtr& x, DevicePtr& norm) const;
  Result<> linear_same_class(const Rows& rows, std::span<const Product> products) const;

  GpuBackend* backend_;
  StreamHandle stream_;
  Precision precision_;
  std::unique_ptr<LaunchPlans> plans_;
  DevicePtr prepared_;

  struct Kernels {
    KernelHandle repack, gather, prepare, linear, linear4, swiglu;
    KernelHandle widen, rotary, rotate_store, attend, attend_one, conv, delta, argmax, score;
    std::uint32_t attend_tile = 0;
    std::uint32_t conv_tile = 0;
  } kernels_;
};

}  // namespace metrale::models
