// SPDX-License-Identifier: Apache-2.0
//
// The guard around captures as a table: each call that could break a capture, from the thread that holds it and from another, on
// the captured stream and on one outside. After each call the capture must still end well and replay right.
#include <algorithm>
#include <array>
#include <functional>
#include <ostream>

#include "conformance/case.h"
#include "metrale/op_cache.h"

namespace metrale::conformance {
namespace {

/// What a row's call finds. Everything was made before the capture began.
struct Scene {
  GpuBackend& gpu;
  StreamHandle stream;      ///< The captured one, or one outside: the column.
  EventHandle event;        ///< Last recorded on `stream`.
  DevicePtr block, second;  ///< Not part of the capture.
  DevicePtr arena, pooled;
  std::span<std::byte> pinned;
  DevicePtr adopted;
  std::span<std::byte> registered;
  GraphHandle graph;
  std::vector<std::byte>& host;
};

enum class Expect : std::uint8_t {
  refused,      ///< capture_unsafe everywhere.
  on_holder,    ///< capture_unsafe on the thread that holds the capture, fine on others.
  on_captured,  ///< capture_unsafe on the captured stream, fine on one outside, from any thread.
  on_either,    ///< capture_unsafe on the holder's thread and on the captured stream.
  fine,         ///< Accepted everywhere.
};

struct Row {
  const char* name;
  Expect expect;
  std::vector<Capability> needs;
  std::function<Result<>(Scene&)> call;
};

template <class T>
Result<> drop(Result<T> result) {
  if (!result) return Error(std::move(result).error());
  return {};
}

const std::vector<Row>& rows() {
  static const std::vector<Row> all{
      // Every alloc and free.
      {"Alloc", Expect::on_holder, {}, [](Scene& s) { return drop(s.gpu.alloc(64)); }},
      {"AllocManaged", Expect::on_holder, {}, [](Scene& s) { return drop(s.gpu.alloc_managed(64)); }},
      {"AllocArena", Expect::on_holder, {}, [](Scene& s) { return drop(s.gpu.alloc_arena(64)); }},
      {"AllocAsync", Expect::on_either, {pooled_memory}, [](Scene& s) { return drop(s.gpu.alloc_async(64, s.stream)); }},
      {"AllocHostPinned", Expect::on_holder, {pinned_memory}, [](Scene& s) { return drop(s.gpu.alloc_host_pinned(64)); }},
      {"RegisterHost", Expect::on_holder, {host_registration}, [](Scene& s) { return s.gpu.register_host(s.host); }},
      {"Free", Expect::on_holder, {}, [](Scene& s) { return s.gpu.free(s.block); }},
      {"FreeArena", Expect::on_holder, {}, [](Scene& s) { return s.gpu.free_arena(s.arena); }},
      {"FreeAsync", Expect::on_either, {pooled_memory}, [](Scene& s) { return s.gpu.free_async(s.pooled, s.stream); }},
      {"FreeHostPinned",
       Expect::on_holder,
       {pinned_memory},
       [](Scene& s) { return s.gpu.free_host_pinned(s.pinned.data(), s.pinned.size()); }},
      {"UnregisterHost",
       Expect::on_holder,
       {host_registration},
       [](Scene& s) { return s.gpu.unregister_host(s.registered.data()); }},
      {"Disown", Expect::on_holder, {}, [](Scene& s) { return s.gpu.disown(s.adopted); }},
      {"Trim", Expect::on_holder, {pooled_memory}, [](Scene& s) { return drop(s.gpu.trim()); }},
      {"SweepUnreleased", Expect::on_holder, {}, [](Scene& s) { return drop(s.gpu.sweep_unreleased()); }},
      // Blocking copies and fills; scan and poison.
      {"CopyH2d", Expect::on_holder, {}, [](Scene& s) { return s.gpu.copy_h2d(s.block, s.host); }},
      {"CopyD2h", Expect::on_holder, {}, [](Scene& s) { return s.gpu.copy_d2h(s.host, s.block); }},
      {"CopyD2d", Expect::on_holder, {}, [](Scene& s) { return s.gpu.copy_d2d(s.block, s.second, 64); }},
      {"CopyD2hOnStream", Expect::on_either, {}, [](Scene& s) { return s.gpu.copy_d2h_on_stream(s.host, s.block, s.stream); }},
      {"Memset", Expect::on_holder, {}, [](Scene& s) { return s.gpu.memset(s.block, 1, 64); }},
      {"ScanRedzones", Expect::refused, {}, [](Scene& s) { return drop(s.gpu.scan_redzones()); }},
      {"PoisonRedzones", Expect::on_holder, {}, [](Scene& s) { return s.gpu.poison_redzones(0, 10); }},
      // Scratch growth.
      {"ScratchGrowth", Expect::on_either, {}, [](Scene& s) { return drop(s.gpu.op_cache().scratch("matrix", s.stream, 4096)); }},
      // Streams.
      {"Synchronize", Expect::on_captured, {}, [](Scene& s) { return s.gpu.synchronize(s.stream); }},
      {"SynchronizeFor", Expect::on_captured, {}, [](Scene& s) { return s.gpu.synchronize_for(s.stream, kPatience); }},
      {"Query", Expect::on_captured, {}, [](Scene& s) { return drop(s.gpu.query(s.stream)); }},
      {"DestroyStream", Expect::on_captured, {}, [](Scene& s) { return s.gpu.destroy_stream(s.stream); }},
      {"SynchronizeDevice", Expect::refused, {}, [](Scene& s) { return s.gpu.synchronize_device(); }},
      {"UnloadModules", Expect::refused, {kernels}, [](Scene& s) { return s.gpu.unload_modules(); }},
      // Events last recorded on the captured stream.
      {"EventSynchronize", Expect::on_captured, {}, [](Scene& s) { return s.gpu.event_synchronize(s.event); }},
      {"EventQuery", Expect::on_captured, {}, [](Scene& s) { return drop(s.gpu.event_query(s.event)); }},
      {"DestroyEvent", Expect::on_captured, {}, [](Scene& s) { return s.gpu.destroy_event(s.event); }},
      // Replays.
      {"LaunchGraph", Expect::on_captured, {}, [](Scene& s) { return s.gpu.launch_graph(s.graph, s.stream); }},
      // What any thread may do.
      {"CreateStream", Expect::fine, {}, [](Scene& s) { return drop(s.gpu.create_stream()); }},
      {"CreateEvent", Expect::fine, {}, [](Scene& s) { return drop(s.gpu.create_event()); }},
      {"StreamIsCapturing", Expect::fine, {}, [](Scene& s) { return s.gpu.stream_is_capturing(s.stream), Result<>(); }},
      {"LedgerReads",
       Expect::fine,
       {},
       [](Scene& s) { return s.gpu.live_bytes(), s.gpu.alloc_report(), s.gpu.live_allocations(), Result<>(); }},
      {"KernelLookUp", Expect::fine, {kernels}, [](Scene& s) { return drop(s.gpu.kernel(kModule, kFill)); }},
      {"MemoryFigures", Expect::fine, {}, [](Scene& s) { return drop(s.gpu.free_memory()); }},
  };
  return all;
}

struct Cell {
  const Row* row;
  bool on_holder;
  bool on_captured;
};

bool expects_refusal(const Cell& c) {
  switch (c.row->expect) {
    case Expect::refused: return true;
    case Expect::on_holder: return c.on_holder;
    case Expect::on_captured: return c.on_captured;
    case Expect::on_either: return c.on_holder || c.on_captured;
    case Expect::fine: return false;
  }
  return true;
}

class CaptureMatrix : public CaseNeeding<memory, copies, streams, events, graphs>, public ::testing::WithParamInterface<Cell> {
 protected:
  void SetUp() override {
    CaseNeeding::SetUp();
    CreateOptions options;
    options.face.redzone_bytes = 64;  // so that a scan has something to wait for
    if (!IsSkipped() && !HasFatalFailure()) remake(options);
  }
};

TEST_P(CaptureMatrix, AnswersAsPromisedAndTheCaptureSurvives) {
  const Cell& cell = GetParam();
  for (const Capability c : cell.row->needs) need({c});

  const StreamHandle captured = stream();
  const StreamHandle outside = stream();
  const EventHandle captured_event = event();
  const EventHandle outside_event = event();
  const DevicePtr target = block(256);
  fill(target, 0, 256);
  std::vector<std::byte> host(64);
  Scene scene{gpu(),
              cell.on_captured ? captured : outside,
              cell.on_captured ? captured_event : outside_event,
              block(64),
              block(64),
              must(gpu().alloc_arena(64)),
              {},
              {},
              foreign_memory(64),
              {},
              {},
              host};
  must(gpu().adopt(scene.adopted, 64, "another library"));
  std::vector<std::byte> registered(4096);
  if (gpu().capabilities().has(host_registration)) {
    must(gpu().register_host(registered));
    scene.registered = registered;
  }
  if (gpu().capabilities().has(pooled_memory)) scene.pooled = must(gpu().alloc_async(64, outside));
  if (gpu().capabilities().has(pinned_memory)) scene.pinned = must(gpu().alloc_host_pinned(64));
  must(gpu().begin_capture(outside));
  scene.graph = must(gpu().end_capture(outside));
  must(gpu().record_event(outside_event, outside));
  settle(outside);

  must(gpu().begin_capture(captured));
  must(gpu().memset_async(target, 0x01, 256, captured));
  must(gpu().record_event(captured_event, captured));

  Result<> answer;
  const auto call = [&] { answer = cell.row->call(scene); };
  if (cell.on_holder) {
    call();
  } else {
    on_thread(call);
  }
  if (expects_refusal(cell)) {
    EXPECT_TRUE(refused(answer, Errc::capture_unsafe));
  } else {
    EXPECT_TRUE(ok(answer));
  }

  must(gpu().copy_d2d_async(target.offset(128), target, 64, captured));
  must(gpu().memset_async(target, 0x02, 64, captured));
  const GraphHandle graph = must(gpu().end_capture(captured));
  EXPECT_FALSE(gpu().stream_is_capturing(captured));
  EXPECT_TRUE(holds(target, 256, 0)) << "recorded work ran";
  const StreamHandle s = stream();
  must(gpu().launch_graph(graph, s));
  settle(s);
  EXPECT_TRUE(holds(target, 64, 0x02));
  EXPECT_TRUE(holds(target.offset(64), 192, 0x01));
  must(gpu().memset_async(target, 0x03, 256, captured));
  settle(captured);
  EXPECT_TRUE(holds(target, 256, 0x03)) << "the stream does not run work again";
}

std::vector<Cell> cells() {
  std::vector<Cell> all;
  for (const Row& row : rows()) {
    for (const bool on_holder : {true, false}) {
      for (const bool on_captured : {true, false}) {
        // A sweep that is accepted would take the scene away.
        if (std::string_view(row.name) == "SweepUnreleased" && !on_holder) continue;
        all.push_back({&row, on_holder, on_captured});
      }
    }
  }
  return all;
}

void PrintTo(const Cell& cell, std::ostream* out) { *out << cell.row->name; }

INSTANTIATE_TEST_SUITE_P(Guard, CaptureMatrix, ::testing::ValuesIn(cells()), [](const auto& cell) {
  return std::string(cell.param.row->name) + (cell.param.on_holder ? "OnTheHoldersThread" : "OnAnotherThread") +
         (cell.param.on_captured ? "OnTheCapturedStream" : "OnAnotherStream");
});

// ---- events, and a capture that spans streams ----

class CaptureGuard : public CaseNeeding<memory, copies, streams, events, graphs> {};

TEST_F(CaptureGuard, EventsAreFreeAgainOnceRecordedOutside) {
  const StreamHandle s = stream();
  const StreamHandle outside = stream();
  const EventHandle e = event();
  const DevicePtr ptr = block(64);
  must(gpu().begin_capture(s));
  must(gpu().record_event(e, s));
  EXPECT_TRUE(refused(gpu().event_query(e), Errc::capture_unsafe));
  must(gpu().record_event(e, outside));
  EXPECT_TRUE(ok(gpu().event_synchronize(e)));
  EXPECT_TRUE(must(gpu().event_query(e)));
  EXPECT_TRUE(ok(gpu().destroy_event(e)));
  must(gpu().memset_async(ptr, 0x01, 64, s));
  const GraphHandle graph = must(gpu().end_capture(s));
  must(gpu().launch_graph(graph, s));
  settle(s);
  EXPECT_TRUE(holds(ptr, 64, 0x01));
}

TEST_F(CaptureGuard, JoinedStreamsAreGuardedToo) {
  const StreamHandle a = stream();
  const StreamHandle b = stream();
  const EventHandle fork = event();
  const EventHandle join = event();
  const DevicePtr ptr = block(64);
  must(gpu().begin_capture(a));
  must(gpu().record_event(fork, a));
  must(gpu().stream_wait_event(b, fork));
  std::vector<std::byte> host(64);
  for (const bool elsewhere : {false, true}) {
    const auto calls = [&] {
      EXPECT_TRUE(refused(gpu().synchronize(b), Errc::capture_unsafe));
      EXPECT_TRUE(refused(gpu().query(b), Errc::capture_unsafe));
      EXPECT_TRUE(refused(gpu().copy_d2h_on_stream(host, ptr, b), Errc::capture_unsafe));
      EXPECT_TRUE(refused(gpu().destroy_stream(b), Errc::capture_unsafe));
    };
    elsewhere ? on_thread(calls) : calls();
  }
  must(gpu().memset_async(ptr, 0x01, 64, b));
  must(gpu().record_event(join, b));
  must(gpu().stream_wait_event(a, join));
  const GraphHandle graph = must(gpu().end_capture(a));
  must(gpu().launch_graph(graph, a));
  settle(a);
  EXPECT_TRUE(holds(ptr, 64, 0x01));
}

TEST_F(CaptureGuard, RefusalsNameTheCapture) {
  const StreamHandle s = stream();
  must(gpu().begin_capture(s));
  const std::string site = line_above();
  EXPECT_TRUE(refused(gpu().alloc(64), Errc::capture_unsafe, {site}));
  EXPECT_TRUE(refused(gpu().synchronize(s), Errc::capture_unsafe, {site}));
  EXPECT_TRUE(refused(gpu().synchronize_device(), Errc::capture_unsafe, {site}));
  EXPECT_TRUE(ok(gpu().end_capture(s)));
}

TEST_F(CaptureGuard, EverythingIsFreeAgainAfterTheEnd) {
  const StreamHandle s = stream();
  const EventHandle e = event();
  must(gpu().begin_capture(s));
  must(gpu().record_event(e, s));
  must(gpu().end_capture(s));
  EXPECT_TRUE(ok(gpu().alloc(64)));
  EXPECT_TRUE(ok(gpu().synchronize(s)));
  EXPECT_TRUE(ok(gpu().synchronize_device()));
  EXPECT_TRUE(ok(gpu().event_query(e)));
  EXPECT_TRUE(ok(gpu().destroy_event(e)));
  EXPECT_TRUE(ok(gpu().destroy_stream(s)));
}

TEST_F(CaptureGuard, FreeOnAnotherThreadWaitsForEarlierWorkNotForTheCapture) {
  need({host_callbacks});
  const StreamHandle captured = stream();
  const StreamHandle s = stream();
  const DevicePtr used = block(4096);
  const DevicePtr target = block(64);
  must(gpu().begin_capture(captured));
  must(gpu().memset_async(target, 0x01, 64, captured));
  on_thread([&] {
    Gate gate(gpu(), s);
    must(gpu().memset_async(used, 0x01, 4096, s));
    returns_before(gate, [&] { must(gpu().free(used)); });
    settle(s);
  });
  const GraphHandle graph = must(gpu().end_capture(captured));
  must(gpu().launch_graph(graph, captured));
  settle(captured);
  EXPECT_TRUE(holds(target, 64, 0x01));
}

}  // namespace
}  // namespace metrale::conformance
