// SPDX-License-Identifier: Apache-2.0
//
// One row of x: weights go from memory straight into registers. A team of threads (blockDim.x of them, blockDim.y teams a block)
// shares its rows of W: each thread has the same chunks of 16 bytes of every row, and several rows on their way at a time, so that
// the elements of x which it holds in registers serve them all. What the threads of a team have summed meets in shared memory, in
// a fixed order. Most of the first rows are on their way before the predecessor has ended; after its end x comes first. The norm's
// factor and the residual are left to the very end.
#pragma once

#include "matmul_call.cuh"
#include "matmul_one_chunks.cuh"
#include "publish.cuh"

namespace metrale::cuda::matmul {

/// Which matrices a launch has.
enum class OneKind : std::uint8_t { single, several, gated };

__device__ __forceinline__ void prefetch_bulk(const std::byte* from, u32 bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
#endif
}

/// Sums v[i] over the warp; lane l gets that of v[l / (32 / count)].
template <u32 count, u32 bit = kWarp / 2>
__device__ __forceinline__ float warp_sums(const float (&v)[count], u32 lane) {
  if constexpr (count > 1) {
    const bool upper = (lane & bit) != 0;
    float halved[count / 2];
#pragma unroll
    for (u32 i = 0; i < count / 2; ++i) {
      const float mine = upper ? v[i + count / 2] : v[i], other = upper ? v[i] : v[i + count / 2];
      halved[i] = mine + __shfl_xor_sync(kAllLanes, other, bit);
    }
    return warp_sums<count / 2, bit / 2>(halved, lane);
  } else if constexpr (bit > 0) {
    const float both[1] = {v[0] + __shfl_xor_sync(kAllLanes, v[0], bit)};
    return warp_sums<1, bit / 2>(both, lane);
  } else {
    return v[0];
  }
}

__device__ __forceinline__ void team_barrier() {
  if (blockDim.x == kWarp) return __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
}

/// What share `i` of `shares` has of `count` things.
struct EqualShare {
  u32 first, count;
};
__device__ __forceinline__ EqualShare equal_share(u32 count, u32 i, u32 shares) {
  const u32 each = count / shares, rest = count - each * shares;
  return {each * i + (i < rest ? i : rest), each + (i < rest ? 1 : 0)};
}

/// What the norm multiplies quad `f` of x with.
__device__ __forceinline__ float4 norm_quad(const Call& call, u32 f) {
  float4 v;
  if (call.p.norm_dtype == static_cast<u32>(DType::f32)) {
    v = __ldg(static_cast<const float4*>(call.norm) + f);
  } else {
    const uint2 b = __ldg(static_cast<const uint2*>(call.norm) + f);
    v = {bf16_low(b.x), bf16_high(b.x), bf16_low(b.y), bf16_high(b.y)};
  }
  const float add = call.p.norm_add;
  return {v.x + add, v.y + add, v.z + add, v.w + add};
}

/// Granules of `rows` rows, of which a team takes whole ones; none reaches into another matrix.
template <u32 rows>
__device__ __forceinline__ u32 granules_of(u32 n) {
  return (n + rows - 1) / rows;
}
/// Turns a granule, counted over all matrices, into one of a matrix.
template <u32 rows, OneKind kind>
__device__ __forceinline__ u32 find_matrix(const Call& call, u32& granule) {
  u32 found = 0;
  if (kind == OneKind::several) {
#pragma unroll
    for (u32 i = 0; i + 1 < kMaxLinearMatrices; ++i) {
      const u32 count = granules_of<rows>(call.p.w[i].n);
      if (found != i || i + 1 >= call.matrices || granule < count) continue;
      granule -= count, ++found;
    }
  }
  return found;
}

/// Writes y for `count` rows from granule `first` on, whose sums by warp are in `sums`; those of the squares of x in `squares`.
/// `early`, where it is to be used, is what is added to the row that this thread writes first.
template <u32 rows, OneKind kind>
__device__ __forceinline__ void one_finish(const Call& call, u32 first, u32 count, const float* sums, const float* squares,
                                           u32 squares_count, bool use_early, float early) {
  constexpr u32 kMatrices = kind == OneKind::gated ? 2 : 1, kPitch = kOneSums * kMatrices;
  const u32 warps = blockDim.x / kWarp;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
    float v[kMatrices] = {};
#pragma unroll 4
    for (u32 w = 0; w < warps; ++w) {
#pragma unroll
      for (u32 r = 0; r < kMatrices; ++r) v[r] += sums[w * kPitch + i * kMatrices + r];
    }
    if (call.norm) {
      float square = 0;
#pragma unroll 4
      for (u32 w = 0; w < squares_count; ++w) square += squares[w];
      const float factor = rsqrtf(square / static_cast<float>(call.p.k) + call.p.norm_eps);
#pragma unroll
      for (float& each : v) each *= factor;
    }
    u32 granule = first + i / rows;
    const u32 matrix = find_matrix<rows, kind>(call, granule), row = granule * rows + i % rows;
    if (rows > 1 && row >= matrix_of(call, matrix).n) continue;
    if (kind == OneKind::gated) {
      write_gated(call, 0, row, v[0], v[kMatrices - 1]);
    } else if (use_early && i == threadIdx.x) {
      call.y[0][row] = v[0] + early;
    } else {
      write_linear(call, matrix, 0, row, v[0]);
    }
  }
}

/// linear, linear4 and swiglu of one row of x. All matrices are of `type`, quantised ones packed; W, x and norm are aligned to 16
/// bytes, and k is whole chunks. Each thread has `rows` rows on their way. `ahead`: bytes of a block that go to the second-level
/// cache at the start, beyond those in registers; dense types only.
template <DType type, OneKind kind, u32 rows, u32 ahead = 0>
__device__ __forceinline__ void one_row(const Call& call, std::byte* shared) {
  using C = OneChunk<type>;
  constexpr bool kGated = kind == OneKind::gated, kSeveral = kind == OneKind::several;
  constexpr u32 kMatrices = kGated ? 2 : 1, kGroup = rows / kMatrices, kPitch = kOneSums * kMatrices;
  constexpr u32 kGranule = C::kPacked ? kGroup : 1;  // a group is one granule, or up to kGroup of them
  static_assert(!C::kPacked || kGroupRows % kGroup == 0);
  const LinearParams& p = call.p;
  const u32 team = blockDim.x, threads = team * blockDim.y, thread = threadIdx.y * team + threadIdx.x;
  const u32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  let_dependents_start();

  // ---- before the predecessor's end: weights, norm ----
  u32 granules = granules_of<kGranule>(p.w[0].n);
  if (kSeveral) {
#pragma unroll
    for (u32 i = 1; i < kMaxLinearMatrices; ++i) granules += granules_of<kGranule>(p.w[i].n);
  }
  const EqualShare block = equal_share(granules, blockIdx.x, gridDim.x);
  const EqualShare mine = equal_share(block.count, threadIdx.y, blockDim.y);
  u32 granule = block.first + mine.first, left = mine.count;  // granules of the team
  u32 matrix = find_matrix<kGranule, kind>(call, granule);
  const u32 chunks = p.k / C::kElements, rounds = (chunks + team - 1) / team;
  const auto place = [&](u32 round) METRALE_INLINE {  // the thread's chunk; beyond the end another one's, which meets zeros
    const u32 chunk = threadIdx.x + round * team;
    return chunk < chunks ? chunk : chunks - 1;
  };
  typename C::Source source[kMatrices];
  u32 count = 0;  // rows of the group
  const auto seek = [&] METRALE_INLINE {
    const u32 row = granule * kGranule, n = matrix_of(call, matrix).n;
    u32 room = n - row;
    if (!C::kPacked) room = left < room ? left : room;
    count = left == 0 ? 0 : room < kGroup ? room : kGroup;
    if (count == 0) return;
#pragma unroll
    for (u32 i = 0; i < kMatrices; ++i) source[i].seek(kGated ? call.w[i] : pick(call.w, matrix), n, p.k, row);
  };
  seek();
  // Some rows are asked for after x: what the predecessor still writes and x itself need not queue behind those. Which ones is
  // known when this is compiled. A load that a condition may make the second one of its registers has to wait for the first.
  constexpr u32 kBefore = C::kPacked ? rows : rows * 5 / 8;
  typename C::Raw w[rows];
#pragma unroll
  for (u32 r = 0; r < rows; ++r) {
    w[r] = {};
    if (r < kBefore) C::load(w[r], source[r % kMatrices], r / kMatrices, place(0), r / kMatrices < count);
  }
  if constexpr (!C::kPacked && ahead != 0) {
    if (warp == 0 && count != 0) {
      const u32 room = matrix_of(call, matrix).n - granule, here = room < left ? room : left, skip = rounds == 1 ? kGroup : 0;
      const u32 stride = source[0].stride, most = ahead / blockDim.y / kMatrices & ~15U;
      u32 bytes = here > skip ? (here - skip) * stride : 0;
      bytes = bytes < most ? bytes : most;
      constexpr u32 kPiece = 8192;
      for (u32 from = lane * kPiece; from < bytes; from += kWarp * kPiece) {
        const u32 piece = bytes - from < kPiece ? bytes - from : kPiece;
#pragma unroll
        for (u32 i = 0; i < kMatrices; ++i) prefetch_bulk(source[i].at + skip * stride + from, piece);
      }
    }
  }
  const u32 quads = p.k / 4, slots = one_slots(rounds * team * C::kQuads);
  const bool norm_ahead = p.k <= kOneNormMost;
  auto* xs = reinterpret_cast<float4*>(shared);
  auto* sums = reinterpret_cast<float*>(xs + slots * (norm_ahead ? 2 : 1));
  float* squares = sums + threads / kWarp * (2 * kPitch);
  u32& end = reinterpret_cast<u32*>(squares + threads / kWarp)[threadIdx.y];
  sums += threadIdx.y * (team / kWarp) * (2 * kPitch);
  // Where a thread has few quads of x and the norm, these stay in its registers until they are multiplied.
  constexpr u32 kMine = C::kPacked ? 1 : 4;
  const bool in_registers = !C::kPacked && call.norm && quads <= kMine * threads;
  float4 norms[kMine];
  if (in_registers) {
#pragma unroll
    for (u32 i = 0; i < kMine; ++i) {
      const u32 f = thread + i * threads;
      norms[i] = norm_quad(call, f < quads ? f : 0);
    }
  } else if (call.norm && norm_ahead) {
#pragma unroll 1
    for (u32 f = thread; f < quads; f += threads) xs[slots + f] = norm_quad(call, f);
  }
#pragma unroll 1
  for (u32 f = quads + thread; f < slots; f += threads) xs[staged_quad(f)] = {0, 0, 0, 0};
  constexpr bool kEarly = kind == OneKind::single;
  float early = 0;
  const u32 early_row = granule * kGranule + threadIdx.x;
  const bool writes = kEarly && threadIdx.x < left * kGranule && early_row < p.w[0].n;
  if (writes && call.bias[0]) early = call.bias[0][early_row];
  if (threadIdx.x == 0) end = block.first + mine.first + mine.count;

  // ---- x: whole lines of it, since all blocks ask for the same at the same time ----
  wait_for_predecessor();
  const auto load_rest = [&] METRALE_INLINE {
    if constexpr (kBefore < rows) {
      if (count <= kBefore / kMatrices) return;  // this branch also keeps the compiler from moving x behind these rows
#pragma unroll
      for (u32 r = kBefore; r < rows; ++r) C::load(w[r], source[r % kMatrices], r / kMatrices, place(0), r / kMatrices < count);
    }
  };
  const auto put_square = [&](float sum) METRALE_INLINE {
    sum = warp_sum(sum);
    if (lane == 0) squares[thread / kWarp] = sum;
  };
  if (in_registers) {
    float4 v[kMine];
#pragma unroll
    for (u32 i = 0; i < kMine; ++i) {
      const u32 f = thread + i * threads;
      v[i] = {0, 0, 0, 0};
      if (f < quads) v[i] = __ldcg(static_cast<const float4*>(call.x) + f);
    }
    load_rest();
    float sum = 0;
#pragma unroll
    for (u32 i = 0; i < kMine; ++i) {
      const u32 f = thread + i * threads;
      const float4 x = v[i], g = norms[i];
      sum += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
      if (f < quads) xs[staged_quad(f)] = {x.x * g.x, x.y * g.y, x.z * g.z, x.w * g.w};
    }
    if (writes && call.residual) early += __ldcg(call.residual + early_row);
    put_square(sum);
  } else {
#pragma unroll 1
    for (u32 f = thread; f < quads; f += threads)
      copy16_async(shared_address(xs + staged_quad(f)), static_cast<const float4*>(call.x) + f);
    commit_copies();
    if (writes && call.residual) early += __ldcg(call.residual + early_row);
    load_rest();
    wait_copies<0>();
    if (call.norm) {
      float sum = 0;
#pragma unroll 1
      for (u32 f = thread; f < quads; f += threads) {
        float4& slot = xs[staged_quad(f)];
        const float4 v = slot, g = norm_ahead ? xs[slots + f] : norm_quad(call, f);
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        slot = {v.x * g.x, v.y * g.y, v.z * g.z, v.w * g.w};
      }
      put_square(sum);
    }
  }
  __syncthreads();

  // ---- the rows ----
  float acc[rows] = {};
  u32 round = 0, slot = 0;  // slot: rows whose sums wait
  bool first_sums = true, flip = false;
#pragma unroll 1
  while (count != 0) {
    const u32 current = count, chunk = threadIdx.x + round * team;
    float4 x[C::kQuads];
#pragma unroll
    for (u32 q = 0; q < C::kQuads; ++q) x[q] = xs[staged_quad(C::position(chunk, q))];
    const typename C::Sums of_x = C::sums(x);
    const bool last = ++round == rounds;
    if (last) {
      round = 0;
      const u32 done = C::kPacked ? 1 : count;
      granule += done, left -= done;
      if (kSeveral && left != 0) {
        while (granule >= granules_of<kGranule>(matrix_of(call, matrix).n))
          granule -= granules_of<kGranule>(matrix_of(call, matrix).n), ++matrix;
      }
      seek();
    }
    const u32 next = place(round);
#pragma unroll
    for (u32 r = 0; r < rows; ++r) {
      acc[r] = C::dot(w[r], chunk, x, of_x, acc[r]);
      C::load(w[r], source[r % kMatrices], r / kMatrices, next, r / kMatrices < count);
    }
    if (!last) continue;
    const float sum = warp_sums(acc, lane);
    constexpr u32 kSpread = kWarp / rows;
    if (lane % kSpread == 0 && lane / kSpread / kMatrices < current) sums[warp * kPitch + slot * kMatrices + lane / kSpread] = sum;
#pragma unroll
    for (float& each : acc) each = 0;
    slot += C::kPacked ? kGranule : current;
    if (slot + kGroup <= kOneSums && count != 0) continue;
    team_barrier();
    one_finish<kGranule, kind>(call, end - left - slot / kGranule, slot, sums, squares, threads / kWarp, kEarly && first_sums,
                               early);
    const auto other = static_cast<int>(team / kWarp * kPitch);  // the two halves take turns
    sums += flip ? -other : other;
    flip = !flip, first_sums = false, slot = 0;
  }
}

}  // namespace metrale::cuda::matmul
