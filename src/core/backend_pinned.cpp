// SPDX-License-Identifier: Apache-2.0
//
// GpuBackend: pinned and registered host memory, and memory of other libraries.
#include <cstring>

#include <fmt/format.h>

#include "core/face_state.h"

namespace metrale {

using detail::at;
using detail::FaceState;

namespace {

DevicePtr host_key(const void* ptr) { return {reinterpret_cast<std::uintptr_t>(ptr)}; }

/// A block that shares bytes with [base, base + bytes).
std::optional<Allocation> overlapping(const AllocLedger& ledger, DevicePtr base, std::uint64_t bytes) {
  for (const Allocation& block : ledger.snapshot()) {
    if (block.base.address < base.address + bytes && base.address < block.base.address + block.bytes) return block;
  }
  return std::nullopt;
}

/// Makes host memory known on both sides, or on none.
Result<> enter_both(FaceState& f, GpuBackend::Site site, void* ptr, std::uint64_t bytes, MemoryKind kind,
                    const std::function<Result<DevicePtr>(void*)>& alias_of) {
  if (f.capabilities.has(Capability::host_alias)) {
    const DevicePtr alias = METRALE_TRY(alias_of(ptr));
    std::lock_guard lock(f.alias_mutex);
    if (kind == MemoryKind::registered) {
      if (const auto block = overlapping(f.device, alias, bytes)) {
        return Error(Errc::invalid_argument,
                     fmt::format("register_host: the device sees the memory at [{:#x}, +{}), where {} bytes of {} memory allocated "
                                 "at {} are",
                                 alias.address, bytes, block->bytes, metrale::to_string(block->kind), at(block->site)),
                     site);
      }
    }
    f.aliases[host_key(ptr).address] = alias;
    detail::Undo forget([&] {
      f.device.take(alias, kind_bit(kind), AllocLedger::Named::goes);
      f.aliases.erase(host_key(ptr).address);
    });
    f.device.add(alias, bytes, kind, site);
    f.host.add(host_key(ptr), bytes, kind, site);
    forget.keep();
    return {};
  }
  f.host.add(host_key(ptr), bytes, kind, site);
  return {};
}

/// As above; without memory for the tables an error too.
Result<> enter(FaceState& f, GpuBackend::Site site, void* ptr, std::uint64_t bytes, MemoryKind kind,
               const std::function<Result<DevicePtr>(void*)>& alias_of) {
  return FaceState::caught("enter host memory", site, [&] { return enter_both(f, site, ptr, bytes, kind, alias_of); });
}

/// Takes host memory off both tables unless a graph names it. `bytes` 0: whatever its size.
Result<Allocation> leave(FaceState& f, GpuBackend::Site site, std::string_view what, void* ptr, std::uint64_t bytes,
                         MemoryKind kind) {
  const auto block = f.host.find(host_key(ptr));
  if (!block || block->base != host_key(ptr) || block->kind != kind) {
    if (!f.usable()) return Allocation{};  // swept already
    return Error(Errc::invalid_argument, fmt::format("{}: {} is not the start of such memory", what, ptr), site);
  }
  if (bytes != 0 && block->bytes != bytes) {
    return Error(Errc::invalid_argument,
                 fmt::format("{}: {} bytes were given, {} were allocated at {}", what, bytes, block->bytes, at(block->site)), site);
  }
  f.reap_retired_graphs();
  std::lock_guard lock(f.alias_mutex);
  const auto alias = f.aliases.find(host_key(ptr).address);
  if (alias != f.aliases.end() && f.usable()) {
    if (const auto seen = f.device.find(alias->second); seen && seen->graph_refs > 0) return f.in_use(*seen, site);
  }
  const AllocLedger::TakeResult taken =
      f.host.take(host_key(ptr), kind_bit(kind), f.usable() ? AllocLedger::Named::stays : AllocLedger::Named::goes);
  if (taken.status == AllocLedger::Take::named_by_graph) return f.in_use(taken.block, site);
  if (taken.status != AllocLedger::Take::taken) {
    return Error(Errc::invalid_argument, fmt::format("{}: {} was given back by another thread", what, ptr), site);
  }
  if (alias != f.aliases.end()) {
    f.device.take(alias->second, kind_bit(kind), AllocLedger::Named::goes);
    f.aliases.erase(alias);
  }
  if (!f.usable()) f.abandoned_bytes.fetch_add(taken.block.bytes, std::memory_order_relaxed);
  return taken.block;
}

}  // namespace

namespace detail {

Result<> FaceState::wait_for_earlier_work() {
  // Without streams every call is done when it returns.
  return capabilities.has(Capability::streams) ? hooks.do_wait_for_earlier_work() : Result<>();
}

Result<> FaceState::unregister(void* ptr, std::uint64_t bytes) {
  Result<> waited = wait_for_earlier_work();
  Result<> unpinned = hooks.do_unregister_host(ptr, bytes);
  return waited ? std::move(unpinned) : std::move(waited);
}

}  // namespace detail

Result<std::span<std::byte>> GpuBackend::alloc_host_pinned(std::uint64_t bytes, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::alloc_host_pinned, .bytes = bytes, .site = site};
  return f.run(op, [&]() -> Result<std::span<std::byte>> {
    if (bytes == 0) return Error(Errc::invalid_argument, "alloc_host_pinned of 0 bytes", site);
    METRALE_TRY(f.guard_thread(op.op, site));
    void* ptr = METRALE_TRY(do_alloc_pinned(bytes));
    std::memset(ptr, 0, bytes);
    if (auto entered = enter(f, site, ptr, bytes, MemoryKind::pinned, [this](void* p) { return do_host_alias(p); }); !entered) {
      return f.after_undoing(std::move(entered).error(), "the memory", do_free_pinned(ptr, bytes), op);
    }
    return std::span<std::byte>(static_cast<std::byte*>(ptr), bytes);
  });
}

Result<> GpuBackend::free_host_pinned(void* ptr, std::uint64_t bytes, Site site) {
  if (ptr == nullptr) return {};
  FaceState& f = *face_;
  OpRecord op{.op = Op::free_host_pinned, .dst = host_key(ptr).address, .bytes = bytes, .site = site};
  return f.run_always(op, [&]() -> Result<> {
    METRALE_TRY(f.guard_thread(op.op, site));
    if (bytes == 0) return Error(Errc::invalid_argument, "free_host_pinned of 0 bytes: give the size that was allocated", site);
    METRALE_TRY(leave(f, site, "free_host_pinned", ptr, bytes, MemoryKind::pinned));
    return f.usable() ? do_free_pinned(ptr, bytes) : Result<>();
  });
}

Result<> GpuBackend::register_host(std::span<std::byte> memory, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::register_host, .dst = host_key(memory.data()).address, .bytes = memory.size(), .site = site};
  return f.run(op, [&]() -> Result<> {
    if (memory.empty()) return Error(Errc::invalid_argument, "register_host of no memory", site);
    METRALE_TRY(f.guard_thread(op.op, site));
    if (overlapping(f.host, host_key(memory.data()), memory.size())) {
      return Error(Errc::invalid_argument, "register_host: the memory overlaps pinned or registered memory", site);
    }
    METRALE_TRY(do_register_host(memory.data(), memory.size()));
    auto entered =
        enter(f, site, memory.data(), memory.size(), MemoryKind::registered, [this](void* p) { return do_host_alias(p); });
    if (entered) return {};
    return f.after_undoing(std::move(entered).error(), "the registration", do_unregister_host(memory.data(), memory.size()), op);
  });
}

Result<> GpuBackend::unregister_host(void* ptr, Site site) {
  if (ptr == nullptr) return {};
  FaceState& f = *face_;
  OpRecord op{.op = Op::unregister_host, .dst = host_key(ptr).address, .site = site};
  return f.run_always(op, [&]() -> Result<> {
    METRALE_TRY(f.guard_thread(op.op, site));
    const Allocation block = METRALE_TRY(leave(f, site, "unregister_host", ptr, 0, MemoryKind::registered));
    return f.usable() ? f.unregister(ptr, block.bytes) : Result<>();
  });
}

Result<DevicePtr> GpuBackend::host_ptr_to_device(const void* host, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::host_ptr_to_device, .src = host_key(host).address, .site = site};
  return f.run(op, [&]() -> Result<DevicePtr> {
    const auto block = f.host.find(host_key(host));
    if (!block)
      return Error(Errc::invalid_argument, fmt::format("host_ptr_to_device: {} is not pinned or registered memory", host), site);
    std::lock_guard lock(f.alias_mutex);
    const auto alias = f.aliases.find(block->base.address);
    if (alias == f.aliases.end()) return Error(Errc::invalid_argument, "host_ptr_to_device: the memory was just given back", site);
    return alias->second.offset(host_key(host).address - block->base.address);
  });
}

bool GpuBackend::is_pinned(std::span<const std::byte> memory) const {
  return !memory.empty() && !in_forked_child() &&
         face_->host.check(host_key(memory.data()), memory.size()) == AllocLedger::Range::inside;
}

Result<> GpuBackend::adopt(DevicePtr ptr, std::uint64_t bytes, std::string_view label, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::adopt, .dst = ptr.address, .bytes = bytes, .site = site};
  return f.run(op, [&]() -> Result<> {
    if (!ptr || bytes == 0)
      return Error(Errc::invalid_argument, fmt::format("adopt of {} bytes at {:#x}", bytes, ptr.address), site);
    std::lock_guard lock(f.alias_mutex);
    if (bytes > UINT64_MAX - ptr.address || overlapping(f.device, ptr, bytes)) {
      return Error(Errc::invalid_argument,
                   fmt::format("adopt of \"{}\": [{:#x}, +{}) overlaps a live block", label, ptr.address, bytes), site);
    }
    f.adopted_labels[ptr.address] = label;
    detail::Undo forget([&] { f.adopted_labels.erase(ptr.address); });
    f.device.add(ptr, bytes, MemoryKind::adopted, site);
    forget.keep();
    return {};
  });
}

std::vector<std::pair<std::string, Allocation>> GpuBackend::adopted_memory() const {
  FaceState& f = *face_;
  if (in_forked_child()) return {};
  std::lock_guard lock(f.alias_mutex);
  std::vector<std::pair<std::string, Allocation>> adopted;
  for (const auto& [base, label] : f.adopted_labels) {
    if (const auto block = f.device.find({base})) adopted.emplace_back(label, *block);
  }
  return adopted;
}

Result<> GpuBackend::disown(DevicePtr ptr, Site site) {
  FaceState& f = *face_;
  OpRecord op{.op = Op::disown, .dst = ptr.address, .site = site};
  return f.run_always(op, [&]() -> Result<> {
    METRALE_TRY(f.guard_thread(op.op, site));
    METRALE_TRY(f.take_block(op.op, ptr, kind_bit(MemoryKind::adopted), site));
    {
      std::lock_guard lock(f.alias_mutex);
      f.adopted_labels.erase(ptr.address);
    }
    return f.usable() ? f.wait_for_earlier_work() : Result<>();
  });
}

}  // namespace metrale
