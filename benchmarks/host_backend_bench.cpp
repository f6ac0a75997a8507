// SPDX-License-Identifier: Apache-2.0
//
// What the host backend costs beside the kernels themselves: a launch inside a replayed graph, enqueueing, waking up.
//   host_backend_bench --benchmark_repetitions=5 --benchmark_report_aggregates_only=true
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <memory>

#include "metrale/backends/host.h"

namespace metrale {
namespace {

template <class T>
T take(Result<T> result) {
  if (!result) std::abort();
  return std::move(*result);
}
void take(const Result<>& result) {
  if (!result) std::abort();
}

void empty(const host::BlockContext&) {}

/// Busy for about as many cycles as the argument says.
void spin(const host::BlockContext& c) {
  for (std::uint32_t i = c.arg<std::uint32_t>(1); i != 0; --i) benchmark::DoNotOptimize(i);
}

constexpr std::uint32_t kParams[] = {8, 4};
constexpr host::HostKernel kKernels[] = {{"bench", "empty", empty, kParams}, {"bench", "spin", spin, kParams}};

struct Fixture {
  explicit Fixture(std::uint32_t num_threads) {
    host::Options options;
    options.num_threads = num_threads;
    options.kernels = {kKernels};
    options.face.flight_recorder = false;
    backend = take(host::create(options));
    stream = take(backend->create_stream());
    memory = take(backend->alloc(256));
  }
  ~Fixture() { take(backend->free(memory)); }

  void launch(std::string_view kernel, std::uint32_t num_blocks, std::uint32_t cycles) {
    const KernelArg args[] = {KernelArg::buffer(memory), KernelArg::value(cycles)};
    take(backend->launch_typed(take(backend->kernel("bench", kernel)), {num_blocks}, {}, 0, stream, args));
  }

  std::unique_ptr<GpuBackend> backend;
  StreamHandle stream;
  DevicePtr memory;
};

/// Time of one launch in a graph of 200: arguments are threads, blocks, cycles a block.
void BM_LaunchInReplay(benchmark::State& state) {
  constexpr int kLaunches = 200;
  Fixture f(static_cast<std::uint32_t>(state.range(0)));
  take(f.backend->begin_capture(f.stream));
  for (int i = 0; i < kLaunches; ++i) {
    f.launch("spin", static_cast<std::uint32_t>(state.range(1)), static_cast<std::uint32_t>(state.range(2)));
  }
  const GraphHandle graph = take(f.backend->end_capture(f.stream));
  for (auto _ : state) {
    take(f.backend->launch_graph(graph, f.stream));
    take(f.backend->synchronize(f.stream));
  }
  state.counters["per_launch"] = benchmark::Counter(static_cast<double>(state.iterations() * kLaunches),
                                                    benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
  take(f.backend->destroy_graph(graph));
}
BENCHMARK(BM_LaunchInReplay)
    ->ArgNames({"threads", "blocks", "cycles"})
    ->Args({1, 1, 0})
    ->Args({1, 16, 0})
    ->Args({2, 1, 0})
    ->Args({2, 2, 0})
    ->Args({2, 16, 0})
    ->Args({1, 16, 2000})
    ->Args({2, 16, 2000})
    ->UseRealTime();

/// Enqueueing alone; the queue drains beside it.
void BM_Enqueue(benchmark::State& state) {
  Fixture f(1);
  const KernelHandle kernel = take(f.backend->kernel("bench", "empty"));
  const KernelArg args[] = {KernelArg::buffer(f.memory), KernelArg::value(std::uint32_t{0})};
  int queued = 0;
  for (auto _ : state) {
    take(f.backend->launch_typed(kernel, {1}, {}, 0, f.stream, args));
    if (++queued == 1000) {
      state.PauseTiming();
      take(f.backend->synchronize(f.stream));
      queued = 0;
      state.ResumeTiming();
    }
  }
}
BENCHMARK(BM_Enqueue)->UseRealTime();

/// One launch and the wait for it: two wake-ups at worst.
void BM_LaunchAndSynchronize(benchmark::State& state) {
  Fixture f(1);
  const KernelHandle kernel = take(f.backend->kernel("bench", "empty"));
  const KernelArg args[] = {KernelArg::buffer(f.memory), KernelArg::value(std::uint32_t{0})};
  for (auto _ : state) {
    take(f.backend->launch_typed(kernel, {1}, {}, 0, f.stream, args));
    take(f.backend->synchronize(f.stream));
  }
}
BENCHMARK(BM_LaunchAndSynchronize)->UseRealTime();

/// A small copy on an idle stream, which runs in the caller.
void BM_SmallCopyOnIdleStream(benchmark::State& state) {
  Fixture f(1);
  for (auto _ : state) take(f.backend->copy_d2d_async(f.memory, f.memory.offset(128), 64, f.stream));
}
BENCHMARK(BM_SmallCopyOnIdleStream);

}  // namespace
}  // namespace metrale

BENCHMARK_MAIN();
