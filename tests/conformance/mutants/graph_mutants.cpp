// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "conformance/mutants/host_mutant.h"

namespace metrale::conformance {
namespace {

/// Records and replays by itself, as a list of functions, so that variants can get the list wrong. Serves captures of one stream.
class OwnGraphs : public HostMutant {
 public:
  using HostMutant::HostMutant;

 protected:
  using Step = std::function<void()>;
  struct Recording {
    std::vector<Step> steps;
    std::atomic<bool> alive{true};
    int num_launches = 0;
  };

  /// Puts a step into the open capture of `stream`; false when there is none.
  bool record(NativeStream stream, Step step) {
    const auto open = open_.find(stream);
    if (open == open_.end()) return false;
    open->second->steps.push_back(std::move(step));
    return true;
  }
  virtual void replay(Recording& recording) {
    for (const Step& step : recording.steps) step();
  }

  Result<> do_begin_capture(NativeStream stream) override {
    open_[stream] = std::make_shared<Recording>();
    return HostMutant::do_begin_capture(stream);
  }
  Result<NativeGraph> do_end_capture(NativeStream stream) override {
    const NativeGraph graph = METRALE_TRY(HostMutant::do_end_capture(stream));
    graphs_[graph] = open_[stream];
    open_.erase(stream);
    return graph;
  }
  Result<> do_launch_graph(NativeGraph graph, NativeStream stream) override {
    return HostMutant::do_enqueue_host(stream, [this, recording = graphs_[graph]] { replay(*recording); });
  }
  Result<> do_destroy_graph(NativeGraph graph) override {
    graphs_[graph]->alive = false;
    graphs_.erase(graph);
    return HostMutant::do_destroy_graph(graph);
  }
  Result<> do_memset_async(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream stream) override {
    if (record(stream, [dst, value, bytes] { std::memset(bytes_at(dst), value, bytes); })) return {};
    return HostMutant::do_memset_async(dst, value, bytes, stream);
  }
  Result<> do_copy_d2d_async(DevicePtr dst, DevicePtr src, std::uint64_t bytes, NativeStream stream) override {
    if (record(stream, [dst, src, bytes] { std::memmove(bytes_at(dst), bytes_at(src), bytes); })) return {};
    return HostMutant::do_copy_d2d_async(dst, src, bytes, stream);
  }
  Result<> do_copy_h2d_async(DevicePtr dst, const void* src, std::uint64_t bytes, NativeStream stream, bool retained) override {
    const auto* begin = static_cast<const std::byte*>(src);
    std::vector<std::byte> frozen(begin, begin + bytes);
    if (record(stream, [dst, frozen = std::move(frozen)] { std::memcpy(bytes_at(dst), frozen.data(), frozen.size()); })) return {};
    return HostMutant::do_copy_h2d_async(dst, src, bytes, stream, retained);
  }
  Result<> do_enqueue_host(NativeStream stream, std::function<void()> fn) override {
    if (record(stream, fn)) return {};
    return HostMutant::do_enqueue_host(stream, std::move(fn));
  }

 private:
  std::map<NativeStream, std::shared_ptr<Recording>> open_;
  std::map<NativeGraph, std::shared_ptr<Recording>> graphs_;
};

class GraphsReplayInReverse : public OwnGraphs {
  using OwnGraphs::OwnGraphs;
  void replay(Recording& recording) override {
    for (auto step = recording.steps.rbegin(); step != recording.steps.rend(); ++step) (*step)();
  }
};

class GraphsReplayOnce : public OwnGraphs {
  using OwnGraphs::OwnGraphs;
  void replay(Recording& recording) override {
    if (recording.num_launches++ == 0) OwnGraphs::replay(recording);
  }
};

class GraphsDropTheirLastStep : public OwnGraphs {
  using OwnGraphs::OwnGraphs;
  void replay(Recording& recording) override {
    for (std::size_t i = 0; i + 1 < recording.steps.size(); ++i) recording.steps[i]();
  }
};

class DestroyDropsReplaysInFlight : public OwnGraphs {
  using OwnGraphs::OwnGraphs;
  void replay(Recording& recording) override {
    if (recording.alive) OwnGraphs::replay(recording);
  }
};

class CapturedWorkRunsAtOnceToo : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_memset_async(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream stream) override {
    if (capturing(stream)) std::memset(bytes_at(dst), value, bytes);
    return HostMutant::do_memset_async(dst, value, bytes, stream);
  }
};

/// The silent default: begin does nothing, end gives an empty graph.
class CaptureSucceedsAndDoesNothing : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_begin_capture(NativeStream) override { return {}; }
  Result<NativeGraph> do_end_capture(NativeStream) override {
    const NativeStream other = METRALE_TRY(HostMutant::do_create_stream(0));
    METRALE_TRY(HostMutant::do_begin_capture(other));
    return HostMutant::do_end_capture(other);
  }
};

class LaunchGraphSucceedsAndDoesNothing : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_launch_graph(NativeGraph, NativeStream) override { return {}; }
};

class ReplaysRunOnAStreamOfTheirOwn : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_launch_graph(NativeGraph graph, NativeStream) override {
    if (own_.value == 0) own_ = METRALE_TRY(HostMutant::do_create_stream(0));
    return HostMutant::do_launch_graph(graph, own_);
  }
  NativeStream own_;
};

class LaunchGraphWaits : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_launch_graph(NativeGraph graph, NativeStream stream) override {
    METRALE_TRY(HostMutant::do_launch_graph(graph, stream));
    return HostMutant::do_synchronize(stream);
  }
};

class CapturedHostFunctionsRunOnce : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_enqueue_host(NativeStream stream, std::function<void()> fn) override {
    if (!capturing(stream)) return HostMutant::do_enqueue_host(stream, std::move(fn));
    return HostMutant::do_enqueue_host(stream, [fn = std::move(fn), ran = false]() mutable {
      if (!std::exchange(ran, true)) fn();
    });
  }
};

class GraphsNeverLetGo : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_destroy_graph(NativeGraph) override { return {}; }
};

/// Remembers which streams joined the capture of which origin.
class JoinsAreKnown : public HostMutant {
 public:
  using HostMutant::HostMutant;

 protected:
  Result<> do_stream_wait_event(NativeStream stream, NativeEvent event) override {
    const bool before = capturing(stream);
    METRALE_TRY(HostMutant::do_stream_wait_event(stream, event));
    if (!before && capturing(stream)) joined_.insert(stream);
    return {};
  }
  std::set<NativeStream> joined_;
};

class UnjoinedStreamsAreAccepted : public JoinsAreKnown {
  using JoinsAreKnown::JoinsAreKnown;
  Result<NativeGraph> do_end_capture(NativeStream stream) override {
    for (const NativeStream joined : joined_) {
      const NativeEvent event = METRALE_TRY(HostMutant::do_create_event(false));
      METRALE_TRY(HostMutant::do_record_event(event, joined));
      METRALE_TRY(HostMutant::do_stream_wait_event(stream, event));
    }
    joined_.clear();
    return JoinsAreKnown::do_end_capture(stream);
  }
};

class WorkOfJoinedStreamsIsLost : public JoinsAreKnown {
  using JoinsAreKnown::JoinsAreKnown;
  Result<> do_memset_async(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream stream) override {
    if (joined_.contains(stream) && capturing(stream)) return {};
    return JoinsAreKnown::do_memset_async(dst, value, bytes, stream);
  }
};

class JoinedStreamsRunTheirWork : public JoinsAreKnown {
  using JoinsAreKnown::JoinsAreKnown;
  Result<> do_memset_async(DevicePtr dst, std::uint8_t value, std::uint64_t bytes, NativeStream stream) override {
    if (joined_.contains(stream) && capturing(stream)) std::memset(bytes_at(dst), value, bytes);
    return JoinsAreKnown::do_memset_async(dst, value, bytes, stream);
  }
};

class AbortLeavesTheStreamRecording : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_abort_capture(NativeStream) override { return {}; }
};

class AbortRunsWhatWasRecorded : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_abort_capture(NativeStream stream) override {
    const NativeGraph graph = METRALE_TRY(HostMutant::do_end_capture(stream));
    METRALE_TRY(HostMutant::do_launch_graph(graph, stream));
    METRALE_TRY(HostMutant::do_synchronize(stream));
    return HostMutant::do_destroy_graph(graph);
  }
};

/// As a driver whose capture is open to the whole process: what another thread allocates breaks it.
class CaptureDiesWhenOthersAllocate : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_begin_capture(NativeStream stream) override {
    open_ = stream;
    return HostMutant::do_begin_capture(stream);
  }
  Result<DevicePtr> do_alloc(std::uint64_t bytes, MemoryKind kind) override {
    if (open_.value != 0) METRALE_TRY(HostMutant::do_abort_capture(std::exchange(open_, {})));
    return HostMutant::do_alloc(bytes, kind);
  }
  Result<NativeGraph> do_end_capture(NativeStream stream) override {
    open_ = {};
    return HostMutant::do_end_capture(stream);
  }
  NativeStream open_;
};

class CaptureDiesWhenAnEventIsMade : public HostMutant {
  using HostMutant::HostMutant;
  Result<> do_begin_capture(NativeStream stream) override {
    open_ = stream;
    return HostMutant::do_begin_capture(stream);
  }
  Result<NativeEvent> do_create_event(bool timed) override {
    if (open_.value != 0) METRALE_TRY(HostMutant::do_abort_capture(std::exchange(open_, {})));
    return HostMutant::do_create_event(timed);
  }
  Result<NativeGraph> do_end_capture(NativeStream stream) override {
    open_ = {};
    return HostMutant::do_end_capture(stream);
  }
  NativeStream open_;
};

class EveryStreamSaysItIsCapturing : public HostMutant {
  using HostMutant::HostMutant;
  Result<bool> do_stream_is_capturing(NativeStream) override { return true; }
};

/// The streams of a replay are not waited for: memory is let go while it is still written.
class MarksBehindReplaysAreMissing : public HostMutant {
  using HostMutant::HostMutant;
  Result<bool> do_event_query(NativeEvent) override { return true; }
};

}  // namespace

std::vector<Mutant> graph_mutants() {
  return {
      host_mutant<GraphsReplayInReverse>("graphs_replay_in_reverse", "Graphs.KeepTheOrderOfTheirWork"),
      host_mutant<GraphsReplayOnce>("graphs_replay_once", "Graphs.ReplayAsOftenAsLaunched"),
      host_mutant<GraphsDropTheirLastStep>("graphs_drop_their_last_step", "Graphs.KeepTheOrderOfTheirWork"),
      host_mutant<DestroyDropsReplaysInFlight>("destroy_drops_replays_in_flight", "Graphs.DestroyLetsReplaysInFlightComplete"),
      host_mutant<CapturedWorkRunsAtOnceToo>("captured_work_runs_at_once_too", "Capture.RecordsWorkInsteadOfRunningIt"),
      host_mutant<CaptureSucceedsAndDoesNothing>("capture_succeeds_and_does_nothing", "Capture.RecordsWorkInsteadOfRunningIt"),
      host_mutant<LaunchGraphSucceedsAndDoesNothing>("launch_graph_succeeds_and_does_nothing", "Graphs.ReplayInStreamOrder"),
      host_mutant<ReplaysRunOnAStreamOfTheirOwn>("replays_run_on_a_stream_of_their_own", "Graphs.ReplayInStreamOrder"),
      host_mutant<LaunchGraphWaits>("launch_graph_waits", "Graphs.ReplayInStreamOrder"),
      host_mutant<CapturedHostFunctionsRunOnce>("captured_host_functions_run_once", "Capture.ReplaysEveryKindOfWorkInOrder"),
      host_mutant<GraphsNeverLetGo>("graphs_never_let_go", "Graphs.LetGoOfTheirHostFunctions"),
      host_mutant<UnjoinedStreamsAreAccepted>("unjoined_streams_are_accepted",
                                              "CaptureJoin.EndWithUnjoinedStreamsIsRefusedAndDiscards"),
      host_mutant<WorkOfJoinedStreamsIsLost>("work_of_joined_streams_is_lost", "CaptureJoin.EventWaitsJoinFurtherStreams"),
      host_mutant<JoinedStreamsRunTheirWork>("joined_streams_run_their_work", "CaptureJoin.EventWaitsJoinFurtherStreams"),
      host_mutant<AbortLeavesTheStreamRecording>("abort_leaves_the_stream_recording",
                                                 "CaptureAbort.AbortDiscardsAndTheStreamRunsWorkAgain"),
      host_mutant<AbortRunsWhatWasRecorded>("abort_runs_what_was_recorded", "CaptureAbort.AbortDiscardsAndTheStreamRunsWorkAgain"),
      host_mutant<CaptureDiesWhenOthersAllocate>("capture_dies_when_others_allocate", "Capture.OtherThreadsGoOn"),
      host_mutant<CaptureDiesWhenAnEventIsMade>(
          "capture_dies_when_an_event_is_made",
          "Guard/CaptureMatrix.AnswersAsPromisedAndTheCaptureSurvives/CreateEventOnTheHoldersThreadOnTheCapturedStream"),
      host_mutant<EveryStreamSaysItIsCapturing>("every_stream_says_it_is_capturing", "Capture.TellsWhetherAStreamIsCapturing"),
      host_mutant<MarksBehindReplaysAreMissing>("marks_behind_replays_are_missing",
                                                "GraphMemory.StaysNamedUntilTheLastReplayIsDone"),
  };
}

}  // namespace metrale::conformance
