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

#include "sm_90a/layers.cu"

namespace {

using S = metrale::cuda::layers::Sizes<metrale::cuda::layers::Small>;
using metrale::LayerAddresses;
using metrale::LayersParams;
using metrale::StepHeader;
constexpr std::uint32_t kBlockTokens = 16, kVocab = 64;
constexpr std::uint32_t kKvWidth = S::kKvHeads * S::kHeadDim;

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
std::uint16_t to_bf16(double x) {
  const auto f = static_cast<float>(x);
  std::uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
double from_bf16(std::uint16_t x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

using Half = std::vector<std::uint16_t>;
struct Layer {
  Half q, k, v, o, gate, up, down, keys, values;
  std::vector<float> input_norm, post_norm;
};

struct Model {
  std::mt19937 random{7};
  std::vector<Layer> layers;
  Half embedding;
  std::vector<float> frequencies;
  std::vector<std::int32_t> table;
  std::uint32_t context;

  Half normal(std::size_t n, double deviation) {
    std::normal_distribution<double> draw(0, deviation);
    Half values(n);
    for (auto& v : values) v = to_bf16(draw(random));
    return values;
  }
  std::vector<float> around_one(std::size_t n) {
    std::normal_distribution<float> draw(1, 0.1F);
    std::vector<float> values(n);
    for (auto& v : values) v = draw(random);
    return values;
  }
  Model(std::uint32_t count, std::uint32_t most_tokens) : context(most_tokens) {
    const std::uint32_t blocks = (most_tokens + kBlockTokens - 1) / kBlockTokens + 3;
    table.resize(blocks);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random);
    for (std::uint32_t l = 0; l < count; ++l) {
      const double d = 1 / std::sqrt(double{S::kHidden});
      Layer layer{normal(S::kHidden * S::kHidden, 2 * d),
                  normal(kKvWidth * S::kHidden, 2 * d),
                  normal(kKvWidth * S::kHidden, d),
                  normal(S::kHidden * S::kHidden, d),
                  normal(S::kFf * S::kHidden, d),
                  normal(S::kFf * S::kHidden, d),
                  normal(S::kFf * S::kHidden, d),
                  normal(blocks * kBlockTokens * kKvWidth, 1),
                  normal(blocks * kBlockTokens * kKvWidth, 1),
                  around_one(S::kHidden),
                  around_one(S::kHidden)};
      layers.push_back(std::move(layer));
    }
    embedding = normal(kVocab * S::kHidden, 1);
    for (std::uint32_t j = 0; j < S::kHeadDim / 2; ++j)
      frequencies.push_back(static_cast<float>(std::pow(100000.0, -2.0 * j / S::kHeadDim)));
  }
  std::size_t row(std::uint32_t token) const {
    return (std::size_t{static_cast<std::uint32_t>(table[token / kBlockTokens])} * kBlockTokens + token % kBlockTokens) * kKvWidth;
  }

  static std::vector<double> product(const Half& w, const std::vector<double>& x) {
    std::vector<double> y(w.size() / x.size());
    for (std::size_t i = 0; i < y.size(); ++i)
      for (std::size_t j = 0; j < x.size(); ++j) y[i] += from_bf16(w[i * x.size() + j]) * x[j];
    return y;
  }
  static std::vector<double> normed(const std::vector<double>& x, const std::vector<float>& w) {
    double sum = 0;
    for (const double v : x) sum += v * v;
    std::vector<double> y(x);
    for (std::size_t i = 0; i < x.size(); ++i) y[i] = x[i] * w[i] / std::sqrt(sum / static_cast<double>(x.size()) + 1e-5);
    return y;
  }
  void rotate(std::vector<double>& x, std::uint32_t position, bool interleaved) const {
    for (std::size_t head = 0; head < x.size(); head += S::kHeadDim) {
      for (std::uint32_t j = 0; j < S::kHeadDim / 2; ++j) {
        const double angle = static_cast<float>(position) * frequencies[j];
        double& a = x[head + (interleaved ? 2 * j : j)];
        double& b = x[head + (interleaved ? 2 * j + 1 : j + S::kHeadDim / 2)];
        const double c = std::cos(angle), s = std::sin(angle), first = a;
        a = first * c - b * s;
        b = b * c + first * s;
      }
    }
  }
  /// The residual stream after all layers; stores keys and values as it goes.
  std::vector<double> step(std::uint32_t token, std::uint32_t position, bool interleaved) {
    std::vector<double> x(S::kHidden);
    for (std::uint32_t i = 0; i < S::kHidden; ++i) x[i] = from_bf16(embedding[token * S::kHidden + i]);
    for (Layer& l : layers) {
      const auto n = normed(x, l.input_norm);
      auto q = product(l.q, n), k = product(l.k, n), v = product(l.v, n);
      rotate(q, position, interleaved);
      rotate(k, position, interleaved);
      for (std::uint32_t i = 0; i < kKvWidth; ++i)
        l.keys[row(position) + i] = to_bf16(k[i]), l.values[row(position) + i] = to_bf16(v[i]);
      std::vector<double> mixed(S::kHidden);
      for (std::uint32_t h = 0; h < S::kHeads; ++h) {
        const std::uint32_t at = h / S::kGroup * S::kHeadDim;
        std::vector<double> p(position + 1);
        for (std::uint32_t t = 0; t <= position; ++t)
          for (std::uint32_t d = 0; d < S::kHeadDim; ++d) p[t] += q[h * S::kHeadDim + d] * from_bf16(l.keys[row(t) + at + d]) / 8;
        const double largest = *std::max_element(p.begin(), p.end());
        double total = 0;
        for (double& w : p) w = std::exp(w - largest), total += w;
        for (std::uint32_t t = 0; t <= position; ++t)
          for (std::uint32_t d = 0; d < S::kHeadDim; ++d)
            mixed[h * S::kHeadDim + d] += p[t] / total * from_bf16(l.values[row(t) + at + d]);
      }
      const auto o = product(l.o, mixed);
      for (std::uint32_t i = 0; i < S::kHidden; ++i) x[i] += o[i];
      const auto m = normed(x, l.post_norm);
      auto gate = product(l.gate, m);
      const auto up = product(l.up, m);
      for (std::uint32_t i = 0; i < S::kFf; ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
      const auto down = product(l.down, gate);
      for (std::uint32_t i = 0; i < S::kHidden; ++i) x[i] += down[i];
    }
    return x;
  }
};

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
      for (const Layer& l : m.layers)
        layers.push_back({at(l.q),
                          at(l.k),
                          at(l.v),
                          at(l.o),
                          at(l.gate),
                          at(l.up),
                          at(l.down),
                          at(l.input_norm),
                          at(l.post_norm),
                          at(l.keys),
                          at(l.values),
                          {}});
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

double difference(const std::vector<double>& want, const std::vector<double>& got) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) difference += (got[i] - want[i]) * (got[i] - want[i]), norm += want[i] * want[i];
  return std::sqrt(difference / norm);
}

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
