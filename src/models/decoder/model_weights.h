// SPDX-License-Identifier: Apache-2.0
//
// ModelWeights: the tensors of a decoder by what they do, whatever their names and formats. Matrices are views into a WeightStore,
// put into the order that the kernels like; norms, biases and other vectors are widened to f32 in an arena of their own, with
// 1 + w and -exp(w) applied where a format leaves that to the reader. Made and released by one thread; read by any.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/backend.h"
#include "metrale/model_resource.h"
#include "metrale/models/model_config.h"
#include "metrale/result.h"
#include "metrale/weight_file.h"
#include "metrale/weight_plan.h"
#include "metrale/weight_store.h"
#include "models/decoder/ops.h"

namespace metrale::models {

/// Vectors are null where a model has none.
struct AttentionWeights {
  Matrix q;  ///< With an output gate, [num_heads, 2, head_dim] rows: query and gate of each head.
  Matrix k, v, o;
  DevicePtr q_bias, k_bias, v_bias, o_bias;
  DevicePtr q_norm, k_norm;
};
struct LinearAttentionWeights {
  Matrix qkv, z, b, a, out;
  DevicePtr conv;   ///< [kernel, channels]
  DevicePtr decay;  ///< -exp(A_log)
  DevicePtr dt_bias;
  DevicePtr norm;
};
struct LayerWeights {
  LayerKind kind = LayerKind::full_attention;
  DevicePtr input_norm, post_norm;
  AttentionWeights attention;
  LinearAttentionWeights linear;
  Matrix gate, up, down;
};

/// Which part of a divided model.
struct Part {
  std::uint32_t rank = 0;
  std::uint32_t ranks = 1;
};

/// A tensor that a decoder needs.
struct TensorWant {
  std::string name;
  std::vector<std::uint64_t> shape;
};

class ModelWeights final : public ModelResource {
 public:
  /// Decides which tensors `config` needs and checks that `file` has each, in the shape that the configuration says and of a type
  /// that the kernels take. `config` is the part's shape. Loads nothing.
  /// Errors: not_found (a tensor is missing: names it and the nearest), bad_format (wrong shape: both shapes),
  ///   unsupported (its type).
  static Result<std::unique_ptr<ModelWeights>> create(GpuBackend& backend, const ModelConfig& config, const WeightFile& file,
                                                      const LaunchPlans& plans, const Part& part = {});
  ~ModelWeights() override;

  /// Every tensor that a decoder of `config` needs, matrices first.
  static std::vector<TensorWant> wanted(const ModelConfig& config);

  /// Names of every tensor that a decoder needs.
  std::vector<std::string> names() const;
  /// What is to be loaded, slices of a part included. Errors: as `WeightPlan::create`.
  Result<WeightPlan> load_plan(const WeightFile& file) const;
  /// Finds every tensor in `store`, which was loaded from the same file, widens the vectors and packs the matrices in place.
  /// Returns when done.
  Result<> bind(const WeightStore& store, const WeightFile& file, Ops& ops);

  Matrix embedding, head;  ///< The same when tied.
  DevicePtr final_norm;
  DevicePtr inverse_frequencies;  ///< f32 [rotary_dim / 2]
  std::vector<LayerWeights> layers;

  std::string_view label() const noexcept override { return "widened weights"; }
  /// Frees the vectors; matrices are the store's. Errors: as of `Regions::release`.
  Result<> release(GpuBackend& backend) override;

 private:
  /// How a tensor is divided: by rows, columns, or not at all.
  enum class Cut : std::uint8_t { none, rows, cols };
  struct MatrixWant {
    std::string name;
    Matrix* to;
    Cut cut = Cut::none;
  };
  struct VectorWant {
    std::string name;
    WidenParams params;
    DevicePtr* to;
    Cut cut = Cut::none;
  };

  ModelWeights(GpuBackend* backend, const ModelConfig& config, const Part& part)
      : backend_(backend), config_(config), part_(part) {}
  void list();
  void list_layer(std::uint32_t index);
  void list_attention(const std::string& prefix, LayerWeights& layer);
  void list_linear_attention(const std::string& prefix, LayerWeights& layer);
  void matrix(std::string name, std::uint32_t n, std::uint32_t k, Matrix& to, Cut cut = Cut::none);
  void vector(std::string name, std::uint32_t n, WidenOp op, DevicePtr& to, Cut cut = Cut::none);
  /// The whole tensor's size where the part's is `size`.
  std::uint64_t whole(std::uint64_t size, bool is_cut) const noexcept { return is_cut ? size * part_.ranks : size; }
  Result<> check(const WeightFile& file, const LaunchPlans& plans);
  Result<std::vector<float>> rotary_frequencies(const WeightFile& file) const;

  GpuBackend* backend_;
  ModelConfig config_;
  Part part_;
  std::vector<MatrixWant> matrices_;
  std::vector<VectorWant> vectors_;
  DevicePtr arena_;
};

}  // namespace metrale::models
