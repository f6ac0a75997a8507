// SPDX-License-Identifier: Apache-2.0
//
// GpuBackend: construction, health, observers, shutdown.
#include <algorithm>

#include <fmt/format.h>

#include "core/face_state.h"
#include "core/op_needs.h"
#include "metrale/log.h"

namespace metrale {

using detail::FaceState;
using detail::StreamRecord;

GpuBackend::GpuBackend(FaceOptions options) : face_(std::make_unique<FaceState>(*this, options)) {}
GpuBackend::~GpuBackend() = default;

std::string_view GpuBackend::name() const noexcept { return do_name(); }
const Capabilities& GpuBackend::capabilities() const noexcept { return face_->capabilities; }
bool GpuBackend::in_forked_child() const noexcept { return face_->in_forked_child(); }
StreamHandle GpuBackend::default_stream() const noexcept { return face_->default_stream; }
OpCache& GpuBackend::op_cache() noexcept { return *face_->op_cache; }
SpanTimer& GpuBackend::timing() noexcept { return *face_->timer; }
FlightRecorder* GpuBackend::flight_recorder() noexcept { return face_->recorder.get(); }
std::uint64_t GpuBackend::abandoned_bytes() const noexcept { return face_->abandoned_bytes.load(std::memory_order_relaxed); }

Result<> GpuBackend::initialize(Site site) {
  FaceState& f = *face_;
  f.capabilities = do_capabilities();
  f.refused_ops = detail::unsupported_ops(f.capabilities);
  f.device_key = do_device_key();
  f.latch = detail::FaultLatch::of_device(f.device_key);
  f.op_cache = std::make_unique<OpCache>(*this);
  f.timer = std::make_unique<SpanTimer>(*this);
  f.pool.set_driver(f.pool_driver());
  if (f.capabilities.has(Capability::streams)) {
    const NativeStream native = METRALE_TRY(do_create_stream(0));
    f.default_stream.value = f.streams.insert([&](StreamRecord& record, std::uint64_t value) {
      record.handle = {value};
      record.native = native;
      record.is_default = true;
    });
    if (!f.default_stream) return Error(Errc::internal, "no handle left for the default stream", site);
  }
  return {};
}

Result<> GpuBackend::health(Site site) const {
  if (face_->usable()) return {};
  return FaceState::caught("health", site, [&]() -> Result<> { return face_->lost(site); });
}

Result<std::uint32_t> GpuBackend::sm_count(Site site) {
  FaceState& f = *face_;
  return f.run({.op = Op::sm_count, .site = site}, [&]() -> Result<std::uint32_t> {
    std::lock_guard lock(f.sm_count_mutex);
    if (!f.sm_count) {
      const std::uint32_t count = METRALE_TRY(do_sm_count());
      if (count == 0) return Error(Errc::internal, "the device reports no processors", site);
      f.sm_count = count;
    }
    return *f.sm_count;
  });
}

Result<> GpuBackend::bind_to_thread(Site site) {
  return face_->run({.op = Op::bind_to_thread, .site = site}, [&] { return do_bind_to_thread(); });
}

void GpuBackend::attach(Observer& observer) {
  std::unique_lock lock(face_->observers_mutex);
  face_->observers.push_back(&observer);
  face_->has_observers.store(true, std::memory_order_relaxed);
  face_->observed.store(true, std::memory_order_relaxed);
}

void GpuBackend::detach(Observer& observer) {
  if (in_forked_child()) return;
  std::unique_lock lock(face_->observers_mutex);
  std::erase(face_->observers, &observer);
  face_->has_observers.store(!face_->observers.empty(), std::memory_order_relaxed);
  face_->observed.store(face_->recorder != nullptr || !face_->observers.empty(), std::memory_order_relaxed);
}

Result<> GpuBackend::shutdown(Site site) {
  FaceState& f = *face_;
  if (f.in_forked_child()) return {};
  return FaceState::caught("shutdown", site, [&] { return close(site); });
}

Result<> GpuBackend::close(Site site) {
  FaceState& f = *face_;
  std::lock_guard lock(f.shutdown_mutex);
  if (f.shut_down.load(std::memory_order_acquire)) return {};
  if (!f.op_cache) {
    // Never initialised, because creating it failed before: there is nothing to release.
    f.shut_down.store(true, std::memory_order_release);
    do_shutdown();
    return {};
  }
  Result<> first;
  const auto keep = [&first](auto&& result) {
    if (!result && first) first = Error(std::forward<decltype(result)>(result).error());
  };
  for (const auto& open : f.captures.all()) keep(f.discard_capture(open.id, open.origin));
  if (f.usable() && f.capabilities.has(Capability::streams)) keep(do_synchronize_device());
  if (f.timer) keep(f.timer->release());
  // Before the scratch that they may name.
  keep(f.retire_all_graphs());
  if (f.op_cache) keep(f.op_cache->release(*this));
  auto swept = sweep_unreleased(site);
  // Without memory for its lists the sweep did nothing; open still, so that this can be called again.
  if (!swept && swept.error().code() == Errc::out_of_memory) return Error(std::move(swept).error());
  keep(std::move(swept));
  if (f.usable()) {
    // Blocks of streams that are gone, where nobody could tell when they were free: everything is done by now.
    keep(f.pool.free_all());
    keep(do_unload_modules());
    for (const std::uint64_t handle : f.events.handles()) keep(do_destroy_event(f.events.find(handle)->native));
    for (const std::uint64_t handle : f.streams.handles()) {
      StreamRecord* record = f.streams.find(handle);
      if (!record->is_foreign) keep(do_destroy_stream(record->native));
    }
  }
  f.shut_down.store(true, std::memory_order_release);
  do_shutdown();
  return first;
}

void GpuBackend::shutdown_from_destructor() noexcept {
  try {
    if (auto closed = shutdown(); !closed) {
      log(LogLevel::warning, fmt::format("closing the {} backend: {}", do_name(), closed.error().to_string()));
    }
  } catch (...) {
    // A destructor has nobody to tell: text for the log could not be made.
  }
}

}  // namespace metrale
