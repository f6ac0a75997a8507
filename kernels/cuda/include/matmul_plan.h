// SPDX-License-Identifier: Apache-2.0
//
// Which launch the CUDA matrix kernels want: names, arguments, shapes and by-value structs are in
// metrale/models/matmul_kernels.h; here are blocks, threads, shared memory, the types that are served and the rules of calling.
// Plain C++ for host code, and the device code reads its own sizes from the same constants. Pure functions; any thread.
//
// Of the buffers of `linear`, `linear4` and `swiglu` only `residual` and `y` may overlap. W, x and prepared activations want
// 16-byte alignment, which `alloc` gives; rows whose bytes are no multiple of 16 are computed too, more slowly.
//
// Calling order: at load, `repack` each W once where `can_repack` says so (never twice). Then for m <= kFusedRows call
// linear/linear4/swiglu on f32 x directly; the norm happens inside. For more rows call `prepare` first (it applies the norm) and
// pass its output as x with `prepared = 1` and norm null; that output may feed several launches whose `activation_class` is equal.
//
// Weights, norms and biases are read before the predecessor has ended, so no dependent launch may follow the kernels that write
// them (repack among them) before the host, or an ordinary launch, has waited for those.
//
// The functions are `static`, so that one compiled with the flags of a device unit is never linked into another.
#pragma once

#include <cstdint>
#include <string_view>

#include "metrale/dtype.h"
#include "metrale/models/matmul_kernels.h"
#include "metrale/types.h"

namespace metrale::cuda::matmul {

/// Most rows of x that linear, linear4 and swiglu take without `prepare`.
inline constexpr std::uint32_t kFusedRows = 4;
/// Rows of W whose quants a packed matrix keeps together; the last group may be shorter.
inline constexpr std::uint32_t kGroupRows = 8;
/// Shared memory that every device of sm_80 and later with a full-size multiprocessor grants one block.
inline constexpr std::uint32_t kSharedLimit = 160 * 1024;
/// What sm_90 grants, asked for only where a single row of x needs it.
inline constexpr std::uint32_t kSharedMost = 227 * 1024;

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

/// Bytes of `k` elements of a supported type: `size_bytes` of dtype.h, static.
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

/// Weights whose prepared activations are interchangeable. f32 weights keep f32 activations in both precisions.
enum class ActivationClass : std::uint8_t { f32, bf16 };
static constexpr ActivationClass activation_class(DType weights, Precision precision) noexcept {
  return precision == Precision::exact || weights == DType::f32 ? ActivationClass::f32 : ActivationClass::bf16;
}

struct Plan {
  std::string_view function;
  Dim3 grid;
  Dim3 block;
  std::uint32_t shared_bytes = 0;
};

// ---- repack, gather, prepare ----

/// Whether `repack` takes a matrix of k columns: quantised, whole blocks, and a group that fits into shared memory. Others, and all
/// dense types, stay as rows, `packed = 0`.
static constexpr bool can_repack(DType type, std::uint64_t k) noexcept {
  return supports(type) && block_elements(type) > 1 && k % block_elements(type) == 0 &&
         kGroupRows * row_bytes(type, k) <= kSharedLimit;
}
/// One group of rows per block, permuted in place through shared memory.
static constexpr Plan plan_repack(DType type, std::uint32_t n, std::uint32_t k) noexcept {
  return {"repack",
          {static_cast<std::uint32_t>(div_ceil(n, kGroupRows)), 1, 1},
          {256, 1, 1},
          static_cast<std::uint32_t>(kGroupRows * row_bytes(type, k))};
}
/// One row per block.
static constexpr Plan plan_gather(std::uint32_t m) noexcept { return {"gather", {m, 1, 1}, {256, 1, 1}, 0}; }

/// Elements between rows of what `prepare` writes.
static constexpr std::uint64_t prepared_stride(std::uint64_t k) noexcept { return round_up(k, 64); }
/// Bytes that `prepare` writes, whatever the class.
static constexpr std::uint64_t prepared_bytes(std::uint64_t m, std::uint64_t k) noexcept { return m * prepared_stride(k) * 4; }
/// One row per block.
static constexpr Plan plan_prepare(std::uint32_t m, std::uint32_t /*k*/) noexcept { return {"prepare", {m, 1, 1}, {256, 1, 1}, 0}; }

// ---- few rows: weights stream past x, which lies in shared memory ----

/// Bytes of weights that each thread keeps on their way, in shared memory.
inline constexpr std::uint32_t kRingBytes = 128;
/// Sums that warps hand to each other, behind the ring.
inline constexpr std::uint32_t kStreamScratch = 4096;
/// Floats between rows of x in shared memory: whole steps of a warp, whatever the type.
static constexpr std::uint64_t staged_stride(std::uint64_t k) noexcept { return round_up(k, 1024); }
static constexpr std::uint32_t stream_fixed_bytes(std::uint32_t threads) noexcept { return threads * kRingBytes + kStreamScratch; }

// ---- many rows: tiles of y ----

struct Tile {
  std::uint32_t rows, columns, threads, stages;
};
inline constexpr std::uint32_t kTileDepth = 64;  ///< Columns of k of a stage, bf16.
inline constexpr Tile kLargeTile{128, 128, 512, 3}, kMiddleTile{64, 64, 256, 4}, kSmallTile{32, 64, 256, 6};
inline constexpr Tile kExactTile{64, 64, 256, 0};
inline constexpr std::uint32_t kExactTileBytes = 2 * 16 * (64 + 4) * 4 * 2;
static constexpr std::uint32_t tile_bytes(const Tile& t) noexcept { return t.stages * (t.rows + t.columns) * kTileDepth * 2; }

/// The launch of linear, linear4 or swiglu for `p` on a device of `sm_count` multiprocessors.
static constexpr Plan plan_linear(std::string_view function, const LinearParams& p, std::uint32_t sm_count) noexcept {
  const bool several = function == "linear4", gated = function == "swiglu";
  const std::uint32_t matrices = several ? kMaxLinearMatrices : 1;
  std::uint64_t rows = 0;
  for (std::uint32_t i = 0; i < matrices; ++i) rows += p.w[i].n;
  if (!p.prepared) {
    const std::uint64_t blocks = rows < sm_count ? (rows == 0 ? 1 : rows) : sm_count;
    // Where a block has few short rows, more warps than rows would only wait.
    const std::uint32_t threads = div_ceil(rows, blocks) <= 8 && p.k <= 2048 ? 256 : 512;
    const std::uint64_t fixed = stream_fixed_bytes(threads), row = staged_stride(p.k) * 4;
    // As many rows of x as fit; the kernel makes several passes over W for the others. None: it reads x from device memory.
    std::uint64_t staged = fixed + row > kSharedLimit ? (fixed + row <= kSharedMost) : (kSharedLimit - fixed) / row;
    staged = staged > p.m ? p.m : staged;
    return {
        function, {static_cast<std::uint32_t>(blocks), 1, 1}, {threads, 1, 1}, static_cast<std::uint32_t>(fixed + staged * row)};
  }
  const bool exact =
      activation_class(static_cast<DType>(p.w[0].dtype), static_cast<Precision>(p.precision)) == ActivationClass::f32;
  const auto tiles = [&](const Tile& t) {
    std::uint64_t n = 0;
    for (std::uint32_t i = 0; i < matrices; ++i) n += div_ceil(p.w[i].n, gated ? t.columns / 2 : t.columns);
    return n;
  };
  Tile tile = kLargeTile;
  if (p.m <= kSmallTile.rows) {
    tile = kSmallTile;
  } else if (div_ceil(p.m, tile.rows) * tiles(tile) < sm_count) {
    tile = kMiddleTile;
  }
  if (exact) tile = kExactTile;
  const auto columns = static_cast<std::uint32_t>(tiles(tile));
  return {function,
          {static_cast<std::uint32_t>(div_ceil(p.m, tile.rows)), columns == 0 ? 1 : columns, 1},
          {tile.threads, 1, 1},
          exact ? kExactTileBytes : tile_bytes(tile)};
}

}  // namespace metrale::cuda::matmul
