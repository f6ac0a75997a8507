// SPDX-License-Identifier: Apache-2.0
#include <optional>

#include "backends/mock/mock_backend.h"
#include "conformance/backends/options.h"
#include "conformance/mutants/mutants.h"

namespace metrale::conformance {
namespace {

using mock::MockBackend;

template <class T>
Mutant mock_mutant(std::string_view name, std::string_view caught_by) {
  return {name, caught_by,
          [](const CreateOptions& options) -> Result<std::unique_ptr<GpuBackend>> {
            auto made = METRALE_TRY(host::HostBackend::make<T>(mock_options(options)));
            teach(static_cast<T&>(*made).control());
            return made;
          },
          "mock"};
}

class CopiesAreCountedAndNotMade : public MockBackend {
 public:
  using MockBackend::MockBackend;

 protected:
  Result<> do_copy_d2d_async(DevicePtr, DevicePtr, std::uint64_t, NativeStream) override { return {}; }
};

class ArgumentsAreNotCompared : public MockBackend {
 public:
  using MockBackend::MockBackend;

 protected:
  Result<KernelFacts> do_kernel_facts(NativeKernel kernel) override {
    KernelFacts facts = METRALE_TRY(MockBackend::do_kernel_facts(kernel));
    facts.takes_any_arguments = true;
    return facts;
  }
};

/// What a mock without events of its own would say.
class EventsAreAlwaysDone : public MockBackend {
 public:
  using MockBackend::MockBackend;

 protected:
  Result<> do_stream_wait_event(NativeStream, NativeEvent) override { return {}; }
};

class LackedCapabilitiesAreListed : public MockBackend {
 public:
  using MockBackend::MockBackend;

 protected:
  Result<NativeStream> do_wrap_stream(std::uint64_t) override {
    return Error(Errc::unsupported, "the mock takes no streams of others");
  }
};

}  // namespace

std::vector<Mutant> mock_mutants() {
  return {
      mock_mutant<CopiesAreCountedAndNotMade>("mock_copies_are_counted_and_not_made", "Copy.D2dAsyncIsOrderedOnItsStream"),
      mock_mutant<ArgumentsAreNotCompared>("mock_arguments_are_not_compared", "Launch.EveryLaunchIsComparedWithTheSignature"),
      mock_mutant<EventsAreAlwaysDone>("mock_events_order_nothing", "Events.WaitHoldsTheStreamNotTheHost"),
      mock_mutant<LackedCapabilitiesAreListed>("mock_lists_what_it_lacks", "Each/CapabilityRules.PresentOnesWork/foreign_streams"),
  };
}

}  // namespace metrale::conformance
