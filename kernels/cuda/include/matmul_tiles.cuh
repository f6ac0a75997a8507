// SPDX-License-Identifier: Apache-2.0
//
// Many rows of x, as `prepare` wrote them: tiles of y on the tensor cores (bf16 operands, f32 sums), and in plain f32 where
// activations are f32. A block computes one tile; blockIdx.x counts its rows, blockIdx.y its columns, over all matrices of the
// call. For swiglu a tile has half its columns from gate and the other half, the same columns, from up, side by side in each
// warp.
#pragma once

#include "matmul_call.cuh"
#include "matmul_rows.cuh"

namespace metrale::cuda::matmul {

/// The columns of a block: of matrix `matrix` (0 for swiglu) from `first` on.
struct TileColumns {
  u32 matrix, first;
};
template <bool gated>
__device__ __forceinline__ TileColumns tile_columns(const Call& call, u32 width) {
  if (gated) return {0, blockIdx.y * (width / 2)};
  u32 tile = blockIdx.y, i = 0;
  for (; i + 1 < call.matrices; ++i) {
    const u32 tiles = (matrix_of(call, i).n + width - 1) / width;
    if (tile < tiles) break;
    tile -= tiles;
  }
  return {i, tile * width};
}

/// Which row of W stands in row `r` of a tile, where `run` columns of gate and of up take turns.
struct TileRow {
  u32 matrix, row;
};
template <bool gated, u32 run>
__device__ __forceinline__ TileRow tile_row(const TileColumns& c, u32 r) {
  if (!gated) return {c.matrix, c.first + r};
  return {r / run % 2, c.first + r / (2 * run) * run + r % run};
}

__device__ __forceinline__ void load_fragments(u32 (&to)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/// Byte of 16-byte piece `piece` of row `row` of a tile of 128-byte rows: pieces of eight rows lie in different banks.
__device__ __forceinline__ u32 tile_byte(u32 row, u32 piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

/// Rows x columns of a block, and of a warp in it.
template <u32 rows_, u32 columns_, u32 warp_rows_, u32 warp_columns_, u32 stages_>
struct TileShape {
  static constexpr u32 kRows = rows_, kColumns = columns_, kWarpRows = warp_rows_, kWarpColumns = warp_columns_, kStages = stages_;
  static constexpr u32 kWarpsAcross = columns_ / warp_columns_;
  static constexpr u32 kThreads = rows_ / warp_rows_ * kWarpsAcross * kWarp;
  static constexpr u32 kStageBytes = (rows_ + columns_) * kTileDepth * 2;
};
using LargeShape = TileShape<kLargeTile.rows, kLargeTile.columns, 32, 32, kLargeTile.stages>;
using MiddleShape = TileShape<kMiddleTile.rows, kMiddleTile.columns, 32, 16, kMiddleTile.stages>;
using SmallShape = TileShape<kSmallTile.rows, kSmallTile.columns, 16, 16, kSmallTile.stages>;
using NarrowShape = TileShape<kNarrowTile.rows, kNarrowTile.columns, 16, 16, kNarrowTile.stages>;
static_assert(NarrowShape::kThreads == kNarrowTile.threads);
static_assert(LargeShape::kThreads == kLargeTile.threads && MiddleShape::kThreads == kMiddleTile.threads &&
              SmallShape::kThreads == kSmallTile.threads);

template <bool direct, bool gated, class Shape>
__device__ __forceinline__ void multiply_tile(const Call& call, std::byte* shared) {
  constexpr u32 kRows = Shape::kRows, kColumns = Shape::kColumns, kStages = Shape::kStages, kThreads = Shape::kThreads;
  constexpr u32 kFragsM = Shape::kWarpRows / 16, kFragsN = Shape::kWarpColumns / 8, kRun = Shape::kWarpColumns / 2;
  constexpr u32 kSegments = kTileDepth / 16;  // of a row and stage
  static_assert(kColumns * kSegments <= kThreads, "a thread unpacks at most one segment a stage");
  const LinearParams& p = call.p;
  const u32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const u32 warp_row = warp / Shape::kWarpsAcross * Shape::kWarpRows,
            warp_column = warp % Shape::kWarpsAcross * Shape::kWarpColumns;
  const u32 m0 = blockIdx.x * kRows, stride = static_cast<u32>(prepared_stride(p.k)), depth = stride / kTileDepth;
  const TileColumns columns = tile_columns<gated>(call, kColumns);
  const u32 n = matrix_of(call, columns.matrix).n;
  const u32 base = shared_address(shared);
  const auto* a = static_cast<const std::byte*>(call.x);

  const auto fetch = [&](u32 stage_k) METRALE_INLINE {
    const u32 at = base + stage_k % kStages * Shape::kStageBytes;
    for (u32 i = threadIdx.x; i < kRows * 8; i += kThreads) {
      const u32 row = i / 8, piece = i % 8;
      const bool valid = m0 + row < p.m;
      copy16_or_zero_async(at + tile_byte(row, piece),
                           a + (u64{valid ? m0 + row : 0} * stride + stage_k * kTileDepth) * 2 + piece * 16, valid);
    }
    if constexpr (direct) {
      for (u32 i = threadIdx.x; i < kColumns * 8; i += kThreads) {
        const u32 row = i / 8, piece = i % 8;
        const TileRow from = tile_row<gated, kRun>(columns, row);
        const u32 first = stage_k * kTileDepth + piece * 8;
        const bool valid = from.row < n && first < p.k;
        copy16_or_zero_async(at + kRows * 128 + tile_byte(row, piece),
                             pick(call.w, from.matrix) + (valid ? (u64{from.row} * p.k + first) * 2 : 0), valid);
      }
    }
  };
  // One segment of W for each of the first threads.
  const u32 my_row = threadIdx.x / kSegments, my_segment = threadIdx.x % kSegments;
  const TileRow mine = tile_row<gated, kRun>(columns, my_row);
  const bool have_row = my_row < kColumns && mine.row < n;
  const MatrixView view = view_of(call, mine.matrix);
  const u32 my_type = matrix_of(call, mine.matrix).dtype;
  const auto convert = [&](u32 stage_k) METRALE_INLINE {
    if (my_row >= kColumns) return;
    const u32 s = stage_k * kSegments + my_segment;
    float4 v[4] = {};
    if (have_row && 16 * s < p.k) read_segment(my_type, view, mine.row, s, v);
    std::byte* at = shared + stage_k % kStages * Shape::kStageBytes + kRows * 128;
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      *reinterpret_cast<uint4*>(at + tile_byte(my_row, 2 * my_segment + i)) = {
          bf16_pair(v[2 * i].x, v[2 * i].y), bf16_pair(v[2 * i].z, v[2 * i].w), bf16_pair(v[2 * i + 1].x, v[2 * i + 1].y),
          bf16_pair(v[2 * i + 1].z, v[2 * i + 1].w)};
    }
  };

  float sums[kFragsM][kFragsN][4] = {};
#pragma unroll 1
  for (u32 s = 0; s + 1 < kStages; ++s) {
    if (s < depth) {
      fetch(s);
      if constexpr (!direct) convert(s);
    }
    commit_copies();
  }
#pragma unroll 1
  for (u32 t = 0; t < depth; ++t) {
    wait_copies<kStages - 2>();
    __syncthreads();  // stage t is there for all, and all have left stage t - 1
    const u32 next = t + kStages - 1;
    if (next < depth) {
      fetch(next);
      if constexpr (!direct) convert(next);
    }
    commit_copies();
    const u32 at = base + t % kStages * Shape::kStageBytes;
#pragma unroll
    for (u32 kk = 0; kk < kTileDepth / 16; ++kk) {
      u32 fa[kFragsM][4];
#pragma unroll
      for (u32 i = 0; i < kFragsM; ++i) load_fragments(fa[i], at + tile_byte(warp_row + i * 16 + lane % 16, 2 * kk + lane / 16));
#pragma unroll
      for (u32 j = 0; j < kFragsN / 2; ++j) {
        u32 fb[4];  // columns 16j to 16j + 7 in the first two, the next eight in the others
        load_fragments(fb, at + kRows * 128 + tile_byte(warp_column + j * 16 + lane % 8 + lane / 16 * 8, 2 * kk + lane / 8 % 2));
#pragma unroll
        for (u32 i = 0; i < kFragsM; ++i) {
          multiply(sums[i][2 * j], fa[i], fb[0], fb[1]);
          multiply(sums[i][2 * j + 1], fa[i], fb[2], fb[3]);
        }
      }
    }
  }

  constexpr u32 kOut = gated ? kFragsN / 2 : kFragsN;
#pragma unroll
  for (u32 i = 0; i < kFragsM; ++i) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 row = m0 + warp_row + i * 16 + half * 8 + lane / 4;
      if (row >= p.m) continue;
#pragma unroll
      for (u32 j = 0; j < kOut; ++j) {
#pragma unroll
        for (u32 c = 0; c < 2; ++c) {
          const u32 column = columns.first + (gated ? warp_column / 2 : warp_column) + j * 8 + lane % 4 * 2 + c;
          if (column >= n) continue;
          if (gated) {
            write_gated(call, row, column, sums[i][j][2 * half + c], sums[i][j + (gated ? kOut : 0)][2 * half + c]);
          } else {
            write_linear(call, columns.matrix, row, column, sums[i][j][2 * half + c]);
          }
        }
      }
    }
  }
}

/// Everything in f32: 64 x 64 tiles, 16 columns of k at a time, 4 x 4 sums a thread.
template <bool gated>
__device__ __forceinline__ void multiply_tile_exact(const Call& call, std::byte* shared) {
  constexpr u32 kSide = 64, kDepth = 16, kPitch = kSide + 4;
  static_assert(kExactTile.rows == kSide && kExactTile.columns == kSide && kExactTile.threads == 256);
  static_assert(2 * kDepth * kPitch * 4 <= kExactTileBytes);
  auto* xs = reinterpret_cast<float*>(shared);  // [kDepth][kPitch]
  float* ws = xs + kDepth * kPitch;
  const LinearParams& p = call.p;
  const u32 m0 = blockIdx.x * kSide, stride = static_cast<u32>(prepared_stride(p.k));
  const TileColumns columns = tile_columns<gated>(call, kSide);
  const u32 n = matrix_of(call, columns.matrix).n;
  const u32 tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const auto put = [&](float* to, u32 row, u32 k0, const float4& v) METRALE_INLINE {
    to[k0 * kPitch + row] = v.x, to[(k0 + 1) * kPitch + row] = v.y, to[(k0 + 2) * kPitch + row] = v.z,
                     to[(k0 + 3) * kPitch + row] = v.w;
  };
  float sums[4][4] = {};
#pragma unroll 1
  for (u32 k0 = 0; k0 < p.k; k0 += kDepth) {
    const u32 row = threadIdx.x / 4, quad = threadIdx.x % 4;
    float4 v{0, 0, 0, 0};
    if (m0 + row < p.m)
      v = *reinterpret_cast<const float4*>(static_cast<const float*>(call.x) + u64{m0 + row} * stride + k0 + 4 * quad);
    put(xs, row, 4 * quad, v);
    if (threadIdx.x < kSide) {
      const TileRow from = tile_row<gated, 2>(columns, threadIdx.x);
      float4 w[4] = {};
      if (from.row < n) {
        read_segment(matrix_of(call, from.matrix).dtype, view_of(call, from.matrix), from.row, k0 / kDepth, w);
      }
#pragma unroll
      for (u32 q = 0; q < 4; ++q) put(ws, threadIdx.x, 4 * q, w[q]);
    }
    __syncthreads();
#pragma unroll
    for (u32 e = 0; e < kDepth; ++e) {
      const float4 a = *reinterpret_cast<const float4*>(xs + e * kPitch + 4 * ty);
      const float4 b = *reinterpret_cast<const float4*>(ws + e * kPitch + 4 * tx);
      const float av[4] = {a.x, a.y, a.z, a.w}, bv[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) sums[i][j] = fmaf(av[i], bv[j], sums[i][j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    const u32 row = m0 + 4 * ty + i;
    if (row >= p.m) continue;
#pragma unroll
    for (u32 j = 0; j < (gated ? 2 : 4); ++j) {
      const u32 column = columns.first + (gated ? 2 : 4) * tx + j;
      if (column >= n) continue;
      if (gated) {
        write_gated(call, row, column, sums[i][j], sums[i][j + (gated ? 2 : 0)]);
      } else {
        write_linear(call, columns.matrix, row, column, sums[i][j]);
      }
    }
  }
}

template <bool direct, bool gated>
__device__ __forceinline__ void multiply_tile_of(const Call& call, std::byte* shared) {
  if (blockDim.x == kLargeTile.threads) {
    multiply_tile<direct, gated, LargeShape>(call, shared);
  } else if (call.p.m <= kSmallTile.rows) {
    multiply_tile<direct, gated, SmallShape>(call, shared);
  } else {
    multiply_tile<direct, gated, MiddleShape>(call, shared);
  }
}

/// As `tiles`, where all matrices are bf16 and aligned.
template <bool gated>
__device__ __forceinline__ void direct_tiles(const Call& call, std::byte* shared) {
  if (blockDim.x == kNarrowTile.threads) {
    multiply_tile<true, gated, NarrowShape>(call, shared);
  } else {
    multiply_tile_of<true, gated>(call, shared);
  }
}

/// linear, linear4 (gated = false) and swiglu on prepared x.
template <bool gated>
__device__ __forceinline__ void tiles(const Call& call, std::byte* shared) {
  const LinearParams& p = call.p;
  if (activation_class(static_cast<DType>(p.w[0].dtype), static_cast<Precision>(p.precision)) == ActivationClass::f32) {
    return multiply_tile_exact<gated>(call, shared);
  }
  const u32 width = blockDim.x == kLargeTile.threads ? kLargeTile.columns : kMiddleTile.columns;
  static_assert(kMiddleTile.columns == kSmallTile.columns);
  // bf16 goes as it is; other types, and rows that are not aligned, are converted on the way.
  const auto is_direct = [&](u32 i) METRALE_INLINE {
    return matrix_of(call, i).dtype == static_cast<u32>(DType::bf16) && is_chunked(DType::bf16, view_of(call, i));
  };
  const u32 matrix = tile_columns<gated>(call, width).matrix;
  if (is_direct(matrix) && (!gated || is_direct(1))) {
    multiply_tile_of<true, gated>(call, shared);
  } else {
    multiply_tile_of<false, gated>(call, shared);
  }
}

}  // namespace metrale::cuda::matmul
