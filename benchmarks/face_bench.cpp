// SPDX-License-Identifier: Apache-2.0
//
// What the face of a backend costs, on the mock with recording off and no flight recorder, and on a backend whose hooks do nothing.
// `Baseline` is one virtual call of a hook's shape; subtract it from a launch to have the face alone.
//   face_bench --benchmark_repetitions=5 --benchmark_report_aggregates_only=true
#include <benchmark/benchmark.h>

#include <array>
#include <cstdlib>
#include <future>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "metrale/alloc_ledger.h"
#include "metrale/backends/mock.h"
#include "metrale/launch.h"
#include "null_backend.h"

namespace metrale {
namespace {

using benchmarks::bare_face;
using benchmarks::eight_args;
using benchmarks::NullBackend;
using benchmarks::take;

constexpr std::uint64_t kBlockBytes = 256;
constexpr std::size_t kLiveBlocks = 10'000;

std::unique_ptr<GpuBackend> quiet_mock(bool flight_recorder = false) {
  mock::Options options;
  options.face = bare_face();
  options.face.flight_recorder = flight_recorder;
  options.recording = false;
  auto backend = take(mock::create(options));
  mock::control(*backend).set_kernel_facts("bench", "eight", {.param_bytes = {8, 8, 8, 8, 4, 4, 4, 4}});
  return backend;
}

/// A hook of do_launch's shape and nothing around it.
class Baseline {
 public:
  virtual ~Baseline() = default;
  virtual Result<> call(const LaunchDesc& launch) = 0;
};
class EmptyBaseline final : public Baseline {
 public:
  Result<> call(const LaunchDesc&) override { return {}; }
};

void BM_EmptyVirtualCall(benchmark::State& state) {
  std::unique_ptr<Baseline> baseline = std::make_unique<EmptyBaseline>();
  const LaunchDesc launch{};
  for (auto _ : state) {
    Baseline* hidden = baseline.get();
    benchmark::DoNotOptimize(hidden);
    benchmark::DoNotOptimize(hidden->call(launch));
  }
}
BENCHMARK(BM_EmptyVirtualCall);

void launch_eight(benchmark::State& state, GpuBackend& backend) {
  const KernelHandle kernel = take(backend.kernel("bench", "eight"));
  const DevicePtr ptr = take(backend.alloc(kBlockBytes));
  const auto args = eight_args(ptr);
  const StreamHandle stream = backend.default_stream();
  for (auto _ : state) benchmark::DoNotOptimize(backend.launch_typed(kernel, {64}, {256}, 0, stream, args).has_value());
  if (!backend.free(ptr)) std::abort();
}
void BM_LaunchTyped8_Mock(benchmark::State& state) { launch_eight(state, *quiet_mock()); }
void BM_LaunchTyped8_MockWithFlightRecorder(benchmark::State& state) { launch_eight(state, *quiet_mock(true)); }
void BM_LaunchTyped8_NullHooks(benchmark::State& state) {
  NullBackend backend;
  launch_eight(state, backend);
}
void BM_LaunchBuilder8_Mock(benchmark::State& state) {
  const auto backend = quiet_mock();
  const KernelHandle kernel = take(backend->kernel("bench", "eight"));
  const DevicePtr ptr = take(backend->alloc(kBlockBytes));
  const StreamHandle stream = backend->default_stream();
  for (auto _ : state) {
    Launch launch(*backend, kernel);
    launch.grid({64}).block({256}).arg_ptr(ptr).arg_ptr(ptr).arg_ptr(ptr).arg_ptr(ptr);
    launch.arg_u32(1).arg_u32(1).arg_u32(1).arg_u32(1);
    benchmark::DoNotOptimize(launch.launch(stream).has_value());
  }
  if (!backend->free(ptr)) std::abort();
}
BENCHMARK(BM_LaunchTyped8_Mock);
BENCHMARK(BM_LaunchTyped8_NullHooks);
BENCHMARK(BM_LaunchTyped8_MockWithFlightRecorder);
BENCHMARK(BM_LaunchBuilder8_Mock);

// ---- ledger ----

/// Addresses of thread `t` do not meet those of another.
DevicePtr region_of(int t) { return {0x1000'0000 + (static_cast<std::uint64_t>(t) << 32)}; }

AllocLedger& shared_ledger() {
  static AllocLedger ledger;
  return ledger;
}

constexpr std::uint32_t kDeviceKind = 1u << static_cast<unsigned>(MemoryKind::device);

/// A block is freed and allocated again, among 1,000 live ones of the thread's own.
void BM_LedgerAllocFree(benchmark::State& state) {
  constexpr std::uint64_t kKept = 1'000;
  AllocLedger& ledger = shared_ledger();
  const DevicePtr region = region_of(state.thread_index());
  for (std::uint64_t i = 0; i < kKept; ++i) {
    ledger.add(region.offset(i * kBlockBytes), kBlockBytes, MemoryKind::device, std::source_location::current());
  }
  std::uint64_t i = 0;
  for (auto _ : state) {
    const DevicePtr base = region.offset(i * kBlockBytes);
    benchmark::DoNotOptimize(ledger.take(base, kDeviceKind).status);
    benchmark::DoNotOptimize(ledger.add(base, kBlockBytes, MemoryKind::device, std::source_location::current()));
    i = (i + 389) % kKept;
  }
  for (std::uint64_t k = 0; k < kKept; ++k) ledger.take(region.offset(k * kBlockBytes), kDeviceKind);
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(BM_LedgerAllocFree)->ThreadRange(1, 8)->UseRealTime();

/// A block that is alone in its 64 KiB page comes and goes.
void BM_LedgerAllocFreeLoneBlock(benchmark::State& state) {
  AllocLedger ledger;
  std::uint64_t i = 0;
  for (auto _ : state) {
    const DevicePtr base = region_of(0).offset(i * kBlockBytes);
    ledger.add(base, kBlockBytes, MemoryKind::device, std::source_location::current());
    benchmark::DoNotOptimize(ledger.take(base, kDeviceKind).status);
    i = (i + 389) % 4'096;
  }
}
BENCHMARK(BM_LedgerAllocFreeLoneBlock);

struct LiveBlocks {
  AllocLedger ledger;
  std::vector<DevicePtr> order;  ///< All bases, shuffled.
  LiveBlocks() {
    for (std::size_t i = 0; i < kLiveBlocks; ++i) {
      order.push_back(region_of(0).offset(i * kBlockBytes));
      ledger.add(order.back(), kBlockBytes, MemoryKind::device, std::source_location::current());
    }
    std::shuffle(order.begin(), order.end(), std::mt19937(1));
  }
};

/// The check of both ends of a copy, in random order over 10,000 live blocks; interior addresses.
void BM_LedgerCheckBothEnds(benchmark::State& state) {
  static const LiveBlocks live;
  std::size_t i = static_cast<std::size_t>(state.thread_index()) * 7919 % kLiveBlocks;
  for (auto _ : state) {
    const DevicePtr dst = live.order[i];
    const DevicePtr src = live.order[kLiveBlocks - 1 - i];
    benchmark::DoNotOptimize(live.ledger.check(dst.offset(64), 128));
    benchmark::DoNotOptimize(live.ledger.check(src.offset(32), 128));
    i = i + 1 == kLiveBlocks ? 0 : i + 1;
  }
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(BM_LedgerCheckBothEnds)->ThreadRange(1, 8)->UseRealTime();

void copy_d2d(benchmark::State& state, GpuBackend& backend) {
  std::vector<DevicePtr> blocks;
  for (std::size_t i = 0; i < kLiveBlocks; ++i) blocks.push_back(take(backend.alloc(kBlockBytes)));
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937(1));
  const StreamHandle stream = backend.default_stream();
  std::size_t i = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(backend.copy_d2d_async(blocks[i], blocks[kLiveBlocks - 1 - i], 128, stream).has_value());
    i = i + 1 == kLiveBlocks ? 0 : i + 1;
  }
  for (const DevicePtr block : blocks) {
    if (!backend.free(block)) std::abort();
  }
}
void BM_CopyD2dAsync_NullHooks(benchmark::State& state) {
  NullBackend backend;
  copy_d2d(state, backend);
}
void BM_CopyD2dAsync_Mock(benchmark::State& state) { copy_d2d(state, *quiet_mock()); }
BENCHMARK(BM_CopyD2dAsync_NullHooks);
BENCHMARK(BM_CopyD2dAsync_Mock);

void BM_AllocFree_NullHooks(benchmark::State& state) {
  NullBackend backend;
  for (auto _ : state) {
    const DevicePtr ptr = take(backend.alloc(kBlockBytes));
    benchmark::DoNotOptimize(backend.free(ptr).has_value());
  }
}
BENCHMARK(BM_AllocFree_NullHooks);

void BM_AllocFreeAsync_Mock(benchmark::State& state) {
  const auto backend = quiet_mock();
  const StreamHandle stream = backend->default_stream();
  for (auto _ : state) {
    const DevicePtr ptr = take(backend->alloc_async(kBlockBytes, stream));
    benchmark::DoNotOptimize(backend->free_async(ptr, stream).has_value());
  }
}
BENCHMARK(BM_AllocFreeAsync_Mock);

}  // namespace
}  // namespace metrale

int main(int argc, char** argv) {
  // The C library leaves out the bus locks of a process that has one thread; no program with a device is such a process.
  std::promise<void> done;
  std::thread idle([&] { done.get_future().wait(); });
  benchmark::Initialize(&argc, argv);
  const bool is_wrong_use = benchmark::ReportUnrecognizedArguments(argc, argv);
  if (!is_wrong_use) benchmark::RunSpecifiedBenchmarks();
  done.set_value();
  idle.join();
  return is_wrong_use ? 2 : 0;
}
