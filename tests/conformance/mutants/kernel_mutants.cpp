// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "conformance/mutants/host_mutant.h"
#include "conformance/test_kernels.h"

namespace metrale::conformance {
namespace {

// ---- launches ----

class StructsAreTruncatedToEightBytes : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_launch(const LaunchDesc& launch) override {
    std::vector<KernelArg> args(launch.args.begin(), launch.args.end());
    std::vector<std::vector<std::byte>> kept;
    for (KernelArg& arg : args) {
      if (arg.size_bytes() <= 8) continue;
      std::vector<std::byte>& bytes = kept.emplace_back(arg.size_bytes());
      std::memcpy(bytes.data(), arg.data(), 8);
      arg = KernelArg::bytes(bytes);
    }
    LaunchDesc truncated = launch;
    truncated.args = args;
    return HostMutant::do_launch(truncated);
  }
};

class FloatsAreRounded : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_launch(const LaunchDesc& launch) override {
    std::vector<KernelArg> args(launch.args.begin(), launch.args.end());
    // Scalars above two bytes lose their upper half, as when an index into the parameters counts in the wrong unit.
    for (KernelArg& arg : args) {
      if (arg.is_buffer() || arg.size_bytes() != 4) continue;
      std::uint32_t word = 0;
      std::memcpy(&word, arg.data(), sizeof(word));
      arg = KernelArg::value(word & 0xFFFFu);
    }
    LaunchDesc narrowed = launch;
    narrowed.args = args;
    return HostMutant::do_launch(narrowed);
  }
};

class OnlyOneLayerOfTheGridRuns : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_launch(const LaunchDesc& launch) override {
    LaunchDesc flat = launch;
    flat.grid.z = 1;
    return HostMutant::do_launch(flat);
  }
};

class BlocksRunTwice : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_launch(const LaunchDesc& launch) override {
    METRALE_TRY(HostMutant::do_launch(launch));
    return HostMutant::do_launch(launch);
  }
};

class SharedMemoryIsMissing : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_launch(const LaunchDesc& launch) override {
    LaunchDesc without = launch;
    without.shared_bytes = 0;
    return HostMutant::do_launch(without);
  }
};

/// Above what needs no opt-in the launch gets what needs none.
class LargeSharedMemoryIsCutTo48KiB : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_launch(const LaunchDesc& launch) override {
    LaunchDesc cut = launch;
    cut.shared_bytes = std::min(cut.shared_bytes, 48u << 10);
    return HostMutant::do_launch(cut);
  }
};

class LaunchesRunOnAStreamOfTheirOwn : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_launch(const LaunchDesc& launch) override {
    if (own_.value == 0) own_ = METRALE_TRY(HostMutant::do_create_stream(0));
    LaunchDesc elsewhere = launch;
    elsewhere.stream = own_;
    return HostMutant::do_launch(elsewhere);
  }
  NativeStream own_;
};

class LaunchesWait : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_launch(const LaunchDesc& launch) override {
    METRALE_TRY(HostMutant::do_launch(launch));
    return HostMutant::do_synchronize(launch.stream);
  }
};

class LaunchesSucceedAndDoNothing : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_launch(const LaunchDesc&) override { return {}; }
};

class CapturedLaunchesAreDropped : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_launch(const LaunchDesc& launch) override {
    return capturing(launch.stream) ? Result<>() : HostMutant::do_launch(launch);
  }
};

class DependentLaunchIsRefused : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_launch(const LaunchDesc& launch) override {
    if (launch.attributes != nullptr && launch.attributes->dependent_launch) return Error(Errc::unsupported, "not after all");
    return HostMutant::do_launch(launch);
  }
};

// ---- look-ups and facts ----

class EveryKernelIsFound : public HostMutant {
  using HostMutant::HostMutant;
  Result<NativeKernel> do_find_kernel(std::string_view module, std::string_view function) override {
    auto found = HostMutant::do_find_kernel(module, function);
    return found ? std::move(found) : HostMutant::do_find_kernel(kModule, kFill);
  }
};

class EveryModuleIsThere : public HostMutant {
  using HostMutant::HostMutant;
  Result<bool> do_has_module(std::string_view) override { return true; }
};

/// Changes the facts of every kernel.
template <auto kChange>
class FactsAreWrong : public HostMutant {
  using HostMutant::HostMutant;
  Result<KernelFacts> do_kernel_facts(NativeKernel kernel) override {
    KernelFacts facts = METRALE_TRY(HostMutant::do_kernel_facts(kernel));
    kChange(facts);
    return facts;
  }
};
constexpr auto kLastArgumentIsForgotten = [](KernelFacts& facts) { facts.param_bytes.pop_back(); };
constexpr auto kTileIsHalved = [](KernelFacts& facts) { facts.n_tile = facts.n_tile.value_or(0) / 2; };
constexpr auto kNobodyCasts = [](KernelFacts& facts) { facts.casts_a_to_e4m3 = false; };
constexpr auto kEverybodyWaits = [](KernelFacts& facts) { facts.waits_for_dependency = true; };

/// Publishes no signature, and makes the best of what it gets.
class AnyArgumentsGo : public HostMutant {
  using HostMutant::HostMutant;
  Result<KernelFacts> do_kernel_facts(NativeKernel kernel) override {
    KernelFacts facts = METRALE_TRY(HostMutant::do_kernel_facts(kernel));
    facts.takes_any_arguments = true;
    return facts;
  }
  Result<> do_launch(const LaunchDesc& launch) override {
    const auto fits = [](const KernelArg& arg, std::uint32_t bytes) { return arg.size_bytes() == bytes; };
    const auto want = kernel_of(launch.kernel).param_bytes;
    if (!std::equal(launch.args.begin(), launch.args.end(), want.begin(), want.end(), fits)) return {};
    return HostMutant::do_launch(launch);
  }
};

/// A registry that changes what the real one says.
class WrongRegistry : public KernelRegistry {
 public:
  Result<std::vector<Entry>> entries() const override {
    std::vector<Entry> all = METRALE_TRY(inner->entries());
    std::reverse(all.begin(), all.end());
    return all;
  }
  Result<DeviceSymbol> device_symbol(std::string_view module, std::string_view name, std::source_location site) override {
    DeviceSymbol symbol = METRALE_TRY(inner->device_symbol(module, name, site));
    symbol.bytes += 16;
    return symbol;
  }
  KernelRegistry* inner = nullptr;
};

class RegistryIsWrong : public HostMutant {
  using HostMutant::HostMutant;
  KernelRegistry* do_kernel_registry() noexcept override {
    registry_.inner = HostMutant::do_kernel_registry();
    return &registry_;
  }
  WrongRegistry registry_;
};

// ---- faults and the rest ----

class FaultsAreSwallowed : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_launch(const LaunchDesc& launch) override {
    return kernel_of(launch.kernel).function == kFault ? Result<>() : HostMutant::do_launch(launch);
  }
};

class FaultsLookLikeTimeouts : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_synchronize_for(NativeStream stream, std::chrono::nanoseconds timeout) override {
    auto waited = HostMutant::do_synchronize_for(stream, timeout);
    if (!waited && waited.error().code() == Errc::device_lost) return Error(Errc::timeout, "still running");
    return waited;
  }
};

class FaultsDoNotNameTheKernel : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_synchronize_for(NativeStream stream, std::chrono::nanoseconds timeout) override {
    auto waited = HostMutant::do_synchronize_for(stream, timeout);
    if (!waited && waited.error().code() == Errc::device_lost) return Error(Errc::device_lost, "something went wrong");
    return waited;
  }
};

class SmCountIsZero : public HostMutant {
  using HostMutant::HostMutant;
  Result<std::uint32_t> do_sm_count() override { return 0u; }
};

class PresentIsUnsupported : public HostMutant {
  using HostMutant::HostMutant;
  Result<NativeEvent> do_create_event(bool timed) override {
    if (timed) return Error(Errc::unsupported, "no timed events after all");
    return HostMutant::do_create_event(timed);
  }
};

class AbsentHasNoReason : public HostMutant {
  using HostMutant::HostMutant;
  Capabilities do_capabilities() const override { return HostMutant::do_capabilities().lacks(Capability::cluster_launch, ""); }
};

class NameIsAnothers : public HostMutant {
  using HostMutant::HostMutant;
  std::string_view do_name() const noexcept override { return "cuda"; }
};

class ShutdownDoesNotWait : public HostMutant {
 public:
  using HostMutant::HostMutant;
  ~ShutdownDoesNotWait() override {
    shutdown_from_destructor();
    device().shut_down();
  }

 protected:
  Result<> do_synchronize_device() override { return {}; }
  void do_shutdown() noexcept override {}
};

class ThreadsAreLeftBehind : public HostMutant {
 public:
  explicit ThreadsAreLeftBehind(host::Options options) : HostMutant(std::move(options)) {
    std::thread([] { std::this_thread::sleep_for(std::chrono::minutes(10)); }).detach();
  }
};

/// Two backends that believe they are on one device share a fault they do not share.
class KernelsComputeNothing : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_launch(const LaunchDesc& launch) override {
    LaunchDesc nothing = launch;
    nothing.kernel = METRALE_TRY(HostMutant::do_find_kernel(kModule, kTooLarge));
    return HostMutant::do_launch(nothing);
  }
};

}  // namespace

std::vector<Mutant> kernel_mutants() {
  return {
      host_mutant<StructsAreTruncatedToEightBytes>("structs_are_truncated_to_eight_bytes", "Launch.ByValueStructsArriveInFull"),
      host_mutant<FloatsAreRounded>("scalars_lose_their_upper_half", "Launch.ScalarsKeepTheirWidths"),
      host_mutant<OnlyOneLayerOfTheGridRuns>("only_one_layer_of_the_grid_runs", "Launch.RunsEveryThreadOfEveryBlockOnce"),
      host_mutant<BlocksRunTwice>("blocks_run_twice", "Launch.RunsEveryThreadOfEveryBlockOnce"),
      host_mutant<SharedMemoryIsMissing>("shared_memory_is_missing", "Launch.GivesEachBlockItsSharedMemory"),
      host_mutant<LargeSharedMemoryIsCutTo48KiB>("large_shared_memory_is_cut", "Launch.GivesEachBlockItsSharedMemory"),
      host_mutant<LaunchesRunOnAStreamOfTheirOwn>("launches_run_on_a_stream_of_their_own", "Launch.IsOrderedOnItsStream"),
      host_mutant<LaunchesWait>("launches_wait", "Launch.IsOrderedOnItsStream"),
      host_mutant<LaunchesSucceedAndDoNothing>("launches_succeed_and_do_nothing", "Launch.ComputesWhatTheKernelSays"),
      host_mutant<KernelsComputeNothing>("kernels_compute_nothing", "Copy.D2hOnStreamSeesKernelWrites"),
      host_mutant<CapturedLaunchesAreDropped>("captured_launches_are_dropped", "Capture.ReplaysKernelsInOrder"),
      host_mutant<DependentLaunchIsRefused>("dependent_launch_is_refused", "Launch.DependentLaunchNeedsAKernelThatWaits"),
      host_mutant<EveryKernelIsFound>("every_kernel_is_found", "Kernels.MissesAreNotFoundAndNamed"),
      host_mutant<EveryModuleIsThere>("every_module_is_there", "Kernels.HasModuleNeverRecords"),
      host_mutant<FactsAreWrong<kLastArgumentIsForgotten>>("last_argument_is_forgotten", "Kernels.PublishTheirSignature"),
      host_mutant<FactsAreWrong<kTileIsHalved>>("tile_is_halved", "Kernels.PublishTheirTileWidth"),
      host_mutant<FactsAreWrong<kNobodyCasts>>("nobody_casts", "Kernels.PublishWhetherTheyCastToE4m3"),
      host_mutant<FactsAreWrong<kEverybodyWaits>>("everybody_waits", "Launch.DependentLaunchNeedsAKernelThatWaits"),
      host_mutant<AnyArgumentsGo>("any_arguments_go", "Launch.EveryLaunchIsComparedWithTheSignature"),
      host_mutant<RegistryIsWrong>("registry_is_unsorted", "Kernels.RegistryListsEveryKernelSorted"),
      host_mutant<RegistryIsWrong>("symbols_are_too_large", "Kernels.DeviceSymbolsHaveAddressAndSizeAndAreKnownToCopies"),
      host_mutant<FaultsAreSwallowed>("faults_are_swallowed", "Faults.LatchWithTheFirstReasonForEveryLaterCall"),
      host_mutant<FaultsLookLikeTimeouts>("faults_look_like_timeouts", "Faults.ComeOutAtOnceOnStreamsThatWait"),
      host_mutant<FaultsDoNotNameTheKernel>("faults_do_not_name_the_kernel", "Faults.ReasonNamesTheKernel"),
      host_mutant<SmCountIsZero>("sm_count_is_zero", "Launch.SmCountIsPositiveAndStays"),
      host_mutant<PresentIsUnsupported>("present_is_unsupported", "Each/CapabilityRules.PresentOnesWork/timed_events"),
      host_mutant<AbsentHasNoReason>("absent_has_no_reason", "CapabilityTable.EveryCapabilityIsPresentOrHasAReason"),
      host_mutant<NameIsAnothers>("name_is_anothers", "Lifecycle.HasItsNameAndIsHealthy"),
      host_mutant<ShutdownDoesNotWait>("shutdown_does_not_wait", "Lifecycle.ShutdownWaitsForWorkInFlight"),
      host_mutant<ThreadsAreLeftBehind>("threads_are_left_behind", "Lifecycle.BackendsMayBeMadeAndDestroyedManyTimes"),
  };
}

}  // namespace metrale::conformance
