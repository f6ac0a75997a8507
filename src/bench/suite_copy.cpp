// SPDX-License-Identifier: Apache-2.0
//
// Suite copy: many blocks with one wait, in both directions, and large copies. Times are the host's, from the first call to the end
// of the wait; within the device they are the device's.
#include <cstring>
#include <random>

#include <fmt/format.h>

#include "bench/suites.h"
#include "metrale/pinned_buffer.h"

namespace metrale::bench {
namespace {

Sample milliseconds(std::function<Result<>()> body) {
  return [body = std::move(body)]() -> Result<double> { return METRALE_TRY(host_seconds(body)) * 1e3; };
}

void randomise(std::span<std::byte> memory) {
  std::mt19937_64 random(11);
  for (std::size_t i = 0; i + sizeof(std::uint64_t) <= memory.size(); i += sizeof(std::uint64_t)) {
    const std::uint64_t word = random();
    std::memcpy(memory.data() + i, &word, sizeof(word));
  }
}

/// Blocks that lie apart on the device and together on the host.
struct Gather {
  std::vector<RawCopy> pinned;
  std::vector<RawCopy> pageable;
  std::vector<CopyDesc> to_host;
  std::vector<CopyDesc> to_device;
};

Gather make_gather(const Scale& scale, DevicePtr device, std::span<std::byte> raw_pinned, std::span<std::byte> pageable,
                   std::span<std::byte> ours) {
  Gather g;
  const std::uint64_t bytes = scale.gather_block_bytes;
  for (std::uint64_t i = 0; i < scale.gather_blocks; ++i) {
    const DevicePtr at = device.offset(2 * i * bytes);
    if (!raw_pinned.empty()) g.pinned.push_back({raw_pinned.data() + i * bytes, at.address, bytes});
    g.pageable.push_back({pageable.data() + i * bytes, at.address, bytes});
    g.to_host.push_back({.src = at, .host_dst = ours.data() + i * bytes, .bytes = bytes});
    g.to_device.push_back({.dst = at, .host_src = ours.data() + i * bytes, .bytes = bytes});
  }
  return g;
}

Result<> blocks(Session& session) {
  GpuBackend& backend = session.backend();
  RawDevice* raw = session.raw();
  const Scale& scale = session.scale();
  const std::uint64_t total = scale.gather_blocks * scale.gather_block_bytes;
  const DeviceBuffer device = METRALE_TRY(DeviceBuffer::create(backend, 2 * total));
  METRALE_TRY(session.fill(device.ptr(), device.size_bytes(), 3));
  METRALE_TRY(backend.synchronize(backend.default_stream()));
  const PinnedBuffer host = METRALE_TRY(PinnedBuffer::create(backend, total));
  std::vector<std::byte> pageable(total);
  randomise(host.bytes());
  randomise(pageable);
  const std::span<std::byte> raw_pinned = raw ? METRALE_TRY(raw->pinned(total)) : std::span<std::byte>();
  if (raw) randomise(raw_pinned);
  const Gather g = make_gather(scale, device.ptr(), raw_pinned, pageable, host.bytes());
  const Stream stream = METRALE_TRY(Stream::create(backend));
  const std::string shape = fmt::format("{} x {} B", scale.gather_blocks, scale.gather_block_bytes);

  const auto batch = [&]() -> Result<> {
    METRALE_TRY(backend.copy_batch_async(g.to_host, stream.handle()));
    return stream.synchronize();
  };
  const auto single = [&]() -> Result<> {
    for (const CopyDesc& copy : g.to_host) {
      METRALE_TRY(backend.copy_d2h_async({static_cast<std::byte*>(copy.host_dst), copy.bytes}, copy.src, stream.handle()));
    }
    return stream.synchronize();
  };
  const auto raw_gather = [&, raw] { return raw->to_host(g.pinned); };
  METRALE_TRY(session.measure({.suite = "copy",
                               .name = "gather to host, " + shape + ", one call, one wait",
                               .unit = "ms",
                               .ours = series("copy_batch_async"),
                               .theirs = series("cuMemcpyDtoHAsync, pinned, one wait"),
                               .measure = Measure::ratio,
                               .target = {.minimum = 1.00, .goal = 0.95}},
                              milliseconds(batch), raw ? milliseconds(raw_gather) : Sample()));
  METRALE_TRY(session.measure({.suite = "copy",
                               .name = "gather to host, " + shape + ", a call each, one wait",
                               .unit = "ms",
                               .ours = series("copy_d2h_async"),
                               .theirs = series("cuMemcpyDtoHAsync, pinned, one wait"),
                               .measure = Measure::ratio},
                              milliseconds(single), raw ? milliseconds(raw_gather) : Sample()));
  METRALE_TRY(session.measure({.suite = "copy",
                               .name = "gather to host, " + shape + ", against blocking pageable",
                               .unit = "ms",
                               .ours = series("copy_batch_async"),
                               .theirs = series("cuMemcpyDtoHAsync, pageable, a wait each"),
                               .measure = Measure::speedup,
                               .better = Better::larger,
                               .target = {.minimum = 5, .goal = 5.7}},
                              milliseconds(batch),
                              raw ? milliseconds([&, raw] { return raw->to_host_blocking(g.pageable); }) : Sample()));
  const auto scatter = [&]() -> Result<> {
    METRALE_TRY(backend.copy_batch_async(g.to_device, stream.handle()));
    return stream.synchronize();
  };
  return session.measure({.suite = "copy",
                          .name = "scatter to device, " + shape + ", one call, one wait",
                          .unit = "ms",
                          .ours = series("copy_batch_async"),
                          .theirs = series("cuMemcpyHtoDAsync, pinned, one wait"),
                          .measure = Measure::ratio},
                         milliseconds(scatter), raw ? milliseconds([&, raw] { return raw->to_device(g.pinned); }) : Sample());
}

Result<> large(Session& session) {
  GpuBackend& backend = session.backend();
  RawDevice* raw = session.raw();
  const std::uint64_t bytes = session.scale().host_copy_bytes;
  const DeviceBuffer device = METRALE_TRY(DeviceBuffer::create(backend, bytes));
  const PinnedBuffer host = METRALE_TRY(PinnedBuffer::create(backend, bytes));
  randomise(host.bytes());
  const std::span<std::byte> raw_pinned = raw ? METRALE_TRY(raw->pinned(bytes)) : std::span<std::byte>();
  if (raw) randomise(raw_pinned);
  const std::vector<RawCopy> copy{{raw_pinned.data(), device.ptr().address, bytes}};
  const Stream stream = METRALE_TRY(Stream::create(backend));
  const std::string size = fmt::format("{} MiB, pinned", bytes >> 20);

  const auto rate = [bytes](std::function<Result<>()> body) -> Sample {
    return [bytes, body = std::move(body)]() -> Result<double> {
      return static_cast<double>(bytes) / 1e9 / METRALE_TRY(host_seconds(body));
    };
  };
  const auto up = [&]() -> Result<> {
    METRALE_TRY(backend.copy_h2d_async_retained(device.ptr(), host.bytes(), stream.handle()));
    return stream.synchronize();
  };
  const auto down = [&]() -> Result<> {
    METRALE_TRY(backend.copy_d2h_async(host.bytes(), device.ptr(), stream.handle()));
    return stream.synchronize();
  };
  METRALE_TRY(session.measure({.suite = "copy",
                               .name = "to device, " + size,
                               .unit = "GB/s",
                               .ours = series("copy_h2d_async_retained"),
                               .theirs = series("cuMemcpyHtoDAsync"),
                               .measure = Measure::ratio,
                               .better = Better::larger},
                              rate(up), raw ? rate([&, raw] { return raw->to_device(copy); }) : Sample()));
  return session.measure({.suite = "copy",
                          .name = "to host, " + size,
                          .unit = "GB/s",
                          .ours = series("copy_d2h_async"),
                          .theirs = series("cuMemcpyDtoHAsync"),
                          .measure = Measure::ratio,
                          .better = Better::larger},
                         rate(down), raw ? rate([&, raw] { return raw->to_host(copy); }) : Sample());
}

Result<> within_device(Session& session) {
  GpuBackend& backend = session.backend();
  RawDevice* raw = session.raw();
  const std::uint64_t bytes = session.scale().device_copy_bytes;
  const DeviceBuffer from = METRALE_TRY(DeviceBuffer::create(backend, bytes));
  const DeviceBuffer to = METRALE_TRY(DeviceBuffer::create(backend, bytes));
  METRALE_TRY(session.fill(from.ptr(), bytes, 5));
  METRALE_TRY(backend.synchronize(backend.default_stream()));
  const Stream stream = METRALE_TRY(Stream::create(backend));
  const double moved = 2 * static_cast<double>(bytes) / 1e9;
  const Sample ours = [&]() -> Result<double> {
    return moved / METRALE_TRY(session.device_seconds(
                       stream.handle(), [&] { return backend.copy_d2d_async(to.ptr(), from.ptr(), bytes, stream.handle()); }));
  };
  const Sample theirs = [&]() -> Result<double> {
    return moved / METRALE_TRY(raw->device_copy_seconds(to.ptr().address, from.ptr().address, bytes));
  };
  return session.measure({.suite = "copy",
                          .name = fmt::format("within the device, {} MiB, read + write", bytes >> 20),
                          .unit = "GB/s",
                          .ours = series("copy_d2d_async"),
                          .theirs = series("cuMemcpyDtoDAsync"),
                          .measure = Measure::ratio,
                          .better = Better::larger},
                         ours, raw ? theirs : Sample());
}

}  // namespace

Result<> run_copy(Session& session, const Options&) {
  METRALE_TRY(blocks(session));
  METRALE_TRY(large(session));
  return within_device(session);
}

}  // namespace metrale::bench
