// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of module "layers" share: numbers that travel between blocks, weights that are fetched ahead, and products of a
// warp on tensor cores.
//
// Exchange. A number that other blocks wait for is stored with one bit of itself, the last of its mantissa, as the phase: the
// parity of the layer it belongs to. Readers poll the numbers until every one has the phase they expect; there is no flag, fence or
// barrier besides. One buffer for each kind of number is enough: whoever overwrites it has, directly or through others, waited for
// numbers that each block computed after it had read the old ones:
//   x (the residual stream) is written after all of h was read, h after all of y, and y by each block of a cluster after all of the
//   cluster's blocks sent what they computed from x. Every MLP block reads x and y before it writes h, and h before it writes x.
// Mailboxes in shared memory that a cluster's blocks write, queries and sums of attention, follow the same order.
// The count of layers done so far, from which the phases of a launch are told, is read by every block before it writes anything and
// advanced once by a block that has read all of the last h.
#pragma once

#include <layers_device.cuh>

#include "layers_plan.h"

namespace metrale::cuda::layers {

/// Polls before a block gives up on its peers, which ends the context: several seconds.
inline constexpr u32 kMostPolls = 1U << 24;

// ---- numbers with their phase ----
__device__ inline bool have_phase(uint4 w, u32 phase) {
  return (((w.x ^ phase) | (w.y ^ phase) | (w.z ^ phase) | (w.w ^ phase)) & 1) == 0;
}
/// Without the phase, so that no result depends on it.
__device__ inline float4 as_floats(uint4 w) {
  return {__uint_as_float(w.x & ~1U), __uint_as_float(w.y & ~1U), __uint_as_float(w.z & ~1U), __uint_as_float(w.w & ~1U)};
}
/// Waits for count times four numbers, `stride` floats apart.
template <u32 count>
__device__ inline void wait_words(const float* p, u32 stride, u32 phase, float4 (&x)[count]) {
  uint4 w[count];
  u32 polls = 0;
  bool ready = false;
  do {
    ready = true;
#pragma unroll
    for (u32 i = 0; i < count; ++i) w[i] = load_words(p + i * stride);
#pragma unroll
    for (u32 i = 0; i < count; ++i) ready = ready && have_phase(w[i], phase);
    if (++polls == kMostPolls) __trap();
  } while (!ready);
#pragma unroll
  for (u32 i = 0; i < count; ++i) x[i] = as_floats(w[i]);
}
__device__ inline void publish(float* p, float x, u32 phase) { store_word(p, (__float_as_uint(x) & ~1U) | phase); }

// ---- weights ----

/// Slots of shared memory that the last warp fills in turn and the matrix warps empty. `full` and `empty`: a barrier for each slot.
struct Ring {
  u32 slots;  ///< Address of the first.
  u32 slot_bytes;
  u32 depth;
  u32 full;
  u32 empty;

  __device__ u32 slot(u32 i) const { return slots + i % depth * slot_bytes; }
  __device__ u32 filled(u32 i) const { return full + i % depth * 8; }
  /// By one warp: waits until slot `i` is free, and says how many bytes come.
  __device__ void open(u32 i, u32 bytes) const {
    if (i >= depth) wait_here(empty + i % depth * 8, (i / depth - 1) & 1);
    if (lane_id() == 0) decoder::expect_bytes(filled(i), bytes);
    __syncwarp();
  }
  __device__ u32 wait(u32 i) const {
    wait_here(filled(i), i / depth & 1);
    return slot(i);
  }
  __device__ void leave(u32 i) const {
    __syncwarp();
    if (lane_id() == 0) arrive_at(empty + i % depth * 8);
  }
  __device__ void init() const {
    for (u32 i = 0; i < depth; ++i) {
      init_barrier_of(full + 8 * i, 1);
      init_barrier_of(empty + 8 * i, kMatrixWarps);
    }
  }
};

// ---- products ----
// A step multiplies 16 rows of W by 16 numbers. Lane 4 r + t of a warp has of row r of an 8-row half the elements 4 t to 4 t + 3:
// as the products may take columns in any order, that is what one load of 8 bytes gives. Of x a lane has four numbers, lane
// 8 s + t those of step s as bf16, lane 8 s + 4 + t what rounding took from them: columns 2 s and 2 s + 1 of the other factor. So
// of the product for step s only those columns count; they come to lanes 4 r + s.
/// The lane's side of x: rounded, or what that left.
__device__ inline uint2 factor(float4 x) {
  const uint2 rounded = decoder::pack_quad(x);
  return (lane_id() & 4) == 0 ? rounded : decoder::pack_rest(x, rounded);
}

/// Rows of a warp's steps: halves of 8 rows, the first at `address` for this warp's first column.
template <u32 halves, u32 steps>
struct Rows {
  static constexpr u32 kTiles = (halves + 1) / 2;
  uint2 a[2 * kTiles][steps];

  __device__ void load(u32 address, u32 row_bytes) {
    const u32 at = address + lane_id() / 4 * row_bytes + lane_id() % 4 * 8;
#pragma unroll
    for (u32 h = 0; h < 2 * kTiles; ++h) {
#pragma unroll
      for (u32 s = 0; s < steps; ++s) a[h][s] = h < halves ? load_half_row(at + 8 * h * row_bytes + 32 * s) : uint2{0, 0};
    }
  }
  /// v[h]: this lane's part of the sum of row 8 h + lane / 4.
  __device__ void multiply(uint2 x, float (&v)[halves]) const {
    const u32 t = lane_id() % 4;
#pragma unroll
    for (u32 tile = 0; tile < kTiles; ++tile) {
      float d[steps][4] = {};
#pragma unroll
      for (u32 s = 0; s < steps; ++s) {
        const uint2 low = a[2 * tile][s];
        const uint2 high = a[2 * tile + 1][s];
        decoder::multiply_add(d[s], low.x, high.x, low.y, high.y, x.x, x.y);
      }
      float sums[2] = {0, 0};
#pragma unroll
      for (u32 s = 0; s < steps; ++s) {
        if (t == s) sums[0] = d[s][0] + d[s][1], sums[1] = d[s][2] + d[s][3];
      }
      v[2 * tile] = sums[0];
      if (2 * tile + 1 < halves) v[2 * tile + 1] = sums[1];
    }
  }
};

/// Adds each v over the four lanes of a row and stores the sums to `to` [8 * halves].
template <u32 halves>
__device__ inline void store_sums(const float (&v)[halves], float* to) {
  const u32 t = lane_id() % 4;
  const u32 row = lane_id() / 4;
#pragma unroll
  for (u32 i = 0; i + 4 <= halves; i += 4) {
    const bool upper = (t & 2) != 0;
    const bool odd = (t & 1) != 0;
    float a = upper ? v[i + 2] : v[i];
    float b = upper ? v[i + 3] : v[i + 1];
    a += __shfl_xor_sync(kAllLanes, upper ? v[i] : v[i + 2], 2);
    b += __shfl_xor_sync(kAllLanes, upper ? v[i + 1] : v[i + 3], 2);
    const float sum = (odd ? b : a) + __shfl_xor_sync(kAllLanes, odd ? a : b, 1);
    to[8 * (i + t) + row] = sum;
  }
#pragma unroll
  for (u32 i = halves / 4 * 4; i < halves; ++i) {
    float sum = v[i];
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    if (t == 0) to[8 * i + row] = sum;
  }
}

/// The sum of squares over the lanes that have x itself, of `steps` steps.
template <u32 steps>
__device__ inline float sum_of_squares(float4 x) {
  float sum = lane_id() / 8 < steps ? x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w : 0.0F;
  for (const u32 w : {1U, 2U, 8U, 16U}) sum += __shfl_xor_sync(kAllLanes, sum, w);
  return sum;
}
__device__ inline float4 times(float4 x, float4 w) { return {x.x * w.x, x.y * w.y, x.z * w.z, x.w * w.w}; }
__device__ inline float4 plus(float4 x, float4 y) { return {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w}; }

/// Twelve numbers in a tree, which takes a third of the time of a chain.
static_assert(kMatrixWarps == 12);
__device__ inline float sum_of(const float (&x)[kMatrixWarps]) {
  return (((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))) + ((x[8] + x[9]) + (x[10] + x[11]));
}
template <u32 width>
__device__ inline float sum_of_warps(const float (&parts)[kMatrixWarps][width], u32 i) {
  float x[kMatrixWarps];
#pragma unroll
  for (u32 w = 0; w < kMatrixWarps; ++w) x[w] = parts[w][i];
  return sum_of(x);
}
__device__ inline float norm_factor(const float (&squares)[kMatrixWarps], u32 width, float eps) {
  float x[kMatrixWarps];
#pragma unroll
  for (u32 w = 0; w < kMatrixWarps; w += 4) {
    const float4 four = *reinterpret_cast<const float4*>(&squares[w]);
    x[w] = four.x, x[w + 1] = four.y, x[w + 2] = four.z, x[w + 3] = four.w;
  }
  return rsqrtf(sum_of(x) * (1.0F / static_cast<float>(width)) + eps);
}

/// The buffers of a launch.
struct LayersBuffers {
  const LayerAddresses* table;
  const std::uint16_t* embedding;
  const std::int32_t* ids;
  const float* inverse_frequencies;
  const StepHeader* step;
  const std::int32_t* block_table;
  float* exchange;
  float* hidden;
};

/// What every block of a launch knows.
struct Step {
  const LayerAddresses* layers;
  const LayersParams* params;
  const std::uint16_t* embedded;  ///< The token's row of the embedding.
  const float* frequencies;
  const std::int32_t* block_table;
  float* exchange;
  float* hidden;
  u32 position;
  u32 done;  ///< Layers before this launch.

  __device__ u32 phase(u32 layer) const { return (done + layer + 1) & 1; }
  /// Four numbers of x as it enters a layer.
  template <class S>
  __device__ float4 wait_x(u32 layer, u32 quad) const {
    if (layer == 0) {
      const auto w = reinterpret_cast<const uint2*>(embedded)[quad];
      return {decoder::low_bf16(w.x), decoder::high_bf16(w.x), decoder::low_bf16(w.y), decoder::high_bf16(w.y)};
    }
    float4 x[1];
    wait_words<1>(exchange + S::kExchangeX + 4 * quad, 0, phase(layer - 1), x);
    return x[0];
  }
};
template <class T>
__device__ inline const T* address(u64 a) {
  return reinterpret_cast<const T*>(a);
}

}  // namespace metrale::cuda::layers
