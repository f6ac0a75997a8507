// SPDX-License-Identifier: Apache-2.0
//
// Few rows of x: weights stream past them. A block takes an equal share of the output columns; its warps take equal shares of the
// steps of those (a step: kParts chunks of 16 bytes a lane), so a column may be summed by several warps, which meet in shared
// memory in a fixed order. Each lane copies its own chunks into its own slots of a ring, as far ahead as the ring is deep, and
// reads them back itself: no barrier in the loop. The first are on their way before the predecessor has ended. Chunks beyond a
// row's end are not copied: their slots hold what was there, zeros at first, and meet the zeros behind x.
#pragma once

#include "matmul_rows.cuh"
#include "matmul_stage.cuh"
#include "publish.cuh"

namespace metrale::cuda::matmul {

/// Steps of a column up to which a column is left to one warp.
inline constexpr u32 kWholeSteps = 2;

/// How the stream runs; `Tuned` is what the kernels use.
template <u32 ring_bytes, u32 ahead, u32 types = kAllTypes>
struct StreamTuning {
  static constexpr u32 kTypes = types;      ///< Those that it is compiled for.
  static constexpr u32 kRing = ring_bytes;  ///< Bytes of shared memory for each thread.
  static constexpr u32 kAhead = ahead;      ///< KiB a warp beyond the ring that go to the second-level cache at the start.
};
using Tuned = StreamTuning<kRingBytes, 32>;

/// A column that no warp had whole: which, whether this part is its first, and the sums.
struct Part {
  u32 unit, starts;
  float sums[2 * kFusedRows];
};
inline constexpr u32 kNoUnit = 0xFFFFFFFFU;
static_assert(2 * kMaxWarps * sizeof(Part) + kFusedRows * kMaxWarps * 4 <= kStreamScratch);

/// Where the parts of shared memory are.
struct StreamMemory {
  u32 ring;  ///< Of this warp, a shared address.
  float* squares;
  Part* parts;
  float4* rows;
};

/// Matrices first to last - 1 of a call, of one type and layout. A unit is an output column (for swiglu, of both matrices).
struct Pass {
  u32 first, last, type;
  bool chunked;
};

/// The steps that a warp takes of a pass: `begin` to `end - 1`, counted over all units of the pass.
struct Share {
  u32 steps;  ///< Of a unit.
  u32 begin, end;
};
/// The first unit of a block; that of the next block ends its share.
__device__ __forceinline__ u32 first_unit(u32 units, u32 block) { return static_cast<u32>(u64{units} * block / gridDim.x); }

template <u32 elements>  // of a step of a lane
__device__ __forceinline__ Share share_of(u32 units, u32 k) {
  Share s;
  s.steps = (k + elements * kWarp - 1) / (elements * kWarp);
  const u32 first = first_unit(units, blockIdx.x), last = first_unit(units, blockIdx.x + 1);
  const u32 warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp;
  const u32 quantum = s.steps <= kWholeSteps ? s.steps : 1;
  const u32 quanta = (last - first) * (s.steps / quantum);
  const u32 base = first * s.steps;
  s.begin = base + quanta * warp / warps * quantum;
  s.end = base + quanta * (warp + 1) / warps * quantum;
  return s;
}

template <bool gated>
__device__ __forceinline__ u32 units_of(const Call& call, const Pass& pass) {
  if (gated) return call.p.w[0].n;
  u32 n = 0;
  for (u32 i = pass.first; i < pass.last; ++i) n += matrix_of(call, i).n;
  return n;
}
/// Turns a unit of the pass into a matrix of the call and its row.
__device__ __forceinline__ u32 locate_unit(const Call& call, const Pass& pass, u32& row) {
  u32 i = pass.first;
  for (; i + 1 < pass.last; ++i) {
    const u32 n = matrix_of(call, i).n;
    if (row < n) break;
    row -= n;
  }
  return i;
}

/// Starts copies step by step from any step on.
template <DType type, bool gated, class Tuning>
struct Fetcher {
  using W = Weights<type>;
  static constexpr u32 kRows = gated ? 2 : 1;
  static constexpr u32 kStepChunks = W::kParts * kWarp;
  static constexpr u32 kSlot = W::kSlotBytes * kWarp * kRows;  ///< Bytes of a part of a step, of a warp.
  static constexpr u32 kDepth = Tuning::kRing / (W::kSlotBytes * kRows) / W::kParts * W::kParts;  ///< Slots.
  static_assert(kDepth >= 2);

  const Call& call;
  const Pass& pass;
  u32 steps, unit, step, left, slot = 0;
  RowSource source[kRows];

  __device__ __forceinline__ Fetcher(const Call& c, const Pass& in, const Share& share, u32 at)
      : call(c), pass(in), steps(share.steps), unit(at / share.steps), step(at % share.steps), left(share.end - at) {
    if (left > 0) find_row();
  }
  static __device__ __forceinline__ Share share(const Call& call, const Pass& pass) {
    return share_of<W::kElements * W::kParts>(units_of<gated>(call, pass), call.p.k);
  }
  __device__ __forceinline__ void find_row() {
    if (gated) {
      source[0] = W::row(view_of(call, 0), unit);
      source[kRows - 1] = W::row(view_of(call, 1), unit);
    } else {
      u32 row = unit;
      const u32 i = locate_unit(call, pass, row);
      source[0] = W::row(view_of(call, i), row);
    }
  }
  /// A part of the next step into slot `slot + part`. Nothing is left: an empty group, so that groups and slots stay in step.
  __device__ __forceinline__ void fetch(u32 ring, u32 lane, u32 part) {
    const u32 chunk = step * kStepChunks + lane;
    if (left > 0 && (chunk + part * kWarp) * W::kElements < call.p.k) {
#pragma unroll
      for (u32 r = 0; r < kRows; ++r)
        W::fetch(ring + (slot + part) * kSlot + r * W::kSlotBytes * kWarp, lane, source[r], chunk, part);
    }
    commit_copies();
  }
  /// On to the next step, after all parts of one.
  __device__ __forceinline__ void advance() {
    slot = slot + W::kParts == kDepth ? 0 : slot + W::kParts;
    if (left == 0) return;
    --left;
    if (++step == steps) {
      step = 0, ++unit;
      if (left > 0) find_row();
    }
  }
  /// Calls steps from here on into the second-level cache, a cache line a lane.
  __device__ __forceinline__ void prefetch(u32 lane) {
    constexpr u32 kSteps = 8 / W::kParts;  // that a warp calls at once
    u32 budget = Tuning::kAhead * 2 / W::kParts / kRows;
    budget = left < budget ? left : budget;
#pragma unroll 1
    while (budget > 0) {
      u32 run = steps - step < budget ? steps - step : budget;
      run = run > kSteps ? kSteps : run;
      const u32 chunk = step * kStepChunks + lane * 8;
      if (lane * 8 < run * kStepChunks && chunk * W::kElements < call.p.k) {
#pragma unroll
        for (u32 r = 0; r < kRows; ++r) prefetch_line(source[r].quants + u64{chunk} * 16);
      }
      budget -= run, step += run;
      if (step == steps) {
        step = 0, ++unit;
        if (budget > 0) find_row();
      }
    }
  }
};

/// Starts the first steps of a pass: to be called once before `stream_rows`.
template <DType type, bool gated, class Tuning>
__device__ __forceinline__ void start_stream(const Call& call, const Pass& pass, const StreamMemory& memory, bool ahead) {
  using F = Fetcher<type, gated, Tuning>;
  const u32 lane = threadIdx.x % kWarp;
  for (u32 i = lane; i < Tuning::kRing * kWarp / 16; i += kWarp) clear_shared16(memory.ring + i * 16);
  __syncwarp();
  const Share share = F::share(call, pass);
  F fetcher(call, pass, share, share.begin);
#pragma unroll 1
  for (u32 d = 0; d < F::kDepth; d += F::W::kParts) {
#pragma unroll
    for (u32 part = 0; part < F::W::kParts; ++part) fetcher.fetch(memory.ring, lane, part);
    fetcher.advance();
  }
  if (ahead && Tuning::kAhead > 0) fetcher.prefetch(lane);
}

/// A finished unit of one row of x.
template <bool gated>
__device__ __forceinline__ void write_unit(const Call& call, const Pass& pass, u32 unit, u32 m, float factor,
                                           const float (&sums)[gated ? 2 : 1]) {
  if (gated) {
    write_gated(call, m, unit, sums[0] * factor, sums[gated ? 1 : 0] * factor);
  } else {
    u32 row = unit;
    const u32 i = locate_unit(call, pass, row);
    write_linear(call, i, m, row, sums[0] * factor);
  }
}

/// The products of a pass with `count` <= rows staged rows of x, the first of them row m0.
template <DType type, bool gated, u32 rows, class Tuning>
__device__ __forceinline__ void stream_rows(const Call& call, const Pass& pass, const StreamMemory& memory, u32 m0, u32 count) {
  using F = Fetcher<type, gated, Tuning>;
  using W = typename F::W;
  constexpr u32 kRows = F::kRows;
  const u32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, quads = static_cast<u32>(staged_stride(call.p.k) / 4);
  const Share share = F::share(call, pass);
  constexpr u32 kLead = F::kDepth / W::kParts;
  F fetcher(call, pass, share, share.end - share.begin > kLead ? share.begin + kLead : share.end);
  const float factor = lane < count ? row_factor(call, memory.squares, lane) : 1.0F;

  u32 parts = 0;
  u32 unit = share.begin / share.steps, step = share.begin % share.steps, left = share.end - share.begin;
#pragma unroll 1
  while (left > 0) {
    const u32 from = step;
    const u32 to = left < share.steps - step ? step + left : share.steps;
    left -= to - from;
    float sums[rows][kRows] = {};
    u32 index[kRows] = {};
    if (block_elements(type) > 1) {  // dense types need no index; both rows of a gated unit have the same
      u32 row = unit;
      const MatrixView view = view_of(call, gated ? 0 : locate_unit(call, pass, row));
      for (u32 r = 0; r < kRows; ++r) index[r] = W::row(view, row).index;
    }
#pragma unroll 1
    for (; step < to; ++step) {
      const u32 chunk = step * F::kStepChunks + lane;
      const float4* x = memory.rows + step * (F::kStepChunks * W::kQuads);
#pragma unroll
      for (u32 part = 0; part < W::kParts; ++part) {
        wait_copies<F::kDepth - 1>();
        const u32 at = memory.ring + (fetcher.slot + part) * F::kSlot;
        typename W::Chunk chunks[kRows];
#pragma unroll
        for (u32 r = 0; r < kRows; ++r) chunks[r] = W::read(at + r * W::kSlotBytes * kWarp, lane, index[r], chunk);
        const auto quad = [&]<u32 q>() METRALE_INLINE {
          float4 weights[kRows];
#pragma unroll
          for (u32 r = 0; r < kRows; ++r) weights[r] = W::template quad<q>(chunks[r]);
          // Runs of 64 quads keep their place, and so do steps; parts do where they are whole runs.
          constexpr bool whole = kWarp * W::kQuads % 64 == 0;
          const u32 place = whole ? staged_quad(W::position(lane, q)) + part * (kWarp * W::kQuads)
                                  : staged_quad(W::position(lane + part * kWarp, q));
#pragma unroll
          for (u32 m = 0; m < rows; ++m) {
            const float4 v = x[(rows == 1 ? 0 : m < count ? m : 0) * quads + place];
#pragma unroll
            for (u32 r = 0; r < kRows; ++r) {
              float& sum = sums[m][r];
              sum = fmaf(v.x, weights[r].x, fmaf(v.y, weights[r].y, fmaf(v.z, weights[r].z, fmaf(v.w, weights[r].w, sum))));
            }
          }
        };
        const auto all = [&]<u32... q>(std::integer_sequence<u32, q...>) METRALE_INLINE { (quad.template operator()<q>(), ...); };
        all(std::make_integer_sequence<u32, W::kQuads>());
        fetcher.fetch(memory.ring, lane, part);  // into the slot that was just read
      }
      fetcher.advance();
    }
#pragma unroll
    for (u32 m = 0; m < rows; ++m) {
#pragma unroll
      for (u32 r = 0; r < kRows; ++r) sums[m][r] = warp_sum(sums[m][r]);
    }
    if (from == 0 && to == share.steps) {
      float mine[kRows];
#pragma unroll
      for (u32 m = 0; m < rows; ++m) {
#pragma unroll
        for (u32 r = 0; r < kRows; ++r) mine[r] = m == 0 || lane == m ? sums[m][r] : mine[r];
      }
      if (lane < count) write_unit<gated>(call, pass, unit, m0 + lane, factor, mine);
    } else if (lane == 0) {
      Part& part = memory.parts[2 * warp + parts++];
      part.unit = unit, part.starts = from == 0;
#pragma unroll
      for (u32 m = 0; m < rows; ++m) {
#pragma unroll
        for (u32 r = 0; r < kRows; ++r) part.sums[m * kRows + r] = sums[m][r];
      }
    }
    step = 0, ++unit;
  }
  if (share.steps <= kWholeSteps) return;  // every unit was whole, in every warp
  if (lane == 0) {
    for (; parts < 2; ++parts) memory.parts[2 * warp + parts].unit = kNoUnit;
  }
  __syncthreads();
  const u32 all_parts = 2 * (blockDim.x / kWarp);
  for (u32 t = threadIdx.x; t < all_parts * rows; t += blockDim.x) {
    const u32 m = t % rows;
    u32 part = t / rows;
    const u32 mine = memory.parts[part].unit;
    if (mine == kNoUnit || !memory.parts[part].starts || m >= count) continue;
    float sums[kRows] = {};
    for (; part < all_parts; ++part) {
      const Part& next = memory.parts[part];
      if (next.unit == kNoUnit) continue;
      if (next.unit != mine) break;
#pragma unroll
      for (u32 r = 0; r < kRows; ++r) sums[r] += next.sums[m * kRows + r];
    }
    write_unit<gated>(call, pass, mine, m0 + m, row_factor(call, memory.squares, m), sums);
  }
}

/// The products of a pass whose rows are in no chunks, or with x where it was: a warp a unit, element by element.
template <bool gated>
__device__ __forceinline__ void walk_rows(const Call& call, const Pass& pass, const float* squares, u32 m0, u32 count) {
  const LinearParams& p = call.p;
  const u32 lane = threadIdx.x % kWarp, units = units_of<gated>(call, pass);
  const u32 last = first_unit(units, blockIdx.x + 1);
  for (u32 unit = first_unit(units, blockIdx.x) + threadIdx.x / kWarp; unit < last; unit += blockDim.x / kWarp) {
    u32 row = unit;
    const u32 first = gated ? 0 : locate_unit(call, pass, row);
    for (u32 m = 0; m < count; ++m) {
      const float* x = static_cast<const float*>(call.x) + u64{m0 + m} * p.ld_x;
      float sums[gated ? 2 : 1] = {};
      for (u32 s = lane; 16 * s < p.k; s += kWarp) {
#pragma unroll
        for (u32 r = 0; r < (gated ? 2 : 1); ++r) {
          float4 w[4];
          read_segment(matrix_of(call, first + r).dtype, view_of(call, first + r), row, s, w);
#pragma unroll
          for (u32 q = 0; q < 4; ++q) {
            const u32 f = 4 * s + q;
            if (4 * f >= p.k) break;
            float4 v = load_quad(x, f, p.k);
            if (call.norm) {
              const auto g = [&](u32 e)
                                 METRALE_INLINE { return e < p.k ? norm_weight(call.norm, p.norm_dtype, p.norm_add, e) : 0.0F; };
              v = {v.x * g(4 * f), v.y * g(4 * f + 1), v.z * g(4 * f + 2), v.w * g(4 * f + 3)};
            }
            sums[r] += v.x * w[q].x + v.y * w[q].y + v.z * w[q].z + v.w * w[q].w;
          }
        }
      }
      for (float& sum : sums) sum = warp_sum(sum);
      if (lane == 0) write_unit<gated>(call, pass, unit, m0 + m, row_factor(call, squares, m), sums);
    }
  }
}

/// linear, linear4 (gated = false) and swiglu on unprepared x.
template <bool gated, class Tuning = Tuned>
__device__ __forceinline__ void stream(const Call& call, std::byte* shared) {
  const LinearParams& p = call.p;
  const u32 warp = threadIdx.x / kWarp, ring = blockDim.x * Tuning::kRing;
  StreamMemory memory;
  memory.ring = shared_address(shared) + warp * kWarp * Tuning::kRing;
  memory.parts = reinterpret_cast<Part*>(shared + ring);
  memory.squares = reinterpret_cast<float*>(memory.parts + 2 * kMaxWarps);
  memory.rows = reinterpret_cast<float4*>(shared + ring + kStreamScratch);
  u32 granted;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(granted));
  const u32 fit = static_cast<u32>((granted - ring - kStreamScratch) / (staged_stride(p.k) * 4));
  const u32 group = fit == 0 ? kFusedRows : fit;

  bool waited = false;
#pragma unroll 1
  for (u32 m0 = 0; m0 < p.m; m0 += group) {
    const u32 count = p.m - m0 < group ? p.m - m0 : group;
    bool staged = false;
    for (Pass pass{0, 0, 0, false}; pass.first < call.matrices; pass.first = pass.last) {
      pass.type = matrix_of(call, pass.first).dtype;
      pass.chunked = fit > 0 && is_chunked(static_cast<DType>(pass.type), view_of(call, pass.first));
      pass.last = pass.first + 1;
      for (; pass.last < call.matrices; ++pass.last) {
        const u32 type = matrix_of(call, pass.last).dtype;
        const bool chunked = fit > 0 && is_chunked(static_cast<DType>(type), view_of(call, pass.last));
        if (gated && (type != pass.type || chunked != pass.chunked)) {
          // Gate and up of different types take the walk, which looks at each.
          pass.chunked = false;
        } else if (!gated && (type != pass.type || chunked != pass.chunked)) {
          break;
        }
      }
      if (pass.chunked) {
        with_type<Tuning::kTypes>(
            pass.type, [&]<DType type>() METRALE_INLINE { start_stream<type, gated, Tuning>(call, pass, memory, !waited); });
      }
      if (!staged) {
        if (call.norm && fit > 0) stage_norm(call, memory.rows);
        if (!waited) {
          let_dependents_start();
          wait_for_predecessor();
          waited = true;
        }
        stage_rows(call, m0, count, fit > 0 ? memory.rows : nullptr, memory.squares);
        staged = true;
        __syncthreads();
      }
      if (pass.chunked) {
        with_type<Tuning::kTypes>(pass.type, [&]<DType type>() METRALE_INLINE {
          if (count == 1) {
            stream_rows<type, gated, 1, Tuning>(call, pass, memory, m0, count);
          } else {
            stream_rows<type, gated, kFusedRows, Tuning>(call, pass, memory, m0, count);
          }
        });
      } else {
        walk_rows<gated>(call, pass, memory.squares, m0, count);
      }
      if (pass.last < call.matrices || m0 + group < p.m) __syncthreads();  // before x or parts are written again
    }
  }
}

}  // namespace metrale::cuda::matmul
