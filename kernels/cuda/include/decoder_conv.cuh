// SPDX-License-Identifier: Apache-2.0
//
// Causal depthwise convolution and silu in place, a thread for each channel and run of tokens.
#pragma once

#include "decoder_common.cuh"

namespace metrale::cuda::decoder {

struct ConvCall {
  float* x;
  const float* weight;
  float* state;
  const StepHeader* step;
};

/// A convolution whose window fits in registers. The threads along a channel take runs of the tokens: what each needs of the run
/// before it is read before anything is overwritten.
template <int taps>
__device__ inline void conv_window(const ConvCall& c, const ConvParams& p) {
  constexpr int kKept = taps - 1;
  const u32 channel = blockIdx.x * kConvTile + threadIdx.x % kConvTile;
  const bool real = channel < p.channels;
  const u32 segments = blockDim.x / kConvTile;
  const u32 length = divide_up(p.m, segments);
  const u32 first = smaller(threadIdx.x / kConvTile * length, p.m);
  const u32 end = smaller(first + length, p.m);
  float* state = c.state + static_cast<u64>(static_cast<u32>(c.step->slot)) * kKept * p.channels + channel;
  float* x = c.x + channel;

  float weight[taps];
  float before[kKept];
  if (real) {
#pragma unroll
    for (int j = 0; j < taps; ++j) weight[j] = c.weight[static_cast<u64>(j) * p.channels + channel];
#pragma unroll
    for (int j = 0; j < kKept; ++j) before[j] = state[static_cast<u64>(j) * p.channels];
  }
  wait_for_predecessor();

  // Inputs in order: those kept, then x. A token's window starts at its own index.
  const auto input = [&](u32 at) {
    if (at >= kKept) return x[static_cast<u64>(at - kKept) * p.ld_x];
    float kept = before[0];
#pragma unroll
    for (int j = 1; j < kKept; ++j) kept = at == static_cast<u32>(j) ? before[j] : kept;
    return kept;
  };
  float window[kKept];
  float keep[kKept];
  const bool keeps = real && threadIdx.x < kConvTile;
  if (real && first < end) {
#pragma unroll
    for (int j = 0; j < kKept; ++j) window[j] = input(first + static_cast<u32>(j));
  }
  if (keeps) {
#pragma unroll
    for (int j = 0; j < kKept; ++j) keep[j] = input(p.m + static_cast<u32>(j));
  }
  if (segments > 1 || p.m > 1) __syncthreads();
  if (keeps) {
#pragma unroll
    for (int j = 0; j < kKept; ++j) state[static_cast<u64>(j) * p.channels] = keep[j];
  }
  if (!real) return;
  constexpr u32 kAhead = 8;
  for (u32 t = first; t < end; t += kAhead) {
    float next[kAhead];
#pragma unroll
    for (u32 i = 0; i < kAhead; ++i) {
      if (t + i < end) next[i] = x[static_cast<u64>(t + i) * p.ld_x];
    }
#pragma unroll
    for (u32 i = 0; i < kAhead; ++i) {
      if (t + i >= end) break;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kKept; ++j) sum += weight[j] * window[j];
      sum += weight[kKept] * next[i];
#pragma unroll
      for (int j = 0; j + 1 < kKept; ++j) window[j] = window[j + 1];
      window[kKept - 1] = next[i];
      x[static_cast<u64>(t + i) * p.ld_x] = silu(sum);
    }
  }
}

/// Any number of taps, one thread a channel: last token first, so that a token's inputs are still there when it is computed.
__device__ inline void conv_any(const ConvCall& c, const ConvParams& p, float* shared) {
  wait_for_predecessor();
  const u32 channel = blockIdx.x * kConvTile + threadIdx.x;
  if (threadIdx.x >= kConvTile || channel >= p.channels) return;
  const u32 kept = p.kernel - 1;
  float* before = shared + threadIdx.x;  // [kept, kConvTile]
  float* x = c.x + channel;
  // A kernel of one keeps nothing and may come without a state.
  float* state = kept == 0 ? nullptr : c.state + static_cast<u64>(static_cast<u32>(c.step->slot)) * kept * p.channels + channel;
  for (u32 j = 0; j < kept; ++j) before[j * kConvTile] = state[static_cast<u64>(j) * p.channels];
  const auto input = [&](u32 at) { return at < kept ? before[at * kConvTile] : x[static_cast<u64>(at - kept) * p.ld_x]; };
  for (u32 j = 0; j < kept; ++j) state[static_cast<u64>(j) * p.channels] = input(p.m + j);
  for (u32 t = p.m; t-- > 0;) {
    float sum = 0;
    for (u32 j = 0; j < p.kernel; ++j) sum += c.weight[static_cast<u64>(j) * p.channels + channel] * input(t + j);
    x[static_cast<u64>(t) * p.ld_x] = silu(sum);
  }
}

__device__ inline void conv_channels(const ConvCall& c, const ConvParams& p, float* shared) {
  switch (p.kernel) {
    case 2: return conv_window<2>(c, p);
    case 3: return conv_window<3>(c, p);
    case 4: return conv_window<4>(c, p);
    default: return conv_any(c, p, shared);
  }
}

}  // namespace metrale::cuda::decoder
