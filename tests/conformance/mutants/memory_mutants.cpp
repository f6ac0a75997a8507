// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <mutex>
#include <vector>

#include "conformance/mutants/host_mutant.h"

namespace metrale::conformance {
namespace {

/// Freed memory goes to whoever asks next, with work on it still in flight.
class FreeHandsBackAtOnce : public HostMutant {
  using HostMutant::HostMutant;
  Result<DevicePtr> do_alloc(std::uint64_t bytes, MemoryKind kind) override {
    std::lock_guard lock(mutex_);
    std::vector<DevicePtr>& freed = freed_[bytes];
    if (freed.empty()) return HostMutant::do_alloc(bytes, kind);
    const DevicePtr ptr = freed.back();
    freed.pop_back();
    return ptr;
  }
  Result<> do_free(DevicePtr base, std::uint64_t bytes, MemoryKind) override {
    std::lock_guard lock(mutex_);
    freed_[bytes].push_back(base);
    return {};
  }
  std::mutex mutex_;
  std::map<std::uint64_t, std::vector<DevicePtr>> freed_;
};

class PinnedIsHandedBackAtOnce : public HostMutant {
  using HostMutant::HostMutant;
  Result<void*> do_alloc_pinned(std::uint64_t bytes) override {
    std::lock_guard lock(mutex_);
    std::vector<void*>& freed = freed_[bytes];
    if (freed.empty()) return HostMutant::do_alloc_pinned(bytes);
    void* ptr = freed.back();
    freed.pop_back();
    return ptr;
  }
  Result<> do_free_pinned(void* ptr, std::uint64_t bytes) override {
    std::lock_guard lock(mutex_);
    freed_[bytes].push_back(ptr);
    return {};
  }
  std::mutex mutex_;
  std::map<std::uint64_t, std::vector<void*>> freed_;
};

class FreeLeaks : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_free(DevicePtr, std::uint64_t, MemoryKind) override { return {}; }
};

class FreeWaitsForTheWholeDevice : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_free(DevicePtr base, std::uint64_t bytes, MemoryKind kind) override {
    METRALE_TRY(HostMutant::do_synchronize_device());
    return HostMutant::do_free(base, bytes, kind);
  }
};

class AllocIsMisaligned : public HostMutant {
  using HostMutant::HostMutant;
  Result<DevicePtr> do_alloc(std::uint64_t bytes, MemoryKind kind) override {
    return METRALE_TRY(HostMutant::do_alloc(bytes + 64, kind)).offset(64);
  }
  Result<> do_free(DevicePtr base, std::uint64_t bytes, MemoryKind kind) override {
    return HostMutant::do_free({base.address - 64}, bytes + 64, kind);
  }
};

/// Blocks lie 256 bytes apart, whatever their size.
class AllocOverlaps : public HostMutant {
  using HostMutant::HostMutant;
  Result<DevicePtr> do_alloc(std::uint64_t bytes, MemoryKind kind) override {
    if (next_.address == 0) next_ = METRALE_TRY(HostMutant::do_alloc(1 << 22, kind));
    next_ = next_.offset(kDeviceAlignment);
    return bytes < (1 << 20) ? next_ : HostMutant::do_alloc(bytes, kind);
  }
  Result<> do_free(DevicePtr, std::uint64_t, MemoryKind) override { return {}; }
  DevicePtr next_;
};

class OutOfMemoryIsReportedAsInternal : public HostMutant {
  using HostMutant::HostMutant;
  Result<DevicePtr> do_alloc(std::uint64_t bytes, MemoryKind kind) override {
    auto made = HostMutant::do_alloc(bytes, kind);
    if (!made && made.error().code() == Errc::out_of_memory) return Error(Errc::internal, made.error().message());
    return made;
  }
};

class ManagedIsRefused : public HostMutant {
  using HostMutant::HostMutant;
  Result<DevicePtr> do_alloc(std::uint64_t bytes, MemoryKind kind) override {
    if (kind == MemoryKind::managed) return Error(Errc::unsupported, "no managed memory after all");
    return HostMutant::do_alloc(bytes, kind);
  }
};

/// Refuses only once the memory of the whole machine is gone.
class MemoryLimitIsIgnored : public HostMutant {
 public:
  explicit MemoryLimitIsIgnored(host::Options options) : HostMutant(without_limit(std::move(options))) {}

 private:
  static host::Options without_limit(host::Options options) {
    options.memory_limit_bytes = 0;
    return options;
  }
};

class FreeMemoryExceedsTheTotal : public HostMutant {
  using HostMutant::HostMutant;
  Result<DeviceMemoryInfo> do_memory_info() override {
    DeviceMemoryInfo info = METRALE_TRY(HostMutant::do_memory_info());
    info.device_free = info.total + 1;
    return info;
  }
};

class MemoryFiguresAreFrozen : public HostMutant {
  using HostMutant::HostMutant;
  Result<DeviceMemoryInfo> do_memory_info() override {
    if (!info_) info_ = METRALE_TRY(HostMutant::do_memory_info());
    return *info_;
  }
  std::optional<DeviceMemoryInfo> info_;
};

class PinnedIsMisaligned : public HostMutant {
  using HostMutant::HostMutant;
  Result<void*> do_alloc_pinned(std::uint64_t bytes) override {
    return static_cast<std::byte*>(METRALE_TRY(HostMutant::do_alloc_pinned(bytes + 16))) + 16;
  }
  Result<> do_free_pinned(void* ptr, std::uint64_t bytes) override {
    return HostMutant::do_free_pinned(static_cast<std::byte*>(ptr) - 16, bytes + 16);
  }
};

class AliasIsOffByOne : public HostMutant {
  using HostMutant::HostMutant;
  Result<DevicePtr> do_host_alias(void* base) override { return METRALE_TRY(HostMutant::do_host_alias(base)).offset(1); }
};

class RegisteringClearsTheMemory : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_register_host(void* ptr, std::uint64_t bytes) override {
    std::memset(ptr, 0, bytes);
    return HostMutant::do_register_host(ptr, bytes);
  }
};

/// The context of a driver that is current on the thread that made the backend only.
class OtherThreadsHaveNoContext : public HostMutant {
  using HostMutant::HostMutant;
  Result<DevicePtr> do_alloc(std::uint64_t bytes, MemoryKind kind) override {
    if (std::this_thread::get_id() != made_on_) return Error(Errc::internal, "no context is current on this thread");
    return HostMutant::do_alloc(bytes, kind);
  }
  std::thread::id made_on_ = std::this_thread::get_id();
};

}  // namespace

std::vector<Mutant> memory_mutants() {
  return {
      host_mutant<FreeHandsBackAtOnce>("free_hands_back_at_once", "Alloc.FreeDoesNotHandTheBlockBackBeforeEarlierWorkIsDone"),
      host_mutant<FreeHandsBackAtOnce>("arena_is_handed_back_at_once", "Arena.IsNotHandedBackBeforeEarlierWorkIsDone"),
      host_mutant<FreeHandsBackAtOnce>("trim_hands_back_at_once", "Pool.TrimDoesNotHandBackABlockWithWorkInFlight"),
      host_mutant<FreeHandsBackAtOnce>("sweep_hands_back_at_once", "Ledger.SweepWaitsForWorkInFlight"),
      host_mutant<PinnedIsHandedBackAtOnce>("pinned_is_handed_back_at_once", "Pinned.IsNotHandedBackBeforeEarlierWorkIsDone"),
      host_mutant<FreeLeaks>("free_leaks", "Alloc.RefusesMoreThanTheDeviceHas"),
      host_mutant<FreeWaitsForTheWholeDevice>("free_waits_for_the_whole_device", "Alloc.FreeDoesNotWaitForWorkEnqueuedLater"),
      host_mutant<AllocIsMisaligned>("alloc_is_misaligned", "Alloc.GivesAlignedBlocks"),
      host_mutant<AllocZeroes>("alloc_zeroes", "Alloc.LeavesContentsThatAreNotZero"),
      host_mutant<AllocOverlaps>("alloc_overlaps", "Alloc.GivesBlocksThatDoNotOverlap"),
      host_mutant<OutOfMemoryIsReportedAsInternal>("out_of_memory_is_reported_as_internal",
                                                   "Alloc.OutOfMemoryTellsBytesFreeAndTotal"),
      host_mutant<ManagedIsRefused>("managed_is_refused", "Alloc.ManagedIsMarkedAndLive"),
      host_mutant<MemoryLimitIsIgnored>("memory_limit_is_ignored", "Alloc.RefusesMoreThanTheDeviceHas"),
      host_mutant<FreeMemoryExceedsTheTotal>("free_memory_exceeds_the_total", "Alloc.TotalMemoryIsAtLeastWhatIsFree"),
      host_mutant<MemoryFiguresAreFrozen>("memory_figures_are_frozen", "Alloc.DeviceFreeMemoryFallsByWhatIsAllocated"),
      host_mutant<PinnedIsMisaligned>("pinned_is_misaligned", "Pinned.IsAlignedTo64"),
      host_mutant<AliasIsOffByOne>("alias_is_off_by_one", "Pinned.AliasReachesTheSameBytes"),
      host_mutant<RegisteringClearsTheMemory>("registering_clears_the_memory", "Pinned.RegisterPinsExistingMemory"),
      host_mutant<OtherThreadsHaveNoContext>("other_threads_have_no_context", "Threads.NeedNoBinding"),
  };
}

}  // namespace metrale::conformance
