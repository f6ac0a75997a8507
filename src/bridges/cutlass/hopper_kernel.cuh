// SPDX-License-Identifier: Apache-2.0
//
// The matrix kernel for Hopper, dense and grouped, bf16 and block-scaled FP8, from CUTLASS's parts: a persistent block of one
// warpgroup that loads and two that multiply. Rows of activations come by cp.async, each from where its index says, so that a
// gather costs nothing of its own; boxes of weights come by TMA. Group sizes are read on the device by each block.
//
// Scheduling: the tiles of all groups are numbered in the order of groups, then rows, then columns, and a block takes the next when
// it has done one. Blocks that run together share rows and weights, which the L2 cache holds. A tile of up to 64 rows leaves the
// second warpgroup idle, so rows are padded to 64.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_types.h>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "bridges/cutlass/launch.h"

namespace metrale::cutlass {

using ::cute::_1;
using ::cute::_128;
using ::cute::_16;
using ::cute::_2;
using ::cute::_3;
using ::cute::_64;
using ::cute::_8;
using ::cute::Int;
using ::cute::Shape;
using ::cute::Step;

inline constexpr int kTileRows = 128;
inline constexpr int kHalfRows = 64;   ///< Of one warpgroup.
inline constexpr int kRowBytes = 128;  ///< Of a row in a stage: the span of the swizzle.
inline constexpr int kChunk = 16;      ///< Bytes of one cp.async.
inline constexpr int kLoaders = 128;   ///< Threads that load.
inline constexpr int kThreads = kLoaders + 256;

template <class Element, int kColumns>
struct HopperAtom;
template <>
struct HopperAtom<::cutlass::bfloat16_t, 256> {
  using Op = ::cute::SM90_64x256x16_F32BF16BF16_SS<::cute::GMMA::Major::K, ::cute::GMMA::Major::K>;
};
template <>
struct HopperAtom<::cutlass::bfloat16_t, 192> {
  using Op = ::cute::SM90_64x192x16_F32BF16BF16_SS<::cute::GMMA::Major::K, ::cute::GMMA::Major::K>;
};
template <>
struct HopperAtom<::cutlass::bfloat16_t, 128> {
  using Op = ::cute::SM90_64x128x16_F32BF16BF16_SS<::cute::GMMA::Major::K, ::cute::GMMA::Major::K>;
};
template <>
struct HopperAtom<::cutlass::float_e4m3_t, 128> {
  using Op = ::cute::SM90_64x128x32_F32E4M3E4M3_SS_TN<>;
};

inline constexpr std::int32_t kNoToken = -1;  ///< Its row reads as zeros.

/// Where a tile lies.
struct HopperTile {
  std::int32_t group;    ///< Below 0: there are no more tiles.
  std::int32_t row;      ///< First, of all rows.
  std::int32_t row_end;  ///< Of the group.
  std::int32_t column;
};

struct HopperSlot {
  HopperTile tile;
  std::int32_t tokens[kTileRows];
};

template <class Element, int kColumns, int kStages>
struct HopperShared {
  static constexpr int kStepColumns = kRowBytes / static_cast<int>(sizeof(Element));
  static constexpr int kActBytes = kTileRows * kRowBytes;
  static constexpr int kWeightBytes = kColumns * kRowBytes;

  alignas(1024) std::uint8_t act[kStages][kActBytes];
  alignas(1024) std::uint8_t weight[kStages][kWeightBytes];
  ::cutlass::arch::ClusterTransactionBarrier full[kStages];
  ::cutlass::arch::ClusterBarrier empty[kStages];
  ::cutlass::arch::ClusterBarrier slot_full[2];
  ::cutlass::arch::ClusterBarrier slot_empty[2];
  HopperSlot slots[2];
  std::int32_t row_begin[kMaxGroups + 1];   ///< Of each group, made sound.
  std::int32_t tile_begin[kMaxGroups + 1];  ///< Of each group, counted in tiles.
};

/// Reads the groups' offsets and makes them sound: none below the one before it, below 0, or above the number of rows, so that no
/// group writes outside the output whatever the offsets are. One warp.
template <class Shared>
__device__ void read_groups(const HopperArguments& p, Shared& shared, int lane) {
  std::int32_t before = p.offsets == nullptr ? 0 : min(max(p.offsets[0], 0), p.rows);
  std::int32_t tiles_before = 0;
  if (lane == 0) {
    shared.row_begin[0] = before;
    shared.tile_begin[0] = 0;
  }
  for (std::int32_t base = 0; base < p.groups; base += 32) {
    const std::int32_t group = base + lane;
    std::int32_t end = before;
    if (group < p.groups) end = p.offsets == nullptr ? p.rows : min(max(p.offsets[group + 1], before), p.rows);
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t other = __shfl_up_sync(~0U, end, step);
      if (lane >= step) end = max(end, other);
    }
    std::int32_t begin = __shfl_up_sync(~0U, end, 1);
    if (lane == 0) begin = before;
    std::int32_t tiles = (end - begin + kTileRows - 1) / kTileRows * p.column_tiles;
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t other = __shfl_up_sync(~0U, tiles, step);
      if (lane >= step) tiles += other;
    }
    if (group < p.groups) {
      shared.row_begin[group + 1] = end;
      shared.tile_begin[group + 1] = tiles_before + tiles;
    }
    before = __shfl_sync(~0U, end, 31);
    tiles_before += __shfl_sync(~0U, tiles, 31);
  }
}

/// Tile number `tile`, whose group is `from` or a later one; empty groups are passed over.
template <int kColumns, class Shared>
__device__ HopperTile find_tile(const HopperArguments& p, const Shared& shared, std::int32_t tile, std::int32_t from) {
  if (tile >= shared.tile_begin[p.groups]) return {.group = -1, .row = 0, .row_end = 0, .column = 0};
  std::int32_t low = from;
  std::int32_t high = p.groups - 1;
  while (low < high) {
    const std::int32_t middle = (low + high) / 2;
    if (shared.tile_begin[middle + 1] > tile) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const std::int32_t local = tile - shared.tile_begin[low];
  return {.group = low,
          .row = shared.row_begin[low] + local / p.column_tiles * kTileRows,
          .row_end = shared.row_begin[low + 1],
          .column = local % p.column_tiles * kColumns};
}

/// What hands tiles out: the first loading warp. A slot is filled while the tile before it is loaded, so that neither the choice
/// nor the tokens of its rows are waited for.
template <int kColumns, class Shared>
class Handout {
 public:
  __device__ Handout(const HopperArguments& p, Shared& shared, int lane) : p_(p), shared_(shared), lane_(lane) {}

  /// Asks for the number of the next tile.
  __device__ void ask(bool first) {
    if (first) {
      number_ = static_cast<std::int32_t>(blockIdx.x);
    } else if (p_.next_tile == nullptr) {
      number_ += static_cast<std::int32_t>(gridDim.x);
    } else if (lane_ == 0) {
      number_ = static_cast<std::int32_t>(gridDim.x + atomicAdd(p_.next_tile, 1U));
    }
  }
  /// Finds the tile, and asks for the tokens of its rows.
  __device__ void find() {
    number_ = __shfl_sync(~0U, number_, 0);
    tile_ = find_tile<kColumns>(p_, shared_, number_, from_);
    if (tile_.group < 0) return;
    from_ = tile_.group;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::int32_t row = tile_.row + lane_ + i * 32;
      tokens_[i] = kNoToken;
      if (row < tile_.row_end) tokens_[i] = p_.row_index == nullptr ? row : __ldg(p_.row_index + row);
    }
  }
  /// Puts it into its slot.
  __device__ void publish() {
    shared_.slot_empty[slot_].wait(phase_ ^ 1);
    auto& slot = shared_.slots[slot_];
    if (lane_ == 0) slot.tile = tile_;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool exists = static_cast<std::uint32_t>(tokens_[i]) < static_cast<std::uint32_t>(p_.tokens);
      slot.tokens[lane_ + i * 32] = exists ? tokens_[i] : kNoToken;
    }
    __syncwarp();
    if (lane_ == 0) shared_.slot_full[slot_].arrive();
    phase_ ^= slot_;
    slot_ ^= 1;
  }

 private:
  const HopperArguments& p_;
  Shared& shared_;
  int lane_;
  HopperTile tile_{};
  std::int32_t number_ = 0;
  std::int32_t from_ = 0;
  std::int32_t tokens_[4] = {kNoToken, kNoToken, kNoToken, kNoToken};
  std::uint32_t slot_ = 0;
  std::uint32_t phase_ = 0;
};

/// A reader of the slots: each warp reads each of them.
template <class Shared>
class Intake {
 public:
  __device__ explicit Intake(Shared& shared) : shared_(shared) {}
  /// Waits for the next tile; its slot stays until `done`.
  __device__ HopperTile next() {
    shared_.slot_full[slot_].wait(phase_);
    return shared_.slots[slot_].tile;
  }
  __device__ std::int32_t token(int row) const { return shared_.slots[slot_].tokens[row]; }
  __device__ void done(int lane) {
    __syncwarp();
    if (lane == 0) shared_.slot_empty[slot_].arrive();
    phase_ ^= slot_;
    slot_ ^= 1;
  }

 private:
  Shared& shared_;
  std::uint32_t slot_ = 0;
  std::uint32_t phase_ = 0;
};

/// 16 bytes from `src`; `bytes` less than 16 fills with zeros, and 0 reads nothing.
__device__ inline void copy_chunk(std::uint32_t dst, const void* src, std::uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes));
}

/// Four lanes that hold two columns of four blocks of eight each, exchanged so that each holds all eight columns of one block.
__device__ inline void transpose_quad(std::uint32_t (&v)[4], int lane) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & step) != 0) continue;
      const std::uint32_t sent = upper ? v[i] : v[i | step];
      const std::uint32_t got = __shfl_xor_sync(~0U, sent, step);
      if (upper) {
        v[i] = got;
      } else {
        v[i | step] = got;
      }
    }
  }
}

template <class Element, int kColumns, int kStages>
__device__ void load_tiles(const CUtensorMap& weight_map, const HopperArguments& p,
                           HopperShared<Element, kColumns, kStages>& shared, std::int32_t steps) {
  constexpr int kRowsEach = kTileRows * kRowBytes / kChunk / kLoaders;
  constexpr int kStepColumns = HopperShared<Element, kColumns, kStages>::kStepColumns;
  const int thread = static_cast<int>(threadIdx.x) & (kLoaders - 1);
  const int chunk = thread % 8;
  const int first_row = thread / 8;
  const std::uint32_t row_bytes = static_cast<std::uint32_t>(p.k) * sizeof(Element);
  // Rows 16 apart have the same place in the swizzle's pattern of eight rows.
  const std::uint32_t place = static_cast<std::uint32_t>(first_row * kRowBytes + ((chunk ^ (first_row % 8)) * kChunk));

  using Shared = HopperShared<Element, kColumns, kStages>;
  const int lane = thread % 32;
  const bool hands_out = thread < 32;
  Handout<kColumns, Shared> handout(p, shared, lane);
  Intake<Shared> intake(shared);
  if (hands_out) {
    handout.ask(true);
    handout.find();
    handout.publish();
  }
  int stage = 0;
  std::uint32_t phase = 1;
  for (HopperTile tile = intake.next(); tile.group >= 0; tile = intake.next()) {
    const std::uint8_t* source[kRowsEach];
    std::uint32_t sound = 0;  // A bit for each row that has a token.
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const std::int32_t token = intake.token(first_row + i * 16);
      source[i] = static_cast<const std::uint8_t*>(p.act);
      if (token == kNoToken) continue;
      source[i] += static_cast<std::uint32_t>(token) * p.act_stride + chunk * kChunk;
      sound |= 1U << i;
    }
    intake.done(lane);
    if (hands_out) handout.ask(false);
    const std::int32_t weight_row = tile.group * p.n + tile.column;
    // A row without a token reads as zeros; rows past the group are not stored, so whatever is in the stage may stay there.
    const int live_rows = min(kRowsEach, (tile.row_end - tile.row - first_row + 15) / 16);
    for (std::int32_t step = 0; step < steps; ++step) {
      if (hands_out && step == min(2, steps - 1)) handout.find();
      if (hands_out && step == min(5, steps - 1)) handout.publish();
      shared.empty[stage].wait(phase);
      if (thread == 0) {
        shared.full[stage].arrive_and_expect_tx(HopperShared<Element, kColumns, kStages>::kWeightBytes);
        ::cute::SM90_TMA_LOAD_2D::copy(&weight_map, reinterpret_cast<std::uint64_t*>(&shared.full[stage]),
                                       static_cast<std::uint64_t>(::cute::TMA::CacheHintSm90::EVICT_NORMAL), shared.weight[stage],
                                       step * kStepColumns, weight_row);
      }
      const std::uint32_t at = static_cast<std::uint32_t>(step) * kRowBytes;
      const std::uint32_t left = row_bytes > at + chunk * kChunk ? kChunk : 0;
      const std::uint32_t dst = ::cute::cast_smem_ptr_to_uint(shared.act[stage]) + place;
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        if (i < live_rows) {
          const std::uint32_t bytes = (sound >> i & 1U) != 0 ? left : 0;
          copy_chunk(dst + i * 16 * kRowBytes, bytes != 0 ? source[i] + at : static_cast<const std::uint8_t*>(p.act), bytes);
        }
      }
      ::cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<std::uint64_t*>(&shared.full[stage]));
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
  // A block stays until its copies have landed.
  asm volatile("cp.async.wait_all;" ::);
}

template <class Element, int kColumns, int kStages>
__device__ void multiply_tiles(const HopperArguments& p, HopperShared<Element, kColumns, kStages>& shared, std::int32_t steps) {
  constexpr bool kScaled = sizeof(Element) == 1;
  constexpr int kStepColumns = HopperShared<Element, kColumns, kStages>::kStepColumns;
  using Layout = ::cute::GMMA::Layout_K_SW128_Atom<Element>;
  using ActLayout = decltype(::cute::tile_to_shape(Layout{}, Shape<_128, Int<kStepColumns>, Int<kStages>>{}, Step<_1, _2, _3>{}));
  using WeightLayout =
      decltype(::cute::tile_to_shape(Layout{}, Shape<Int<kColumns>, Int<kStepColumns>, Int<kStages>>{}, Step<_1, _2, _3>{}));
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int lane = thread % 32;
  const int half = static_cast<int>(threadIdx.x) / 128 - 1;

  auto mma = ::cute::make_tiled_mma(typename HopperAtom<Element, kColumns>::Op{});
  auto slice = mma.get_slice(0);
  auto act = ::cute::make_tensor(::cute::make_smem_ptr(reinterpret_cast<Element*>(shared.act)), ActLayout{});
  auto act_half = ::cute::local_tile(act, Shape<_64, Int<kStepColumns>, Int<kStages>>{}, ::cute::make_coord(half, 0, 0));
  auto weight = ::cute::make_tensor(::cute::make_smem_ptr(reinterpret_cast<Element*>(shared.weight)), WeightLayout{});
  auto a = slice.make_fragment_A(slice.partition_A(act_half));
  auto b = slice.make_fragment_B(slice.partition_B(weight));
  auto sums = ::cute::partition_fragment_C(mma, Shape<_64, Int<kColumns>>{});

  int stage = 0;
  std::uint32_t phase = 0;
  Intake<HopperShared<Element, kColumns, kStages>> intake(shared);
  const auto advance = [&] {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  };
  const auto release = [&](int which) {
    if (lane == 0) shared.empty[which].arrive();
  };
  for (HopperTile tile = intake.next(); tile.group >= 0; tile = intake.next()) {
    const int places[2] = {half * kHalfRows + thread / 32 * 16 + lane / 4, half * kHalfRows + thread / 32 * 16 + lane / 4 + 8};
    const float* row_scales[2] = {nullptr, nullptr};
    if constexpr (kScaled) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const std::int32_t token = intake.token(places[h]);
        if (token != kNoToken) row_scales[h] = p.act_scales + static_cast<std::uint32_t>(token) * p.act_scale_stride;
      }
    }
    intake.done(lane);
    if (tile.row + half * kHalfRows >= tile.row_end) {
      for (std::int32_t step = 0; step < steps; ++step) {
        shared.full[stage].wait(phase);
        release(stage);
        advance();
      }
      continue;
    }
    const std::int32_t rows[2] = {tile.row + places[0], tile.row + places[1]};
    if constexpr (kScaled) {
      auto part = ::cute::partition_fragment_C(mma, Shape<_64, Int<kColumns>>{});
      const float* column_scales =
          p.weight_scales + (static_cast<std::int64_t>(tile.group) * p.weight_scale_rows + tile.column / 128) * steps;
      ::cute::clear(sums);
      for (std::int32_t step = 0; step < steps; ++step) {
        const float column_scale = __ldg(column_scales + step);
        const float scales[2] = {row_scales[0] != nullptr ? __ldg(row_scales[0] + step) * column_scale : 0,
                                 row_scales[1] != nullptr ? __ldg(row_scales[1] + step) * column_scale : 0};
        shared.full[stage].wait(phase);
        ::cutlass::arch::fence_view_async_shared();
        ::cute::warpgroup_fence_operand(part);
        ::cute::warpgroup_arrive();
        mma.accumulate_ = ::cute::GMMA::ScaleOut::Zero;
#pragma unroll
        for (int block = 0; block < ::cute::size<2>(a); ++block) {
          ::cute::gemm(mma, a(::cute::_, ::cute::_, block, stage), b(::cute::_, ::cute::_, block, stage), part);
          mma.accumulate_ = ::cute::GMMA::ScaleOut::One;
        }
        ::cute::warpgroup_commit_batch();
        ::cute::warpgroup_wait<0>();
        ::cute::warpgroup_fence_operand(part);
        release(stage);
        advance();
#pragma unroll
        for (int i = 0; i < ::cute::size(sums); ++i) sums(i) += part(i) * scales[i / 2 % 2];
      }
    } else {
      mma.accumulate_ = ::cute::GMMA::ScaleOut::Zero;
      int last = 0;
      for (std::int32_t step = 0; step < steps; ++step) {
        shared.full[stage].wait(phase);
        ::cutlass::arch::fence_view_async_shared();
        ::cute::warpgroup_fence_operand(sums);
        ::cute::warpgroup_arrive();
#pragma unroll
        for (int block = 0; block < ::cute::size<2>(a); ++block) {
          ::cute::gemm(mma, a(::cute::_, ::cute::_, block, stage), b(::cute::_, ::cute::_, block, stage), sums);
          mma.accumulate_ = ::cute::GMMA::ScaleOut::One;
        }
        ::cute::warpgroup_commit_batch();
        // The products of this step go on while the stage of the one before is handed back.
        ::cute::warpgroup_wait<1>();
        ::cute::warpgroup_fence_operand(sums);
        if (step > 0) release(last);
        last = stage;
        advance();
      }
      ::cute::warpgroup_wait<0>();
      ::cute::warpgroup_fence_operand(sums);
      release(last);
    }

    auto* out = static_cast<__nv_bfloat16*>(p.out);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      __nv_bfloat16* row = out + static_cast<std::int64_t>(rows[h]) * p.out_stride;
#pragma unroll
      for (int quad = 0; quad < kColumns / 32; ++quad) {
        std::uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = (quad * 4 + i) * 4 + h * 2;
          const __nv_bfloat162 pair = __floats2bfloat162_rn(sums(at) * p.alpha, sums(at + 1) * p.alpha);
          v[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
        }
        transpose_quad(v, lane);
        const std::int32_t column = tile.column + quad * 32 + lane % 4 * 8;
        if (rows[h] < tile.row_end && column < p.n) {
          *reinterpret_cast<uint4*>(row + column) = make_uint4(v[0], v[1], v[2], v[3]);
        }
      }
    }
  }
}

template <class Element, int kColumns, int kStages>
__global__ void __launch_bounds__(kThreads, 1)
    hopper_kernel(const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ HopperArguments p) {
  using Shared = HopperShared<Element, kColumns, kStages>;
  extern __shared__ std::uint8_t raw[];
  auto& shared = *reinterpret_cast<Shared*>((reinterpret_cast<std::uintptr_t>(raw) + 1023) & ~std::uintptr_t{1023});
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp == 0) {
    read_groups(p, shared, static_cast<int>(threadIdx.x));
  } else if (threadIdx.x == 32) {
    ::cute::prefetch_tma_descriptor(&weight_map);
    for (int i = 0; i < kStages; ++i) {
      shared.full[i].init(kLoaders + 1);
      shared.empty[i].init(8);  // One for each multiplying warp.
    }
    for (int i = 0; i < 2; ++i) {
      shared.slot_full[i].init(1);
      shared.slot_empty[i].init(kThreads / 32);
    }
    ::cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  const std::int32_t steps = (p.k + Shared::kStepColumns - 1) / Shared::kStepColumns;
  if (threadIdx.x < kLoaders) {
    ::cutlass::arch::warpgroup_reg_dealloc<72>();
    load_tiles<Element, kColumns, kStages>(weight_map, p, shared, steps);
  } else {
    ::cutlass::arch::warpgroup_reg_alloc<216>();
    multiply_tiles<Element, kColumns, kStages>(p, shared, steps);
  }
}

}  // namespace metrale::cutlass
