// SPDX-License-Identifier: Apache-2.0
//
// What compute-sanitizer's racecheck makes of orders that the kernel of all layers is built on. Each kernel below hands data from
// some threads to others in a way that PTX orders; a hazard that racecheck reports of one is racecheck's, not the kernel's.
//   nvcc -std=c++20 -O2 -lineinfo -gencode=arch=compute_90a,code=sm_90a -cudart static racecheck_probe.cu -o racecheck_probe
//   compute-sanitizer --tool racecheck racecheck_probe [arrive|bulk|cluster|ring|poll|rounds|syncthreads|none]
// Prints how many words came over; exit status 1: not all of them.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string_view>
#include <vector>

namespace {

using u32 = unsigned int;
using u64 = unsigned long long;
constexpr u32 kWords = 256;

#define CHECK(call)                                                       \
  do {                                                                    \
    const cudaError_t code_ = (call);                                     \
    if (code_ != cudaSuccess) {                                           \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(code_)); \
      std::exit(1);                                                       \
    }                                                                     \
  } while (0)

__device__ u32 address(const void* shared) { return static_cast<u32>(__cvta_generic_to_shared(shared)); }
__device__ void wait(u32 barrier, u32 phase) {
  u32 done = 0;
  while (done == 0) {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(phase)
                 : "memory");
  }
}

/// All threads meet: the order that racecheck is made for.
__global__ void syncthreads(const u32* in, u32* out) {
  __shared__ u32 words[kWords];
  if (threadIdx.x < kWords) words[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  if (threadIdx.x >= kWords) out[threadIdx.x - kWords] = words[threadIdx.x - kWords];
}

/// One half arrives at a barrier with a name, the other waits at it.
__global__ void arrive(const u32* in, u32* out) {
  __shared__ u32 words[kWords];
  if (threadIdx.x < kWords) {
    words[threadIdx.x] = in[threadIdx.x];
    asm volatile("bar.arrive 1, 512;" ::: "memory");
  } else {
    asm volatile("bar.sync 1, 512;" ::: "memory");
    out[threadIdx.x - kWords] = words[threadIdx.x - kWords];
  }
}

/// A bulk copy counts its bytes at a barrier in shared memory, where the readers wait.
__global__ void bulk(const u32* in, u32* out) {
  __shared__ alignas(128) u32 words[kWords];
  __shared__ u64 barrier;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address(&barrier)) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(&barrier)), "r"(u32{sizeof(words)}) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(words)),
                 "l"(in), "r"(u32{sizeof(words)}), "r"(address(&barrier))
                 : "memory");
  }
  wait(address(&barrier), 0);
  if (threadIdx.x < kWords) out[threadIdx.x] = words[threadIdx.x];
}

/// The other block of a cluster sends words, counted likewise.
__global__ void __cluster_dims__(2, 1, 1) cluster(const u32* in, u32* out) {
  __shared__ alignas(16) u32 words[kWords];
  __shared__ u64 barrier;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address(&barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(&barrier)), "r"(u32{sizeof(words)}) : "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  const u32 other = 1 - blockIdx.x % 2;
  if (threadIdx.x < kWords) {
    asm volatile(
        "{.reg .u32 to, counter; mapa.shared::cluster.u32 to, %0, %2; mapa.shared::cluster.u32 counter, %1, %2;"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %3, [counter];}" ::"r"(address(&words[threadIdx.x])),
        "r"(address(&barrier)), "r"(other), "r"(in[threadIdx.x])
        : "memory");
  }
  wait(address(&barrier), 0);
  if (threadIdx.x < kWords && blockIdx.x == 0) out[threadIdx.x] = words[threadIdx.x];
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// A ring of one slot: a second bulk copy fills it once a lane of each reading warp has said, behind the warp's meeting, that it
/// has read.
__global__ void ring(const u32* in, u32* out) {
  __shared__ alignas(128) u32 words[kWords];
  __shared__ u64 full, empty;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address(&full)) : "memory");
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(&empty)), "r"(kWords / 32) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  u32 sum = 0;
  for (u32 round = 0; round < 2; ++round) {
    if (threadIdx.x == kWords) {
      if (round != 0) wait(address(&empty), 0);
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(&full)), "r"(u32{sizeof(words)}) : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(words)),
                   "l"(in), "r"(u32{sizeof(words)}), "r"(address(&full))
                   : "memory");
    }
    if (threadIdx.x >= kWords) continue;
    wait(address(&full), round);
    sum += words[threadIdx.x];
    __syncwarp();
    if (threadIdx.x % 32 == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address(&empty)) : "memory");
  }
  if (threadIdx.x < kWords) out[threadIdx.x] = sum / 2;
}

/// What was read goes out to device memory; who finds it there writes over what it was read from.
__global__ void poll(const u32* in, u32* out) {
  __shared__ u32 words[kWords];
  if (threadIdx.x < kWords) words[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  const u32 i = threadIdx.x % kWords;
  if (threadIdx.x < kWords) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(out + i), "r"(words[i]) : "memory");
  } else {
    u32 seen = ~0U;
    while (seen == ~0U) asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(out + i) : "memory");
    words[i] = seen + 1;
  }
}

/// `arrive`, round after round: whoever read says so in device memory, where the writers of the next round find it.
__global__ void rounds(const u32* in, u32* out) {
  __shared__ u32 words[kWords];
  const u32 i = threadIdx.x % kWords;
  for (u32 round = 1; round <= 3; ++round) {
    if (threadIdx.x < kWords) {
      u32 seen = 0;
      while (round != 1 && seen != in[i] * (round - 1))
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(out + i) : "memory");
      words[i] = in[i] * round;
      asm volatile("bar.arrive 1, 512;" ::: "memory");
    } else {
      asm volatile("bar.sync 1, 512;" ::: "memory");
      // Another's word, so that reader and writer are of different warps and lanes.
      const u32 other = (i + 33) % kWords;
      asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(out + other), "r"(round == 3 ? in[other] : words[other]) : "memory");
    }
  }
}

/// No order at all: what a race looks like.
__global__ void none(const u32* in, u32* out) {
  __shared__ u32 words[kWords];
  if (threadIdx.x < kWords) words[threadIdx.x] = in[threadIdx.x];
  if (threadIdx.x >= kWords) out[threadIdx.x - kWords] = words[threadIdx.x - kWords];
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view chosen = argc > 1 ? argv[1] : "syncthreads";
  std::vector<u32> words(kWords);
  std::iota(words.begin(), words.end(), 1U);
  u32 *in = nullptr, *out = nullptr;
  CHECK(cudaMalloc(&in, kWords * sizeof(u32)));
  CHECK(cudaMalloc(&out, kWords * sizeof(u32)));
  CHECK(cudaMemcpy(in, words.data(), kWords * sizeof(u32), cudaMemcpyHostToDevice));
  CHECK(cudaMemset(out, 0xFF, kWords * sizeof(u32)));
  if (chosen == "syncthreads") syncthreads<<<1, 512>>>(in, out);
  if (chosen == "arrive") arrive<<<1, 512>>>(in, out);
  if (chosen == "bulk") bulk<<<1, 512>>>(in, out);
  if (chosen == "cluster") cluster<<<2, 512>>>(in, out);
  if (chosen == "ring") ring<<<1, 512>>>(in, out);
  if (chosen == "poll") poll<<<1, 512>>>(in, out);
  if (chosen == "rounds") rounds<<<1, 512>>>(in, out);
  if (chosen == "none") none<<<1, 512>>>(in, out);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  std::vector<u32> back(kWords);
  CHECK(cudaMemcpy(back.data(), out, kWords * sizeof(u32), cudaMemcpyDeviceToHost));
  u32 right = 0;
  for (u32 i = 0; i < kWords; ++i) right += back[i] == words[i] ? 1 : 0;
  std::printf("%s: %u of %u words came over\n", argc > 1 ? argv[1] : "syncthreads", right, kWords);
  return right == kWords || chosen == "none" ? 0 : 1;
}
