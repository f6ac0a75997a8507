// SPDX-License-Identifier: Apache-2.0
#include "metrale/op_cache.h"

#include <fmt/format.h>

#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "metrale/backend.h"
#include "metrale/handle_owner.h"
#include "metrale/owner_scope.h"

namespace metrale {
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

  // Under `growth`. `wait`: let `free` wait for the block's work instead of asking whether it has passed.
  void collect_retired(bool wait, Result<>& first) {
    std::vector<Retired> left;
    for (Retired& old : retired) {
      if (old.passed && !wait) {
        const Result<bool> passed = backend.event_query(old.passed);
        if (passed ? !*passed : detail::left_untouched(passed.error().code())) {
          left.push_back(old);
          continue;
        }
      }
      drop_event(std::exchange(old.passed, {}));
      if (!free_block(old.block, first)) left.push_back(old);
    }
    retired = std::move(left);
  }

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
  const KernelKeyView key{module, function};
  std::uint64_t num_forgotten = 0;
  {
    const std::shared_lock lock(impl_->kernels_mutex);
    if (const auto it = impl_->kernels.find(key); it != impl_->kernels.end()) return it->second;
    num_forgotten = impl_->num_forgotten;
  }
  Kernel found;
  found.handle = METRALE_TRY(impl_->backend.kernel(module, function, site));
  found.facts = METRALE_TRY(impl_->backend.kernel_facts(found.handle, site));
  const std::unique_lock lock(impl_->kernels_mutex);
  if (impl_->num_forgotten == num_forgotten) {
    impl_->kernels.insert_or_assign({std::string(module), std::string(function)}, found);
  }
  return found;
}

void OpCache::forget_kernels() {
  const std::unique_lock lock(impl_->kernels_mutex);
  impl_->kernels.clear();
  ++impl_->num_forgotten;
}

Result<DevicePtr> OpCache::scratch(std::string_view tag, StreamHandle stream, std::uint64_t bytes, std::source_location site) {
  if (bytes == 0 || !stream) [[unlikely]] {
    return Error(Errc::invalid_argument,
                 fmt::format("scratch '{}': {} bytes on stream {:#x}; both must be more than 0", tag, bytes, stream.value), site);
  }
  const ScratchKeyView key{tag, stream};
  const auto current = [&] {
    const std::shared_lock lock(impl_->scratch_mutex);
    const auto it = impl_->scratch.find(key);
    return it == impl_->scratch.end() ? Block{} : it->second;
  };
  if (const Block block = current(); block.bytes >= bytes) [[likely]]
    return block.ptr;

  const std::lock_guard growing(impl_->growth);
  const Block old = current();
  if (old.bytes >= bytes) return old.ptr;
  const auto why = [&] {
    return fmt::format("scratch '{}' on stream {:#x} grows from {} to {} bytes", tag, stream.value, old.bytes, bytes);
  };
  if (impl_->backend.stream_is_capturing(stream, site)) {
    return Error(Errc::capture_unsafe, why() + " while the stream is captured; request the largest size once before capturing",
                 site);
  }
  // In this order a failure at any step leaves the old block in place and nothing behind.
  EventHandle passed;
  if (old.ptr) passed = METRALE_TRY(impl_->mark(stream, site));
  const OwnerScope owner(label());
  Result<DevicePtr> grown = impl_->backend.alloc(bytes, site);
  if (!grown) {
    impl_->drop_event(passed);
    const bool capturing = grown.error().code() == Errc::capture_unsafe;
    return std::move(grown).error().with_note(why() + (capturing ? "; request the largest size once before capturing" : ""));
  }
  {
    const std::unique_lock lock(impl_->scratch_mutex);
    impl_->scratch.insert_or_assign({std::string(tag), stream}, Block{*grown, bytes});
    if (old.ptr) impl_->retired.push_back({old, passed});
  }
  Result<> ignored;  // a block that cannot be freed now is tried again later
  impl_->collect_retired(/*wait=*/false, ignored);
  return grown;
}

Result<> OpCache::retire_stream(StreamHandle stream, std::source_location site) {
  const std::lock_guard growing(impl_->growth);
  Result<> first;
  for (auto it = impl_->scratch.begin(); it != impl_->scratch.end();) {
    if (it->first.stream != stream) {
      ++it;
      continue;
    }
    Result<EventHandle> passed = impl_->mark(stream, site);
    if (!passed) {
      if (first) first = std::move(passed).error();
      ++it;
      continue;
    }
    const std::unique_lock lock(impl_->scratch_mutex);
    impl_->retired.push_back({it->second, *passed});
    it = impl_->scratch.erase(it);
  }
  Result<> ignored;
  impl_->collect_retired(/*wait=*/false, ignored);
  return first;
}

std::uint64_t OpCache::collect() {
  const std::lock_guard growing(impl_->growth);
  Result<> ignored;
  impl_->collect_retired(/*wait=*/false, ignored);
  return impl_->retired.size();
}

std::uint64_t OpCache::scratch_bytes() const {
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
  forget_kernels();
  const std::lock_guard growing(impl_->growth);
  Result<> first;
  impl_->collect_retired(/*wait=*/true, first);
  const std::unique_lock lock(impl_->scratch_mutex);
  std::erase_if(impl_->scratch, [&](const auto& entry) { return impl_->free_block(entry.second, first); });
  return first;
}

}  // namespace metrale
