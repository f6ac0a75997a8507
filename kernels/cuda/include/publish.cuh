// SPDX-License-Identifier: Apache-2.0
//
// What a kernel tells its host beside its code: globals named after the entry, read once when the module is loaded. And the two
// halves of programmatic dependent launch.
#pragma once

/// The width of an output-column tile of `entry`.
#define METRALE_PUBLISH_N_TILE(entry, tile) extern "C" __device__ const unsigned entry##_n_tile = (tile)

/// `entry` casts its bf16 operand A to E4M3 without a scale.
#define METRALE_PUBLISH_A_E4M3(entry) extern "C" __device__ const unsigned entry##_a_e4m3 = 1

/// `entry` calls `wait_for_predecessor` before it touches what an earlier kernel wrote, and before it writes what one may still
/// read, so it may be launched dependently. Code for devices before sm_90 has no such wait and publishes 0.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define METRALE_PUBLISH_WAITS(entry) extern "C" __device__ const unsigned entry##_waits = 1
#else
#define METRALE_PUBLISH_WAITS(entry) extern "C" __device__ const unsigned entry##_waits = 0
#endif

namespace metrale {

/// Returns when the kernels this one depends on have ended and their writes are visible. At once in an ordinary launch.
__device__ inline void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets a kernel launched dependently on this one start once every block has called it or ended. A hint only: that kernel still
/// waits for the end of this one in `wait_for_predecessor`.
__device__ inline void let_dependents_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace metrale
