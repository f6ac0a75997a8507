// SPDX-License-Identifier: Apache-2.0
//
// Plans for the host's kernels: blocks of one thread, as many as there are workers to share them.
#include <algorithm>

#include "models/decoder/launch_plans.h"

// Pure functions only: nothing is linked from the kernels.
#include "decoder/decoder.h"
#include "matmul/matmul.h"

namespace metrale::models {
namespace {

namespace matmul = host::matmul;
namespace decoder = host::decoder;

LaunchShape shape(const matmul::Plan& plan) { return {.grid = plan.grid, .block = {}, .shared_bytes = plan.shared_bytes}; }
LaunchShape blocks(std::uint32_t x, std::uint32_t y = 1, std::uint32_t shared_bytes = 0) {
  return {.grid = {x, y, 1}, .block = {}, .shared_bytes = shared_bytes};
}

std::uint32_t tiles(std::uint32_t n, std::uint32_t tile) { return static_cast<std::uint32_t>(div_ceil(n, tile)); }

class HostPlans final : public LaunchPlans {
 public:
  explicit HostPlans(std::uint32_t threads) : threads_(threads) {}

  DType default_kv_type(Precision) const noexcept override { return DType::f32; }

  bool supports(DType weights) const noexcept override { return matmul::supports(weights); }
  bool can_repack(DType weights, std::uint32_t k) const noexcept override { return matmul::can_repack(weights, k); }
  int activation_class(DType weights, Precision precision) const noexcept override {
    return static_cast<int>(matmul::activation_class(weights, precision));
  }
  std::uint32_t max_unprepared_rows() const noexcept override { return matmul::kFusedRows; }
  std::uint64_t prepared_bytes(std::uint32_t m, std::uint32_t k) const noexcept override { return matmul::prepared_bytes(m, k); }
  LaunchShape repack(DType weights, std::uint32_t n, std::uint32_t k) const noexcept override {
    return shape(matmul::plan_repack(weights, n, k));
  }
  LaunchShape gather(std::uint32_t m) const noexcept override { return shape(matmul::plan_gather(m)); }
  LaunchShape prepare(std::uint32_t m, std::uint32_t k) const noexcept override { return shape(matmul::plan_prepare(m, k)); }
  LaunchShape linear(std::string_view function, const LinearParams& params) const noexcept override {
    return shape(matmul::plan_linear(function, params, threads_));
  }

  LaunchShape widen(std::uint64_t elements) const noexcept override { return blocks(elements < 4096 ? 1 : threads_); }
  LaunchShape rotary(const RotaryParams& params) const noexcept override { return blocks(params.m); }
  LaunchShape rotate_store(const RotateStoreParams& params) const noexcept override { return blocks(params.m); }
  LaunchShape attend(const AttendParams& params, std::uint32_t n_tile) const noexcept override {
    return blocks(params.num_heads, tiles(params.m, n_tile), decoder::attend_shared_bytes(params.head_dim));
  }
  LaunchShape attend_one(const AttendParams& params) const noexcept override {
    // Neighbouring heads share keys and values: one range of heads a worker.
    return blocks(std::min(params.num_heads, threads_), 1, decoder::attend_one_shared_bytes(params.head_dim));
  }
  LaunchShape conv(const ConvParams& params, std::uint32_t n_tile) const noexcept override {
    return blocks(tiles(params.channels, n_tile), 1, decoder::conv_shared_bytes(params.kernel));
  }
  LaunchShape delta(const DeltaParams& params) const noexcept override {
    return blocks(params.num_value_heads, 1, decoder::delta_shared_bytes(params.key_dim, params.value_dim));
  }
  LaunchShape rows(const RowsParams& params) const noexcept override { return blocks(params.rows); }

 private:
  std::uint32_t threads_;
};

}  // namespace

std::unique_ptr<LaunchPlans> host_plans(std::uint32_t threads) { return std::make_unique<HostPlans>(threads); }

}  // namespace metrale::models
