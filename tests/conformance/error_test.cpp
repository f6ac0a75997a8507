// SPDX-License-Identifier: Apache-2.0
//
// How calls fail: code, caller, one line of text; foreign handles; observers that see refusals too.
#include <algorithm>
#include <array>
#include <functional>
#include <mutex>

#include "conformance/case.h"
#include "metrale/observer.h"

namespace metrale::conformance {
namespace {

class Errors : public CaseNeeding<memory, copies, streams> {};

TEST_F(Errors, CarryTheLineOfTheirCaller) {
  const auto line_of = [](const auto& result) { return result ? 0u : result.error().site().line(); };
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  std::vector<std::byte> host(65);
  const std::vector<std::pair<std::uint32_t, std::uint32_t>> seen{
      {line_of(gpu().alloc(0)), __LINE__},
      {line_of(gpu().alloc(std::uint64_t{1} << 60)), __LINE__},
      {line_of(gpu().free(ptr.offset(1))), __LINE__},
      {line_of(gpu().copy_h2d(ptr, host)), __LINE__},
      {line_of(gpu().copy_d2h_on_stream(host, ptr, s)), __LINE__},
      {line_of(gpu().memset_async(ptr, 0, 65, s)), __LINE__},
      {line_of(gpu().synchronize({})), __LINE__},
      {line_of(gpu().destroy_stream(gpu().default_stream())), __LINE__},
      {line_of(gpu().event_query({})), __LINE__},
      {line_of(gpu().end_capture(s)), __LINE__},
      {line_of(gpu().launch_graph({}, s)), __LINE__},
      {line_of(gpu().kernel("no_such_module", "absent")), __LINE__},
      {line_of(gpu().launch_typed({}, {}, {}, 0, s, {})), __LINE__},
      {line_of(gpu().disown(ptr)), __LINE__},
  };
  for (const auto& [got, expected] : seen) EXPECT_EQ(got, expected);
}

TEST_F(Errors, AreOneLineThatSaysWhatWasAsked) {
  const DevicePtr ptr = block(64);
  std::vector<std::byte> host(65);
  EXPECT_TRUE(refused(gpu().copy_h2d(ptr, host), Errc::out_of_range, {"copy_h2d", "65", "64", "error_test.cpp"}));
  EXPECT_TRUE(refused(gpu().memset(ptr, 0, 1000), Errc::out_of_range, {"memset", "1000", "64"}));
  EXPECT_TRUE(refused(gpu().alloc(0), Errc::invalid_argument, {"alloc", "0 bytes"}));
}

TEST_F(Errors, LeaveOutputsUntouched) {
  const DevicePtr ptr = block(64);
  std::vector<std::byte> host(65, std::byte{0x12});
  EXPECT_FALSE(gpu().copy_d2h(host, ptr).has_value());
  EXPECT_FALSE(gpu().copy_d2h_async(host, ptr, gpu().default_stream()).has_value());
  settle(gpu().default_stream());
  EXPECT_EQ(std::count(host.begin(), host.end(), std::byte{0x12}), 65);
}

TEST_F(Errors, HandlesOfAnotherBackendAreRefused) {
  auto other = make();
  const auto& caps = gpu().capabilities();
  const StreamHandle theirs = must(other->create_stream());
  stream();  // so that the same index is live here too
  EXPECT_TRUE(refused(gpu().synchronize(theirs), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().destroy_stream(theirs), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().synchronize(other->default_stream()), Errc::invalid_argument));
  if (caps.has(events)) {
    const EventHandle their_event = must(other->create_event());
    event();
    EXPECT_TRUE(refused(gpu().event_query(their_event), Errc::invalid_argument));
    EXPECT_TRUE(refused(gpu().record_event(their_event, gpu().default_stream()), Errc::invalid_argument));
    EXPECT_TRUE(refused(gpu().destroy_event(their_event), Errc::invalid_argument));
  }
  if (caps.has(graphs)) {
    must(other->begin_capture(theirs));
    const GraphHandle their_graph = must(other->end_capture(theirs));
    EXPECT_TRUE(refused(gpu().launch_graph(their_graph, gpu().default_stream()), Errc::invalid_argument));
    EXPECT_TRUE(refused(gpu().destroy_graph(their_graph), Errc::invalid_argument));
  }
  EXPECT_TRUE(ok(other->synchronize(theirs)));
}

TEST_F(Errors, MemoryOfAnotherBackendIsUnknownHere) {
  auto other = make();
  must(other->alloc(1 << 20));  // where each has an address space of its own, theirs is then beyond ours
  const DevicePtr theirs = must(other->alloc(64));
  block(64);
  EXPECT_TRUE(refused(gpu().memset(theirs, 0, 64), Errc::out_of_range));
  EXPECT_TRUE(refused(gpu().free(theirs), Errc::invalid_argument));
}

TEST_F(Errors, NullHostEndsAreRefused) {
  const DevicePtr ptr = block(64);
  EXPECT_TRUE(refused(gpu().copy_h2d(ptr, {static_cast<const std::byte*>(nullptr), 8}), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().copy_d2h({static_cast<std::byte*>(nullptr), 8}, ptr), Errc::invalid_argument));
}

// ---- observers ----

class Recording : public Observer {
 public:
  void on_op(const OpRecord& record) noexcept override {
    std::lock_guard lock(mutex_);
    records_.push_back(record);
  }
  std::vector<OpRecord> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(records_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<OpRecord> records_;
};

TEST_F(Errors, ObserversSeeWhatWasAcceptedAndWhatWasRefused) {
  Recording observer;
  gpu().attach(observer);
  const StreamHandle s = stream();
  const DevicePtr ptr = must(gpu().alloc(64));
  const std::uint32_t line = __LINE__ - 1;
  must(gpu().memset_async(ptr, 7, 32, s));
  EXPECT_FALSE(gpu().memset_async(ptr, 7, 65, s).has_value());
  settle(s);
  gpu().detach(observer);
  must(gpu().free(ptr));
  const auto records = observer.take();
  std::vector<Op> ops;
  for (const OpRecord& r : records) ops.push_back(r.op);
  ASSERT_EQ(ops, (std::vector<Op>{Op::create_stream, Op::alloc, Op::memset_async, Op::memset_async, Op::synchronize_for}));
  EXPECT_EQ(records[1].bytes, 64u);
  EXPECT_EQ(records[1].site.line(), line);
  EXPECT_EQ(records[1].outcome, 0u);
  EXPECT_EQ(records[2].dst, ptr.address);
  EXPECT_EQ(records[2].bytes, 32u);
  EXPECT_EQ(records[2].stream, s);
  EXPECT_EQ(records[2].outcome, 0u);
  EXPECT_EQ(records[3].outcome, static_cast<std::uint8_t>(Errc::out_of_range));
  EXPECT_TRUE(std::is_sorted(records.begin(), records.end(), [](const auto& a, const auto& b) { return a.time_ns < b.time_ns; }));
}

TEST_F(Errors, ObserversSeeTheGeometryOfLaunches) {
  need({kernels});
  const DevicePtr out = block(64);
  const KernelHandle k = kernel(kTiled);
  Recording observer;
  gpu().attach(observer);
  const std::array<KernelArg, 1> args{KernelArg::buffer(out)};
  must(gpu().launch_typed(k, {2, 3, 4}, {5, 6, 7}, 64, gpu().default_stream(), args));
  settle(gpu().default_stream());
  gpu().detach(observer);
  const auto records = observer.take();
  ASSERT_GE(records.size(), 1u);
  EXPECT_EQ(records[0].op, Op::launch);
  EXPECT_EQ(records[0].kernel, k);
  EXPECT_EQ(records[0].grid, (Dim3{2, 3, 4}));
  EXPECT_EQ(records[0].block, (Dim3{5, 6, 7}));
  EXPECT_EQ(records[0].shared_bytes, 64u);
  EXPECT_EQ(records[0].num_args, 1u);
}

TEST_F(Errors, FlightRecorderKeepsTheLastOperations) {
  FlightRecorder* recorder = gpu().flight_recorder();
  ASSERT_NE(recorder, nullptr);
  const DevicePtr ptr = block(64);
  for (std::size_t i = 0; i < FlightRecorder::kCapacity + 10; ++i) must(gpu().memset(ptr, 1, 64));
  must(gpu().free(ptr));
  const auto last = recorder->snapshot();
  ASSERT_EQ(last.size(), FlightRecorder::kCapacity);
  EXPECT_EQ(last.back().op, Op::free);
  EXPECT_EQ(last.front().op, Op::memset);
  CreateOptions without;
  without.face.flight_recorder = false;
  remake(without);
  EXPECT_EQ(gpu().flight_recorder(), nullptr);
}

}  // namespace
}  // namespace metrale::conformance
