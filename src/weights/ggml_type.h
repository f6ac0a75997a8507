// SPDX-License-Identifier: Apache-2.0
//
// The tensor types of GGUF: number, name, block layout, and the DType for those that metrale loads.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "metrale/dtype.h"

namespace metrale::weights {

struct GgmlType {
  std::uint32_t number;
  std::string_view name;
  std::uint32_t block_elements;
  std::uint32_t block_bytes;
  std::optional<DType> dtype;  ///< None: listed, not loadable.
};

/// The type with that number, or null. Numbers of types that were withdrawn are unknown.
const GgmlType* find_ggml_type(std::uint32_t number) noexcept;

}  // namespace metrale::weights
