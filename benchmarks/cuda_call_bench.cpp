// SPDX-License-Identifier: Apache-2.0
//
// What the CUDA backend adds to a call of the driver, without a GPU: the fake driver's hot functions are replaced by ones that
// answer at once. In the rows with /1 they do as a real driver does: they leave little of ours in the first level of cache, take a
// lock, and ring the device's doorbell last. Subtract the raw row of the same kind.
// What is to be seen behind a real call: each line of our code costs, for it has to be fetched anew; loads that do not wait for
// each other, a locked instruction or a few lines written cost next to nothing; and nothing of ours runs for free while the
// doorbell is on its way.
//   cuda_call_bench --benchmark_repetitions=5 --benchmark_report_aggregates_only=true
#include <benchmark/benchmark.h>

#include <array>
#include <atomic>
#include <random>
#include <vector>

#include "backends/cuda/cuda_backend.h"
#include "metrale/graph.h"
#include "metrale/stream.h"
#include "null_backend.h"
#include "support/fake_cuda/fake_gpu.h"

namespace metrale {
namespace {

using benchmarks::take;

constexpr std::size_t kSweptBytes = 48 * 1024;
constexpr std::size_t kHeld = 64;

enum class Caches : bool { warm, cold };
Caches caches = Caches::warm;
std::uint64_t next_block = 0;
std::vector<std::uint64_t> swept(kSweptBytes / sizeof(std::uint64_t), 1);

/// Code of twice the first level's size, a jump in every line of it.
#if defined(__x86_64__)
[[gnu::noinline]] void run_long_code() { asm volatile(".rept 1024\n.p2align 6\njmp 1f\n.p2align 5\n1:\n.endr"); }
#else
void run_long_code() {}
#endif

/// A driver's lock, and at the end its write past the caches, which tells the device. It is waited for here: otherwise the next
/// lock would wait, and whatever runs between the two would look free.
std::atomic<int> driver_lock{0};
std::vector<long long> doorbell(std::size_t{1} << 20);
void ring_doorbell() {
  static std::size_t at = 0;
  at = (at + 8) % doorbell.size();
#if defined(__x86_64__)
  __builtin_ia32_movnti64(&doorbell[at], 1);
  __builtin_ia32_mfence();
#else
  doorbell[at] = 1;
#endif
}

void stand_in() {
  if (caches == Caches::warm) return;
  driver_lock.fetch_add(1);
  run_long_code();
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < swept.size(); i += 8) sum += swept[i];
  benchmark::DoNotOptimize(sum);
  ring_doorbell();
}

CUresult launch_kernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**, void**) {
  stand_in();
  return CUDA_SUCCESS;
}
CUresult launch_graph(CUgraphExec, CUstream) {
  stand_in();
  return CUDA_SUCCESS;
}
CUresult mem_alloc(CUdeviceptr* ptr, std::size_t bytes) {
  stand_in();
  // Addresses come round, as those of a driver do.
  *ptr = 0x7000'0000'0000 + (next_block++ % (2 * kHeld)) * bytes;
  return CUDA_SUCCESS;
}
CUresult mem_free(CUdeviceptr) {
  stand_in();
  return CUDA_SUCCESS;
}

void nothing(const host::BlockContext&) {}
constexpr std::array<std::uint32_t, 8> kParamBytes{8, 8, 8, 8, 4, 4, 4, 4};
constexpr std::array<host::HostKernel, 1> kKernels{{{"bench", "nop8", nothing, kParamBytes, {}, false, false}}};

/// A backend on the fake, and the table with the functions above in it.
class Gpu {
 public:
  Gpu() : module_(fake_.add_module("bench", kKernels)), driver(fake_.driver()) {
    take(fake_.driver().cuInit_(0));
    driver.cuLaunchKernel_ = launch_kernel;
    driver.cuGraphLaunch_ = launch_graph;
    cuda::Options options;
    options.modules = {module_};
    backend = take(cuda::create_with_driver(driver, std::move(options)));
  }
  /// From here on blocks are addresses only.
  void replace_memory() {
    driver.cuMemAlloc_ = mem_alloc;
    driver.cuMemFree_ = mem_free;
  }

 private:
  static void take(CUresult code) {
    if (code != CUDA_SUCCESS) std::abort();
  }
  template <class T>
  static T take(Result<T> result) {
    return benchmarks::take(std::move(result));
  }

  fake_cuda::FakeGpu fake_;
  const cuda::ModuleImage module_;

 public:
  cuda::Driver driver;  // before the backend, which refers to it
  std::unique_ptr<GpuBackend> backend;
};

void set_caches(const benchmark::State& state) { caches = state.range(0) != 0 ? Caches::cold : Caches::warm; }

void BM_LaunchRaw(benchmark::State& state) {
  set_caches(state);
  void* params[8]{};
  auto* volatile call = launch_kernel;
  for (auto _ : state) benchmark::DoNotOptimize(call(nullptr, 1, 1, 1, 32, 1, 1, 0, nullptr, params, nullptr));
}
void BM_Launch(benchmark::State& state) {
  set_caches(state);
  Gpu gpu;
  GpuBackend& backend = *gpu.backend;
  const DevicePtr block = take(backend.alloc(4096));
  const KernelHandle kernel = take(backend.kernel("bench", "nop8"));
  const auto args = benchmarks::eight_args(block);
  const StreamHandle stream = backend.default_stream();
  for (auto _ : state) benchmark::DoNotOptimize(backend.launch_typed(kernel, {1}, {32}, 0, stream, args).has_value());
  if (!backend.free(block)) std::abort();
}

void BM_ReplayRaw(benchmark::State& state) {
  set_caches(state);
  auto* volatile call = launch_graph;
  for (auto _ : state) benchmark::DoNotOptimize(call(nullptr, nullptr));
}
void BM_Replay(benchmark::State& state) {
  set_caches(state);
  Gpu gpu;
  GpuBackend& backend = *gpu.backend;
  const DevicePtr block = take(backend.alloc(4096));
  const Stream stream = benchmarks::take(Stream::create(backend));
  CaptureScope capture = benchmarks::take(CaptureScope::begin(backend, stream.handle()));
  if (!backend.memset_async(block, 1, 4096, stream.handle())) std::abort();
  Graph graph = benchmarks::take(capture.end());
  for (auto _ : state) benchmark::DoNotOptimize(graph.launch(stream.handle()).has_value());
  graph = Graph();
  if (!backend.free(block)) std::abort();
}

void BM_AllocFreeRaw(benchmark::State& state) {
  set_caches(state);
  auto* volatile alloc = mem_alloc;
  auto* volatile free = mem_free;
  for (auto _ : state) {
    CUdeviceptr ptr = 0;
    benchmark::DoNotOptimize(alloc(&ptr, 4096));
    benchmark::DoNotOptimize(free(ptr));
  }
}
void BM_AllocFree(benchmark::State& state) {
  set_caches(state);
  Gpu gpu;
  gpu.replace_memory();
  GpuBackend& backend = *gpu.backend;
  const auto bytes = static_cast<std::uint64_t>(state.range(1));
  std::array<DevicePtr, kHeld> held{};
  std::size_t oldest = 0;
  for (auto _ : state) {
    if (held[oldest] && !backend.free(held[oldest])) std::abort();
    held[oldest] = take(backend.alloc(bytes));
    oldest = (oldest + 1) % kHeld;
  }
  for (const DevicePtr ptr : held) {
    if (ptr && !backend.free(ptr)) std::abort();
  }
}

/// Sizes as those of `metgpu bench`: every power of two from 512 bytes to 4 MiB as likely.
void BM_AllocFreeAsyncMixed(benchmark::State& state) {
  caches = Caches::warm;
  Gpu gpu;
  GpuBackend& backend = *gpu.backend;
  const StreamHandle stream = backend.default_stream();
  std::mt19937 random(1);
  std::vector<std::uint64_t> sizes(8192);
  for (std::uint64_t& size : sizes) {
    const std::uint64_t power = std::uint64_t{512} << (random() % 14);
    size = power - random() % (power / 4);
  }
  std::array<DevicePtr, 32> live{};
  std::size_t i = 0;
  for (auto _ : state) {
    DevicePtr& block = live[i % live.size()];
    if (!backend.free_async(block, stream)) std::abort();
    block = benchmarks::take(backend.alloc_async(sizes[i++ % sizes.size()], stream));
  }
  for (const DevicePtr block : live) {
    if (!backend.free_async(block, stream)) std::abort();
  }
}

BENCHMARK(BM_AllocFreeAsyncMixed);
BENCHMARK(BM_LaunchRaw)->Arg(0)->Arg(1);
BENCHMARK(BM_Launch)->Arg(0)->Arg(1);
BENCHMARK(BM_ReplayRaw)->Arg(0)->Arg(1);
BENCHMARK(BM_Replay)->Arg(0)->Arg(1);
BENCHMARK(BM_AllocFreeRaw)->Arg(0)->Arg(1);
BENCHMARK(BM_AllocFree)->ArgsProduct({{0, 1}, {4096, 65536, 1 << 20}});

}  // namespace
}  // namespace metrale

BENCHMARK_MAIN();
