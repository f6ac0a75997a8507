// SPDX-License-Identifier: Apache-2.0
//
// DeviceBuffer, PinnedBuffer, Stream, Event, Graph and CaptureScope.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <thread>
#include <vector>

#include "metrale/device_buffer.h"
#include "metrale/event.h"
#include "metrale/graph.h"
#include "metrale/pinned_buffer.h"
#include "metrale/stream.h"
#include "unit/core/two_backends.h"

namespace metrale {
namespace {

using test::LogLines;
using testing::HasSubstr;

class OwnersTest : public test::OnBothBackends {};
METRALE_ON_BOTH_BACKENDS(OwnersTest);

TEST_P(OwnersTest, BufferFreesItsBlockAndOnlyOnce) {
  {
    Result<DeviceBuffer> buffer = DeviceBuffer::create(*backend_, 1000);
    ASSERT_OK(buffer);
    EXPECT_TRUE(buffer->ptr());
    EXPECT_EQ(buffer->size_bytes(), 1000u);
    EXPECT_EQ(backend_->live_bytes(), 1000u);
    ASSERT_OK(buffer->release());
    EXPECT_EQ(backend_->live_bytes(), 0u);
    EXPECT_FALSE(*buffer);
    ASSERT_OK(buffer->release());
    const Result<DeviceBuffer> managed = DeviceBuffer::create_managed(*backend_, 500);
    ASSERT_OK(managed);
    EXPECT_EQ(backend_->live_alloc_count(), 1u);
  }
  EXPECT_EQ(backend_->live_alloc_count(), 0u);
}

TEST_P(OwnersTest, BufferKnowsTheLineThatMadeIt) {
  const Result<DeviceBuffer> buffer = DeviceBuffer::create(*backend_, 64);
  const auto line = std::source_location::current().line() - 1;
  ASSERT_OK(buffer);
  ASSERT_EQ(backend_->live_allocations().size(), 1u);
  EXPECT_EQ(backend_->live_allocations()[0].site.line(), line);
}

TEST_P(OwnersTest, MovingABufferMovesItsBlock) {
  DeviceBuffer a = *DeviceBuffer::create(*backend_, 100);
  const DevicePtr ptr = a.ptr();
  DeviceBuffer b = std::move(a);
  EXPECT_EQ(b.ptr(), ptr);
  EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move): the moved-from state is the point
  DeviceBuffer c = *DeviceBuffer::create(*backend_, 200);
  c = std::move(b);
  EXPECT_EQ(c.ptr(), ptr);
  EXPECT_EQ(backend_->live_bytes(), 100u) << "what c held was freed";
  DeviceBuffer& self = c;
  c = std::move(self);
  EXPECT_EQ(c.ptr(), ptr);
  ASSERT_OK(backend_->free(c.detach()));
  EXPECT_FALSE(c);
}

TEST_P(OwnersTest, FailedCreateOwnsNothing) {
  EXPECT_ERRC(DeviceBuffer::create(*backend_, 0), Errc::invalid_argument);
  EXPECT_ERRC(PinnedBuffer::create(*backend_, 0), Errc::invalid_argument);
  EXPECT_ERRC(DeviceBuffer::create_async(*backend_, 64, {}), Errc::invalid_argument);
  EXPECT_EQ(backend_->live_alloc_count(), 0u);
}

TEST_P(OwnersTest, PooledBufferGoesBackInStreamOrder) {
  Stream stream = *Stream::create(*backend_);
  {
    Result<DeviceBuffer> buffer = DeviceBuffer::create_async(*backend_, 4096, stream.handle());
    ASSERT_OK(buffer);
    EXPECT_EQ(backend_->live_bytes(), 4096u);
    ASSERT_OK(backend_->memset_async(buffer->ptr(), 1, 4096, stream.handle()));
    ASSERT_OK(buffer->release());
    EXPECT_EQ(backend_->live_bytes(), 0u);
    DeviceBuffer plain = *DeviceBuffer::create(*backend_, 10);
    EXPECT_ERRC(plain.release_on(stream.handle()), Errc::invalid_argument);
    EXPECT_TRUE(plain);
  }
  ASSERT_OK(stream.synchronize());
}

TEST_P(OwnersTest, PooledBufferOutlivesItsStreamAndGoesBackOnAnother) {
  Stream stream = *Stream::create(*backend_);
  DeviceBuffer buffer = *DeviceBuffer::create_async(*backend_, 4096, stream.handle());
  ASSERT_OK(stream.synchronize());
  ASSERT_OK(stream.release());
  EXPECT_ERRC(buffer.release(), Errc::invalid_argument);
  EXPECT_TRUE(buffer) << "the block is still owned";
  ASSERT_OK(buffer.release_on(backend_->default_stream()));
  EXPECT_EQ(backend_->live_bytes(), 0u);
}

TEST_P(OwnersTest, BufferThatAGraphNamesStaysOwnedUntilTheGraphIsGone) {
  Stream stream = *Stream::create(*backend_);
  DeviceBuffer buffer = *DeviceBuffer::create(*backend_, 256);
  Result<CaptureScope> capture = CaptureScope::begin(*backend_, stream.handle());
  ASSERT_OK(capture);
  ASSERT_OK(backend_->memset_async(buffer.ptr(), 7, 256, stream.handle()));
  EXPECT_ERRC(buffer.release(), Errc::capture_unsafe);
  EXPECT_TRUE(buffer);
  Result<Graph> graph = capture->end();
  ASSERT_OK(graph);
  EXPECT_ERRC(buffer.release(), Errc::in_use);
  EXPECT_TRUE(buffer);
  ASSERT_OK(graph->release());
  ASSERT_OK(buffer.release());
  EXPECT_EQ(backend_->live_alloc_count(), 0u);
}

TEST_P(OwnersTest, BufferThatDiesWhileAGraphNamesItIsLeftToTheSweepAndSaysSo) {
  Stream stream = *Stream::create(*backend_);
  Graph graph;
  LogLines log;
  {
    DeviceBuffer buffer = *DeviceBuffer::create(*backend_, 256);
    Result<CaptureScope> capture = CaptureScope::begin(*backend_, stream.handle());
    ASSERT_OK(backend_->memset_async(buffer.ptr(), 7, 256, stream.handle()));
    graph = std::move(*capture->end());
  }
  EXPECT_THAT(log.text(), HasSubstr("left to the sweep"));
  EXPECT_THAT(log.text(), HasSubstr("in_use"));
  EXPECT_EQ(backend_->live_bytes(), 256u);
  const Result<std::uint64_t> swept = backend_->sweep_unreleased();
  ASSERT_OK(swept);
  EXPECT_EQ(*swept, 1u);
  EXPECT_EQ(backend_->live_bytes(), 0u);
  (void)graph.release();  // the sweep destroyed it
}

TEST_P(OwnersTest, PinnedBufferIsZeroedAlignedAndGivenBack) {
  PinnedBuffer buffer = *PinnedBuffer::create(*backend_, 100);
  EXPECT_EQ(buffer.size_bytes(), 100u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.bytes().data()) % kPinnedAlignment, 0u);
  EXPECT_TRUE(std::all_of(buffer.bytes().begin(), buffer.bytes().end(), [](std::byte b) { return b == std::byte{0}; }));
  EXPECT_TRUE(backend_->is_pinned(buffer.bytes()));
  EXPECT_EQ(buffer.as<std::uint64_t>().size(), 12u) << "the rest is left out";
  const std::span<std::byte> memory = buffer.bytes();
  PinnedBuffer other = std::move(buffer);
  EXPECT_FALSE(buffer);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(other.bytes().data(), memory.data());
  other = *PinnedBuffer::create(*backend_, 50);
  EXPECT_FALSE(backend_->is_pinned(memory)) << "what it held was given back";
  ASSERT_OK(other.release());
  ASSERT_OK(other.release());
  EXPECT_FALSE(other);
}

TEST_P(OwnersTest, StreamEventAndGraphWorkTogether) {
  Stream a = *Stream::create(*backend_);
  Stream b = *Stream::create(*backend_);
  Event event = *Event::create(*backend_);
  DeviceBuffer buffer = *DeviceBuffer::create(*backend_, 4);
  ASSERT_OK(backend_->memset_async(buffer.ptr(), 0x11, 4, a.handle()));
  ASSERT_OK(event.record(a.handle()));
  ASSERT_OK(event.hold(b.handle()));
  std::array<std::byte, 4> seen{};
  ASSERT_OK(backend_->copy_d2h_on_stream(seen, buffer.ptr(), b.handle()));
  EXPECT_EQ(seen[3], std::byte{0x11});
  ASSERT_OK(event.synchronize());
  const Result<bool> done = event.query();
  ASSERT_OK(done);
  EXPECT_TRUE(*done);

  Result<CaptureScope> capture = CaptureScope::begin(*backend_, a.handle());
  ASSERT_OK(capture);
  EXPECT_TRUE(capture->active());
  ASSERT_OK(backend_->memset_async(buffer.ptr(), 0x22, 4, a.handle()));
  Result<Graph> graph = capture->end();
  ASSERT_OK(graph);
  EXPECT_FALSE(capture->active());
  EXPECT_ERRC(capture->end(), Errc::invalid_argument);
  EXPECT_ERRC(capture->uses(buffer.ptr()), Errc::invalid_argument);
  ASSERT_OK(graph->launch(a.handle()));
  ASSERT_OK(backend_->copy_d2h_on_stream(seen, buffer.ptr(), a.handle()));
  EXPECT_EQ(seen[3], std::byte{0x22});
  const Result<bool> idle = a.query();
  ASSERT_OK(idle);
  EXPECT_TRUE(*idle);
}

TEST_P(OwnersTest, TimedEventsMeasureForwards) {
  Stream stream = *Stream::create(*backend_);
  Event start = *Event::create_timed(*backend_);
  Event end = *Event::create_timed(*backend_);
  ASSERT_OK(start.record(stream.handle()));
  ASSERT_OK(end.record(stream.handle()));
  ASSERT_OK(stream.synchronize());
  const Result<std::int64_t> elapsed = end.elapsed_ns_since(start);
  ASSERT_OK(elapsed);
  EXPECT_GE(*elapsed, 0);
}

TEST_P(OwnersTest, EmptyOwnersRefuseWork) {
  Stream stream;
  Event event;
  Graph graph;
  EXPECT_ERRC(stream.synchronize(), Errc::invalid_argument);
  EXPECT_ERRC(stream.query(), Errc::invalid_argument);
  EXPECT_ERRC(event.record(backend_->default_stream()), Errc::invalid_argument);
  EXPECT_ERRC(event.hold(backend_->default_stream()), Errc::invalid_argument);
  EXPECT_ERRC(event.synchronize(), Errc::invalid_argument);
  EXPECT_ERRC(event.query(), Errc::invalid_argument);
  EXPECT_ERRC(event.elapsed_ns_since(event), Errc::invalid_argument);
  EXPECT_ERRC(graph.launch(backend_->default_stream()), Errc::invalid_argument);
  ASSERT_OK(stream.release());
}

TEST_P(OwnersTest, HandleOwnersMoveAndReleaseOnce) {
  Stream a = *Stream::create(*backend_);
  const StreamHandle handle = a.handle();
  Stream b = std::move(a);
  EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(b.handle(), handle);
  b = *Stream::create(*backend_);
  EXPECT_ERRC(backend_->synchronize(handle), Errc::invalid_argument);
  ASSERT_OK(b.release());
  ASSERT_OK(b.release());
  {
    const Event event = *Event::create(*backend_);
    const EventHandle seen = event.handle();
    ASSERT_OK(backend_->event_query(seen));
    Graph graph;
    (void)graph;
  }
}

TEST_P(OwnersTest, CaptureThatAnErrorLeavesIsAbortedAndTheStreamRunsAgain) {
  Stream stream = *Stream::create(*backend_);
  DeviceBuffer buffer = *DeviceBuffer::create(*backend_, 16);
  const auto fails_inside = [&]() -> Result<> {
    const CaptureScope capture = METRALE_TRY(CaptureScope::begin(*backend_, stream.handle()));
    METRALE_TRY(capture.uses(buffer.ptr()));
    METRALE_TRY(backend_->memset_async(buffer.ptr(), 1, 16, stream.handle()));
    METRALE_TRY(backend_->alloc(64));  // refused in a capture
    return {};
  };
  EXPECT_ERRC(fails_inside(), Errc::capture_unsafe);
  EXPECT_FALSE(backend_->stream_is_capturing(stream.handle()));
  ASSERT_OK(backend_->memset_async(buffer.ptr(), 2, 16, stream.handle()));
  std::array<std::byte, 16> seen{};
  ASSERT_OK(backend_->copy_d2h_on_stream(seen, buffer.ptr(), stream.handle()));
  EXPECT_EQ(seen[0], std::byte{2});
  EXPECT_EQ(backend_->live_graph_count(), 0u);
  ASSERT_OK(buffer.release());
}

TEST_P(OwnersTest, EndWithAnUnjoinedStreamIsOverAndBothStreamsRunAgain) {
  Stream a = *Stream::create(*backend_);
  Stream b = *Stream::create(*backend_);
  Event event = *Event::create(*backend_);
  CaptureScope capture = std::move(*CaptureScope::begin(*backend_, a.handle()));
  ASSERT_OK(event.record(a.handle()));
  ASSERT_OK(event.hold(b.handle()));
  EXPECT_ERRC(capture.end(), Errc::invalid_argument);
  EXPECT_FALSE(capture.active());
  ASSERT_OK(a.synchronize());
  ASSERT_OK(b.synchronize());
  ASSERT_OK(capture.abort());
}

TEST_P(OwnersTest, MovedCaptureScopeAbortsOnce) {
  Stream stream = *Stream::create(*backend_);
  CaptureScope first = std::move(*CaptureScope::begin(*backend_, stream.handle()));
  {
    const CaptureScope second = std::move(first);
    EXPECT_FALSE(first.active());  // NOLINT(bugprone-use-after-move)
    EXPECT_TRUE(backend_->stream_is_capturing(stream.handle()));
    EXPECT_EQ(second.stream(), stream.handle());
  }
  EXPECT_FALSE(backend_->stream_is_capturing(stream.handle()));
}

TEST_P(OwnersTest, OwnersAreQuietAfterShutdown) {
  Stream stream = *Stream::create(*backend_);
  Event event = *Event::create(*backend_);
  DeviceBuffer buffer = *DeviceBuffer::create(*backend_, 16);
  PinnedBuffer pinned = *PinnedBuffer::create(*backend_, 16);
  {
    LogLines sweep_warning;
    ASSERT_OK(backend_->shutdown());
  }
  LogLines log;
  ASSERT_OK(buffer.release());
  ASSERT_OK(pinned.release());
  ASSERT_OK(event.release());
  ASSERT_OK(stream.release());
  EXPECT_EQ(log.text(), "");
}

// ---- failures injected at each call that reaches the device ----

// Runs `work` with the n-th device call failing, for every n, and expects that no block or graph is left whatever the step.
void expect_no_leak_at_any_failure(const std::function<Result<>(GpuBackend&)>& work) {
  std::uint64_t num_calls = 0;
  {
    const auto backend = test::make_mock();
    mock::control(*backend).reset();
    ASSERT_OK(work(*backend));
    num_calls = mock::control(*backend).counts().hook_calls;
  }
  ASSERT_GT(num_calls, 3u);
  LogLines quiet;
  std::uint64_t num_failed = 0;
  for (std::uint64_t n = 1; n <= num_calls; ++n) {
    const auto backend = test::make_mock();
    mock::control(*backend).fail_any_nth(n, Errc::internal);
    if (const Result<> result = work(*backend); !result) ++num_failed;
    mock::control(*backend).clear_failures();
    EXPECT_EQ(backend->live_alloc_count(), 0u) << "call " << n;
    EXPECT_EQ(backend->live_graph_count(), 0u) << "call " << n;
    const Result<std::uint64_t> swept = backend->sweep_unreleased();
    ASSERT_OK(swept);
    EXPECT_EQ(*swept, 0u) << "call " << n;
  }
  EXPECT_GT(num_failed, 0u);
}

TEST(OwnersFailureTest, NothingIsLeftWhicheverCallFails) {
  expect_no_leak_at_any_failure([](GpuBackend& backend) -> Result<> {
    const Stream stream = METRALE_TRY(Stream::create(backend));
    const Event event = METRALE_TRY(Event::create_timed(backend));
    const DeviceBuffer device = METRALE_TRY(DeviceBuffer::create(backend, 512));
    const DeviceBuffer managed = METRALE_TRY(DeviceBuffer::create_managed(backend, 512));
    const DeviceBuffer pooled = METRALE_TRY(DeviceBuffer::create_async(backend, 512, stream.handle()));
    const PinnedBuffer pinned = METRALE_TRY(PinnedBuffer::create(backend, 64));
    CaptureScope capture = METRALE_TRY(CaptureScope::begin(backend, stream.handle()));
    METRALE_TRY(backend.copy_h2d_async_retained(device.ptr(), pinned.bytes(), stream.handle()));
    METRALE_TRY(backend.memset_async(managed.ptr(), 0, 512, stream.handle()));
    const Graph graph = METRALE_TRY(capture.end());
    METRALE_TRY(graph.launch(stream.handle()));
    METRALE_TRY(event.record(stream.handle()));
    METRALE_TRY(event.synchronize());
    return stream.synchronize();
  });
}

TEST(OwnersFailureTest, RefusedFreeIsReportedOnceAndTheOwnerIsEmpty) {
  const auto backend = test::make_mock();
  DeviceBuffer buffer = *DeviceBuffer::create(*backend, 512);
  mock::control(*backend).fail_nth(Op::free, 1);
  EXPECT_ERRC(buffer.release(), Errc::internal);
  EXPECT_FALSE(buffer) << "the block left the ledger before the driver was told";
  ASSERT_OK(buffer.release());
  LogLines log;
  {
    const DeviceBuffer dying = *DeviceBuffer::create(*backend, 512);
    mock::control(*backend).fail_nth(Op::free, 1);
  }
  EXPECT_THAT(log.text(), HasSubstr("512 bytes of device memory"));
}

TEST(OwnersFailureTest, OwnersLetGoOfALostDevice) {
  const auto backend = test::make_mock();
  LogLines log;
  {
    const Stream stream = *Stream::create(*backend);
    const Event event = *Event::create(*backend);
    const DeviceBuffer buffer = *DeviceBuffer::create(*backend, 512);
    const PinnedBuffer pinned = *PinnedBuffer::create(*backend, 64);
    mock::control(*backend).lose_device("fell off the bus");
    EXPECT_ERRC(stream.synchronize(), Errc::device_lost);
    EXPECT_ERRC(DeviceBuffer::create(*backend, 512), Errc::device_lost);
  }
  EXPECT_EQ(backend->live_alloc_count(), 0u);
  EXPECT_GE(backend->abandoned_bytes(), 512u + 64u);
  EXPECT_THAT(log.text(), testing::Not(HasSubstr("not freed")));
  EXPECT_THAT(log.text(), testing::Not(HasSubstr("not released")));
}

}  // namespace
}  // namespace metrale
