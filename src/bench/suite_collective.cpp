// SPDX-License-Identifier: Apache-2.0
//
// Suite collective: all-reduce between two devices through the NCCL bridge, and beside it the library called directly on the same
// memory, each in a graph of many. Where there is one device, the rows say so; what a call costs the host is measured there too, in
// a world of one. On the host two ranks of one process are measured by themselves.
#include <functional>
#include <random>
#include <thread>

#include <fmt/format.h>

#include "bench/raw_nccl.h"
#include "bench/suites.h"
#include "metrale/backends.h"
#include "metrale/bridges/in_process.h"
#include "metrale/bridges/nccl.h"
#include "metrale/switches.h"

namespace metrale::bench {
namespace {

constexpr std::uint32_t kRanks = 2;

struct Size {
  std::uint64_t bytes;
  std::string_view name;
  std::uint32_t calls;  ///< In a graph.
};

/// Runs `body` for each rank in a thread of its own; the first error.
Result<> on_each(std::uint32_t ranks, const std::function<Result<>(std::uint32_t)>& body) {
  std::vector<Result<>> results(ranks);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) threads.emplace_back([&, rank] { results[rank] = body(rank); });
  for (std::thread& thread : threads) thread.join();
  for (Result<>& result : results) METRALE_TRY(std::move(result));
  return {};
}

/// A rank's side of both comparisons, in the order in which it is made.
struct Rank {
  GpuBackend* backend = nullptr;
  Communicator* communicator = nullptr;
  DeviceBuffer from;
  DeviceBuffer to;
  Stream stream;
  Graph ours;
  Graph theirs;
};

Result<> make_memory(Rank& rank, std::uint64_t bytes, std::uint32_t seed) {
  rank.from = METRALE_TRY(DeviceBuffer::create(*rank.backend, bytes));
  rank.to = METRALE_TRY(DeviceBuffer::create(*rank.backend, bytes));
  std::vector<float> values(bytes / sizeof(float));
  std::minstd_rand random(seed);
  for (float& value : values) value = static_cast<float>(random() % 20'001) / 10'000 - 1;
  METRALE_TRY(rank.backend->copy_h2d(rank.from.ptr(), std::as_bytes(std::span(values))));
  rank.stream = METRALE_TRY(Stream::create(*rank.backend));
  return {};
}

Row row_of(const Size& size) {
  return {.suite = "collective",
          .name = fmt::format("all-reduce of {} f32 over 2 devices, in a graph", size.name),
          .unit = "us",
          .measure = Measure::ratio,
          .target = {.minimum = 1.03, .goal = 1.01}};
}

/// Captures `calls` all-reduces of each side, once each has run outside a capture: the first makes connections.
Result<> capture(Rank& rank, std::uint32_t index, const RawNccl& raw, std::uint64_t count, std::uint32_t calls) {
  const StreamHandle stream = rank.stream.handle();
  const std::uint64_t native = METRALE_TRY(rank.backend->native_stream(stream));
  const auto ours = [&] { return rank.communicator->all_reduce(rank.from.ptr(), rank.to.ptr(), count, DType::f32, stream); };
  const auto theirs = [&] { return raw.all_reduce(index, rank.from.ptr(), rank.to.ptr(), count, native); };
  METRALE_TRY(rank.backend->bind_to_thread());
  METRALE_TRY(ours());
  METRALE_TRY(rank.communicator->synchronize(stream));
  METRALE_TRY(theirs());
  METRALE_TRY(rank.backend->synchronize(stream));
  CaptureScope scope = METRALE_TRY(CaptureScope::begin(*rank.backend, stream));
  for (std::uint32_t i = 0; i < calls; ++i) METRALE_TRY(ours());
  rank.ours = METRALE_TRY(scope.end());
  CaptureScope other = METRALE_TRY(CaptureScope::begin(*rank.backend, stream));
  for (std::uint32_t i = 0; i < calls; ++i) METRALE_TRY(theirs());
  rank.theirs = METRALE_TRY(other.end());
  return {};
}

Result<> measure_size(Session& session, std::span<const std::unique_ptr<Communicator>> world, const RawNccl& raw,
                      const Size& size) {
  std::vector<Rank> ranks(world.size());
  for (std::uint32_t i = 0; i < ranks.size(); ++i) {
    ranks[i].backend = &world[i]->backend();
    ranks[i].communicator = world[i].get();
    METRALE_TRY(make_memory(ranks[i], size.bytes, i + 1));
  }
  const std::uint64_t count = size.bytes / sizeof(float);
  Result<> captured = on_each(kRanks, [&](std::uint32_t rank) { return capture(ranks[rank], rank, raw, count, size.calls); });
  if (!captured) return captured;
  const auto sample = [&](Graph Rank::* graph) -> Result<double> {
    // The other rank waits for the first, whose time it is.
    METRALE_TRY((ranks[1].*graph).launch(ranks[1].stream.handle()));
    const StreamHandle stream = ranks[0].stream.handle();
    const double seconds = METRALE_TRY(session.device_seconds(stream, [&] { return (ranks[0].*graph).launch(stream); }));
    METRALE_TRY(ranks[1].communicator->synchronize(ranks[1].stream.handle()));
    return seconds * 1e6 / size.calls;
  };
  Row row = row_of(size);
  row.ours = series("all_reduce");
  row.theirs = series("ncclAllReduce");
  return session.measure(std::move(row), [&] { return sample(&Rank::ours); }, [&] { return sample(&Rank::theirs); });
}

/// Host time of a call outside graphs, in a world of this device alone.
Result<> measure_call(Session& session, int device, const Size& size) {
  GpuBackend* const on[] = {&session.backend()};
  const auto world = METRALE_TRY(nccl::create_all(on));
  const auto raw = METRALE_TRY(RawNccl::create({&device, 1}));
  Rank rank;
  rank.backend = on[0];
  METRALE_TRY(make_memory(rank, size.bytes, 1));
  const StreamHandle stream = rank.stream.handle();
  const std::uint64_t native = METRALE_TRY(rank.backend->native_stream(stream));
  const std::uint64_t count = size.bytes / sizeof(float);
  const std::uint32_t calls = session.scale().launch_batch / 8;
  const auto sample = [&](const std::function<Result<>()>& call) -> Result<double> {
    const Result<double> seconds = host_seconds([&]() -> Result<> {
      for (std::uint32_t i = 0; i < calls; ++i) METRALE_TRY(call());
      return {};
    });
    if (!seconds) return seconds;
    METRALE_TRY(rank.backend->synchronize(stream));
    return *seconds * 1e6 / calls;
  };
  return session.measure(
      {.suite = "collective",
       .name = fmt::format("all-reduce of {} f32 in a world of one, host time of a call outside graphs", size.name),
       .unit = "us",
       .ours = series("all_reduce"),
       .theirs = series("ncclAllReduce"),
       .measure = Measure::difference},
      [&] { return sample([&] { return world[0]->all_reduce(rank.from.ptr(), rank.to.ptr(), count, DType::f32, stream); }); },
      [&] { return sample([&] { return raw->all_reduce(0, rank.from.ptr(), rank.to.ptr(), count, native); }); });
}

Result<> run_on_devices(Session& session, std::span<const Size> sizes) {
  const auto skip = [&](const std::string& why) {
    for (const Size& size : sizes) {
      Row row = row_of(size);
      row.note = why;
      session.report().rows.push_back(std::move(row));
    }
  };
  const BridgeStatus status = nccl::status();
  if (!status.is_available) {
    skip(status.text);
    return {};
  }
  const int first = static_cast<int>(switches().cuda_device);
  METRALE_TRY(measure_call(session, first, sizes[0]));
  const int second = first == 0 ? 1 : 0;
  BackendOptions options;
  options.cuda_device = second;
  options.face.redzone_bytes = 0;
  Result<std::unique_ptr<GpuBackend>> other = create_backend("cuda", options);
  if (!other) {
    skip(fmt::format("two devices are needed: {}", other.error().message()));
    return {};
  }
  GpuBackend* const on[] = {&session.backend(), other->get()};
  const int devices[] = {first, second};
  const auto world = METRALE_TRY(nccl::create_all(on));
  const auto raw = METRALE_TRY(RawNccl::create(devices));
  for (const Size& size : sizes) METRALE_TRY(measure_size(session, world, *raw, size));
  return {};
}

Result<> run_on_host(Session& session, const Size& size) {
  std::vector<std::unique_ptr<GpuBackend>> backends;
  std::vector<GpuBackend*> on;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    BackendOptions options;
    options.host_threads = 1;
    backends.push_back(METRALE_TRY(create_backend("host", options)));
    on.push_back(backends.back().get());
  }
  const auto world = METRALE_TRY(in_process::create(on));
  std::vector<Rank> ranks(kRanks);
  for (std::uint32_t i = 0; i < kRanks; ++i) {
    ranks[i].backend = on[i];
    METRALE_TRY(make_memory(ranks[i], size.bytes, i + 1));
  }
  const Sample sample = [&]() -> Result<double> {
    const auto body = [&](std::uint32_t rank) -> Result<> {
      const Rank& r = ranks[rank];
      const std::uint64_t count = size.bytes / sizeof(float);
      for (std::uint32_t i = 0; i < size.calls; ++i)
        METRALE_TRY(world[rank]->all_reduce(r.from.ptr(), r.to.ptr(), count, DType::f32, r.stream.handle()));
      return world[rank]->synchronize(r.stream.handle());
    };
    const Result<double> seconds = host_seconds([&] { return on_each(kRanks, body); });
    if (!seconds) return seconds;
    return *seconds * 1e6 / size.calls;
  };
  METRALE_TRY(session.measure({.suite = "collective",
                               .name = fmt::format("all-reduce of {} f32 over 2 ranks of one process, host time", size.name),
                               .unit = "us",
                               .ours = series("all_reduce")},
                              sample, {}));
  for (const auto& rank : world) METRALE_TRY(rank->trim());
  return {};
}

}  // namespace

Result<> run_collective(Session& session, const Options&) {
  static constexpr Size kSizes[] = {{std::uint64_t{64} << 10, "64 KiB", 32}, {std::uint64_t{64} << 20, "64 MiB", 8}};
  if (session.backend().name() == "cuda") return run_on_devices(session, kSizes);
  return run_on_host(session, kSizes[0]);
}

}  // namespace metrale::bench
