// SPDX-License-Identifier: Apache-2.0
//
// Models without a file: random weights in the shape of a configuration, to measure and to test with. The text that such a model
// makes means nothing; its numbers stay finite. Values of their owner; one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "metrale/backend.h"
#include "metrale/dtype.h"
#include "metrale/models/decoder.h"
#include "metrale/models/model_config.h"
#include "metrale/result.h"
#include "metrale/weight_file.h"
#include "metrale/weight_store.h"

namespace metrale {

/// Weights on a device and what a Decoder wants to know of their file. The backend outlives it, and it outlives its decoder.
struct SyntheticModel {
  ModelConfig config;
  std::unique_ptr<WeightFile> file;
  std::unique_ptr<WeightStore> weights;

  /// A decoder of these weights; one for each model, since matrices are packed in place. Errors: as `Decoder::create`.
  Result<std::unique_ptr<Decoder>> make_decoder(GpuBackend& backend, const DecoderOptions& options = {}) const;
};

/// Makes every tensor that a decoder of `config` needs, of type `dtype` (f32 or bf16): normal, mean 0, deviation 0.02, from
/// `seed`; norms are 1. The same call gives the same bytes on every backend.
/// The values repeat after some 4 million, out of step with rows and tensors, so that a model of 16 GB takes seconds.
/// Ordering: returns when they are on the device. Not legal on a thread that holds a capture.
/// Errors: unsupported (another type; a configuration read from GGUF, whose tensors are arranged otherwise), otherwise as
///   `Decoder::tensors` and `WeightStore::load`.
Result<SyntheticModel> make_synthetic(GpuBackend& backend, const ModelConfig& config, DType dtype = DType::bf16,
                                      std::uint64_t seed = 0);

/// Names that `model_shape` knows.
std::span<const std::string_view> model_shapes() noexcept;

/// The configuration of a published size of model, with its number of parameters:
///   "llama-8b"      Llama 3.1 8B; 8.03 G
///   "smollm2-135m"  SmolLM2 135M; 0.13 G
///   "hybrid-4b"     after Qwen3.5 4B: every fourth layer is attention, the others gated DeltaNet; 4.1 G
/// Errors: not_found (lists the names).
Result<ModelConfig> model_shape(std::string_view name);

}  // namespace metrale
