// SPDX-License-Identifier: Apache-2.0
//
// The rules that a ModelConfig obeys whatever file it came from.
#pragma once

#include <string_view>

#include "metrale/models/model_config.h"

namespace metrale::text {

/// What the file and its keys are called in messages.
struct ConfigNames {
  std::string_view file;
  std::string_view num_kv_heads;
  std::string_view head_dim;
  std::string_view rms_norm_eps;
  std::string_view rope_theta;
  std::string_view rotary_dim;
  std::string_view rope_factor;
  std::string_view layer_types;
  std::string_view linear_num_value_heads;
  std::string_view linear_value_head_dim;
  std::string_view eos_token_id;
};

/// Checks what single values cannot show. The reader has already held each count against ModelLimits; heads and sizes are positive.
Result<> check(const ModelConfig& config, const ConfigNames& names);

}  // namespace metrale::text
