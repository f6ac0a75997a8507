// SPDX-License-Identifier: Apache-2.0
//
// Suite launch: what a launch costs the host. Batches are small enough that the driver's queue never fills, and the wait between
// two batches is not timed.
#include <array>

#include "bench/suites.h"

namespace metrale::bench {
namespace {

constexpr std::uint32_t kThreads = 32;
constexpr std::uint64_t kBufferBytes = 4'096;

/// Nanoseconds of a call, of `batches` times `batch` calls.
template <class Enqueue, class Wait>
Result<double> call_ns(std::uint32_t batches, std::uint32_t batch, const Enqueue& enqueue, const Wait& wait) {
  double seconds = 0;
  for (std::uint32_t i = 0; i < batches; ++i) {
    seconds += METRALE_TRY(host_seconds([&] { return enqueue(batch); }));
    METRALE_TRY(wait());
  }
  return seconds * 1e9 / (static_cast<double>(batches) * batch);
}

}  // namespace

Result<> run_launch(Session& session, const Options&) {
  GpuBackend& backend = session.backend();
  RawDevice* raw = session.raw();
  const Scale& scale = session.scale();
  const KernelHandle nop = METRALE_TRY(backend.kernel(kBenchModule, "nop8"));
  const KernelHandle waits = METRALE_TRY(backend.kernel(kBenchModule, "nop_waits"));
  const Stream stream = METRALE_TRY(Stream::create(backend));
  const DeviceBuffer buffer = METRALE_TRY(DeviceBuffer::create(backend, kBufferBytes));
  METRALE_TRY(backend.memset(buffer.ptr(), 0, kBufferBytes));

  const KernelArg pointer = KernelArg::buffer(buffer.ptr());
  const KernelArg word = KernelArg::value(std::uint32_t{1});
  const std::array<KernelArg, 8> args{pointer, pointer, pointer, pointer, word, word, word, word};
  const auto ours_wait = [&] { return stream.synchronize(); };
  const auto raw_wait = [&] { return raw->synchronize(); };
  const auto timed = [&](const auto& enqueue, const auto& wait) -> Sample {
    return [&, enqueue, wait] { return call_ns(scale.launch_batches, scale.launch_batch, enqueue, wait); };
  };
  const auto theirs = [&](const Sample& sample) { return raw != nullptr ? sample : Sample(); };

  const auto launch = [&](std::uint32_t count) -> Result<> {
    for (std::uint32_t i = 0; i < count; ++i) METRALE_TRY(backend.launch_typed(nop, {1}, {kThreads}, 0, stream.handle(), args));
    return {};
  };
  METRALE_TRY(session.measure({.suite = "launch",
                               .name = "launch of 8 arguments, host cost",
                               .unit = "ns",
                               .ours = series("launch_typed"),
                               .theirs = series("cuLaunchKernel"),
                               .measure = Measure::difference,
                               .target = {.minimum = 90, .goal = 40}},
                              timed(launch, ours_wait),
                              theirs(timed([&](std::uint32_t count) { return raw->launch_nops(count); }, raw_wait))));

  if (backend.capabilities().has(Capability::dependent_launch)) {
    const std::array<KernelArg, 1> one{pointer};
    const auto dependent = [&](std::uint32_t count) -> Result<> {
      for (std::uint32_t i = 0; i < count; ++i)
        METRALE_TRY(backend.launch_typed(waits, {1}, {kThreads}, 0, stream.handle(), one, {.dependent_launch = true}));
      return {};
    };
    METRALE_TRY(session.measure({.suite = "launch",
                                 .name = "dependent launch of 1 argument, host cost",
                                 .unit = "ns",
                                 .ours = series("launch_typed"),
                                 .theirs = series("cuLaunchKernelEx"),
                                 .measure = Measure::difference},
                                timed(dependent, ours_wait),
                                theirs(timed([&](std::uint32_t count) { return raw->launch_dependent(count); }, raw_wait))));
  }

  const auto launch_and_wait = [&](std::uint32_t count) -> Result<> {
    for (std::uint32_t i = 0; i < count; ++i) {
      METRALE_TRY(backend.launch_typed(nop, {1}, {kThreads}, 0, stream.handle(), args));
      METRALE_TRY(backend.synchronize(stream.handle()));
    }
    return {};
  };
  return session.measure({.suite = "launch",
                          .name = "launch and wait",
                          .unit = "ns",
                          .ours = series("launch_typed, synchronize"),
                          .theirs = series("cuLaunchKernel, cuStreamSynchronize"),
                          .measure = Measure::ratio},
                         timed(launch_and_wait, ours_wait),
                         theirs(timed([&](std::uint32_t count) { return raw->launch_and_wait(count); }, raw_wait)));
}

}  // namespace metrale::bench
