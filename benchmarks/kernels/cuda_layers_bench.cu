// SPDX-License-Identifier: Apache-2.0
//
// The kernels of module "layers" by themselves: right against sums in double precision, and how long a step takes in a graph.
// Needs a GPU of sm_90 and nothing of the library:
//   nvcc -std=c++20 -O2 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -cudart static -Iinclude -Ikernels/cuda
//     -Ikernels/cuda/include benchmarks/kernels/cuda_layers_bench.cu -o cuda_layers_bench
//   cuda_layers_bench [check|time]
// Exit status 1: a result was wrong.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string_view>
#include <vector>

#include "cuda_layers_model.h"
#include "sm_90a/layers.cu"

namespace {

using bench::difference;
using bench::from_bf16;
using bench::Half;
using bench::kBlockTokens;
using bench::kKvWidth;
using bench::kVocab;
using bench::Layer;
using bench::Model;
using bench::S;
using metrale::LayerAddresses;
using metrale::LayersParams;
using metrale::StepHeader;

#define CHECK_CUDA(call)                                                                    \
  do {                                                                                      \
    const cudaError_t code_ = (call);                                                       \
    if (code_ != cudaSuccess) {                                                             \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(code_)); \
      std::exit(1);                                                                         \
    }                                                                                       \
  } while (false)

template <class T>
T* on_device(const std::vector<T>& values) {
  T* p = nullptr;
  CHECK_CUDA(cudaMalloc(&p, values.size() * sizeof(T)));
  CHECK_CUDA(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}
template <class T>
std::vector<T> from_device(const T* p, std::size_t n) {
  std::vector<T> values(n);
  CHECK_CUDA(cudaMemcpy(values.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}
struct OnDevice {
  std::vector<LayerAddresses> layers;
  LayerAddresses* addresses;
  std::uint16_t* embedding;
  float* frequencies;
  std::int32_t* table;
  float* exchange;
  float* hidden;
  std::int32_t* ids;
  StepHeader* step;

  explicit OnDevice(const Model& m, std::uint32_t copies = 1) {
    const auto at = [](const auto& values) { return reinterpret_cast<std::uint64_t>(on_device(values)); };
    for (std::uint32_t i = 0; i < copies; ++i) {
      for (const Layer& l : m.layers) layers.push_back(addresses_of(l, at));
    }
    addresses = on_device(layers);
    embedding = on_device(m.embedding);
    frequencies = on_device(m.frequencies);
    table = on_device(m.table);
    exchange = on_device(std::vector<float>(S::kExchangeFloats));
    hidden = on_device(std::vector<float>(S::kHidden, NAN));
    ids = on_device(std::vector<std::int32_t>{0});
    step = on_device(std::vector<StepHeader>{{}});
  }
  void set(std::int32_t token, std::uint32_t position) {
    const StepHeader header{.position = static_cast<std::int32_t>(position), .slot = 0};
    CHECK_CUDA(cudaMemcpy(ids, &token, 4, cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMemcpy(step, &header, sizeof(header), cudaMemcpyHostToDevice));
  }
  cudaError_t launch(cudaStream_t stream, bool interleaved, bool cooperative, bool dependent) {
    LayersParams p{.num_layers = static_cast<std::uint32_t>(layers.size()),
                   .interleaved = interleaved,
                   .norm_eps = 1e-5F,
                   .scale = 0.125F,
                   .cache = {.dtype = 0,
                             .block_tokens = kBlockTokens,
                             .block_stride = std::uint64_t{kBlockTokens} * kKvWidth,
                             .token_stride = kKvWidth,
                             .head_stride = S::kHeadDim}};
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config{};
    config.gridDim = S::kBlocks;
    config.blockDim = metrale::cuda::layers::kThreads;
    config.dynamicSmemBytes = S::kSharedBytes;
    config.stream = stream;
    config.attrs = attributes;
    if (cooperative) {
      attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
      attributes[config.numAttrs++].val.cooperative = 1;
    }
    if (dependent) {
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    return cudaLaunchKernelEx(&config, layers_576_9_3_64_1536, static_cast<const LayerAddresses*>(addresses),
                              static_cast<const std::uint16_t*>(embedding), static_cast<const std::int32_t*>(ids),
                              static_cast<const float*>(frequencies), static_cast<const StepHeader*>(step),
                              static_cast<const std::int32_t*>(table), exchange, hidden, p);
  }
};

bool check() {
  bool right = true;
  for (const std::uint32_t layers : {1U, 3U}) {
    Model model(layers, 2400);
    OnDevice device(model);
    for (const bool interleaved : {false, true}) {
      for (const std::uint32_t position : {0U, 1U, 15U, 16U, 127U, 128U, 200U, 511U, 600U, 895U, 896U, 1000U, 2399U}) {
        const auto token = static_cast<std::int32_t>(position % kVocab);
        device.set(token, position);
        CHECK_CUDA(device.launch(nullptr, interleaved, true, false));
        CHECK_CUDA(cudaDeviceSynchronize());
        const auto want = model.step(static_cast<std::uint32_t>(token), position, interleaved);
        const auto hidden = from_device(device.hidden, S::kHidden);
        double worst = difference(want, {hidden.begin(), hidden.end()});
        double worst_kv = 0;
        for (std::uint32_t l = 0; l < layers; ++l) {
          for (const bool keys : {true, false}) {
            Half& host = keys ? model.layers[l].keys : model.layers[l].values;
            auto* there = reinterpret_cast<std::uint16_t*>(keys ? device.layers[l].keys : device.layers[l].values);
            const Half all = from_device(there, host.size());
            std::vector<double> got, expected;
            for (std::size_t i = 0; i < all.size(); ++i) {
              const bool own = i >= model.row(position) && i < model.row(position) + kKvWidth;
              if (own) got.push_back(from_bf16(all[i])), expected.push_back(from_bf16(host[i]));
              if (!own && all[i] != host[i]) worst_kv = NAN;
            }
            worst_kv = std::max(worst_kv, difference(expected, got));
            // Later steps start from the same cache.
            CHECK_CUDA(cudaMemcpy(there, host.data(), host.size() * 2, cudaMemcpyHostToDevice));
          }
        }
        const bool ok = worst < 1e-3 && worst_kv < 2e-3;
        right = right && ok;
        if (!ok || position % 16 == 0)
          std::printf("%u layers, position %4u%s: hidden %.2e, keys and values %.2e%s\n", layers, position,
                      interleaved ? ", interleaved" : "", worst, worst_kv, ok ? "" : "  WRONG");
      }
    }
  }
  return right;
}

__global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}

void time_steps() {
  int clusters = 0;
  Model model(1, 2400);
  OnDevice device(model, 30);
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {8, 1, 1};
  config.gridDim = S::kBlocks, config.blockDim = metrale::cuda::layers::kThreads, config.dynamicSmemBytes = S::kSharedBytes,
  config.attrs = &cluster, config.numAttrs = 1;
  CHECK_CUDA(cudaOccupancyMaxActiveClusters(&clusters, layers_576_9_3_64_1536, &config));
  std::printf("clusters at once: %d\n", clusters);
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  spin<<<132, 128, 0, stream>>>(2'000'000'000);
  for (const std::uint32_t position : {0U, 512U, 600U, 895U, 2048U}) {
    device.set(0, position);
    for (const bool cooperative : {false, true}) {
      for (const bool dependent : {false, true}) {
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        constexpr int kCount = 16;
        cudaError_t code = cudaSuccess;
        for (int i = 0; i < kCount && code == cudaSuccess; ++i) code = device.launch(stream, false, cooperative, dependent);
        const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
        if (code != cudaSuccess || ended != cudaSuccess) {
          std::printf("cooperative %d, dependent %d: %s\n", cooperative, dependent, cudaGetErrorString(code));
          cudaGetLastError();
          continue;
        }
        if (const cudaError_t made = cudaGraphInstantiate(&exec, graph, 0); made != cudaSuccess) {
          std::printf("cooperative %d, dependent %d: %s\n", cooperative, dependent, cudaGetErrorString(made));
          cudaGetLastError();
          continue;
        }
        float best = 1e9F;
        for (int round = 0; round < 8; ++round) {
          CHECK_CUDA(cudaEventRecord(begin, stream));
          CHECK_CUDA(cudaGraphLaunch(exec, stream));
          CHECK_CUDA(cudaEventRecord(end, stream));
          CHECK_CUDA(cudaStreamSynchronize(stream));
          float ms = 0;
          CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
          best = std::min(best, ms * 1000 / kCount);
        }
        std::printf("position %4u, cooperative %d, dependent %d: %.2f us a step of %zu layers\n", position, cooperative, dependent,
                    best, device.layers.size());
        CHECK_CUDA(cudaGraphExecDestroy(exec));
        CHECK_CUDA(cudaGraphDestroy(graph));
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view what = argc > 1 ? argv[1] : "";
  CHECK_CUDA(
      cudaFuncSetAttribute(layers_576_9_3_64_1536, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(S::kSharedBytes)));
  const bool right = what == "time" || check();
  if (what != "check") time_steps();
  if (!right) std::printf("WRONG\n");
  return right ? 0 : 1;
}
