// SPDX-License-Identifier: Apache-2.0
//
// The CUDA matrix kernels on their own: first every kernel and type against sums in double precision, then times of single rows
// over buffers that rotate through more than the second-level cache, as a graph of dependent launches: each matrix of two models,
// several tunings, the matrices of whole steps. The exit code is 1 if a result was wrong. `checks`, `times` or `rows` as its
// argument: only checks, only times, only those of models. Needs a device of sm_90 and 20 GB of its memory; takes under a minute.
//   nvcc -O3 -std=c++20 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -cudart static
//     -I include -I kernels/cuda/include benchmarks/kernels/cuda_matmul_bench.cu -o cuda_matmul_bench
#include "cuda_matmul_check.cuh"

namespace {

// ---- times ----

template <bool gated, mm::u32 rows, mm::u32 threads, mm::u32 ahead, mm::u32 resident>
__global__ void __launch_bounds__(threads, resident)
    tuned(const void* x, const void* norm, const std::byte* w, const std::byte* up, const float* residual, float* y,
          const __grid_constant__ LinearParams p) {
  extern __shared__ __align__(16) std::byte shared[];
  constexpr auto kind = gated ? mm::OneKind::gated : mm::OneKind::single;
  mm::one_row<DType::bf16, kind, rows, ahead>({p, x, norm, {w, up}, {}, residual, {y}, gated ? 2U : 1U}, shared);
}

__global__ void fill(uint4* to, std::size_t count) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count; i += std::size_t{gridDim.x} * blockDim.x) {
    mm::u32 h = static_cast<mm::u32>(i) * 2654435761U + 99;
    const auto next = [&] {
      h ^= h << 13, h ^= h >> 17, h ^= h << 5;
      return 0x3A003A00U | (h & 0x80FF80FFU);  // bf16 of about 0.0005, either sign
    };
    to[i] = {next(), next(), next(), next()};
  }
}
__global__ void sweep(const uint4* from, std::size_t count, mm::u32* out) {
  mm::u32 all = 0;
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int u = 0; u < 8; ++u) v[u] = __ldcs(from + i + u * step);
#pragma unroll
    for (int u = 0; u < 8; ++u) all ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  if (all == 0x12345678U) *out = all;
}

/// Microseconds of one run of what `body` enqueues: a graph, replayed, the median.
template <class Body>
double graph_us(Body body, int replays = 7) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  body();
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<double> times;
  for (int i = 0; i < replays + 2; ++i) {
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms * 1e3);
  }
  CHECK(cudaGraphExecDestroy(executable));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

struct Bench {
  std::byte* weights;
  std::size_t bytes;
  std::size_t at = 0;
  float *a, *b, *c;
  float* norm;

  const std::byte* next(mm::u32 n, mm::u32 k) {
    const std::size_t need = std::size_t{n} * k * 2;
    if (at + need > bytes) at = 0;
    const std::byte* w = weights + at;
    at += (need + 255) / 256 * 256;
    return w;
  }
};

metrale::LinearParams row_params(mm::u32 n, mm::u32 k) {
  metrale::LinearParams p;
  p.m = 1, p.k = k, p.ld_x = k, p.norm_eps = 1e-5F;
  for (int i = 0; i < 2; ++i) p.w[i] = {n, static_cast<mm::u32>(DType::bf16), 0, n};
  return p;
}

using TunedKernel = void (*)(const void*, const void*, const std::byte*, const std::byte*, const float*, float*, LinearParams);
struct Variant {
  mm::u32 rows, threads, ahead, resident;
  TunedKernel linear, gated;
};
template <mm::u32 rows, mm::u32 threads, mm::u32 ahead, mm::u32 resident = 2>
constexpr Variant variant() {
  return {
      rows, threads, ahead, resident, tuned<false, rows, threads, ahead, resident>, tuned<true, rows, threads, ahead, resident>};
}

/// As plan_one, for any variant and `blocks` a multiprocessor.
mm::Plan plan_variant(const Variant& v, mm::u32 n, mm::u32 k, bool gated, mm::u32 blocks) {
  const mm::u32 chunks = k / 8, rounds = (chunks + v.threads - 1) / v.threads,
                team = ((chunks + rounds - 1) / rounds + 31) / 32 * 32;
  const mm::u32 grid = std::min(n, sms * blocks), group = v.rows / (gated ? 2 : 1), each = (n + grid - 1) / grid;
  const mm::u32 teams = std::clamp((each + group - 1) / group, 1U, std::max(1U, v.threads / team));
  return {"", {grid, 1, 1}, {team, teams, 1}, mm::one_shared_bytes(DType::bf16, k, team, teams, gated, false)};
}

void time_variants(Bench& bench) {
  const Variant variants[] = {variant<16, 256, 0>(), variant<16, 256, 16384>(), variant<16, 256, 65536>(), variant<8, 256, 16384>(),
                              variant<8, 384, 16384>()};
  struct Shape {
    mm::u32 n, k;
    bool gated, norm;
  };
  const Shape shapes[] = {{4096, 4096, false, false},  {14336, 4096, false, false}, {14336, 4096, true, true},
                          {4096, 14336, false, false}, {128256, 4096, false, true}, {2560, 9216, false, false},
                          {9216, 2560, true, true},    {576, 576, false, false},    {960, 576, false, true},
                          {576, 1536, false, false},   {1536, 576, true, true},     {49152, 576, false, true}};
  std::printf("\nmicroseconds a launch, dependent launches, bf16, one row\n%-38s", "rows threads   ahead resident blocks");
  for (const Shape& s : shapes) std::printf(" %7u%s", s.n, s.gated ? "g" : " ");
  std::printf("\n%-38s", "");
  for (const Shape& s : shapes) std::printf(" %8u", s.k);
  std::printf("\n");
  for (const Variant& v : variants) {
    CHECK(cudaFuncSetAttribute(v.linear, cudaFuncAttributeMaxDynamicSharedMemorySize, mm::kSharedLimit));
    CHECK(cudaFuncSetAttribute(v.gated, cudaFuncAttributeMaxDynamicSharedMemorySize, mm::kSharedLimit));
    for (const mm::u32 blocks : {1U, 2U}) {
      std::printf("%4u %7u %7u %8u %6u  ", v.rows, v.threads, v.ahead, v.resident, blocks);
      for (const Shape& s : shapes) {
        const metrale::LinearParams p = row_params(s.n, s.k);
        const std::size_t bytes = std::size_t{s.n} * s.k * (s.gated ? 4 : 2);
        const int launches = static_cast<int>(std::clamp<std::size_t>(600'000'000 / bytes, 4, 200));
        const double us = graph_us(
            [&] {
              for (int i = 0; i < launches; ++i) {
                const float* x = i % 2 ? bench.b : bench.a;
                float* y = i % 2 ? bench.a : bench.b;  // large enough for either; values do not matter here
                const std::byte* w = bench.next(s.n, s.k);
                launch(s.gated ? v.gated : v.linear, plan_variant(v, s.n, s.k, s.gated, blocks), true, x,
                       s.norm ? bench.norm : nullptr, w, s.gated ? bench.next(s.n, s.k) : w, nullptr, y, p);
              }
            },
            5);
        std::printf(" %8.2f", us / launches);
      }
      std::printf("\n");
    }
  }
}

struct Model {
  const char* name;
  mm::u32 layers, hidden, q, kv, inner, vocabulary;
  DType type = DType::bf16;
  /// Where not 0: rows of what three of four layers have beside q, in place of k and v; and of two more matrices.
  mm::u32 recurrent = 0, heads = 0;
  /// Launches between a layer's first matrices and its output matrix.
  mm::u32 between(mm::u32 layer) const { return is_recurrent(layer) ? 2 : 1; }
  mm::u32 q_rows() const { return recurrent != 0 ? 2 * q : q; }
  bool is_recurrent(mm::u32 layer) const { return recurrent != 0 && layer % 4 != 3; }
};

/// What stands for attention and the like: a short launch of few blocks that waits as those do.
__global__ void between(const float* x, float* y) {
  metrale::let_dependents_start();
  metrale::wait_for_predecessor();
  const mm::u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = __ldcg(x + i);
}

/// The matrix kernels of one decode step, in order, with `between` where a step has other kernels.
double step_us(Bench& bench, const Model& m, bool dependent, double& bytes) {
  const auto matrix = [&](mm::u32 n, mm::u32 k) {
    return LinearMatrix{n, static_cast<mm::u32>(m.type), mm::can_repack(m.type, k), n};
  };
  const auto weights = [&](mm::u32 n, mm::u32 k) {
    bytes += static_cast<double>(mm::row_bytes(m.type, k)) * n;
    return bench.next(n, k);
  };
  const float* none = nullptr;
  return graph_us([&] {
    bytes = 0;
    bench.at = 0;
    for (mm::u32 i = 0; i < m.layers; ++i) {
      metrale::LinearParams p;
      p.m = 1, p.k = m.hidden, p.ld_x = m.hidden, p.norm_eps = 1e-5F;
      const bool recurrent = m.is_recurrent(i);
      const mm::u32 second = recurrent ? m.recurrent : m.kv, third = recurrent ? m.heads : m.kv, fourth = recurrent ? m.heads : 0;
      p.w[0] = matrix(m.q_rows(), m.hidden), p.w[1] = matrix(second, m.hidden), p.w[2] = matrix(third, m.hidden);
      if (fourth != 0) p.w[3] = matrix(fourth, m.hidden);
      float* y = bench.c;
      launch(linear4_entries, p, "linear4", dependent, bench.a, bench.norm, weights(m.q_rows(), m.hidden),
             weights(second, m.hidden), weights(third, m.hidden), weights(fourth, m.hidden), none, none, none, none, bench.b, y,
             y + second, y + second + third, p);
      for (mm::u32 j = 0; j < m.between(i); ++j)
        launch(between, dim3(128), dim3(64), 0, dependent, j == 0 ? bench.b : bench.c, j == 0 ? bench.c : bench.b);
      p.w[3] = {};
      p.k = p.ld_x = m.q, p.w[0] = matrix(m.hidden, m.q), p.w[1] = p.w[2] = {};
      launch(linear_entries, p, "linear", dependent, bench.b, nullptr, weights(m.hidden, m.q), none, bench.a, bench.a, p);
      p.k = p.ld_x = m.hidden, p.w[0] = p.w[1] = matrix(m.inner, m.hidden);
      launch(swiglu_entries, p, "swiglu", dependent, bench.a, bench.norm, weights(m.inner, m.hidden), weights(m.inner, m.hidden),
             bench.b, p);
      p.k = p.ld_x = m.inner, p.w[0] = matrix(m.hidden, m.inner), p.w[1] = {};
      launch(linear_entries, p, "linear", dependent, bench.b, nullptr, weights(m.hidden, m.inner), none, bench.a, bench.a, p);
    }
    metrale::LinearParams p;
    p.m = 1, p.k = m.hidden, p.ld_x = m.hidden, p.norm_eps = 1e-5F;
    p.w[0] = matrix(m.vocabulary, m.hidden);
    launch(linear_entries, p, "linear", dependent, bench.a, bench.norm, weights(m.vocabulary, m.hidden), none, none, bench.b, p);
  });
}

/// Each matrix of two models as a step launches it, in a chain of its own.
void time_rows(Bench& bench, double sweep_rate) {
  struct Shape {
    const char* what;
    std::string_view function;
    mm::u32 n[metrale::kMaxLinearMatrices], k;
    bool norm, residual;
  };
  const Shape shapes[] = {{"q, k, v", "linear4", {4096, 1024, 1024}, 4096, true, false},
                          {"output", "linear", {4096}, 4096, false, true},
                          {"gate, up", "swiglu", {14336, 14336}, 4096, true, false},
                          {"down", "linear", {4096}, 14336, false, true},
                          {"vocabulary", "linear", {128256}, 4096, true, false},
                          {"q, gate, k, v", "linear4", {8192, 1024, 1024}, 2560, true, false},
                          {"recurrent", "linear4", {8192, 4096, 32, 32}, 2560, true, false},
                          {"output", "linear", {2560}, 4096, false, true},
                          {"gate, up", "swiglu", {9728, 9728}, 2560, true, false},
                          {"down", "linear", {2560}, 9728, false, true},
                          {"vocabulary", "linear", {151936}, 2560, true, false}};
  std::printf("\none row, bf16, as in a step of an 8B model and of a hybrid one of 4B: microseconds, floor, share of the sweep\n");
  for (const Shape& s : shapes) {
    metrale::LinearParams p = row_params(0, s.k);
    double bytes = 0;
    for (mm::u32 i = 0; i < metrale::kMaxLinearMatrices; ++i) {
      p.w[i] = {s.n[i], static_cast<mm::u32>(DType::bf16), 0, s.n[i]};
      bytes += 2.0 * s.n[i] * s.k;
    }
    const int launches = std::clamp(static_cast<int>(2e9 / bytes), 4, 100);
    const float* none = nullptr;
    const double us = graph_us(
                          [&] {
                            for (int i = 0; i < launches; ++i) {
                              const float* x = i % 2 ? bench.b : bench.a;
                              float* y = i % 2 ? bench.a : bench.b;
                              const void* norm = s.norm ? bench.norm : nullptr;
                              const std::byte* w[metrale::kMaxLinearMatrices];
                              for (mm::u32 j = 0; j < metrale::kMaxLinearMatrices; ++j) w[j] = bench.next(s.n[j], s.k);
                              if (s.function == "linear") {
                                launch(linear_entries, p, s.function, true, x, norm, w[0], none, s.residual ? y : none, y, p);
                              } else if (s.function == "swiglu") {
                                launch(swiglu_entries, p, s.function, true, x, norm, w[0], w[1], y, p);
                              } else {
                                launch(linear4_entries, p, s.function, true, x, norm, w[0], w[1], w[2], w[3], none, none, none,
                                       none, y, bench.c, bench.c + s.n[1], bench.c + s.n[1] + s.n[2], p);
                              }
                            }
                          },
                          31) /
                      launches;
    const double floor_us = bytes / sweep_rate / 1e3;
    std::printf("%-14s %6u %5u %5u %4u x %5u  %7.2f %7.2f %6.3f\n", s.what, s.n[0], s.n[1], s.n[2], s.n[3], s.k, us, floor_us,
                floor_us / us);
  }
}

void time_prefill(Bench& bench) {
  std::printf("\nprepared rows x 4096 x 4096 bf16, TFLOP/s:");
  for (const mm::u32 m : {8U, 32U, 64U, 128U, 512U, 2048U}) {
    metrale::LinearParams p = row_params(4096, 4096);
    p.m = m, p.prepared = 1, p.w[1] = {};
    const int launches = 10;
    const double us = graph_us([&] {
      for (int i = 0; i < launches; ++i)
        launch(linear_entries, p, "linear", true, bench.weights, nullptr, bench.next(4096, 4096), nullptr, nullptr, bench.c, p);
    });
    std::printf("  %u: %.0f (%.1f us)", m, 2e-6 * m * 4096 * 4096 / (us / launches), us / launches);
  }
  std::printf("\n");
}

void time_types(Bench& bench) {
  for (const mm::u32 n : {4096U, 14336U}) {
    std::printf("\none row x %u x 4096, microseconds and GB/s:", n);
    for (const DType type :
         {DType::f32, DType::f16, DType::bf16, DType::q4_0, DType::q4_1, DType::q8_0, DType::q4_k, DType::q6_k}) {
      metrale::LinearParams p = row_params(n, 4096);
      p.w[0].dtype = static_cast<mm::u32>(type), p.w[0].packed = mm::can_repack(type, 4096), p.w[1] = {};
      const int launches = 40;
      const double us = graph_us([&] {
        for (int i = 0; i < launches; ++i) {
          launch(linear_entries, p, "linear", true, i % 2 ? bench.b : bench.a, nullptr, bench.next(2 * n, 4096), nullptr, nullptr,
                 i % 2 ? bench.a : bench.b, p);
        }
      });
      std::printf("  %s %.1f %.0f", name_of(type), us / launches, mm::row_bytes(type, 4096) * n / (us / launches) / 1e3);
    }
  }
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string only = argc > 1 ? argv[1] : "";
  const double began = now();
  CHECK(cudaSetDevice(0));
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  sms = static_cast<std::uint32_t>(device.multiProcessorCount);
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::printf("%s, %u multiprocessors\n", device.name, sms);
  allow_shared_memory(linear_entries);
  allow_shared_memory(linear4_entries);
  allow_shared_memory(swiglu_entries);
  CHECK(cudaFuncSetAttribute(repack, cudaFuncAttributeMaxDynamicSharedMemorySize, mm::kSharedLimit));
  if (only != "times" && only != "rows") check_all();
  std::printf("%.1f s\n", now() - began);
  std::fflush(stdout);
  if (only == "checks") return failures ? 1 : 0;

  Bench bench{};
  bench.bytes = std::size_t{17} << 30;
  CHECK(cudaMalloc(&bench.weights, bench.bytes));
  for (float** p : {&bench.a, &bench.b, &bench.c}) CHECK(cudaMalloc(p, std::size_t{4096} * 8192 * 4));
  CHECK(cudaMalloc(&bench.norm, 1 << 20));
  fill<<<4096, 256, 0, stream>>>(reinterpret_cast<uint4*>(bench.weights), bench.bytes / 16);
  for (float* p : {bench.a, bench.b, bench.c, bench.norm}) CHECK(cudaMemsetAsync(p, 0, 1 << 20, stream));
  CHECK(cudaStreamSynchronize(stream));
  mm::u32* sink;
  CHECK(cudaMalloc(&sink, 4));
  double sweep_us = 0;
  for (const double until = now() + 1; now() < until;) {
    sweep_us =
        graph_us([&] { sweep<<<sms * 8, 256, 0, stream>>>(reinterpret_cast<uint4*>(bench.weights), bench.bytes / 16, sink); }, 3);
  }
  const double sweep_rate = bench.bytes / sweep_us / 1e3;
  std::printf("read sweep %.0f GB/s\n", sweep_rate);

  time_rows(bench, sweep_rate);
  if (only != "rows") {
    time_variants(bench);
    time_types(bench);
    time_prefill(bench);
  }
  for (const Model& m :
       {Model{"8B Llama", 32, 4096, 4096, 1024, 14336, 128256}, Model{"135M SmolLM2", 30, 576, 576, 192, 1536, 49152},
        Model{"hybrid 4B", 32, 2560, 4096, 1024, 9728, 151936, DType::bf16, 4096, 32},
        Model{"8B q4_k", 32, 4096, 4096, 1024, 14336, 128256, DType::q4_k},
        Model{"SmolLM2 q4_1", 30, 576, 576, 192, 1536, 49152, DType::q4_1},
        Model{"SmolLM2 q8_0", 30, 576, 576, 192, 1536, 49152, DType::q8_0}}) {
    double bytes = 0;
    const double with = step_us(bench, m, true, bytes), without = step_us(bench, m, false, bytes);
    std::printf("%-12s matrices of a step: %.0f us dependent, %.0f us not; sweep of the same bytes %.0f us (ratio %.3f)\n", m.name,
                with, without, bytes / sweep_rate / 1e3, bytes / sweep_rate / 1e3 / with);
  }
  std::printf("%.1f s in all; %s\n", now() - began, failures ? "WRONG RESULTS" : "results right");
  return failures ? 1 : 0;
}
