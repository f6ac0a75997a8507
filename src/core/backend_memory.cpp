// SPDX-License-Identifier: Apache-2.0
//
// GpuBackend: device memory, the pool, and what the ledger answers. Host memory is in backend_pinned.cpp, guard bands in
// backend_redzones.cpp.
#include <algorithm>

#include <fmt/format.h>

#include "core/face_state.h"
#include "metrale/log.h"
#include "metrale/switches.h"

namespace metrale {

using detail::at;
using detail::FaceState;
using detail::StreamRecord;
using detail::Undo;

namespace {

constexpr std::size_t kSitesInMessages = 5;

std::string largest_sites(const std::vector<Allocation>& blocks) {
  std::string text;
  std::size_t shown = 0;
  for (const SiteUse& use : uses_by_site(blocks)) {
    if (shown++ == kSitesInMessages) break;
    text += fmt::format("{}{} x {} bytes at {}", text.empty() ? "" : ", ", use.count, use.bytes, at(use.site));
  }
  return text.empty() ? "none" : text;
}

}  // namespace

namespace detail {

Error FaceState::out_of_memory(Op op, std::uint64_t bytes, const Site& site, std::string_view why) {
  const DeviceMemoryInfo info = hooks.do_memory_info().value_or(DeviceMemoryInfo{});
  return Error(Errc::out_of_memory,
               fmt::format("{} of {} bytes: {}; device free {} of {} bytes, {} live here; largest: {}", metrale::to_string(op),
                           bytes, why, info.device_free, info.total, device.live_bytes(), largest_sites(device.snapshot())),
               site);
}

Result<std::unique_lock<std::mutex>> FaceState::check_budget(Op op, std::uint64_t bytes, const Site& site) {
  const std::uint64_t budget = budget_bytes.load(std::memory_order_relaxed);
  if (budget == UINT64_MAX) [[likely]]
    return std::unique_lock<std::mutex>();
  std::unique_lock lock(budget_mutex);
  if (bytes <= budget && device.live_bytes() <= budget - bytes) return lock;
  return out_of_memory(op, bytes, site, fmt::format("the budget is {} bytes", budget));
}

Result<DevicePtr> FaceState::alloc_with_retry(Op op, std::uint64_t bytes, std::uint64_t band, MemoryKind kind, const Site& site) {
  auto ptr = hooks.do_alloc(bytes + band, kind);
  if (ptr || ptr.error().code() != Errc::out_of_memory) return ptr;
  pool.trim();
  ptr = hooks.do_alloc(bytes + band, kind);
  if (ptr || ptr.error().code() != Errc::out_of_memory) return ptr;
  Error error = out_of_memory(op, bytes, site, "the driver refused, also after the pool was trimmed");
  if (ptr.error().native_code() != 0) {
    error = std::move(error).with_native(ptr.error().native_code(), ptr.error().native_text());
  }
  return error;
}

Result<DevicePtr> FaceState::allocate(Op op, std::uint64_t bytes, MemoryKind kind, const Site& site) {
  if (bytes == 0) return Error(Errc::invalid_argument, fmt::format("{} of 0 bytes", metrale::to_string(op)), site);
  METRALE_TRY(guard_thread(op, site));
  std::unique_lock<std::mutex> budget_lock;
  if (counts_as_live(kind)) budget_lock = METRALE_TRY(check_budget(op, bytes, site));
  if (kind == MemoryKind::managed) {
    DeviceMemoryInfo info = METRALE_TRY(hooks.do_memory_info());
    if (bytes > info.device_free && pool.trim() != 0) info = METRALE_TRY(hooks.do_memory_info());
    if (bytes > info.device_free) return out_of_memory(op, bytes, site, "managed memory beyond the device's own can hang it");
  }
  std::uint64_t band = 0;
  RedZone zone;
  if (red_zones.on()) [[unlikely]] {
    zone.index = red_zones.next_index();
    if (zone.index >= switches().redzone_min_idx) band = red_zones.band_bytes();
    if (switches().redzone_trace_idx == zone.index) {
      log(LogLevel::info, fmt::format("allocation {}: {} bytes at {}", zone.index, bytes, at(site)));
    }
  }
  if (bytes > UINT64_MAX - band) return out_of_memory(op, bytes, site, "the size with its guard band overflows");
  const DevicePtr ptr = METRALE_TRY(alloc_with_retry(op, bytes, band, kind, site));
  // Red zones and ledger need memory of their own; without it the block goes back.
  Undo give_back([&] {
    if (band != 0) red_zones.remove(ptr);
    static_cast<void>(hooks.do_free(ptr, bytes + band, kind).has_value());
  });
  if (band != 0) {
    zone.base = ptr, zone.block_bytes = bytes, zone.band_bytes = band, zone.site = site, zone.written = switches().redzone_fill;
    // Blocking, so that the band holds its value before anything can use the block.
    const StreamRecord* stream = streams.find(default_stream.value);
    Result<> filled = stream == nullptr ? Result<>() : hooks.do_memset(ptr.offset(bytes), zone.written, band, stream->native);
    if (!filled) {
      Error error = std::move(filled).error().with_note("while filling the guard band");
      give_back.keep();
      return after_undoing(std::move(error), "the block", hooks.do_free(ptr, bytes + band, kind),
                           {.op = op, .dst = ptr.address, .bytes = bytes, .site = site});
    }
  }
  if (band != 0) red_zones.add(zone);
  device.add(ptr, bytes, kind, site);
  give_back.keep();
  return ptr;
}

Error FaceState::not_a_base(std::string_view what, DevicePtr ptr, const Site& site) const {
  std::string where = "no block is live";
  if (const auto nearest = device.nearest(ptr)) {
    where = fmt::format("the nearest is [{:#x}, +{}) {} allocated at {}", nearest->base.address, nearest->bytes,
                        metrale::to_string(nearest->kind), at(nearest->site));
  }
  return Error(Errc::invalid_argument,
               fmt::format("{}: {:#x} is not the base of a live block of that kind; {}", what, ptr.address, where), site);
}

Result<std::optional<Allocation>> FaceState::take_block(Op op, DevicePtr ptr, std::uint32_t kinds, const Site& site) {
  AllocLedger::TakeResult taken = device.take(ptr, kinds, usable() ? AllocLedger::Named::stays : AllocLedger::Named::goes);
  if (taken.status == AllocLedger::Take::named_by_graph) {
    reap_retired_graphs();
    taken = device.take(ptr, kinds);
    if (taken.status == AllocLedger::Take::named_by_graph) return in_use(taken.block, site);
  }
  if (taken.status != AllocLedger::Take::taken) {
    if (!usable()) return std::nullopt;
    return not_a_base(metrale::to_string(op), ptr, site);
  }
  if (!usable() && taken.block.kind != MemoryKind::adopted) {
    abandoned_bytes.fetch_add(taken.block.bytes, std::memory_order_relaxed);
  }
  return taken.block;
}

Result<> FaceState::release(Op op, DevicePtr ptr, std::uint32_t kinds, const Site& site) {
  METRALE_TRY(guard_thread(op, site));
  const std::optional<Allocation> block = METRALE_TRY(take_block(op, ptr, kinds, site));
  if (!block) return {};
  const std::uint64_t band = red_zones.on() ? red_zones.remove(ptr) : 0;
  return usable() ? hooks.do_free(ptr, block->bytes + band, block->kind) : Result<>();
}

}  // namespace detail

Result<DevicePtr> GpuBackend::alloc(std::uint64_t bytes, Site site) {
  OpRecord op{.op = Op::alloc, .bytes = bytes, .site = site};
  return face_->run(op, [&] { return face_->allocate(op.op, bytes, MemoryKind::device, site); });
}

Result<DevicePtr> GpuBackend::alloc_managed(std::uint64_t bytes, Site site) {
  OpRecord op{.op = Op::alloc_managed, .bytes = bytes, .site = site};
  return face_->run(op, [&] { return face_->allocate(op.op, bytes, MemoryKind::managed, site); });
}

Result<DevicePtr> GpuBackend::alloc_arena(std::uint64_t bytes, Site site) {
  OpRecord op{.op = Op::alloc_arena, .bytes = bytes, .site = site};
  return face_->run(op, [&] { return face_->allocate(op.op, bytes, MemoryKind::arena, site); });
}

Result<> GpuBackend::free(DevicePtr ptr, Site site) {
  if (!ptr) return {};
  OpRecord op{.op = Op::free, .dst = ptr.address, .site = site};
  return face_->run_always(
      op, [&] { return face_->release(op.op, ptr, kind_bit(MemoryKind::device) | kind_bit(MemoryKind::managed), site); });
}

Result<> GpuBackend::free_arena(DevicePtr ptr, Site site) {
  if (!ptr) return {};
  OpRecord op{.op = Op::free_arena, .dst = ptr.address, .site = site};
  return face_->run_always(op, [&] { return face_->release(op.op, ptr, kind_bit(MemoryKind::arena), site); });
}

Result<DevicePtr> GpuBackend::alloc_async(std::uint64_t bytes, StreamHandle stream, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::alloc_async, .stream = stream, .bytes = bytes, .site = site};
  return f.run(op, [&]() -> Result<DevicePtr> {
    if (bytes == 0) return Error(Errc::invalid_argument, "alloc_async of 0 bytes", site);
    METRALE_TRY(f.guard_thread(op.op, site));
    StreamRecord* record = METRALE_TRY(f.stream(stream, site));
    METRALE_TRY(f.guard_not_captured(op.op, record->capture.load(std::memory_order_acquire), site));
    const std::unique_lock<std::mutex> budget_lock = METRALE_TRY(f.check_budget(op.op, bytes, site));
    auto ptr = f.pool.take(bytes, record->native, record->pool);
    if (!ptr) {
      if (ptr.error().code() != Errc::out_of_memory) return ptr;
      return f.out_of_memory(op.op, bytes, site, "the driver refused, also after the pool was trimmed");
    }
    Undo give_back([&] { f.pool.give(*ptr, bytes, record->pool); });
    f.device.add(*ptr, bytes, MemoryKind::pooled, site);
    give_back.keep();
    return ptr;
  });
}

Result<> GpuBackend::free_async(DevicePtr ptr, StreamHandle stream, Site site) {
  if (!ptr) return {};
  FaceState& f = *face_;
  OpRecord op{.op = Op::free_async, .stream = stream, .dst = ptr.address, .site = site};
  return f.run_always(op, [&]() -> Result<> {
    METRALE_TRY(f.guard_thread(op.op, site));
    // On a lost device the stream may be gone; the block still leaves the ledger.
    StreamRecord* record = f.usable() ? METRALE_TRY(f.stream(stream, site)) : nullptr;
    if (f.usable()) METRALE_TRY(f.guard_not_captured(op.op, record->capture.load(std::memory_order_acquire), site));
    const std::optional<Allocation> block = METRALE_TRY(f.take_block(op.op, ptr, kind_bit(MemoryKind::pooled), site));
    if (!block || !f.usable()) return {};
    // Where the pool's list cannot grow, the block stays the caller's.
    Undo undo([&] { f.device.add(ptr, block->bytes, block->kind, block->site); });
    f.pool.give(ptr, block->bytes, record->pool);
    undo.keep();
    return {};
  });
}

Result<std::uint64_t> GpuBackend::trim(Site site) {
  OpRecord op{.op = Op::trim, .site = site};
  return face_->run(op, [&]() -> Result<std::uint64_t> {
    METRALE_TRY(face_->guard_thread(op.op, site));
    return face_->pool.trim();
  });
}

std::uint64_t GpuBackend::pool_reserved_bytes() const { return in_forked_child() ? 0 : face_->pool.reserved_bytes(); }

Result<> GpuBackend::memset(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::memset, .stream = f.default_stream, .dst = dst.address, .bytes = bytes, .site = site};
  return f.run(op, [&]() -> Result<> {
    METRALE_TRY(f.guard_thread(op.op, site));
    if (bytes == 0) return {};
    METRALE_TRY(f.check_device("memset", dst, bytes, site));
    StreamRecord* stream = METRALE_TRY(f.stream(f.default_stream, site));
    return do_memset(dst, value, bytes, stream->native);
  });
}

Result<> GpuBackend::memset_async(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, StreamHandle stream, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::memset_async, .stream = stream, .dst = dst.address, .bytes = bytes, .site = site};
  return f.run(op, [&]() -> Result<> {
    StreamRecord* record = METRALE_TRY(f.stream_for_work(op.op, stream, site));
    if (bytes == 0) return {};
    METRALE_TRY(f.check_device("memset_async", dst, bytes, site));
    METRALE_TRY(do_memset_async(dst, value, bytes, record->native));
    f.name_device(*record, dst);
    return {};
  });
}

Result<std::uint64_t> GpuBackend::total_memory(Site site) {
  return face_->run({.op = Op::memory_info, .site = site},
                    [&]() -> Result<std::uint64_t> { return METRALE_TRY(do_memory_info()).total; });
}

Result<std::uint64_t> GpuBackend::free_memory(Site site) {
  return face_->run({.op = Op::memory_info, .site = site}, [&]() -> Result<std::uint64_t> {
    const DeviceMemoryInfo info = METRALE_TRY(do_memory_info());
    // Only an integrated device may use what the host has left; on a discrete card the host's figure would be fiction.
    return info.integrated ? std::max(info.device_free, info.host_available) : info.device_free;
  });
}

Result<std::uint64_t> GpuBackend::device_free_memory(Site site) {
  return face_->run({.op = Op::memory_info, .site = site},
                    [&]() -> Result<std::uint64_t> { return METRALE_TRY(do_memory_info()).device_free; });
}

bool GpuBackend::shares_host_memory() {
  if (!face_->usable()) return false;
  return do_memory_info().value_or(DeviceMemoryInfo{}).integrated;
}

void GpuBackend::set_budget(std::optional<std::uint64_t> bytes) noexcept {
  face_->budget_bytes.store(bytes.value_or(UINT64_MAX), std::memory_order_relaxed);
}

std::uint64_t GpuBackend::live_bytes() const { return face_->device.live_bytes(); }
std::uint64_t GpuBackend::peak_bytes() const { return face_->device.peak_bytes(); }
std::uint64_t GpuBackend::live_alloc_count() const { return face_->device.live_alloc_count(); }
std::vector<Allocation> GpuBackend::live_allocations() const {
  if (in_forked_child()) return {};
  return face_->known_blocks();
}

std::string GpuBackend::alloc_report(std::size_t top_n, std::uint64_t min_mb) const {
  if (in_forked_child()) return format_alloc_report({}, top_n, min_mb);
  std::vector<Allocation> blocks = face_->known_blocks();
  std::lock_guard lock(face_->alias_mutex);  // keeps the labels while the text is made
  for (Allocation& block : blocks) {
    if (block.kind != MemoryKind::adopted) continue;
    if (const auto label = face_->adopted_labels.find(block.base.address); label != face_->adopted_labels.end())
      block.owner = label->second;
  }
  return format_alloc_report(blocks, top_n, min_mb);
}

std::optional<std::uint64_t> GpuBackend::chunk_slack_bytes() const {
  if (!do_packs_small_allocations() || in_forked_child()) return std::nullopt;
  return metrale::chunk_slack_bytes(face_->device.snapshot());
}

Result<std::uint64_t> GpuBackend::sweep_unreleased(Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::sweep_unreleased, .site = site};
  return f.run_always(op, [&]() -> Result<std::uint64_t> {
    METRALE_TRY(f.guard_thread(op.op, site));
    const Result<> retired = f.retire_all_graphs();
    // What is left in the cache afterwards is named still and goes below, so the cache must not hand it out again.
    if (f.op_cache) {
      if (const Result<> released = f.op_cache->release(*this); !released && released.error().code() != Errc::in_use) {
        log(LogLevel::warning, fmt::format("sweep: {}", released.error().to_string()));
      }
      f.op_cache->forget_scratch();
    }

    const std::vector<Allocation> on_device = f.device.snapshot();
    const std::vector<Allocation> on_host = f.host.snapshot();
    std::vector<Allocation> swept;
    swept.reserve(on_device.size() + on_host.size());
    const std::uint32_t freed_here = kind_bit(MemoryKind::device) | kind_bit(MemoryKind::managed) | kind_bit(MemoryKind::arena);
    for (const Allocation& block : on_device) {
      if ((kind_bit(block.kind) & (freed_here | kind_bit(MemoryKind::pooled))) == 0) continue;
      // Named ones too: replays still running were given to do_free, which waits for the work that may use the block.
      if (f.device.take(block.base, kind_bit(block.kind), AllocLedger::Named::goes).status != AllocLedger::Take::taken) continue;
      swept.push_back(block);
      const std::uint64_t band = f.red_zones.on() ? f.red_zones.remove(block.base) : 0;
      if (!f.usable()) {
        f.abandoned_bytes.fetch_add(block.bytes, std::memory_order_relaxed);
      } else if (block.kind == MemoryKind::pooled) {
        StreamRecord* stream = f.streams.find(f.default_stream.value);
        if (stream != nullptr) f.pool.give(block.base, block.bytes, stream->pool);
      } else if (auto freed = do_free(block.base, block.bytes + band, block.kind); !freed) {
        log(LogLevel::warning, fmt::format("sweep: {}", freed.error().to_string()));
      }
    }
    if (f.usable()) {
      f.pool.trim();
    } else {
      f.pool.forget();
    }
    for (const Allocation& block : on_host) {
      void* ptr = reinterpret_cast<void*>(static_cast<std::uintptr_t>(block.base.address));
      if (f.host.take(block.base, kAllKinds, AllocLedger::Named::goes).status != AllocLedger::Take::taken) continue;
      {
        std::lock_guard lock(f.alias_mutex);
        if (const auto alias = f.aliases.find(block.base.address); alias != f.aliases.end()) {
          f.device.take(alias->second, kind_bit(block.kind), AllocLedger::Named::goes);
          f.aliases.erase(alias);
        }
      }
      swept.push_back(block);
      if (!f.usable()) {
        f.abandoned_bytes.fetch_add(block.bytes, std::memory_order_relaxed);
        continue;
      }
      Result<> freed = block.kind == MemoryKind::pinned ? do_free_pinned(ptr, block.bytes) : f.unregister(ptr, block.bytes);
      if (!freed) log(LogLevel::warning, fmt::format("sweep: {}", freed.error().to_string()));
    }
    if (!swept.empty()) {
      std::uint64_t bytes = 0;
      for (const Allocation& block : swept) bytes += block.bytes;
      log(LogLevel::warning, fmt::format("sweep: {} blocks of {} bytes in all were never released; largest: {}", swept.size(),
                                         bytes, largest_sites(swept)));
    }
    METRALE_TRY(retired);
    return swept.size();
  });
}

}  // namespace metrale
