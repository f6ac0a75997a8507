// SPDX-License-Identifier: Apache-2.0
//
// One row of x and so few rows of W that what counts is the time from the predecessor's end to the last sum. As `one_row`, with
// one chunk for each thread of a team, so that its elements of x stay in registers; the squares are summed beside the products, by
// each team for itself.
#pragma once

#include "matmul_one.cuh"

namespace metrale::cuda::matmul {

/// linear, linear4 and swiglu of one row of x. As `one_row`; k is one chunk for each thread of a team at most.
template <DType type, OneKind kind, u32 rows>
__device__ __forceinline__ void one_few(const Call& call, std::byte* shared) {
  using C = OneChunk<type>;
  constexpr bool kGated = kind == OneKind::gated, kSeveral = kind == OneKind::several;
  constexpr u32 kMatrices = kGated ? 2 : 1, kGroup = rows / kMatrices, kPitch = kOneSums * kMatrices;
  constexpr u32 kGranule = C::kPacked ? kGroup : 1;
  const LinearParams& p = call.p;
  const u32 team = blockDim.x, warps = team / kWarp, threads = team * blockDim.y, thread = threadIdx.y * team + threadIdx.x;
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
  const u32 chunks = p.k / C::kElements, place = threadIdx.x < chunks ? threadIdx.x : chunks - 1;
  u32 at = block.first + mine.first;  // granules over all matrices
  const u32 end = at + mine.count;
  typename C::Source source[kMatrices];
  const auto seek = [&] METRALE_INLINE {  // to granule `at`; the rows of the group
    if (at >= end) return 0U;
    u32 granule = at;
    const u32 matrix = find_matrix<kGranule, kind>(call, granule), row = granule * kGranule, n = matrix_of(call, matrix).n;
    u32 room = n - row;
    if (!C::kPacked) room = end - at < room ? end - at : room;
#pragma unroll
    for (u32 i = 0; i < kMatrices; ++i) source[i].seek(kGated ? call.w[i] : pick(call.w, matrix), n, p.k, row);
    return room < kGroup ? room : kGroup;
  };
  u32 count = seek();
  typename C::Raw w[rows];
#pragma unroll
  for (u32 r = 0; r < rows; ++r) {
    w[r] = {};
    C::load(w[r], source[r % kMatrices], r / kMatrices, place, r / kMatrices < count);
  }
  const u32 quads = p.k / 4, slots = one_slots(team * C::kQuads);
  auto* xs = reinterpret_cast<float4*>(shared);
  float4* norms = xs + slots + thread;  // this thread's own, a quad every `threads`
  auto* sums = reinterpret_cast<float*>(xs + slots + C::kQuads * threads);
  float* squares = sums + threads / kWarp * (2 * kPitch) + threadIdx.y * warps;
  sums += threadIdx.y * warps * (2 * kPitch);
  if (call.norm) {
    float4 g[C::kQuads];
#pragma unroll
    for (u32 q = 0; q < C::kQuads; ++q) g[q] = norm_quad(call, C::position(place, q));
#pragma unroll
    for (u32 q = 0; q < C::kQuads; ++q) norms[q * threads] = g[q];
  }
#pragma unroll 1
  for (u32 f = quads + thread; f < slots; f += threads) xs[staged_quad(f)] = {0, 0, 0, 0};
  constexpr bool kEarly = kind == OneKind::single;
  float early = 0;
  const u32 early_row = at * kGranule + threadIdx.x;
  const bool writes = kEarly && threadIdx.x < mine.count * kGranule && early_row < p.w[0].n;
  if (writes && call.bias[0]) early = call.bias[0][early_row];

  // ---- x ----
  wait_for_predecessor();
#pragma unroll 1
  for (u32 f = thread; f < quads; f += threads)
    copy16_async(shared_address(xs + staged_quad(f)), static_cast<const float4*>(call.x) + f);
  commit_copies();
  if (writes && call.residual) early += __ldcg(call.residual + early_row);
  wait_copies<0>();
  __syncthreads();
  float4 x[C::kQuads];
#pragma unroll
  for (u32 q = 0; q < C::kQuads; ++q) x[q] = xs[staged_quad(C::position(threadIdx.x, q))];
  float square = 0;
  if (call.norm) {
#pragma unroll
    for (u32 q = 0; q < C::kQuads; ++q) {
      const float4 g = norms[q * threads];
      square = dot4(x[q], x[q], square);
      x[q] = {x[q].x * g.x, x[q].y * g.y, x[q].z * g.z, x[q].w * g.w};
    }
  }
  const typename C::Sums of_x = C::sums(x);

  // ---- the rows ----
  u32 slot = 0;  // rows whose sums wait
  bool first_sums = true, flip = false;
#pragma unroll 1
  while (count != 0) {
    const u32 current = count;
    at += C::kPacked ? 1 : count;
    count = seek();
    float acc[rows];
#pragma unroll
    for (u32 r = 0; r < rows; ++r) {
      acc[r] = C::dot(w[r], threadIdx.x, x, of_x, 0.0F);
      C::load(w[r], source[r % kMatrices], r / kMatrices, place, r / kMatrices < count);
    }
    const float sum = warp_sums(acc, lane);
    constexpr u32 kSpread = kWarp / rows;
    if (lane % kSpread == 0 && lane / kSpread / kMatrices < current) sums[warp * kPitch + slot * kMatrices + lane / kSpread] = sum;
    if (first_sums && slot == 0 && call.norm) {  // once
      square = warp_sum(square);
      if (lane == 0) squares[warp] = square;
    }
    slot += C::kPacked ? kGranule : current;
    if (slot + kGroup <= kOneSums && count != 0) continue;
    team_barrier();
    const u32 done = C::kPacked ? slot / kGranule : slot;
    one_finish<kGranule, kind>(call, at - done, slot, sums, squares, warps, kEarly && first_sums, early);
    const auto other = static_cast<int>(warps * kPitch);  // the two halves take turns
    sums += flip ? -other : other;
    flip = !flip, first_sums = false, slot = 0;
  }
}

}  // namespace metrale::cuda::matmul
