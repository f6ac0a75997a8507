// SPDX-License-Identifier: Apache-2.0
#include "metrale/op_cache.h"

#include <fmt/format.h>

#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/face_state.h"
#include "metrale/backend.h"
#include "metrale/handle_owner.h"
#include "metrale/owner_scope.h"

namespace metrale {

using detail::FaceState;

namespace {

std::size_t mix(std::size_t a, std::size_t b) noexcept { return a ^ (b + 0x9e3779b97f4a7c15ULL + (a << 6) + (a >> 2)); }

// Keys own their text in the map; look-ups compare views and allocate nothing.
struct KernelKeyView {
  std::string_view module;
  std::string_view function;
};
struct KernelKey {
  std::string module;
  std::string function;
  operator KernelKeyView() const noexcept { return {module, function}; }  // NOLINT(google-explicit-constructor)
};
struct KernelKeyHash {
  using is_transparent = void;
  std::size_t operator()(KernelKeyView key) const noexcept {
    return mix(std::hash<std::string_view>{}(key.module), std::hash<std::string_view>{}(key.function));
  }
};
struct KernelKeyEqual {
  using is_transparent = void;
  bool operator()(KernelKeyView a, KernelKeyView b) const noexcept { return a.module == b.module && a.function == b.function; }
};

struct ScratchKeyView {
  std::string_view tag;
  StreamHandle stream;
};
struct ScratchKey {
  std::string tag;
  StreamHandle stream;
  operator ScratchKeyView() const noexcept { return {tag, stream}; }  // NOLINT(google-explicit-constructor)
};
struct ScratchKeyHash {
  using is_transparent = void;
  std::size_t operator()(ScratchKeyView key) const noexcept {
    return mix(std::hash<std::string_view>{}(key.tag), std::hash<StreamHandle>{}(key.stream));
  }
};
struct ScratchKeyEqual {
  using is_transparent = void;
  bool operator()(ScratchKeyView a, ScratchKeyView b) const noexcept { return a.stream == b.stream && a.tag == b.tag; }
};

struct Block {
  DevicePtr ptr;
  std::uint64_t bytes = 0;
};
// A block that was outgrown, and the mark of the work that may still use it. A null event: there is nothing to wait for, or the
// backend has no events and `free` alone keeps the order.
struct Retired {
  Block block;
  EventHandle passed;
};

}  // namespace

struct OpCache::Impl {
  explicit Impl(GpuBackend& owner) : backend(owner) {}

  // Marks the work on `stream` so far; null where the backend has no events.
  Result<EventHandle> mark(StreamHandle stream, std::source_location site) {
    if (!backend.capabilities().has(Capability::events)) return EventHandle{};
    const EventHandle event = METRALE_TRY(backend.create_event(site));
    if (Result<> recorded = backend.record_event(event, stream, site); !recorded) {
      drop_event(event);
      return std::move(recorded).error();
    }
    return event;
  }

  void drop_event(EventHandle event) {
    // Nothing is lost by a refusal: shutdown destroys what is left.
    if (event) (void)backend.destroy_event(event);
  }

  // Frees a block. False when it is still there and to be tried again.
  bool free_block(const Block& block, Result<>& first) {
    Result<> freed = backend.free(block.ptr);
    const bool gone = freed || !detail::left_untouched(freed.error().code());
    if (!freed && first) first = std::move(freed);
    return gone;
  }

  // Under `growth`. `wait`: let `free` wait for the block's work instead of asking whether it has passed. Needs no memory.
  void collect_retired(bool wait, Result<>& first) {
    std::erase_if(retired, [&](Retired& old) {
      if (old.passed && !wait) {
        const Result<bool> passed = backend.event_query(old.passed);
        if (passed ? !*passed : detail::left_untouched(passed.error().code())) return false;
      }
      drop_event(std::exchange(old.passed, {}));
      return free_block(old.block, first);
    });
  }

  // The block of a key; empty when it has none.
  Block current(ScratchKeyView key) const {
    const std::shared_lock lock(scratch_mutex);
    const auto it = scratch.find(key);
    return it == scratch.end() ? Block{} : it->second;
  }

  Result<DevicePtr> grow(ScratchKeyView key, std::uint64_t bytes, std::source_location site);
  Result<> retire_stream(StreamHandle stream, std::source_location site);

  GpuBackend& backend;

  std::shared_mutex kernels_mutex;
  std::unordered_map<KernelKey, Kernel, KernelKeyHash, KernelKeyEqual> kernels;
  std::uint64_t num_forgotten = 0;  ///< Calls of forget_kernels: a look-up across one is not remembered.

  // `growth` is taken first and held across driver calls; `scratch_mutex` only while the map is read or changed, so that requests
  // that fit never wait for one that grows.
  std::mutex growth;
  mutable std::shared_mutex scratch_mutex;
  std::unordered_map<ScratchKey, Block, ScratchKeyHash, ScratchKeyEqual> scratch;
  std::vector<Retired> retired;
};

OpCache::OpCache(GpuBackend& backend) : impl_(std::make_unique<Impl>(backend)) {}
OpCache::~OpCache() = default;

Result<OpCache::Kernel> OpCache::kernel(std::string_view module, std::string_view function, std::source_location site) {
  if (impl_->backend.in_forked_child()) [[unlikely]]
    METRALE_TRY(impl_->backend.health(site));
  const KernelKeyView key{module, function};
  std::uint64_t num_forgotten = 0;
  {
    const std::shared_lock lock(impl_->kernels_mutex);
    if (const auto it = impl_->kernels.find(key); it != impl_->kernels.end()) return it->second;
    num_forgotten = impl_->num_forgotten;
  }
  return FaceState::caught("kernel", site, [&]() -> Result<Kernel> {
    Kernel found;
    found.handle = METRALE_TRY(impl_->backend.kernel(module, function, site));
    found.facts = METRALE_TRY(impl_->backend.kernel_facts(found.handle, site));
    const std::unique_lock lock(impl_->kernels_mutex);
    if (impl_->num_forgotten == num_forgotten) {
      impl_->kernels.insert_or_assign({std::string(module), std::string(function)}, found);
    }
    return found;
  });
}

void OpCache::forget_kernels() {
  const std::unique_lock lock(impl_->kernels_mutex);
  impl_->kernels.clear();
  ++impl_->num_forgotten;
}

Result<DevicePtr> OpCache::scratch(std::string_view tag, StreamHandle stream, std::uint64_t bytes, std::source_location site) {
  if (impl_->backend.in_forked_child()) [[unlikely]]
    METRALE_TRY(impl_->backend.health(site));
  if (bytes == 0 || !stream) [[unlikely]] {
    return FaceState::caught("scratch", site, [&]() -> Result<DevicePtr> {
      return Error(Errc::invalid_argument,
                   fmt::format("scratch '{}': {} bytes on stream {:#x}; both must be more than 0", tag, bytes, stream.value), site);
    });
  }
  const ScratchKeyView key{tag, stream};
  if (const Block block = impl_->current(key); block.bytes >= bytes) [[likely]]
    return block.ptr;
  return FaceState::caught("scratch", site, [&] {
    const OwnerScope owner(label());
    return impl_->grow(key, bytes, site);
  });
}

Result<DevicePtr> OpCache::Impl::grow(ScratchKeyView key, std::uint64_t bytes, std::source_location site) {
  const auto [tag, stream] = key;
  // A lost device and a stream that has gone count as capturing, and are none: asked first.
  METRALE_TRY(backend.health(site));
  METRALE_TRY(backend.native_stream(stream, site));
  const std::lock_guard growing(growth);
  const Block old = current(key);
  if (old.bytes >= bytes) return old.ptr;
  const auto why = [&] {
    return fmt::format("scratch '{}' on stream {:#x} grows from {} to {} bytes", key.tag, key.stream.value, old.bytes, bytes);
  };
  if (backend.stream_is_capturing(stream, site)) {
    return Error(Errc::capture_unsafe, why() + " while the stream is captured; request the largest size once before capturing",
                 site);
  }
  // In this order a failure at any step leaves the old block in place and nothing behind.
  retired.reserve(retired.size() + 1);
  EventHandle passed;
  if (old.ptr) passed = METRALE_TRY(mark(stream, site));
  detail::Undo drop_mark([&] { drop_event(passed); });
  Result<DevicePtr> grown = backend.alloc(bytes, site);
  if (!grown) {
    const bool capturing = grown.error().code() == Errc::capture_unsafe;
    return std::move(grown).error().with_note(why() + (capturing ? "; request the largest size once before capturing" : ""));
  }
  detail::Undo give_back([&] { (void)backend.free(*grown); });
  {
    const std::unique_lock lock(scratch_mutex);
    scratch.insert_or_assign({std::string(tag), stream}, Block{*grown, bytes});
    if (old.ptr) retired.push_back({old, passed});
  }
  give_back.keep();
  drop_mark.keep();
  Result<> ignored;  // a block that cannot be freed now is tried again later
  collect_retired(/*wait=*/false, ignored);
  return grown;
}

Result<> OpCache::retire_stream(StreamHandle stream, std::source_location site) {
  if (impl_->backend.in_forked_child()) return {};
  return FaceState::caught("retire_stream", site, [&] { return impl_->retire_stream(stream, site); });
}

Result<> OpCache::Impl::retire_stream(StreamHandle stream, std::source_location site) {
  const std::lock_guard growing(growth);
  retired.reserve(retired.size() + scratch.size());
  Result<> first;
  for (auto it = scratch.begin(); it != scratch.end();) {
    if (it->first.stream != stream) {
      ++it;
      continue;
    }
    Result<EventHandle> passed = mark(stream, site);
    if (!passed) {
      if (first) first = std::move(passed).error();
      ++it;
      continue;
    }
    const std::unique_lock lock(scratch_mutex);
    retired.push_back({it->second, *passed});
    it = scratch.erase(it);
  }
  Result<> ignored;
  collect_retired(/*wait=*/false, ignored);
  return first;
}

std::uint64_t OpCache::collect() {
  if (impl_->backend.in_forked_child()) return 0;
  const std::lock_guard growing(impl_->growth);
  Result<> ignored;
  impl_->collect_retired(/*wait=*/false, ignored);
  return impl_->retired.size();
}

void OpCache::forget_scratch() {
  const std::lock_guard growing(impl_->growth);
  for (const Retired& old : impl_->retired) impl_->drop_event(old.passed);
  const std::unique_lock lock(impl_->scratch_mutex);
  impl_->retired.clear();
  impl_->scratch.clear();
}

std::uint64_t OpCache::scratch_bytes() const {
  if (impl_->backend.in_forked_child()) return 0;
  const std::lock_guard growing(impl_->growth);
  const std::shared_lock lock(impl_->scratch_mutex);
  std::uint64_t sum = 0;
  for (const auto& [key, block] : impl_->scratch) sum += block.bytes;
  for (const Retired& old : impl_->retired) sum += old.block.bytes;
  return sum;
}

Result<> OpCache::release(GpuBackend& backend) {
  if (&backend != &impl_->backend) {
    return Error(Errc::invalid_argument, "release of the op scratch on another backend than its own");
  }
  if (backend.in_forked_child()) return {};
  forget_kernels();
  const std::lock_guard growing(impl_->growth);
  Result<> first;
  impl_->collect_retired(/*wait=*/true, first);
  const std::unique_lock lock(impl_->scratch_mutex);
  std::erase_if(impl_->scratch, [&](const auto& entry) { return impl_->free_block(entry.second, first); });
  return first;
}

}  // namespace metrale
