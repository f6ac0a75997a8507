// SPDX-License-Identifier: Apache-2.0
//
// Suite alloc: what memory costs the host: from the driver, from the pool, pinned.
#include <algorithm>
#include <array>
#include <atomic>
#include <random>
#include <thread>

#include <fmt/format.h>

#include "bench/suites.h"

namespace metrale::bench {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint32_t kLivePooled = 32;

Sample per_call(std::uint32_t calls, std::function<Result<>()> body) {
  return [calls, body = std::move(body)]() -> Result<double> { return METRALE_TRY(host_seconds(body)) * 1e9 / calls; };
}

/// Holds blocks of 1 MiB until the driver's 2 MiB chunks have no room for one more, so that the next comes with a chunk of its own,
/// as it does in a fresh process.
Result<std::vector<DeviceBuffer>> fill_chunks(GpuBackend& backend) {
  constexpr std::size_t kMostBlocks = 64;
  std::vector<DeviceBuffer> held;
  while (held.size() < kMostBlocks) {
    held.push_back(METRALE_TRY(DeviceBuffer::create(backend, kMiB)));
    const std::size_t n = held.size();
    if (n > 1 && held[n - 1].ptr().address / (2 * kMiB) == held[n - 2].ptr().address / (2 * kMiB)) break;
  }
  return held;
}

Result<> from_driver(Session& session) {
  GpuBackend& backend = session.backend();
  RawDevice* raw = session.raw();
  const std::uint32_t calls = session.scale().alloc_calls;
  const auto measure_pairs = [&](std::string name, std::uint32_t count, Target target) {
    const auto pairs = [&backend, count]() -> Result<> {
      for (std::uint32_t i = 0; i < count; ++i) {
        const DevicePtr ptr = METRALE_TRY(backend.alloc(kMiB));
        METRALE_TRY(backend.free(ptr));
      }
      return {};
    };
    return session.measure({.suite = "alloc",
                            .name = std::move(name),
                            .unit = "ns",
                            .ours = series("alloc, free"),
                            .theirs = series("cuMemAlloc, cuMemFree"),
                            .measure = Measure::ratio,
                            .target = target},
                           per_call(count, pairs),
                           raw ? per_call(count, [raw, count] { return raw->alloc_free(kMiB, count); }) : Sample());
  };
  METRALE_TRY(measure_pairs("alloc + free, 1 MiB, in a chunk that stays", calls, {}));
  {
    const std::vector<DeviceBuffer> held = METRALE_TRY(fill_chunks(backend));
    // Some tens of microseconds each.
    METRALE_TRY(measure_pairs("alloc + free, 1 MiB", std::max(1U, calls / 16), {.minimum = 1.03, .goal = 1.01}));
  }

  struct Packed {
    std::uint64_t bytes;
    std::uint32_t group;
  };
  // Small blocks share one of the driver's 2 MiB chunks; the anchor keeps it from coming and going.
  for (const Packed& packed_as : {Packed{4'096, 256}, Packed{65'536, 16}}) {
    const std::uint64_t bytes = packed_as.bytes;
    const std::uint32_t group = packed_as.group;
    const DeviceBuffer anchor = METRALE_TRY(DeviceBuffer::create(backend, bytes));
    const std::uint32_t groups = std::max(1U, calls / group);
    std::vector<DevicePtr> held(group);
    const auto packed = [&]() -> Result<> {
      for (std::uint32_t i = 0; i < groups; ++i) {
        for (DevicePtr& ptr : held) ptr = METRALE_TRY(backend.alloc(bytes));
        for (const DevicePtr ptr : held) METRALE_TRY(backend.free(ptr));
      }
      return {};
    };
    METRALE_TRY(
        session.measure({.suite = "alloc",
                         .name = fmt::format("alloc + free, {} KiB, {} held at a time", bytes >> 10, group),
                         .unit = "ns",
                         .ours = series("alloc, free"),
                         .theirs = series("cuMemAlloc, cuMemFree"),
                         .measure = Measure::difference,
                         .target = {.minimum = 100, .goal = 50}},
                        per_call(groups * group, packed),
                        raw ? per_call(groups * group, [=] { return raw->alloc_free_groups(bytes, group, groups); }) : Sample()));
  }
  return {};
}

/// From 512 bytes to 4 MiB, every power of two as likely, and not aligned to anything.
std::vector<std::uint64_t> mixed_sizes(std::uint32_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::uint64_t> sizes(count);
  for (std::uint64_t& size : sizes) {
    const std::uint64_t power = std::uint64_t{512} << (random() % 14);
    size = power - random() % (power / 4);
  }
  return sizes;
}

/// Runs `body` on `threads` threads, which begin together, and returns the mean of what they return.
Result<double> on_threads(std::uint32_t threads, const std::function<Result<double>(std::uint32_t)>& body) {
  std::vector<Result<double>> results(threads, Result<double>(0.0));
  std::atomic<std::uint32_t> ready{0};
  {
    std::vector<std::jthread> workers;
    for (std::uint32_t t = 0; t < threads; ++t) {
      workers.emplace_back([&, t] {
        ready.fetch_add(1);
        while (ready.load() < threads) std::this_thread::yield();
        results[t] = body(t);
      });
    }
  }
  double sum = 0;
  for (Result<double>& result : results) sum += METRALE_TRY(std::move(result));
  return sum / threads;
}

Result<> replace_blocks(GpuBackend& backend, StreamHandle stream, std::span<const std::uint64_t> sizes) {
  std::array<DevicePtr, kLivePooled> live{};
  std::size_t oldest = 0;
  for (const std::uint64_t bytes : sizes) {
    METRALE_TRY(backend.free_async(live[oldest], stream));
    live[oldest] = METRALE_TRY(backend.alloc_async(bytes, stream));
    oldest = (oldest + 1) % live.size();
  }
  for (const DevicePtr ptr : live) METRALE_TRY(backend.free_async(ptr, stream));
  return {};
}

/// Nanoseconds of a pair of allocating and freeing.
Result<double> ring_ns(GpuBackend& backend, StreamHandle stream, std::span<const std::uint64_t> sizes) {
  const double seconds = METRALE_TRY(host_seconds([&] { return replace_blocks(backend, stream, sizes); }));
  METRALE_TRY(backend.synchronize(stream));
  return seconds * 1e9 / static_cast<double>(sizes.size());
}

Result<> from_pool(Session& session) {
  GpuBackend& backend = session.backend();
  RawDevice* raw = session.raw();
  constexpr std::uint32_t kMostThreads = 4;
  const bool compares = raw != nullptr && raw->has_pool();
  if (compares) METRALE_TRY(raw->open_pool(kMostThreads));
  std::vector<Stream> streams;
  std::vector<std::vector<std::uint64_t>> sizes;
  for (std::uint32_t t = 0; t < kMostThreads; ++t) {
    streams.push_back(METRALE_TRY(Stream::create(backend)));
    sizes.push_back(mixed_sizes(session.scale().pool_calls, t + 1));
  }
  for (const std::uint32_t threads : {1U, kMostThreads}) {
    const Sample ours = [&, threads] {
      return on_threads(threads, [&](std::uint32_t t) { return ring_ns(backend, streams[t].handle(), sizes[t]); });
    };
    const Sample theirs = [&, threads] {
      return on_threads(threads, [&](std::uint32_t t) { return raw->pool_ring(t, sizes[t], kLivePooled); });
    };
    METRALE_TRY(
        session.measure({.suite = "alloc",
                         .name = fmt::format("alloc_async + free_async, mixed sizes, {} thread{}", threads, threads > 1 ? "s" : ""),
                         .unit = "ns",
                         .ours = series("alloc_async, free_async"),
                         .theirs = series("cuMemAllocAsync, cuMemFreeAsync"),
                         .measure = Measure::ratio,
                         .target = {.minimum = 0.5, .goal = 0.2}},
                        ours, compares ? theirs : Sample()));
  }
  METRALE_TRY(backend.trim());
  return {};
}

Result<> pinned(Session& session) {
  GpuBackend& backend = session.backend();
  RawDevice* raw = session.raw();
  const std::uint64_t bytes = session.scale().pinned_bytes;
  const auto pair = [&, bytes]() -> Result<> {
    const std::span<std::byte> memory = METRALE_TRY(backend.alloc_host_pinned(bytes));
    return backend.free_host_pinned(memory.data(), bytes);
  };
  return session.measure({.suite = "alloc",
                          .name = fmt::format("pinned alloc + free, {} MiB", bytes >> 20),
                          .unit = "ns",
                          .ours = series("alloc_host_pinned, free_host_pinned"),
                          .theirs = series("cuMemHostAlloc, cuMemFreeHost"),
                          .measure = Measure::ratio,
                          .note = "ours is zeroed in full, theirs is not"},
                         per_call(1, pair), raw ? per_call(1, [=] { return raw->pinned_alloc_free(bytes); }) : Sample());
}

}  // namespace

Result<> run_alloc(Session& session, const Options&) {
  METRALE_TRY(from_driver(session));
  if (session.backend().capabilities().has(Capability::pooled_memory)) METRALE_TRY(from_pool(session));
  if (session.backend().capabilities().has(Capability::pinned_memory)) METRALE_TRY(pinned(session));
  return {};
}

}  // namespace metrale::bench
