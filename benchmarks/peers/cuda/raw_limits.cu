// SPDX-License-Identifier: Apache-2.0
//
// What one GPU can do through CUDA's driver and runtime, without metrale: launches, graphs, memory, copies and the read-only sweep.
// A JSON line each. Device times are by events; calls are timed in batches by the host's clock, with the wait outside.
//   nvcc -O3 -std=c++17 -arch=native raw_limits.cu -o raw_limits -lcuda && ./raw_limits
#include <string>

#include "peer.cuh"

namespace {

using namespace peer;

constexpr int kRounds = 15;

__global__ void nop8(const void*, const void*, const void*, const void*, unsigned, unsigned, unsigned, unsigned) {}

__global__ void dependent(float* counters) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  if (threadIdx.x == 0) counters[blockIdx.x] += 1.0f;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__global__ void __launch_bounds__(256) sweep(const uint4* from, std::size_t words, unsigned* out) {
  constexpr int kUnroll = 8;
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
  unsigned all = 0;
  for (; i + (kUnroll - 1) * step < words; i += kUnroll * step) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = __ldcs(from + i + u * step);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) all ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  if (all == 0x9e3779b9u) *out = all;
}

__global__ void pack(const uint4* const* from, uint4* to, std::size_t words) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < words; i += step) {
    to[blockIdx.y * words + i] = from[blockIdx.y][i];
  }
}

void launches(Device& device) {
  cudaFunction_t symbol;
  PEER_CHECK(cudaGetFuncBySymbol(&symbol, reinterpret_cast<const void*>(nop8)));
  CUfunction function = reinterpret_cast<CUfunction>(symbol);
  CUstream stream = device.stream;
  void* pointer = nullptr;
  unsigned word = 1;
  void* args[] = {&pointer, &pointer, &pointer, &pointer, &word, &word, &word, &word};
  const auto launch = [&] { PEER_CHECK(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, args, nullptr)); };
  print("launch of 8 arguments, host cost", "ns",
        figures(kRounds,
                [&] {
                  double seconds = 0;
                  for (int batch = 0; batch < 4; ++batch) {
                    const double start = now();
                    for (int i = 0; i < 512; ++i) launch();
                    seconds += now() - start;
                    PEER_CHECK(cudaStreamSynchronize(stream));
                  }
                  return seconds / 2048;
                }),
        1e9);
  print("launch and wait", "ns",
        figures(kRounds,
                [&] {
                  const double start = now();
                  for (int i = 0; i < 1024; ++i) {
                    launch();
                    PEER_CHECK(cudaStreamSynchronize(stream));
                  }
                  return (now() - start) / 1024;
                }),
        1e9);
}

void chain(Device& device, float* counters, int nodes, int blocks, bool dependent_launch) {
  const cudaGraphExec_t graph = device.capture([&] {
    for (int i = 0; i < nodes; ++i) {
      cudaLaunchConfig_t config{};
      config.gridDim = blocks;
      config.blockDim = 128;
      config.stream = device.stream;
      cudaLaunchAttribute attribute{};
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
      config.attrs = &attribute;
      config.numAttrs = dependent_launch && i != 0 ? 1 : 0;
      PEER_CHECK(cudaLaunchKernelEx(&config, dependent, counters));
    }
  });
  const std::string name = "graph of " + std::to_string(nodes) + " dependent nodes, " + std::to_string(blocks) + " blocks" +
                           (dependent_launch ? ", programmatic dependent launch" : "");
  print((name + ", a node").c_str(), "us",
        figures(kRounds, [&] { return device.seconds([&] { PEER_CHECK(cudaGraphLaunch(graph, device.stream)); }); }), 1e6 / nodes);
  if (blocks == 1 && !dependent_launch) {
    const int batch = nodes >= 1000 ? 4 : nodes >= 100 ? 16 : 64;
    print((name + ", host call").c_str(), "ns",
          figures(kRounds,
                  [&] {
                    const double start = now();
                    for (int i = 0; i < batch; ++i) PEER_CHECK(cudaGraphLaunch(graph, device.stream));
                    const double seconds = now() - start;
                    PEER_CHECK(cudaStreamSynchronize(device.stream));
                    return seconds / batch;
                  }),
          1e9);
  }
  PEER_CHECK(cudaGraphExecDestroy(graph));
}

void graphs(Device& device) {
  const int processors = device.properties.multiProcessorCount;
  auto* counters = static_cast<float*>(device_memory(sizeof(float) * 2 * processors));
  PEER_CHECK(cudaMemsetAsync(counters, 0, sizeof(float) * 2 * processors, device.stream));
  for (const int nodes : {16, 256, 2048}) chain(device, counters, nodes, 1, false);
  for (const bool dependent_launch : {false, true}) {
    if (dependent_launch && device.properties.major < 9) continue;
    for (const int blocks : {1, processors, 2 * processors}) chain(device, counters, 1000, blocks, dependent_launch);
  }
  PEER_CHECK(cudaFree(counters));
}

void memory(Device& device) {
  for (const std::size_t bytes : {std::size_t{4096}, std::size_t{1} << 20, std::size_t{64} << 20}) {
    const std::string name = std::to_string(bytes >> 10) + " KiB";
    print(("cuMemAlloc + cuMemFree, " + name).c_str(), "ns",
          figures(kRounds,
                  [&] {
                    const double start = now();
                    for (int i = 0; i < 256; ++i) {
                      CUdeviceptr block;
                      PEER_CHECK(cuMemAlloc(&block, bytes));
                      PEER_CHECK(cuMemFree(block));
                    }
                    return (now() - start) / 256;
                  }),
          1e9);
    print(("cudaMallocAsync + cudaFreeAsync, " + name).c_str(), "ns",
          figures(kRounds,
                  [&] {
                    const double start = now();
                    for (int i = 0; i < 1024; ++i) {
                      void* block;
                      PEER_CHECK(cudaMallocAsync(&block, bytes, device.stream));
                      PEER_CHECK(cudaFreeAsync(block, device.stream));
                    }
                    const double seconds = now() - start;
                    PEER_CHECK(cudaStreamSynchronize(device.stream));
                    return seconds / 1024;
                  }),
          1e9);
  }
  print("cuMemAlloc + cuMemFree, 4 KiB, 256 held at a time", "ns",
        figures(kRounds,
                [&] {
                  CUdeviceptr blocks[256];
                  const double start = now();
                  for (CUdeviceptr& block : blocks) PEER_CHECK(cuMemAlloc(&block, 4096));
                  for (CUdeviceptr block : blocks) PEER_CHECK(cuMemFree(block));
                  return (now() - start) / 256;
                }),
        1e9);
  print("cuMemAllocHost + cuMemFreeHost, 64 MiB", "ms",
        figures(kRounds,
                [&] {
                  const double start = now();
                  void* block;
                  PEER_CHECK(cuMemAllocHost(&block, std::size_t{64} << 20));
                  PEER_CHECK(cuMemFreeHost(block));
                  return now() - start;
                }),
        1e3);
}

void gather(Device& device) {
  constexpr std::size_t kBytes = 1'114'112;
  constexpr std::size_t kBlocks = 60;
  auto* memory = static_cast<char*>(device_memory(2 * kBytes * kBlocks));
  auto* staging = static_cast<char*>(device_memory(kBytes * kBlocks));
  fill(device, memory, 2 * kBytes * kBlocks, 3);
  char* pinned;
  PEER_CHECK(cudaMallocHost(&pinned, kBytes * kBlocks));
  std::vector<char> pageable(kBytes * kBlocks, 1);
  std::vector<void*> from;
  std::vector<void*> to;
  const std::vector<std::size_t> sizes(kBlocks, kBytes);
  for (std::size_t i = 0; i < kBlocks; ++i) {
    from.push_back(memory + 2 * i * kBytes);
    to.push_back(pinned + i * kBytes);
  }
  void* table = device_memory(kBlocks * sizeof(void*));
  PEER_CHECK(cudaMemcpy(table, from.data(), kBlocks * sizeof(void*), cudaMemcpyHostToDevice));
  const auto loop = [&](char* host, bool wait_each) {
    for (std::size_t i = 0; i < kBlocks; ++i) {
      PEER_CHECK(cudaMemcpyAsync(host + i * kBytes, from[i], kBytes, cudaMemcpyDeviceToHost, device.stream));
      if (wait_each) PEER_CHECK(cudaStreamSynchronize(device.stream));
    }
  };
  const auto run = [&](const char* name, const auto& body) {
    print(name, "ms", figures(kRounds, [&] { return device.host_seconds(body); }), 1e3);
  };
  run("gather 60 x 1114112 B, pinned, one wait", [&] { loop(pinned, false); });
  run("gather 60 x 1114112 B, pinned, a wait each", [&] { loop(pinned, true); });
  run("gather 60 x 1114112 B, pageable, a wait each", [&] { loop(pageable.data(), true); });
  run("gather 60 x 1114112 B, pageable, one wait", [&] { loop(pageable.data(), false); });
  run("gather 60 x 1114112 B, packed by a kernel, one copy", [&] {
    pack<<<dim3(8, kBlocks), 256, 0, device.stream>>>(static_cast<const uint4* const*>(table), reinterpret_cast<uint4*>(staging),
                                                      kBytes / 16);
    PEER_CHECK(cudaGetLastError());
    PEER_CHECK(cudaMemcpyAsync(pinned, staging, kBytes * kBlocks, cudaMemcpyDeviceToHost, device.stream));
  });
  run("gather 60 x 1114112 B, one contiguous copy",
      [&] { PEER_CHECK(cudaMemcpyAsync(pinned, staging, kBytes * kBlocks, cudaMemcpyDeviceToHost, device.stream)); });
#if CUDA_VERSION >= 13000
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  std::size_t first = 0;
  run("gather 60 x 1114112 B, cuMemcpyBatchAsync", [&] {
    PEER_CHECK(cuMemcpyBatchAsync(reinterpret_cast<CUdeviceptr*>(to.data()), reinterpret_cast<CUdeviceptr*>(from.data()),
                                  const_cast<std::size_t*>(sizes.data()), kBlocks, &attributes, &first, 1, device.stream));
  });
#endif
  const auto scatter = [&](char* host) {
    for (std::size_t i = 0; i < kBlocks; ++i) {
      PEER_CHECK(cudaMemcpyAsync(from[i], host + i * kBytes, kBytes, cudaMemcpyHostToDevice, device.stream));
    }
  };
  run("scatter 60 x 1114112 B, pinned, one wait", [&] { scatter(pinned); });
  run("scatter 60 x 1114112 B, pageable", [&] { scatter(pageable.data()); });
  for (void* block : {static_cast<void*>(memory), static_cast<void*>(staging), table}) PEER_CHECK(cudaFree(block));
  PEER_CHECK(cudaFreeHost(pinned));
}

void bandwidth(Device& device) {
  constexpr std::size_t kSweep = std::size_t{8} << 30;
  constexpr std::size_t kHost = std::size_t{1} << 30;
  auto* memory = static_cast<char*>(device_memory(kSweep));
  auto* out = static_cast<unsigned*>(device_memory(sizeof(unsigned)));
  fill(device, memory, kSweep, 7);
  for (const int blocks : {4, 8, 16}) {
    const int grid = device.properties.multiProcessorCount * blocks;
    print_rate(("read-only sweep of 8 GiB, " + std::to_string(blocks) + " blocks a processor").c_str(), "GB/s",
               figures(kRounds,
                       [&] {
                         return device.seconds([&] {
                           sweep<<<grid, 256, 0, device.stream>>>(reinterpret_cast<const uint4*>(memory), kSweep / 16, out);
                           PEER_CHECK(cudaGetLastError());
                         });
                       }),
               kSweep / 1e9);
  }
  print_rate(
      "copy of 4 GiB within the device, read + write", "GB/s",
      figures(kRounds,
              [&] {
                return device.seconds([&] {
                  PEER_CHECK(cudaMemcpyAsync(memory + kSweep / 2, memory, kSweep / 2, cudaMemcpyDeviceToDevice, device.stream));
                });
              }),
      kSweep / 1e9);
  char* pinned;
  PEER_CHECK(cudaMallocHost(&pinned, kHost));
  std::vector<char> pageable(kHost, 1);
  PEER_CHECK(cudaMemcpy(pinned, memory, kHost, cudaMemcpyDeviceToHost));
  const auto copy = [&](const char* name, void* to, const void* from) {
    print_rate(name, "GB/s",
               figures(5,
                       [&] {
                         return device.host_seconds(
                             [&] { PEER_CHECK(cudaMemcpyAsync(to, from, kHost, cudaMemcpyDefault, device.stream)); });
                       }),
               kHost / 1e9);
  };
  copy("1 GiB to the device, pinned", memory, pinned);
  copy("1 GiB to the device, pageable", memory, pageable.data());
  copy("1 GiB to the host, pinned", pinned, memory);
  copy("1 GiB to the host, pageable", pageable.data(), memory);
  PEER_CHECK(cudaFreeHost(pinned));
  PEER_CHECK(cudaFree(memory));
  PEER_CHECK(cudaFree(out));
}

}  // namespace

int main() {
  Device device;
  warm_up(device);
  launches(device);
  graphs(device);
  memory(device);
  gather(device);
  warm_up(device, 0.5);
  bandwidth(device);
  return 0;
}
