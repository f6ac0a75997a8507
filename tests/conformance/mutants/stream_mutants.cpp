// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "conformance/mutants/host_mutant.h"

namespace metrale::conformance {
namespace {

// ---- streams ----

class StreamsAreOneStream : public HostMutant {
  using HostMutant::HostMutant;
  Result<NativeStream> do_create_stream(int priority) override {
    return first_stream().value != 0 ? first_stream() : HostMutant::do_create_stream(priority);
  }
  Result<> do_destroy_stream(NativeStream) override { return {}; }
};

/// As a legacy default stream: nothing begins before what it holds.
class StreamsWaitForTheDefaultStream : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_memset_async(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream stream) override {
    if (!capturing(stream) && stream != first_stream()) {
      const NativeEvent event = METRALE_TRY(HostMutant::do_create_event(false));
      METRALE_TRY(HostMutant::do_record_event(event, first_stream()));
      METRALE_TRY(HostMutant::do_stream_wait_event(stream, event));
    }
    return HostMutant::do_memset_async(dst, value, bytes, stream);
  }
};

/// The other half of a legacy default stream: it begins after what all others hold.
class DefaultStreamWaitsForAllOthers : public HostMutant {
  using HostMutant::HostMutant;
  Result<NativeStream> do_create_stream(int priority) override {
    made_.push_back(METRALE_TRY(HostMutant::do_create_stream(priority)));
    return made_.back();
  }
  Result<> do_memset_async(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream stream) override {
    for (const NativeStream other : made_) {
      if (stream != first_stream() || other == stream || capturing(other)) continue;
      const NativeEvent event = METRALE_TRY(HostMutant::do_create_event(false));
      METRALE_TRY(HostMutant::do_record_event(event, other));
      METRALE_TRY(HostMutant::do_stream_wait_event(stream, event));
    }
    return HostMutant::do_memset_async(dst, value, bytes, stream);
  }
  std::vector<NativeStream> made_;
};

class DestroyDropsPendingWork : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_memset_async(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream stream) override {
    auto& alive = alive_[stream];
    if (!alive) alive = std::make_shared<std::atomic<bool>>(true);
    return HostMutant::do_enqueue_host(stream, [alive, dst, value, bytes] {
      if (*alive) std::memset(bytes_at(dst), value, bytes);
    });
  }
  Result<> do_destroy_stream(NativeStream stream) override {
    if (const auto& alive = alive_[stream]) *alive = false;
    return HostMutant::do_destroy_stream(stream);
  }
  std::map<NativeStream, std::shared_ptr<std::atomic<bool>>> alive_;
};

class DestroyWaitsForPendingWork : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_destroy_stream(NativeStream stream) override {
    METRALE_TRY(HostMutant::do_synchronize(stream));
    return HostMutant::do_destroy_stream(stream);
  }
};

/// A copy comes after the fill that was enqueued behind it.
class WorkChangesPlaces : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_copy_d2d_async(DevicePtr dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) override {
    late_ = [this, dst, src, bytes, stream] { return HostMutant::do_copy_d2d_async(dst, src, bytes, stream); };
    return {};
  }
  Result<> do_memset_async(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream stream) override {
    METRALE_TRY(HostMutant::do_memset_async(dst, value, bytes, stream));
    const auto late = std::exchange(late_, nullptr);
    return late ? late() : Result<>();
  }
  std::function<Result<>()> late_;
};

class SynchronizeReturnsAtOnce : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_synchronize(NativeStream) override { return {}; }
};

class SynchronizeWaitsForTheWholeDevice : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_synchronize(NativeStream) override { return HostMutant::do_synchronize_device(); }
};

class TimeoutIsIgnored : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_synchronize_for(NativeStream stream, std::chrono::nanoseconds) override { return HostMutant::do_synchronize(stream); }
};

class TimeoutComesEarly : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_synchronize_for(NativeStream stream, std::chrono::nanoseconds timeout) override {
    return HostMutant::do_synchronize_for(stream, timeout / 100);
  }
};

class SynchronizeDeviceForgetsStreams : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_synchronize_device() override { return HostMutant::do_synchronize(first_stream()); }
};

class QueryBlocks : public HostMutant {
  using HostMutant::HostMutant;
  Result<bool> do_query(NativeStream stream) override {
    METRALE_TRY(HostMutant::do_synchronize(stream));
    return true;
  }
};

class QueryAlwaysSaysDone : public HostMutant {
  using HostMutant::HostMutant;
  Result<bool> do_query(NativeStream) override { return true; }
};

class HostFunctionsRunInTheCaller : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_enqueue_host(NativeStream stream, std::function<void()> fn) override {
    METRALE_TRY(HostMutant::do_synchronize(stream));
    fn();
    return {};
  }
};

class HostFunctionsGetLost : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_enqueue_host(NativeStream stream, std::function<void()> fn) override {
    return ++count_ % 10 == 0 ? Result<>() : HostMutant::do_enqueue_host(stream, std::move(fn));
  }
  int count_ = 0;
};

class HostFunctionsAreNeverLetGo : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_enqueue_host(NativeStream stream, std::function<void()> fn) override {
    kept_.push_back(fn);
    return HostMutant::do_enqueue_host(stream, std::move(fn));
  }
  std::vector<std::function<void()>> kept_;
};

class WrapMakesAnotherStream : public HostMutant {
  using HostMutant::HostMutant;
  Result<NativeStream> do_wrap_stream(std::uint64_t) override { return HostMutant::do_create_stream(0); }
};

// ---- events ----

class EventWaitsAreIgnored : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_stream_wait_event(NativeStream, NativeEvent) override { return {}; }
};

class EventWaitsHoldTheHost : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_stream_wait_event(NativeStream, NativeEvent event) override { return HostMutant::do_event_synchronize(event); }
};

/// The record is looked up when the waiting stream comes to its wait.
class EventWaitsTakeALaterRecord : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_stream_wait_event(NativeStream stream, NativeEvent event) override {
    return HostMutant::do_enqueue_host(stream, [this, event] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      static_cast<void>(HostMutant::do_event_synchronize(event).has_value());
    });
  }
};

class DestroyedEventsLetTheirWaitersGo : public HostMutant {
  using HostMutant::HostMutant;
  Result<NativeEvent> do_create_event(bool timed) override {
    const NativeEvent event = METRALE_TRY(HostMutant::do_create_event(timed));
    gone_[event] = std::make_shared<std::atomic<bool>>(false);
    return event;
  }
  Result<> do_stream_wait_event(NativeStream stream, NativeEvent event) override {
    return HostMutant::do_enqueue_host(stream, [this, event, gone = gone_[event]] {
      while (!*gone && !HostMutant::do_event_query(event).value_or(true)) std::this_thread::yield();
    });
  }
  Result<> do_destroy_event(NativeEvent event) override {
    *gone_[event] = true;
    return HostMutant::do_destroy_event(event);
  }
  std::map<NativeEvent, std::shared_ptr<std::atomic<bool>>> gone_;
};

class EventQueryAlwaysSaysDone : public HostMutant {
  using HostMutant::HostMutant;
  Result<bool> do_event_query(NativeEvent) override { return true; }
};

class EventsNeverComplete : public HostMutant {
  using HostMutant::HostMutant;
  Result<bool> do_event_query(NativeEvent) override { return false; }
};

/// Of ten recordings one is lost: the event then belongs to a stream that never comes to it.
class RecordingsGetLost : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_record_event(NativeEvent event, NativeStream stream) override {
    lost_[event] = ++count_ % 10 == 0;
    return HostMutant::do_record_event(event, stream);
  }
  Result<> do_event_synchronize(NativeEvent event) override {
    return lost_[event] ? Result<>() : HostMutant::do_event_synchronize(event);
  }
  Result<bool> do_event_query(NativeEvent event) override {
    return lost_[event] ? Result<bool>(false) : HostMutant::do_event_query(event);
  }
  int count_ = 0;
  std::map<NativeEvent, bool> lost_;
};

class EventSynchronizeReturnsAtOnce : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_event_synchronize(NativeEvent) override { return {}; }
};

class EventSynchronizeWaitsForTheStream : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_record_event(NativeEvent event, NativeStream stream) override {
    recorded_on_[event] = stream;
    return HostMutant::do_record_event(event, stream);
  }
  Result<> do_event_synchronize(NativeEvent event) override { return HostMutant::do_synchronize(recorded_on_[event]); }
  std::map<NativeEvent, NativeStream> recorded_on_;
};

class LaterRecordingsAreIgnored : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_record_event(NativeEvent event, NativeStream stream) override {
    if (std::exchange(recorded_[event], true)) return {};
    return HostMutant::do_record_event(event, stream);
  }
  std::map<NativeEvent, bool> recorded_;
};

class ElapsedIsNegative : public HostMutant {
  using HostMutant::HostMutant;
  Result<std::int64_t> do_event_elapsed_ns(NativeEvent start, NativeEvent end) override {
    return HostMutant::do_event_elapsed_ns(end, start);
  }
};

class ElapsedIsInMicroseconds : public HostMutant {
  using HostMutant::HostMutant;
  Result<std::int64_t> do_event_elapsed_ns(NativeEvent start, NativeEvent end) override {
    return METRALE_TRY(HostMutant::do_event_elapsed_ns(start, end)) / 1000;
  }
};

/// The time of the call that records, not that at which the stream comes to the event.
class TimesAreThoseOfTheCall : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_record_event(NativeEvent event, NativeStream stream) override {
    called_[event] = std::chrono::steady_clock::now();
    return HostMutant::do_record_event(event, stream);
  }
  Result<std::int64_t> do_event_elapsed_ns(NativeEvent start, NativeEvent end) override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(called_[end] - called_[start]).count();
  }
  std::map<NativeEvent, std::chrono::steady_clock::time_point> called_;
};

class ElapsedIsNeverBusy : public HostMutant {
  using HostMutant::HostMutant;
  Result<std::int64_t> do_event_elapsed_ns(NativeEvent start, NativeEvent end) override {
    return HostMutant::do_event_elapsed_ns(start, end).value_or(0);
  }
};

}  // namespace

std::vector<Mutant> stream_mutants() {
  return {
      host_mutant<StreamsAreOneStream>("streams_are_one_stream", "Streams.RunIndependently"),
      host_mutant<StreamsWaitForTheDefaultStream>("streams_wait_for_the_default_stream", "Streams.DefaultStreamHoldsNoOther"),
      host_mutant<DefaultStreamWaitsForAllOthers>("default_stream_waits_for_all_others", "Streams.NoOtherHoldsTheDefaultStream"),
      host_mutant<DestroyDropsPendingWork>("destroy_drops_pending_work", "Streams.DestroyReturnsAtOnceAndPendingWorkCompletes"),
      host_mutant<DestroyWaitsForPendingWork>("destroy_waits_for_pending_work",
                                              "Streams.DestroyReturnsAtOnceAndPendingWorkCompletes"),
      host_mutant<WorkChangesPlaces>("work_changes_places", "Streams.RunDifferentKindsOfWorkInOrder"),
      host_mutant<SynchronizeReturnsAtOnce>("synchronize_returns_at_once", "Streams.SynchronizeWaitsForAllWorkBefore"),
      host_mutant<SynchronizeWaitsForTheWholeDevice>("synchronize_waits_for_the_whole_device",
                                                     "Streams.SynchronizeDoesNotWaitForOtherStreams"),
      host_mutant<TimeoutIsIgnored>("timeout_is_ignored", "Streams.SynchronizeForTimesOutAndTheWorkGoesOn"),
      host_mutant<TimeoutComesEarly>("timeout_comes_early", "Streams.SynchronizeForTimesOutAndTheWorkGoesOn"),
      host_mutant<SynchronizeDeviceForgetsStreams>("synchronize_device_forgets_streams",
                                                   "Streams.SynchronizeDeviceWaitsForEveryStream"),
      host_mutant<QueryBlocks>("query_blocks", "Streams.QueryNeverBlocksAndTellsWhetherAllIsDone"),
      host_mutant<QueryAlwaysSaysDone>("query_always_says_done", "Streams.QueryNeverBlocksAndTellsWhetherAllIsDone"),
      host_mutant<HostFunctionsRunInTheCaller>("host_functions_run_in_the_caller", "Streams.HostFunctionsDoNotRunInTheCaller"),
      host_mutant<HostFunctionsGetLost>("host_functions_get_lost", "Streams.HostFunctionsRunInStreamOrder"),
      host_mutant<HostFunctionsAreNeverLetGo>("host_functions_are_never_let_go",
                                              "Streams.HostFunctionsAreKeptUntilTheyRanAndThenLetGo"),
      host_mutant<WrapMakesAnotherStream>("wrap_makes_another_stream", "Streams.WrappedStreamsAreTheSameStream"),
      host_mutant<EventWaitsAreIgnored>("event_waits_are_ignored", "Events.WaitHoldsTheStreamNotTheHost"),
      host_mutant<EventWaitsAreIgnored>("pool_reuses_without_an_event",
                                        "Pool.ReusesABlockOfAnotherStreamBehindItsWorkWhenMemoryIsShort"),
      host_mutant<EventWaitsHoldTheHost>("event_waits_hold_the_host", "Events.OneStreamMayWaitForSeveral"),
      host_mutant<EventWaitsTakeALaterRecord>("event_waits_take_a_later_record", "Events.WaitTakesTheRecordThatWasLastAtTheCall"),
      host_mutant<DestroyedEventsLetTheirWaitersGo>("destroyed_events_let_their_waiters_go",
                                                    "Events.DestroyingOneLeavesThoseWhoWaitWaiting"),
      host_mutant<EventQueryAlwaysSaysDone>("event_query_always_says_done",
                                            "Events.QueryNeverBlocksAndTellsWhetherTheMarkedWorkIsDone"),
      host_mutant<EventsNeverComplete>("events_never_complete", "Events.QueryNeverBlocksAndTellsWhetherTheMarkedWorkIsDone"),
      host_mutant<RecordingsGetLost>("recordings_get_lost", "Events.CompleteByThemselves"),
      host_mutant<EventSynchronizeReturnsAtOnce>("event_synchronize_returns_at_once", "Events.SynchronizeWaitsForTheMarkedWork"),
      host_mutant<EventSynchronizeWaitsForTheStream>("event_synchronize_waits_for_the_stream",
                                                     "Events.SynchronizeWaitsOnlyForWhatCameBeforeTheRecord"),
      host_mutant<LaterRecordingsAreIgnored>("later_recordings_are_ignored", "Events.RecordingAgainMovesTheMark"),
      host_mutant<ElapsedIsNegative>("elapsed_is_negative", "Events.ElapsedCoversTheWorkBetween"),
      host_mutant<ElapsedIsInMicroseconds>("elapsed_is_in_microseconds", "Events.ElapsedCoversTheWorkBetween"),
      host_mutant<TimesAreThoseOfTheCall>("times_are_those_of_the_call", "Events.ElapsedIsTakenWhenTheStreamComesToTheEvent"),
      host_mutant<ElapsedIsNeverBusy>("elapsed_is_never_busy", "Events.ElapsedIsBusyUntilBothAreDone"),
  };
}

}  // namespace metrale::conformance
