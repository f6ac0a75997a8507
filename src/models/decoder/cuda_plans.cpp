// SPDX-License-Identifier: Apache-2.0
//
// Plans for the CUDA kernels, from the pure functions that stand beside them.
#include "models/decoder/launch_plans.h"

#include "include/decoder_plan.h"
#include "include/layers_plan.h"
#include "include/matmul_plan.h"
#include "include/sampling_plan.h"

namespace metrale::models {
namespace {

namespace matmul = cuda::matmul;
namespace decoder = cuda::decoder;

LaunchShape shape(const matmul::Plan& plan) {
  return {.grid = plan.grid, .block = plan.block, .shared_bytes = plan.shared_bytes, .entry = plan.entry};
}
LaunchShape shape(const decoder::Plan& plan) {
  return {.grid = {plan.grid_x, plan.grid_y, 1}, .block = {plan.threads, 1, 1}, .shared_bytes = plan.shared_bytes};
}

class CudaPlans final : public LaunchPlans {
 public:
  // The matrix kernels ask for as much shared memory on every device, so the others may too.
  explicit CudaPlans(std::uint32_t sm_count) : chip_{.sm_count = sm_count, .max_shared_bytes = matmul::kSharedLimit} {}

  DType default_kv_type(Precision precision) const noexcept override {
    return precision == Precision::exact ? DType::f32 : DType::bf16;
  }

  // Waiting for the device and starting the next replay leave it idle for some 10 us.
  std::uint32_t default_tokens_per_replay() const noexcept override { return 8; }

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
  std::span<const std::string_view> matmul_entries() const noexcept override { return matmul::kEntries; }
  LaunchShape linear(std::string_view function, const LinearParams& params) const noexcept override {
    return shape(matmul::plan_linear(function, params, chip_.sm_count));
  }

  LaunchShape widen(std::uint64_t elements) const noexcept override { return shape(decoder::plan_widen(elements, chip_)); }
  LaunchShape rotary(const RotaryParams& params) const noexcept override { return shape(decoder::plan_rotary(params)); }
  LaunchShape rotate_store(const RotateStoreParams& params) const noexcept override {
    return shape(decoder::plan_rotate_store(params));
  }
  LaunchShape attend(const AttendParams& params, std::uint32_t) const noexcept override {
    return shape(decoder::plan_attend(params));
  }
  LaunchShape attend_one(const AttendParams& params) const noexcept override {
    return shape(decoder::plan_attend_one(params, chip_));
  }
  bool has_rotate_attend() const noexcept override { return true; }
  std::uint64_t attend_scratch_bytes(std::uint32_t num_heads, std::uint32_t num_kv_heads,
                                     std::uint32_t head_dim) const noexcept override {
    return decoder::attend_scratch_bytes(num_heads, num_kv_heads, head_dim, chip_);
  }
  LaunchShape rotate_attend(const RotateAttendParams& params) const noexcept override {
    return shape(decoder::plan_rotate_attend(params.rotate, true, chip_));
  }
  LaunchShape conv(const ConvParams& params, std::uint32_t) const noexcept override { return shape(decoder::plan_conv(params)); }
  LaunchShape delta(const DeltaParams& params) const noexcept override { return shape(decoder::plan_delta(params)); }
  LaunchShape rows(const RowsParams& params) const noexcept override { return shape(decoder::plan_rows(params)); }
  std::optional<LayersPlan> layers(const ModelConfig& c) const noexcept override {
    const bool plain = c.family == ModelFamily::llama && !c.attention_bias && !c.mlp_bias && c.rope.rotary_dim == c.head_dim;
    for (const cuda::layers::Entry& e : cuda::layers::kEntries) {
      if (!plain || e.hidden != c.hidden_size || e.heads != c.num_heads || e.kv_heads != c.num_kv_heads ||
          e.head_dim != c.head_dim || e.ff != c.intermediate_size || c.num_layers > e.most_layers ||
          !cuda::layers::fits(e, chip_.sm_count))
        continue;
      return LayersPlan{.entry = e.name,
                        .shape = {.grid = {e.blocks, 1, 1},
                                  .block = {cuda::layers::kThreads, 1, 1},
                                  .shared_bytes = e.shared_bytes,
                                  .cooperative = true},
                        .exchange_bytes = e.exchange_bytes};
    }
    return {};
  }
  LaunchShape sample() const noexcept override {
    return {.grid = {cuda::sampling::kSampleBlocks, 1, 1}, .block = {cuda::sampling::kSampleThreads, 1, 1}};
  }

 private:
  decoder::Chip chip_;
};

}  // namespace

std::unique_ptr<LaunchPlans> cuda_plans(std::uint32_t sm_count) { return std::make_unique<CudaPlans>(sm_count); }

}  // namespace metrale::models
