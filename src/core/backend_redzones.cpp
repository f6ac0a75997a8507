// SPDX-License-Identifier: Apache-2.0
//
// GpuBackend: scanning and poisoning of guard bands.
#include <algorithm>

#include <fmt/format.h>

#include "core/face_state.h"
#include "metrale/log.h"

namespace metrale {

using detail::at;
using detail::FaceState;
using detail::RedZone;
using detail::StreamRecord;

namespace {
constexpr std::uint8_t kPoison = 0xEE;
}

Result<std::uint64_t> GpuBackend::scan_redzones(Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::scan_redzones, .site = site};
  return f.run(op, [&]() -> Result<std::uint64_t> {
    METRALE_TRY(f.guard_thread(op.op, site));
    if (!f.red_zones.on()) return 0;
    METRALE_TRY(f.guard_device(op.op, site));
    METRALE_TRY(do_synchronize_device());
    StreamRecord* stream = METRALE_TRY(f.stream(f.default_stream, site));

    const std::unique_lock<std::mutex> held = f.red_zones.hold();
    // Every band in one batch with one wait.
    const std::vector<RedZone> zones = f.red_zones.snapshot();
    std::uint64_t total = 0;
    for (const RedZone& zone : zones) total += zone.band_bytes;
    std::vector<std::byte> bands(total);
    std::vector<CopyDesc> copies;
    std::uint64_t offset = 0;
    for (const RedZone& zone : zones) {
      copies.push_back({.src = zone.base.offset(zone.block_bytes), .host_dst = bands.data() + offset, .bytes = zone.band_bytes});
      offset += zone.band_bytes;
    }
    METRALE_TRY(do_copy_batch_async(copies, stream->native, false));
    METRALE_TRY(do_synchronize(stream->native));

    std::uint64_t violated = 0;
    offset = 0;
    for (const RedZone& zone : zones) {
      const auto* begin = bands.data() + offset;
      offset += zone.band_bytes;
      const auto differs = [&](std::byte b) { return b != std::byte{zone.written}; };
      const auto* first = std::find_if(begin, begin + zone.band_bytes, differs);
      if (first == begin + zone.band_bytes) continue;
      const auto* last = first;
      for (const auto* p = first; p != begin + zone.band_bytes; ++p) {
        if (differs(*p)) last = p;
      }
      ++violated;
      log(LogLevel::error,
          fmt::format("red zone of allocation {} ({} bytes, {}): bytes +{} to +{} past its end were written, first value {:#04x}",
                      zone.index, zone.block_bytes, at(zone.site), first - begin, last - begin, std::to_integer<unsigned>(*first)));
      METRALE_TRY(do_memset(zone.base.offset(zone.block_bytes), zone.written, zone.band_bytes, stream->native));
    }
    return violated;
  });
}

Result<> GpuBackend::poison_redzones(std::uint64_t lo, std::uint64_t hi, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::poison_redzones, .site = site};
  return f.run(op, [&]() -> Result<> {
    METRALE_TRY(f.guard_thread(op.op, site));
    if (!f.red_zones.on()) return {};
    StreamRecord* stream = METRALE_TRY(f.stream(f.default_stream, site));
    const std::unique_lock<std::mutex> held = f.red_zones.hold();
    for (const RedZone& zone : f.red_zones.snapshot()) {
      const std::uint8_t value = zone.index >= lo && zone.index < hi ? kPoison : 0;
      METRALE_TRY(do_memset(zone.base.offset(zone.block_bytes), value, zone.band_bytes, stream->native));
      f.red_zones.set_written(zone.base, value);
    }
    return {};
  });
}

}  // namespace metrale
