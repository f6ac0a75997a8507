// SPDX-License-Identifier: Apache-2.0
//
// What the peer programs share: checks that end the program, medians, times by events and by the host's clock, JSON lines, random
// data. CUDA's runtime only; nothing of metrale.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace peer {

template <class Status>
void check(Status status, const char* what, int line) {
  if (static_cast<int>(status) == 0) return;
  std::fprintf(stderr, "line %d: %s answers %d\n", line, what, static_cast<int>(status));
  std::exit(1);
}
#define PEER_CHECK(...) ::peer::check((__VA_ARGS__), #__VA_ARGS__, __LINE__)

inline double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Figures {
  double min, p10, median, p90;
};

/// Of `rounds` samples; one more, the first, is dropped.
template <class Sample>
Figures figures(int rounds, const Sample& sample) {
  std::vector<double> values;
  sample();
  for (int i = 0; i < rounds; ++i) values.push_back(sample());
  std::sort(values.begin(), values.end());
  const auto at = [&](double part) { return values[static_cast<std::size_t>(part * (values.size() - 1) + 0.5)]; };
  return {values.front(), at(0.1), at(0.5), at(0.9)};
}

/// A line of JSON: `value` is of the sample's unit times `scale`.
inline void print(const char* what, const char* unit, const Figures& f, double scale = 1) {
  std::printf("{\"what\": \"%s\", \"unit\": \"%s\", \"median\": %.6g, \"min\": %.6g, \"p10\": %.6g, \"p90\": %.6g}\n", what, unit,
              f.median * scale, f.min * scale, f.p10 * scale, f.p90 * scale);
  std::fflush(stdout);
}

/// A rate of times: the shortest time is the highest rate.
inline void print_rate(const char* what, const char* unit, const Figures& f, double amount) {
  print(what, unit, {amount / f.p90, amount / f.p90, amount / f.median, amount / f.p10});
}

class Device {
 public:
  Device() {
    PEER_CHECK(cudaSetDevice(0));
    PEER_CHECK(cudaFree(nullptr));
    PEER_CHECK(cudaGetDeviceProperties(&properties, 0));
    PEER_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    PEER_CHECK(cudaEventCreate(&start_));
    PEER_CHECK(cudaEventCreate(&end_));
    int driver = 0;
    PEER_CHECK(cudaDriverGetVersion(&driver));
    std::printf("{\"device\": \"%s\", \"processors\": %d, \"l2_bytes\": %d, \"driver\": %d}\n", properties.name,
                properties.multiProcessorCount, properties.l2CacheSize, driver);
  }

  /// Device time of what `body` enqueues on `stream`.
  template <class Body>
  double seconds(const Body& body) {
    PEER_CHECK(cudaEventRecord(start_, stream));
    body();
    PEER_CHECK(cudaEventRecord(end_, stream));
    PEER_CHECK(cudaEventSynchronize(end_));
    float milliseconds = 0;
    PEER_CHECK(cudaEventElapsedTime(&milliseconds, start_, end_));
    return milliseconds / 1e3;
  }
  /// The host's time of `body` and of the wait for its work.
  template <class Body>
  double host_seconds(const Body& body) {
    const double start = now();
    body();
    PEER_CHECK(cudaStreamSynchronize(stream));
    return now() - start;
  }
  template <class Body>
  cudaGraphExec_t capture(const Body& body) {
    cudaGraph_t graph;
    cudaGraphExec_t instance;
    PEER_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    body();
    PEER_CHECK(cudaStreamEndCapture(stream, &graph));
    PEER_CHECK(cudaGraphInstantiate(&instance, graph, 0));
    PEER_CHECK(cudaGraphDestroy(graph));
    PEER_CHECK(cudaGraphUpload(instance, stream));
    PEER_CHECK(cudaStreamSynchronize(stream));
    return instance;
  }

  cudaDeviceProp properties{};
  cudaStream_t stream = nullptr;

 private:
  cudaEvent_t start_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

/// Random bf16 pairs of magnitude 0.0078 to 2: nothing is timed on zeros.
__global__ void fill_kernel(uint4* to, std::size_t words, unsigned seed) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < words; i += step) {
    unsigned h = (static_cast<unsigned>(i) ^ static_cast<unsigned>(i >> 32)) * 2654435761u + seed * 0x9e3779b9u;
    unsigned lanes[4];
    for (unsigned& lane : lanes) {
      h = (h ^ h >> 16) * 0x85ebca6bu;
      h = (h ^ h >> 13) * 0xc2b2ae35u;
      h ^= h >> 16;
      lane = (h & 0x83ff83ffu) | 0x3c003c00u;
      h += 0x6d2b79f5u;
    }
    to[i] = make_uint4(lanes[0], lanes[1], lanes[2], lanes[3]);
  }
}

inline void fill(Device& device, void* to, std::size_t bytes, unsigned seed) {
  fill_kernel<<<device.properties.multiProcessorCount * 8, 256, 0, device.stream>>>(static_cast<uint4*>(to), bytes / 16, seed);
  PEER_CHECK(cudaGetLastError());
}

inline void* device_memory(std::size_t bytes) {
  void* memory = nullptr;
  PEER_CHECK(cudaMalloc(&memory, bytes));
  return memory;
}

/// Keeps the device busy until its clocks have risen.
inline void warm_up(Device& device, double for_seconds = 1.5) {
  constexpr std::size_t kBytes = std::size_t{1} << 30;
  void* memory = device_memory(kBytes);
  unsigned seed = 0;
  for (const double start = now(); now() - start < for_seconds;) {
    fill(device, memory, kBytes, ++seed);
    PEER_CHECK(cudaStreamSynchronize(device.stream));
  }
  PEER_CHECK(cudaFree(memory));
}

}  // namespace peer
