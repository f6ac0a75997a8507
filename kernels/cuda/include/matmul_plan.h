// SPDX-License-Identifier: Apache-2.0
//
// Which launch the CUDA matrix kernels want: names, arguments, shapes and by-value structs are in
// metrale/models/matmul_kernels.h; here are blocks, threads, shared memory, the types that are served and the rules of calling.
// Plain C++ for host code, and the device code reads its own sizes from the same constants. Pure functions; any thread.
//
// Of the buffers of `linear`, `linear4` and `swiglu` only `residual` and `y` may overlap. W, x, norm and prepared activations are
// aligned to 16 bytes, as `alloc` gives them; rows whose bytes are no multiple of 16 are computed too, more slowly.
//
// Besides those three, which take everything, there are entries that take only some calls, and those quickly: kEntries. They have
// the arguments of the general one, and `plan_linear` names the one to launch.
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
#include "metrale/models/weight_types.h"
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

using weight_types::block_elements;
using weight_types::row_bytes;
using weight_types::supports;

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
  std::int32_t entry = -1;  ///< Which of kEntries `function` is, if it is one.
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

// ---- one row of x: see matmul_one.cuh ----

/// Most threads of a block: two blocks of as many registers as they need fit on a multiprocessor.
static constexpr std::uint32_t one_threads(DType type, bool few) noexcept { return few && block_elements(type) == 1 ? 384 : 256; }
/// Most chunks of a row that a team takes at a time.
inline constexpr std::uint32_t kOneChunks = 256;
/// Rows of W for each multiprocessor up to which they are `few`: what counts then is the time that a row takes.
inline constexpr std::uint32_t kOneFewRows = 24;
/// Bytes of dense weights of a block that go to the second-level cache at the start, beyond those in registers.
inline constexpr std::uint32_t kOneAhead = 16 * 1024;
/// Blocks of a multiprocessor where rows are not few and a block has all its threads; of smaller ones as many more as there are
/// registers for.
inline constexpr std::uint32_t kOneBlocks = 2;
/// Rows whose sums a team gathers before it writes them.
inline constexpr std::uint32_t kOneSums = 64;
/// Most columns for which the norm's weights are fetched ahead, into shared memory.
inline constexpr std::uint32_t kOneNormMost = 8192;
/// Elements of a chunk of 16 bytes of elements or quants.
static constexpr std::uint32_t chunk_elements(DType type) noexcept {
  if (block_elements(type) == 1) return type == DType::f32 ? 4 : 8;
  return type == DType::q8_0 ? 16 : 32;
}
/// Rows that a thread has on their way; for swiglu half of them from gate.
static constexpr std::uint32_t one_rows(DType type, bool gated, bool few) noexcept {
  if (block_elements(type) == 1) return few ? 8 : 16;
  return few ? (gated ? 4 : 2) : block_elements(type) == 256 ? 4 : 8;
}
/// Room for x, in quads: whole runs of `staged_quad`.
static constexpr std::uint32_t one_slots(std::uint32_t quads) noexcept { return (quads + 63) / 64 * 64; }
/// Shared memory of a block of `teams` teams of `team` threads; where rows are few each thread has the norm's weights for itself.
static constexpr std::uint32_t one_shared_bytes(DType type, std::uint32_t k, std::uint32_t team, std::uint32_t teams, bool gated,
                                                bool few) noexcept {
  const std::uint32_t elements = chunk_elements(type), threads = team * teams;
  const auto rounds = static_cast<std::uint32_t>(div_ceil(k / elements, team));
  const std::uint32_t slots = one_slots(rounds * team * elements / 4);
  const std::uint32_t norms = few ? threads * elements / 4 : k <= kOneNormMost ? slots : 0;
  // The compiler reads what is left of a team's squares as a whole quad, up to three floats beyond the last.
  constexpr std::uint32_t kBeyond = 12;
  return (slots + norms) * 16 + threads / 32 * (2 * kOneSums * (gated ? 2 : 1) + 1) * 4 + teams * 4 + kBeyond;
}
/// Entries beside the general ones, each with the arguments of one of those: for one row of x and weights of one type, in the
/// order of `one_entry`, where rows of W are many and where they are few; and for prepared rows and bf16 weights.
inline constexpr std::string_view kEntries[] = {"linear_f32_1",      "linear4_f32_1",      "swiglu_f32_1",       //
                                                "linear_f16_1",      "linear4_f16_1",      "swiglu_f16_1",       //
                                                "linear_bf16_1",     "linear4_bf16_1",     "swiglu_bf16_1",      //
                                                "linear_q4_0_1",     "linear4_q4_0_1",     "swiglu_q4_0_1",      //
                                                "linear_q4_1_1",     "linear4_q4_1_1",     "swiglu_q4_1_1",      //
                                                "linear_q8_0_1",     "linear4_q8_0_1",     "swiglu_q8_0_1",      //
                                                "linear_q4_k_1",     "linear4_q4_k_1",     "swiglu_q4_k_1",      //
                                                "linear_q6_k_1",     "linear4_q6_k_1",     "swiglu_q6_k_1",      //
                                                "linear_f32_1_few",  "linear4_f32_1_few",  "swiglu_f32_1_few",   //
                                                "linear_f16_1_few",  "linear4_f16_1_few",  "swiglu_f16_1_few",   //
                                                "linear_bf16_1_few", "linear4_bf16_1_few", "swiglu_bf16_1_few",  //
                                                "linear_q4_0_1_few", "linear4_q4_0_1_few", "swiglu_q4_0_1_few",  //
                                                "linear_q4_1_1_few", "linear4_q4_1_1_few", "swiglu_q4_1_1_few",  //
                                                "linear_q8_0_1_few", "linear4_q8_0_1_few", "swiglu_q8_0_1_few",  //
                                                "linear_q4_k_1_few", "linear4_q4_k_1_few", "swiglu_q4_k_1_few",  //
                                                "linear_q6_k_1_few", "linear4_q6_k_1_few", "swiglu_q6_k_1_few",  //
                                                "linear_bf16_n",     "linear4_bf16_n",     "swiglu_bf16_n"};
inline constexpr std::int32_t kFewEntry = 24, kManyEntry = 48;
static constexpr std::int32_t entry_of(std::string_view function) noexcept {
  return function == "linear4" ? 1 : function == "swiglu" ? 2 : 0;
}
static constexpr std::int32_t one_entry(std::string_view function, DType type, bool few) noexcept {
  std::int32_t t = 0;
  for (const DType each : {DType::f32, DType::f16, DType::bf16, DType::q4_0, DType::q4_1, DType::q8_0, DType::q4_k, DType::q6_k}) {
    if (each == type) break;
    ++t;
  }
  return 3 * t + entry_of(function) + (few ? kFewEntry : 0);
}
/// Whether one of those takes the call: one row, `count` matrices of one type, rows of whole chunks, quantised ones packed.
static constexpr bool is_one(const LinearParams& p, std::uint32_t count) noexcept {
  const auto type = static_cast<DType>(p.w[0].dtype);
  if (p.m != 1 || p.prepared || !supports(type) || p.k == 0 || p.k % chunk_elements(type) != 0) return false;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (p.w[i].n == 0) continue;
    if (p.w[i].dtype != p.w[0].dtype || (block_elements(type) > 1 && !p.w[i].packed)) return false;
  }
  return true;
}
/// Its launch; no `entry` where a block would need more shared memory than a device grants.
static constexpr Plan plan_one(std::string_view function, const LinearParams& p, std::uint32_t sm_count) noexcept {
  const auto type = static_cast<DType>(p.w[0].dtype);
  const bool gated = function == "swiglu", packed = block_elements(type) > 1;
  const std::uint32_t matrices = function == "linear4" ? kMaxLinearMatrices : 1, of_row = gated ? 2 : 1;
  std::uint64_t rows = 0;
  for (std::uint32_t i = 0; i < matrices; ++i) rows += p.w[i].n;
  const std::uint64_t chunks = p.k / chunk_elements(type), rounds = div_ceil(chunks, kOneChunks);
  const bool few = rounds == 1 && rows * of_row <= std::uint64_t{kOneFewRows} * sm_count;
  const std::uint32_t group = one_rows(type, gated, few) / of_row;
  std::uint64_t granules = 0;
  for (std::uint32_t i = 0; i < matrices; ++i) granules += packed ? div_ceil(p.w[i].n, group) : p.w[i].n;
  const std::uint64_t team = round_up(div_ceil(chunks, rounds), 32);
  const std::uint64_t threads = one_threads(type, few), whole_teams = team < threads ? threads / team * team : team;
  const std::uint64_t most = (few ? 1 : kOneBlocks * threads / whole_teams) * sm_count;
  const std::uint64_t blocks = granules < most ? (granules == 0 ? 1 : granules) : most;
  // A team for each group of rows that a block has, as far as there are threads.
  std::uint64_t teams = div_ceil(div_ceil(granules, blocks), packed ? 1 : group);
  teams = teams > threads / team ? threads / team : teams == 0 ? 1 : teams;
  const std::uint32_t shared =
      one_shared_bytes(type, p.k, static_cast<std::uint32_t>(team), static_cast<std::uint32_t>(teams), gated, few);
  if (shared > kSharedLimit) return {};
  const std::int32_t entry = one_entry(function, type, few);
  return {kEntries[entry],
          {static_cast<std::uint32_t>(blocks), 1, 1},
          {static_cast<std::uint32_t>(team), static_cast<std::uint32_t>(teams), 1},
          shared,
          entry};
}

// ---- many rows: tiles of y ----

struct Tile {
  std::uint32_t rows, columns, threads, stages;
};
inline constexpr std::uint32_t kTileDepth = 64;  ///< Columns of k of a stage, bf16.
inline constexpr Tile kLargeTile{128, 128, 512, 3}, kMiddleTile{64, 64, 256, 4}, kSmallTile{32, 64, 256, 6};
inline constexpr Tile kNarrowTile{32, 32, 128, 12};  ///< Of the bf16 entries alone.
inline constexpr Tile kExactTile{64, 64, 256, 0};
inline constexpr std::uint32_t kExactTileBytes = 2 * 16 * (64 + 4) * 4 * 2;
static constexpr std::uint32_t tile_bytes(const Tile& t) noexcept { return t.stages * (t.rows + t.columns) * kTileDepth * 2; }

/// The launch of linear, linear4 or swiglu for `p` on a device of `sm_count` multiprocessors. Its `function` is that one or one of
/// kEntries, with the same arguments.
static constexpr Plan plan_linear(std::string_view function, const LinearParams& p, std::uint32_t sm_count) noexcept {
  const bool several = function == "linear4", gated = function == "swiglu";
  const std::uint32_t matrices = several ? kMaxLinearMatrices : 1;
  if (is_one(p, gated ? 2 : matrices)) {
    const Plan one = plan_one(function, p, sm_count);
    if (one.entry >= 0) return one;
  }
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
  bool direct = !exact && p.k % 8 == 0;
  for (std::uint32_t i = 0; i < (gated ? 2 : matrices); ++i)
    direct = direct && (p.w[i].n == 0 || p.w[i].dtype == static_cast<std::uint32_t>(DType::bf16));
  if (direct && p.m <= kNarrowTile.rows && tiles(tile) < sm_count) tile = kNarrowTile;
  if (exact) tile = kExactTile;
  const auto columns = static_cast<std::uint32_t>(tiles(tile));
  const std::int32_t entry = direct ? kManyEntry + entry_of(function) : -1;
  return {direct ? kEntries[entry] : function,
          {static_cast<std::uint32_t>(div_ceil(p.m, tile.rows)), columns == 0 ? 1 : columns, 1},
          {tile.threads, 1, 1},
          exact ? kExactTileBytes : tile_bytes(tile),
          entry};
}

}  // namespace metrale::cuda::matmul
