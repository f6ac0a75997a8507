// SPDX-License-Identifier: Apache-2.0
//
// An MLP block of module "layers": kGateRows rows of gate and up, then kDownRows of down, of every layer.
#pragma once

#include "layers_common.cuh"

namespace metrale::cuda::layers {

template <class S>
struct MlpShared {
  float gate_up[kMatrixWarps][2 * S::kGateRows];
  float down[kMatrixWarps][8];
  alignas(16) float squares[kMatrixWarps];
  alignas(16) float x[S::kHidden];  ///< With what attention added.
  u64 barriers[4 * S::kMlpDepth];
};

template <class S>
class Mlp {
 public:
  __device__ Mlp(const Step& step, u32 index, char* shared)
      : step_(step), index_(index), shared_(*reinterpret_cast<MlpShared<S>*>(shared + S::kRing)) {
    static_assert(sizeof(MlpShared<S>) <= S::kSmall);
    const u32 ring = shared_address(shared);
    const u32 barriers = shared_address(shared_.barriers);
    gate_up_ = {ring, S::kGateBytes, S::kMlpDepth, barriers, barriers + 8 * S::kMlpDepth};
    down_ = {ring + S::kMlpDepth * S::kGateBytes, S::kDownBytes, S::kMlpDepth, barriers + 16 * S::kMlpDepth,
             barriers + 24 * S::kMlpDepth};
  }
  /// By one thread, before the others start.
  __device__ void init() const {
    gate_up_.init();
    down_.init();
  }

  /// The warp that fetches weights.
  __device__ void fetch(u32 from, u32 to) const {
    const u32 lane = lane_id();
    for (u32 l = from; l < to; ++l) {
      const LayerAddresses& w = step_.layers[l];
      gate_up_.open(l, 2 * S::kGateRows * 2 * S::kHidden);
      for (u32 i = lane; i < 2 * S::kGateRows; i += 32) {
        const auto* matrix = address<std::uint16_t>(i < S::kGateRows ? w.gate : w.up);
        copy_bulk(gate_up_.slot(l) + i * S::kHiddenRow, matrix + (S::kGateRows * index_ + i % S::kGateRows) * S::kHidden,
                  2 * S::kHidden, gate_up_.filled(l));
      }
      down_.open(l, S::kDownRows * 2 * S::kFf);
      if (lane < S::kDownRows) {
        copy_bulk(down_.slot(l) + lane * S::kFfRow, address<std::uint16_t>(w.down) + (S::kDownRows * index_ + lane) * S::kFf,
                  2 * S::kFf, down_.filled(l));
      }
    }
  }

  /// A matrix warp.
  __device__ void multiply(u32 warp) const {
    const u32 lane = lane_id();
    const u32 t = lane % 4;
    const u32 group = lane / 8;
    const bool has_x = group < S::kHiddenSteps;
    const u32 quad = (warp * S::kHiddenSteps + (has_x ? group : 0)) * 4 + t;
    for (u32 l = 0; l < step_.params->num_layers; ++l) {
      {
        const float4 norm = load_early(address<float>(step_.layers[l].post_norm) + 4 * quad);
        Rows<2 * S::kGateRows / 8, S::kHiddenSteps> rows;
        rows.load(gate_up_.wait(l) + warp * S::kHiddenSteps * 32, S::kHiddenRow);
        gate_up_.leave(l);
        float4 x = step_.wait_x<S>(l, quad);
        float4 y[S::kKvHeads];
        wait_words<S::kKvHeads>(step_.exchange + S::kExchangeY + 4 * quad, S::kHidden, step_.phase(l), y);
#pragma unroll
        for (u32 i = 0; i < S::kKvHeads; ++i) x = plus(x, y[i]);
        float v[2 * S::kGateRows / 8];
        rows.multiply(factor(times(x, norm)), v);
        const float squares = sum_of_squares<S::kHiddenSteps>(x);
        if (has_x && (lane & 4) == 0) *reinterpret_cast<float4*>(&shared_.x[4 * quad]) = x;
        if (lane == 0) shared_.squares[warp] = squares;
        store_sums(v, shared_.gate_up[warp]);
        barrier_arrive(kGateUp, kBarrierThreads);
      }
      multiply_down(l, warp);
      barrier_arrive(kDown, kBarrierThreads);
    }
  }

  /// The warp that finishes sums.
  __device__ void finish() const {
    const u32 lane = lane_id();
    const u32 layers = step_.params->num_layers;
    for (u32 l = 0; l < layers; ++l) {
      barrier_wait(kGateUp, kBarrierThreads);
      const float sum = sum_of_warps(shared_.gate_up, lane) * norm_factor(shared_.squares, S::kHidden, step_.params->norm_eps);
      const float up = __shfl_down_sync(kAllLanes, sum, 16);
      if (lane < S::kGateRows) {
        publish(step_.exchange + S::kExchangeH + S::kGateRows * index_ + lane, __fdividef(sum, 1 + __expf(-sum)) * up,
                step_.phase(l));
      }
      barrier_wait(kDown, kBarrierThreads);
      if (lane < S::kDownRows) {
        const u32 row = S::kDownRows * index_ + lane;
        const float x = shared_.x[row] + sum_of_warps(shared_.down, lane);
        publish(step_.exchange + S::kExchangeX + row, x, step_.phase(l));
        if (l + 1 == layers) step_.hidden[row] = x;
      }
    }
    // All blocks have read the count: each contributed to the last h, which this one has read.
    if (index_ == 0 && lane == 0) reinterpret_cast<u32*>(step_.exchange)[S::kExchangeCount] = step_.done + layers;
  }

 private:
  static constexpr u32 kGateUp = 1, kDown = 2;
  static constexpr u32 kBarrierThreads = 32 * (kMatrixWarps + 1);

  /// Eight rows at most fill one half of a step's rows, so the other half takes the same rows for the next 16 columns.
  __device__ void multiply_down(u32 l, u32 warp) const {
    const u32 lane = lane_id();
    const u32 t = lane % 4;
    uint2 a[S::kFfLoads][4];
    const u32 row = min(lane / 4, S::kDownRows - 1);
    const u32 at = down_.wait(l) + row * S::kFfRow + warp * S::kFfLoads * 128 + 8 * t;
#pragma unroll
    for (u32 i = 0; i < S::kFfLoads; ++i) {
#pragma unroll
      for (u32 s = 0; s < 4; ++s) a[i][s] = load_half_row(at + 128 * i + 32 * s);
    }
    down_.leave(l);
    float4 h[S::kFfLoads];
    wait_words<S::kFfLoads>(step_.exchange + S::kExchangeH + 64 * S::kFfLoads * warp + 16 * (lane / 8) + 4 * t, 64, step_.phase(l),
                            h);
    float d[2][4] = {};
#pragma unroll
    for (u32 i = 0; i < S::kFfLoads; ++i) {
      const uint2 x = factor(h[i]);
#pragma unroll
      for (u32 j = 0; j < 2; ++j) {
        decoder::multiply_add(d[j], a[i][2 * j].x, a[i][2 * j + 1].x, a[i][2 * j].y, a[i][2 * j + 1].y, x.x, x.y);
      }
    }
    const float v[1] = {t == 0 ? d[0][0] + d[0][1] : t == 1 ? d[0][2] + d[0][3] : t == 2 ? d[1][0] + d[1][1] : d[1][2] + d[1][3]};
    store_sums(v, shared_.down[warp]);
  }

  const Step& step_;
  u32 index_;
  MlpShared<S>& shared_;
  Ring gate_up_;
  Ring down_;
};

}  // namespace metrale::cuda::layers
