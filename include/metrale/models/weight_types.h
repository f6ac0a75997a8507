// SPDX-License-Identifier: Apache-2.0
//
// The types of weights that the matrix kernels of every backend take, and their bytes. Pure functions; any thread.
//
// They are `static`: kernels are compiled with the flags of instruction sets that the machine may lack, and of device units, and a
// shared inline function could be linked from there.
#pragma once

#include <cstdint>

#include "metrale/dtype.h"

namespace metrale::weight_types {

/// f32, f16, bf16, q4_0, q4_1, q8_0, q4_k, q6_k.
static constexpr bool supports(DType type) noexcept {
  switch (type) {
    case DType::f32:
    case DType::f16:
    case DType::bf16:
    case DType::q4_0:
    case DType::q4_1:
    case DType::q8_0:
    case DType::q4_k:
    case DType::q6_k: return true;
    default: return false;
  }
}

/// Elements of a block; 1 for dense types.
static constexpr std::uint32_t block_elements(DType type) noexcept {
  switch (type) {
    case DType::q4_0:
    case DType::q4_1:
    case DType::q8_0: return 32;
    case DType::q4_k:
    case DType::q6_k: return 256;
    default: return 1;
  }
}

/// Bytes of `k` elements of a supported type: `size_bytes` of dtype.h, static; tests hold them together.
static constexpr std::uint64_t row_bytes(DType type, std::uint64_t k) noexcept {
  switch (type) {
    case DType::f32: return 4 * k;
    case DType::q4_0: return k / 32 * 18;
    case DType::q4_1: return k / 32 * 20;
    case DType::q8_0: return k / 32 * 34;
    case DType::q4_k: return k / 256 * 144;
    case DType::q6_k: return k / 256 * 210;
    default: return 2 * k;
  }
}

}  // namespace metrale::weight_types
