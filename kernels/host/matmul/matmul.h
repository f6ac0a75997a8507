// SPDX-License-Identifier: Apache-2.0
//
// Host matrix kernels: y = x · Wᵀ with W dense or block-quantised, plus what feeds them (RMS norm, activation quantisation) and
// what follows them (bias, residual, SwiGLU). Names, arguments, shapes and by-value structs are in
// metrale/models/matmul_kernels.h; with it this header is all that a caller needs: the kernel tables, and pure functions that say
// which launch to make. It owns nothing and holds no state; every function may be called from any thread.
//
// Of the buffers of `linear`, `linear4` and `swiglu` only `residual` and `y` may overlap. W and prepared activations want 64-byte
// alignment.
//
// Grid: any number of blocks along x; each takes an equal share of the output columns. Block {1,1,1}. `plan_*` give the grid and
// the dynamic shared memory; less shared memory than planned is a fault.
//
// Calling order: at load, `repack` each W once (never twice). Then for m <= kFusedRows call linear/linear4/swiglu on f32 x
// directly; norm and quantisation happen inside. For more rows call `prepare` first (it applies the norm) and pass its output as x
// with `prepared = 1` and norm null; that output may feed several launches whose `activation_class` is the same.
//
// The functions below are `static`: the header is also compiled with the flags of instruction sets that the machine may lack, and a
// shared inline function could be linked from there.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "metrale/backends/host_kernel.h"
#include "metrale/dtype.h"
#include "metrale/models/matmul_kernels.h"
#include "metrale/models/weight_types.h"
#include "metrale/types.h"

namespace metrale::host::matmul {

using metrale::GatherParams;
using metrale::LinearParams;
using metrale::Precision;
using metrale::RepackParams;
using Matrix = metrale::LinearMatrix;

inline constexpr std::string_view kModule = metrale::kMatmulModule;
inline constexpr std::uint32_t kMaxMatrices = metrale::kMaxLinearMatrices;
/// Rows of W that a packed matrix interleaves, and the granule of output columns.
inline constexpr std::uint32_t kGroupRows = 16;
/// Most rows of x that linear, linear4 and swiglu take without `prepare`.
inline constexpr std::uint32_t kFusedRows = 8;

/// Instruction sets that the kernels are built for, weakest first. `amx` includes all the others.
enum class Isa : std::uint8_t { generic, avx2, avx512, amx };
std::string_view to_string(Isa isa) noexcept;

/// The strongest set that this machine and its operating system run, and not stronger than `limit`. Choosing `amx` asks the system
/// for the tile state of this process (Linux arch_prctl), which lasts as long as the process.
Isa select_isa(Isa limit = Isa::amx) noexcept;

/// The kernels of one instruction set, all under the names above: register exactly one of these tables. `isa` must be one that
/// `select_isa` returned. Lifetime: static.
std::span<const HostKernel> kernels(Isa isa) noexcept;

using weight_types::row_bytes;
using weight_types::supports;

/// Weights whose prepared activations are interchangeable.
enum class ActivationClass : std::uint8_t { f32, bf16, quantised };
static constexpr ActivationClass activation_class(DType weights, Precision precision) noexcept {
  if (precision == Precision::exact || weights == DType::f32 || weights == DType::f16) return ActivationClass::f32;
  return weights == DType::bf16 ? ActivationClass::bf16 : ActivationClass::quantised;
}

struct Plan {
  std::string_view function;
  Dim3 grid;
  std::uint32_t shared_bytes = 0;
};

/// Whether `repack` takes a matrix of this shape: whole blocks of k (32 for dense types). Others stay as rows, `packed = 0`.
static constexpr bool can_repack(DType type, std::uint64_t k) noexcept {
  return supports(type) && k % (weight_types::block_elements(type) == 256 ? 256 : 32) == 0;
}

/// Bytes that `prepare` writes, for any instruction set. Align the buffer to 64.
static constexpr std::uint64_t prepared_bytes(std::uint64_t m, std::uint64_t k) noexcept {
  return round_up(m, 32) * (round_up(k, 64) * 6 + 64);
}
static constexpr Plan plan_prepare(std::uint32_t m, std::uint32_t k) noexcept {
  return {"prepare", {static_cast<std::uint32_t>(div_ceil(m, 16)), 1, 1}, static_cast<std::uint32_t>(round_up(k, 64) * 4 + 64)};
}
/// Groups are permuted in place, one per block; each block holds a copy of one group.
static constexpr Plan plan_repack(DType type, std::uint32_t n, std::uint32_t k) noexcept {
  const auto groups = static_cast<std::uint32_t>(n < kGroupRows ? 1 : n / kGroupRows);
  return {"repack", {groups, 1, 1}, static_cast<std::uint32_t>(kGroupRows * row_bytes(type, k) + 64)};
}
/// One row per block.
static constexpr Plan plan_gather(std::uint32_t m) noexcept { return {"gather", {m, 1, 1}, 64}; }

/// The launch of linear, linear4 or swiglu for `p`. `threads`: workers that share a grid (the backend's sm_count).
static constexpr Plan plan_linear(std::string_view function, const LinearParams& p, std::uint32_t threads) noexcept {
  const bool several = function == "linear4";
  std::uint64_t groups = 0, staged = 0;
  for (std::uint32_t i = 0; i < kMaxMatrices; ++i) {
    const Matrix& w = p.w[i];
    if (w.n == 0 || (i > 0 && function == "linear")) continue;
    if (several || i == 0) groups += div_ceil(w.n, kGroupRows);
    if (!w.packed || w.n % kGroupRows != 0) {  // rows are packed on the fly
      const std::uint64_t bytes = kGroupRows * row_bytes(static_cast<DType>(w.dtype), round_up(p.k, 32)) + 64;
      staged = bytes > staged ? bytes : staged;
    }
  }
  // Few rows: each block prepares x anew. Many: each streams its rows past its columns. So only as many as balance the workers.
  std::uint64_t blocks = std::uint64_t{threads} * (groups < 512 ? 2 : 8);
  blocks = blocks > groups ? groups : blocks;
  const std::uint64_t fused = p.prepared ? 0 : (std::uint64_t{p.m} + 1) * (round_up(p.k, 64) * 4 + 64);
  const std::uint64_t panel = 160 * 1024;  // a slice of W as bf16, and output tiles
  const std::uint64_t exact =
      p.precision == static_cast<std::uint32_t>(Precision::exact) ? 2 * 68 * std::uint64_t{p.k} : 0;  // W as f32
  return {function,
          {static_cast<std::uint32_t>(blocks == 0 ? 1 : blocks), 1, 1},
          static_cast<std::uint32_t>(fused + panel + 2 * staged + exact + 128)};
}

}  // namespace metrale::host::matmul
