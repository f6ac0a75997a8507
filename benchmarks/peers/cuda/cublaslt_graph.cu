// SPDX-License-Identifier: Apache-2.0
//
// cuBLASLt for one row: single bf16 matrices, and every matrix product of one decode step of the 8B Llama shape as one graph, which
// is what a decoder over that library cannot beat. Each shape takes the fastest of the algorithms that the library suggests. A
// JSON line each, times by events, weights random and larger than any cache.
//   nvcc -O3 -std=c++17 -arch=native cublaslt_graph.cu -o cublaslt_graph -lcuda -lcublasLt && ./cublaslt_graph
#include <cublasLt.h>

#include <map>
#include <string>
#include <utility>

#include "peer.cuh"

namespace {

using namespace peer;

constexpr int kRounds = 15;
constexpr std::size_t kWorkspace = std::size_t{64} << 20;
constexpr std::size_t kBytesInTurn = std::size_t{1} << 30;

struct Shape {
  int n;
  int k;
  std::size_t bytes() const { return std::size_t{2} * n * k; }
  bool operator<(const Shape& other) const { return std::pair(n, k) < std::pair(other.n, other.k); }
};

class Products {
 public:
  explicit Products(Device& device) : device_(device) {
    PEER_CHECK(cublasLtCreate(&handle_));
    workspace_ = device_memory(kWorkspace);
    x_ = device_memory(std::size_t{2} << 20);
    y_ = device_memory(std::size_t{2} << 20);
    fill(device, x_, std::size_t{2} << 20, 9);
  }

  void run(const Shape& shape, const void* weights) {
    const Plan& p = plan(shape);
    multiply(p, weights, p.algorithms[p.best].algo);
  }

  /// Times every suggestion once and keeps the fastest.
  void choose(const Shape& shape, const std::vector<const void*>& weights) {
    Plan& p = plan(shape);
    double least = 1e9;
    for (int a = 0; a < p.count; ++a) {
      std::size_t turn = 0;
      const Figures f = figures(5, [&] {
        return device_.seconds([&] {
          for (int i = 0; i < 16; ++i) multiply(p, weights[turn++ % weights.size()], p.algorithms[a].algo);
        });
      });
      if (f.median < least) least = f.median, p.best = a;
    }
  }

 private:
  struct Plan {
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t weights, x, y;
    cublasLtMatmulHeuristicResult_t algorithms[8];
    int count = 0;
    int best = 0;
  };

  Plan& plan(const Shape& shape) {
    const auto found = plans_.find(shape);
    if (found != plans_.end()) return found->second;
    Plan& p = plans_[shape];
    PEER_CHECK(cublasLtMatmulDescCreate(&p.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t transposed = CUBLAS_OP_T;
    PEER_CHECK(cublasLtMatmulDescSetAttribute(p.operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)));
    PEER_CHECK(cublasLtMatrixLayoutCreate(&p.weights, CUDA_R_16BF, shape.k, shape.n, shape.k));
    PEER_CHECK(cublasLtMatrixLayoutCreate(&p.x, CUDA_R_16BF, shape.k, 1, shape.k));
    PEER_CHECK(cublasLtMatrixLayoutCreate(&p.y, CUDA_R_16BF, shape.n, 1, shape.n));
    cublasLtMatmulPreference_t preference;
    PEER_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    PEER_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kWorkspace,
                                                    sizeof(kWorkspace)));
    PEER_CHECK(
        cublasLtMatmulAlgoGetHeuristic(handle_, p.operation, p.weights, p.x, p.y, p.y, preference, 8, p.algorithms, &p.count));
    PEER_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    PEER_CHECK(p.count == 0);
    return p;
  }

  void multiply(const Plan& p, const void* weights, const cublasLtMatmulAlgo_t& algorithm) {
    const float one = 1;
    const float zero = 0;
    PEER_CHECK(cublasLtMatmul(handle_, p.operation, &one, weights, p.weights, x_, p.x, &zero, y_, p.y, y_, p.y, &algorithm,
                              workspace_, kWorkspace, device_.stream));
  }

  Device& device_;
  cublasLtHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  void* x_ = nullptr;
  void* y_ = nullptr;
  std::map<Shape, Plan> plans_;
};

void single(Device& device, Products& products, const Shape& shape) {
  const std::size_t count = std::max<std::size_t>(1, std::min<std::size_t>(64, kBytesInTurn / shape.bytes()));
  auto* memory = static_cast<char*>(device_memory(count * shape.bytes()));
  fill(device, memory, count * shape.bytes(), shape.n);
  std::vector<const void*> weights;
  for (std::size_t i = 0; i < count; ++i) weights.push_back(memory + i * shape.bytes());
  products.choose(shape, weights);
  const std::size_t launches = std::max<std::size_t>(8, count);
  const cudaGraphExec_t graph = device.capture([&] {
    for (std::size_t i = 0; i < launches; ++i) products.run(shape, weights[i % count]);
  });
  const Figures f = figures(kRounds, [&] { return device.seconds([&] { PEER_CHECK(cudaGraphLaunch(graph, device.stream)); }); });
  print(("cuBLASLt graph, 1 row x " + std::to_string(shape.n) + "x" + std::to_string(shape.k) + " bf16").c_str(), "us", f,
        1e6 / static_cast<double>(launches));
  PEER_CHECK(cudaGraphExecDestroy(graph));
  PEER_CHECK(cudaFree(memory));
}

/// Query, key and value rows in one matrix, gate and up in another.
void llama_8b(Device& device, Products& products) {
  constexpr int kLayers = 32;
  const Shape layer[] = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}};
  const Shape head{128256, 4096};
  std::size_t bytes = head.bytes();
  for (const Shape& shape : layer) bytes += kLayers * shape.bytes();
  auto* memory = static_cast<char*>(device_memory(bytes));
  fill(device, memory, bytes, 5);
  for (const Shape& shape : layer) products.choose(shape, {memory, memory + bytes / 4, memory + bytes / 2});
  products.choose(head, {memory, memory + bytes / 2});
  const cudaGraphExec_t graph = device.capture([&] {
    const char* at = memory;
    for (int i = 0; i < kLayers; ++i) {
      for (const Shape& shape : layer) {
        products.run(shape, at);
        at += shape.bytes();
      }
    }
    products.run(head, at);
  });
  warm_up(device, 0.5);
  const Figures f = figures(kRounds, [&] { return device.seconds([&] { PEER_CHECK(cudaGraphLaunch(graph, device.stream)); }); });
  print("cuBLASLt graph, every matrix product of a step of the 8B Llama shape, bf16", "ms", f, 1e3);
  print_rate("cuBLASLt graph, 8B Llama shape, matrix products alone", "tokens/s", f, 1);
  print_rate("cuBLASLt graph, 8B Llama shape, weights read", "GB/s", f, static_cast<double>(bytes) / 1e9);
  PEER_CHECK(cudaGraphExecDestroy(graph));
  PEER_CHECK(cudaFree(memory));
}

}  // namespace

int main() {
  Device device;
  warm_up(device);
  Products products(device);
  for (const Shape& shape : {Shape{4096, 4096}, Shape{14336, 4096}, Shape{4096, 14336}, Shape{128256, 4096}}) {
    single(device, products, shape);
  }
  llama_8b(device, products);
  return 0;
}
