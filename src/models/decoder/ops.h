// SPDX-License-Identifier: Apache-2.0
//
// Ops: the operations of a decoder as launches on one stream. Each method fills in the kernel's arguments, asks the plans for its
// geometry and enqueues; none allocates or waits, so all may run during a capture. Copies go through here too: a kernel that
// follows another of ours may start before that one ends, and what lies between must be known. Nothing else enqueues on the stream
// between two launches. Holds its backend by reference. One thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "metrale/backend.h"
#include "metrale/bridges/communicator.h"
#include "metrale/models/decoder_kernels.h"
#include "metrale/models/matmul_kernels.h"
#include "metrale/models/model_config.h"
#include "metrale/models/sampling_kernels.h"
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

struct OpsOptions {
  Precision precision = Precision::fast;
  /// Launch kernels that wait for their predecessor themselves so that they may start before it ends, where the backend can.
  bool dependent_launch = true;
};

class Ops {
 public:
  /// Finds every kernel. `prepared` is room for `LaunchPlans::prepared_bytes` of the most rows and columns, and may be set later.
  /// Errors: not_found (a kernel is missing), and those of `launch_plans`.
  static Result<Ops> create(GpuBackend& backend, StreamHandle stream, const OpsOptions& options);

  const LaunchPlans& plans() const noexcept { return *plans_; }
  Precision precision() const noexcept { return precision_; }
  StreamHandle stream() const noexcept { return stream_; }
  void set_prepared(DevicePtr prepared) noexcept { prepared_ = prepared; }

  // ---- copies and fills; as the backend's calls of like names ----
  Result<> copy_h2d(DevicePtr to, std::span<const std::byte> from);
  Result<> copy_h2d_retained(DevicePtr to, std::span<const std::byte> from);
  Result<> copy_d2h(std::span<std::byte> to, DevicePtr from);
  Result<> clear(DevicePtr to, std::uint64_t bytes);
  /// `values` become their sums over all ranks, f32.
  Result<> all_reduce(Communicator& ranks, DevicePtr values, std::uint64_t count);

  /// Begins another step of the same capture: its first kernel waits for the end of all before, since kernels read the step's
  /// inputs and states ahead of their own wait.
  void begin_step() noexcept { after_kernel_ = false; }

  // ---- kernels ----
  Result<> repack(Matrix& weight);
  Result<> gather(DevicePtr ids, const Matrix& weight, std::uint32_t m, DevicePtr y);
  /// Up to kMaxLinearMatrices products of the same rows, in as few launches as their types allow. Only a single one may
  /// have a residual.
  Result<> linear(const Rows& rows, std::span<const Product> products);
  /// y = silu(rows · gateᵀ) * (rows · upᵀ). Errors: unsupported (types that cannot share prepared rows).
  Result<> swiglu(const Rows& rows, const Matrix& gate, const Matrix& up, DevicePtr y);

  Result<> widen(DevicePtr from, DevicePtr to, const WidenParams& params);
  Result<> rotary(DevicePtr step, DevicePtr inverse_frequencies, DevicePtr table, const RotaryParams& params);

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
  Result<> rotate_store(const RotateStore& tensors, const Cache& cache, const RotateStoreParams& params);
  /// Whether `rotate_attend` is there, for steps of one token.
  bool has_rotate_attend() const noexcept { return static_cast<bool>(kernels_.rotate_attend.handle); }
  /// `rotate_store` and `attend` in one. `scratch` was cleared once and serves one launch at a time.
  Result<> rotate_attend(const RotateStore& tensors, const Cache& cache, DevicePtr scratch, DevicePtr out,
                         const RotateAttendParams& params);
  /// By `attend_one` when m is 1.
  Result<> attend(DevicePtr q, const Cache& cache, DevicePtr out, const AttendParams& params);

  /// Looks for the kernel that runs all layers of `config` for one token, with bf16 matrices and cache. Where the backend has none
  /// or cannot launch it, `layers_plan` stays empty; that is no failure.
  Result<> find_layers(const ModelConfig& config);
  const std::optional<LayersPlan>& layers_plan() const noexcept { return layers_plan_; }
  struct Layers {
    DevicePtr table;
    DevicePtr embedding;
    DevicePtr ids;
    DevicePtr inverse_frequencies;
    DevicePtr step;
    DevicePtr block_table;
    DevicePtr exchange;
    DevicePtr hidden;
  };
  /// What `table` says is to be named by the caller. It reads nothing of the step before its wait, so it may follow any kernel.
  Result<> layers(const Layers& tensors, const LayersParams& params);

  Result<> conv(DevicePtr x, DevicePtr weight, DevicePtr state, DevicePtr step, const ConvParams& params);
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
  Result<> delta(const Delta& tensors, const DeltaParams& params);
  Result<> argmax(DevicePtr logits, DevicePtr ids, const RowsParams& params);
  /// `token` holds the largest logit's id. `scratch`: 8 bytes for each logit.
  Result<> sample(DevicePtr logits, DevicePtr inputs, DevicePtr token, DevicePtr scratch, const SampleParams& params);
  /// The token becomes the input of the step that `begin_step` begins.
  Result<> advance(DevicePtr token, DevicePtr step, DevicePtr ids, DevicePtr tokens, const AdvanceParams& params);
  Result<> score(DevicePtr logits, DevicePtr targets, DevicePtr scores, const RowsParams& params);

 private:
  struct Kernel {
    KernelHandle handle;
    bool waits = false;  ///< For its predecessor, by itself.
  };

  Ops(GpuBackend& backend, StreamHandle stream, const OpsOptions& options, std::unique_ptr<LaunchPlans> plans)
      : backend_(&backend), stream_(stream), precision_(options.precision), plans_(std::move(plans)) {}

  template <class... Args>
  Result<> launch(const Kernel& kernel, const LaunchShape& shape, const Args&... args);
  /// `kernel`, or the entry that the shape names.
  template <class... Args>
  Result<> launch_matmul(const Kernel& kernel, const LaunchShape& shape, const Args&... args);
  /// The rows as the next launch reads them: prepared when there are many.
  Result<LinearParams> begin(const Rows& rows, DType weights, DevicePtr& x, DevicePtr& norm);
  Result<> linear_same_class(const Rows& rows, std::span<const Product> products);

  GpuBackend* backend_;
  StreamHandle stream_;
  Precision precision_;
  std::unique_ptr<LaunchPlans> plans_;
  std::optional<LayersPlan> layers_plan_;
  DevicePtr prepared_;
  bool dependent_launch_ = false;
  bool after_kernel_ = false;  // the last thing on the stream was a launch from here

  struct Kernels {
    Kernel repack, gather, prepare, linear, linear4, swiglu;
    Kernel widen, rotary, rotate_store, attend, attend_one, rotate_attend, layers, conv, delta, argmax, score, sample, advance;
    std::vector<Kernel> matmul_entries;
    std::uint32_t attend_tile = 0;
    std::uint32_t conv_tile = 0;
  } kernels_;
};

}  // namespace metrale::models
