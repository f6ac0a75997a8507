// SPDX-License-Identifier: Apache-2.0
//
// What entries.cpp hands to the code of one instruction set. Each ops_<isa>.cpp is compiled with its own machine flags and exports
// one table and nothing else: an inline function shared with other objects could be linked from here and run on a machine without
// these instructions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matmul.h"

namespace metrale::host::matmul {

/// The decoded arguments of prepare, linear, linear4 or swiglu for one block of the grid.
struct Call {
  LinearParams p;
  const void* x = nullptr;
  const void* norm = nullptr;
  void* prepared_out = nullptr;
  const std::byte* w[kMaxMatrices] = {};
  const float* bias[kMaxMatrices] = {};
  const float* residual = nullptr;
  float* y[kMaxMatrices] = {};
  std::uint32_t matrices = 0;
  bool swiglu = false;
  std::uint32_t block = 0;
  std::uint32_t blocks = 1;
  std::byte* shared = nullptr;
};

struct Ops {
  void (*prepare)(const Call&);
  void (*linear)(const Call&);
};

extern const Ops kOpsGeneric;
#if defined(__x86_64__)
extern const Ops kOpsAvx2;
extern const Ops kOpsAvx512;
extern const Ops kOpsAmx;
#endif

/// Packs rows [first, first + rows) of a row-major matrix into one group at `out`; rows beyond are zero.
void pack_group(DType type, const std::byte* w, std::uint32_t first, std::uint32_t rows, std::uint32_t k, std::byte* out) noexcept;
/// One row of a packed group, or of row storage when `row_major`, as floats.
void unpack_row(DType type, const std::byte* group, std::uint32_t row, std::uint32_t k, bool row_major, float* out) noexcept;

}  // namespace metrale::host::matmul
