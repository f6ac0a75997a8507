// SPDX-License-Identifier: Apache-2.0
//
// The CUDA build of the kernels in conformance/test_kernels.h; one module, named `conformance`. Their arguments and facts are those
// of the host's build beside this file.
#include "conformance/test_kernels.h"
#include "publish.cuh"

using metrale::conformance::Largest;
using metrale::conformance::TooLarge;
using metrale::conformance::Wide;

namespace {

constexpr unsigned long long kPatienceNs = 20'000'000'000ull;  // a test that fails must not hang the device

__device__ unsigned long long now_ns() {
  unsigned long long ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__device__ unsigned linear_block() { return (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x; }
__device__ unsigned linear_thread() { return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x; }
__device__ unsigned block_threads() { return blockDim.x * blockDim.y * blockDim.z; }
__device__ unsigned long long global_thread() {
  return static_cast<unsigned long long>(linear_block()) * block_threads() + linear_thread();
}
__device__ unsigned long long all_threads() {
  return static_cast<unsigned long long>(gridDim.x) * gridDim.y * gridDim.z * block_threads();
}

__device__ void append_to(unsigned* log, unsigned value) {
  const unsigned index = log[0] + 1;
  log[index] = value;
  log[0] = index;
}

}  // namespace

extern "C" {

__device__ unsigned char conformance_table[metrale::conformance::kSymbolBytes];

__global__ void fill(unsigned* dst, unsigned value, unsigned long long count) {
  for (unsigned long long i = global_thread(); i < count; i += all_threads()) dst[i] = value;
}

// Product and sum are rounded one by one, as on the host.
__global__ void axpy(float* y, const float* x, float a, unsigned count) {
  for (unsigned long long i = global_thread(); i < count; i += all_threads()) y[i] = __fadd_rn(y[i], __fmul_rn(a, x[i]));
}

__global__ void append(unsigned* log, unsigned value) { append_to(log, value); }

// The flag may be host memory, written by the host meanwhile.
__global__ void hold(volatile unsigned* flag) {
  const unsigned long long deadline = now_ns() + kPatienceNs;
  while (*flag == 0 && now_ns() < deadline) __nanosleep(1000);
}

// The first page is never mapped.
__global__ void fault(unsigned* ptr, unsigned value) {
  const auto address = reinterpret_cast<unsigned long long>(ptr) & 0xFC;
  *reinterpret_cast<volatile unsigned*>(address) = value;
}

__global__ void echo(unsigned long long* out, Wide value, unsigned tag) {
  for (unsigned i = 0; i < sizeof(value) / 8; ++i) out[i] = reinterpret_cast<const unsigned long long*>(&value)[i];
  out[sizeof(value) / 8] = tag;
}

__global__ void echo_widths(unsigned long long* out, unsigned char u8, unsigned short u16, unsigned u32, unsigned long long u64,
                            float f32) {
  out[0] = u8;
  out[1] = u16;
  out[2] = u32;
  out[3] = u64;
  out[4] = __float_as_uint(f32);
}

__global__ void echo_largest(unsigned long long* out, Largest value) {
  for (unsigned i = 0; i < sizeof(value) / 8; ++i) out[i] = reinterpret_cast<const unsigned long long*>(&value)[i];
}

// Takes more than a launch may carry, so it never runs.
__global__ void too_large(unsigned long long* out, TooLarge value) {
  out[0] = reinterpret_cast<const unsigned long long*>(&value)[0];
}

__global__ void geometry(unsigned* out) { ++out[global_thread()]; }

// Leaves the sum as it was where the launch gave too little memory.
__global__ void shared(unsigned* out, unsigned words) {
  extern __shared__ unsigned mine[];
  unsigned given;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(given));
  if (given < words * sizeof(unsigned)) return;
  for (unsigned i = linear_thread(); i < words; i += block_threads()) mine[i] = linear_block() + 1;
  __syncthreads();
  if (linear_thread() != 0) return;
  unsigned sum = 0;
  for (unsigned i = 0; i < words; ++i) sum += mine[i];
  out[linear_block()] = sum;
}

// Meant for blocks that are resident together, as a cooperative launch promises. Others give up after a while.
__global__ void meet(unsigned* counter, unsigned* out) {
  if (linear_thread() != 0) return;
  const unsigned blocks = gridDim.x * gridDim.y * gridDim.z;
  const unsigned long long deadline = now_ns() + kPatienceNs;
  atomicAdd(counter, 1);
  unsigned seen = 0;
  while ((seen = atomicAdd(counter, 0)) < blocks && now_ns() < deadline) __nanosleep(100);
  out[linear_block()] = seen;
}

__global__ void tiled(unsigned*) {}
__global__ void tiled_zero(unsigned*) {}
__global__ void casts(unsigned*) {}

__global__ void waiter(unsigned* log, unsigned value) {
  metrale::let_dependents_start();
  metrale::wait_for_predecessor();
  append_to(log, value);
}

}  // extern "C"

METRALE_PUBLISH_N_TILE(tiled, metrale::conformance::kTile);
METRALE_PUBLISH_N_TILE(tiled_zero, 0);
METRALE_PUBLISH_A_E4M3(casts);
METRALE_PUBLISH_WAITS(waiter);
