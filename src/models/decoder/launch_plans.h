// SPDX-License-Identifier: Apache-2.0
//
// LaunchPlans: what a backend's kernels want of a launch beyond their names and arguments: blocks, shared memory, packed layouts.
// One implementation for each set of kernels. Constant after construction; any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "metrale/backend.h"
#include "metrale/dtype.h"
#include "metrale/models/decoder_kernels.h"
#include "metrale/models/matmul_kernels.h"
#include "metrale/models/model_config.h"
#include "metrale/result.h"
#include "metrale/types.h"

namespace metrale::models {

struct LaunchShape {
  Dim3 grid;
  Dim3 block;
  std::uint32_t shared_bytes = 0;
  Dim3 cluster{0, 0, 0};    ///< All zero: none.
  std::int32_t entry = -1;  ///< Which of `LaunchPlans::matmul_entries` to launch in place of the kernel that was asked for.
  bool cooperative = false;
};

/// A kernel of module kLayersModule.
struct LayersPlan {
  std::string_view entry;
  LaunchShape shape;
  std::uint64_t exchange_bytes = 0;
};

class LaunchPlans {
 public:
  virtual ~LaunchPlans() = default;

  /// What keys and values are kept as where the options leave it open.
  virtual DType default_kv_type(Precision precision) const noexcept = 0;

  /// Tokens that one replay decodes greedily where the options leave it open.
  virtual std::uint32_t default_tokens_per_replay() const noexcept { return 1; }

  // ---- matrices ----
  virtual bool supports(DType weights) const noexcept = 0;
  /// Whether `repack` takes a matrix of k columns.
  virtual bool can_repack(DType weights, std::uint32_t k) const noexcept = 0;
  /// Matrices with the same class may share one `prepare`.
  virtual int activation_class(DType weights, Precision precision) const noexcept = 0;
  /// Most rows that linear, linear4 and swiglu take as they are; more go through `prepare`.
  virtual std::uint32_t max_unprepared_rows() const noexcept = 0;
  virtual std::uint64_t prepared_bytes(std::uint32_t m, std::uint32_t k) const noexcept = 0;
  virtual LaunchShape repack(DType weights, std::uint32_t n, std::uint32_t k) const noexcept = 0;
  virtual LaunchShape gather(std::uint32_t m) const noexcept = 0;
  virtual LaunchShape prepare(std::uint32_t m, std::uint32_t k) const noexcept = 0;
  /// Kernels of module matmul beyond the common ones, which take the arguments of some of those.
  virtual std::span<const std::string_view> matmul_entries() const noexcept { return {}; }
  /// `function` is linear, linear4 or swiglu.
  virtual LaunchShape linear(std::string_view function, const LinearParams& params) const noexcept = 0;

  // ---- the rest; grids as decoder_kernels.h says, `n_tile` as published ----
  virtual LaunchShape widen(std::uint64_t elements) const noexcept = 0;
  virtual LaunchShape rotary(const RotaryParams& params) const noexcept = 0;
  virtual LaunchShape rotate_store(const RotateStoreParams& params) const noexcept = 0;
  virtual LaunchShape attend(const AttendParams& params, std::uint32_t n_tile) const noexcept = 0;
  virtual LaunchShape attend_one(const AttendParams& params) const noexcept = 0;
  /// Whether the optional kernel rotate_attend is there; `rotate_attend` gives its launch with scratch of `attend_scratch_bytes`.
  virtual bool has_rotate_attend() const noexcept { return false; }
  virtual std::uint64_t attend_scratch_bytes(std::uint32_t num_heads, std::uint32_t num_kv_heads,
                                             std::uint32_t head_dim) const noexcept;
  virtual LaunchShape rotate_attend(const RotateAttendParams& params) const noexcept;
  virtual LaunchShape conv(const ConvParams& params, std::uint32_t n_tile) const noexcept = 0;
  virtual LaunchShape delta(const DeltaParams& params) const noexcept = 0;
  virtual LaunchShape rows(const RowsParams& params) const noexcept = 0;
  /// The kernel that runs all layers of a model of this shape for one token; none for most.
  virtual std::optional<LayersPlan> layers(const ModelConfig&) const noexcept { return {}; }
  virtual LaunchShape sample() const noexcept { return {}; }
};

/// The host's, for `threads` workers.
std::unique_ptr<LaunchPlans> host_plans(std::uint32_t threads);
/// Those of CUDA, for a device of `sm_count` multiprocessors.
std::unique_ptr<LaunchPlans> cuda_plans(std::uint32_t sm_count);

/// The plans for the kernels that `backend` serves. Errors: unsupported (no decoder kernels were written for it), and
/// those of `sm_count`.
Result<std::unique_ptr<LaunchPlans>> launch_plans(GpuBackend& backend);

}  // namespace metrale::models
