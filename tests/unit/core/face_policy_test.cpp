// SPDX-License-Identifier: Apache-2.0
//
// Rules that live in the face and that no broken backend could show: what is asked of a driver, in which order, and what is made of
// its answers.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "core/face_state.h"
#include "scripted_backend.h"

namespace metrale {
namespace {

using test::Scripted;

class FacePolicyTest : public testing::Test {
 protected:
  test::LogLines log_;
  std::unique_ptr<Scripted> b_ = Scripted::make_one();
};

// ---- memory ----

TEST_F(FacePolicyTest, FreeLeavesTheLedgerBeforeTheDriverIsTold) {
  const DevicePtr ptr = b_->alloc(100).value();
  std::uint64_t live_in_hook = 1;
  b_->on_free = [&]() -> Result<> {
    live_in_hook = b_->live_bytes();
    return Error(Errc::internal, "the driver refuses");
  };
  EXPECT_ERRC(b_->free(ptr), Errc::internal);
  EXPECT_EQ(live_in_hook, 0u);
  EXPECT_EQ(b_->live_alloc_count(), 0u) << "a refusal is reported; the block has left all the same";
}

TEST_F(FacePolicyTest, OutOfMemoryIsRetriedOnceAfterTrimming) {
  int refusals = 1;
  b_->on_alloc = [&](std::uint64_t) -> Result<DevicePtr> {
    if (refusals-- > 0) return Error(Errc::out_of_memory, "full");
    return DevicePtr{};
  };
  EXPECT_TRUE(b_->alloc(100).has_value());
  EXPECT_EQ(b_->num_alloc, 2);
  refusals = 5;
  b_->num_alloc = 0;
  EXPECT_ERRC(b_->alloc(100), Errc::out_of_memory);
  EXPECT_EQ(b_->num_alloc, 2) << "one retry, then the answer";
}

TEST_F(FacePolicyTest, OutOfMemoryKeepsTheDriversWords) {
  b_->on_alloc = [](std::uint64_t) -> Result<DevicePtr> {
    return Error(Errc::out_of_memory, "full").with_native(2, "CUDA_ERROR_OUT_OF_MEMORY");
  };
  const auto result = b_->alloc(100);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().native_code(), 2);
  EXPECT_EQ(result.error().native_text(), "CUDA_ERROR_OUT_OF_MEMORY");
}

TEST_F(FacePolicyTest, OtherFailuresAreNotRetried) {
  b_->on_alloc = [](std::uint64_t) -> Result<DevicePtr> { return Error(Errc::io, "broken"); };
  EXPECT_ERRC(b_->alloc(100), Errc::io);
  EXPECT_EQ(b_->num_alloc, 1);
}

TEST_F(FacePolicyTest, BudgetIsAskedBeforeTheDriver) {
  b_->set_budget(10);
  EXPECT_ERRC(b_->alloc(100), Errc::out_of_memory);
  EXPECT_ERRC(b_->alloc_managed(100), Errc::out_of_memory);
  EXPECT_EQ(b_->num_alloc, 0);
}

TEST_F(FacePolicyTest, ManagedMemoryBeyondTheFreeIsRefusedBeforeTheDriverIsAsked) {
  b_->on_memory_info = []() -> Result<DeviceMemoryInfo> {
    return DeviceMemoryInfo{.total = 1000, .device_free = 500, .integrated = false, .host_available = 1 << 30};
  };
  EXPECT_ERRC(b_->alloc_managed(501), Errc::out_of_memory);
  EXPECT_EQ(b_->num_alloc, 0);
  EXPECT_TRUE(b_->alloc_managed(500).has_value());
}

TEST_F(FacePolicyTest, ManagedTrimsPoolsBeforeItFails) {
  constexpr std::uint64_t kBytes = 6u << 20;
  const auto mock = test::make_mock();
  mock::control(*mock).set_memory(8u << 20, 8u << 20);
  const StreamHandle s = mock->default_stream();
  ASSERT_OK(mock->free_async(mock->alloc_async(kBytes, s).value(), s));
  ASSERT_OK(mock->synchronize(s));
  ASSERT_OK(mock->alloc_managed(kBytes));
  EXPECT_ERRC(mock->alloc_managed(kBytes), Errc::out_of_memory);
}

TEST_F(FacePolicyTest, FreeMemoryCountsTheHostsOnlyWhereTheDeviceSharesIt) {
  const auto figures = [&](bool integrated, std::uint64_t device, std::uint64_t host) {
    b_->on_memory_info = [=]() -> Result<DeviceMemoryInfo> {
      return DeviceMemoryInfo{.total = 9000, .device_free = device, .integrated = integrated, .host_available = host};
    };
    EXPECT_EQ(b_->device_free_memory().value(), device) << "the host's memory is never mixed in here";
    return b_->free_memory().value();
  };
  EXPECT_EQ(figures(false, 100, 5000), 100u);
  EXPECT_EQ(figures(false, 100, 50), 100u);
  EXPECT_EQ(figures(true, 100, 5000), 5000u);
  EXPECT_EQ(figures(true, 100, 50), 100u);
}

TEST_F(FacePolicyTest, AGuardBandThatCannotBeFilledGivesTheBlockBack) {
  host::Options options;
  options.face.redzone_bytes = 64;
  b_ = Scripted::make_one(options);
  b_->on_memset = []() -> Result<> { return Error(Errc::internal, "no fill today"); };
  EXPECT_ERRC(b_->alloc(100), Errc::internal);
  EXPECT_EQ(b_->num_free, 1);
  EXPECT_EQ(b_->live_bytes(), 0u);
  b_->on_memset = nullptr;
  EXPECT_EQ(b_->scan_redzones().value(), 0u);
}

// ---- a failure whose clean-up fails too: the caller is told the first, with the second as a note ----

Result<> no_alias() { return Error(Errc::unsupported, "no alias for this"); }
Result<> stuck() { return Error(Errc::internal, "it does not come back"); }

template <class T>
void expect_first_and_note(const Result<T>& result, Errc code, std::string_view message) {
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().code(), code);
  EXPECT_EQ(result.error().message(), message);
  ASSERT_FALSE(result.error().notes().empty());
  EXPECT_NE(result.error().notes().back().find("it does not come back"), std::string::npos) << result.error().to_string();
}

TEST_F(FacePolicyTest, AGuardBandThatCannotBeFilledIsToldBeforeABlockThatIsNotGivenBack) {
  host::Options options;
  options.face.redzone_bytes = 64;
  b_ = Scripted::make_one(options);
  b_->on_memset = []() -> Result<> { return Error(Errc::io, "no fill today"); };
  b_->on_free = stuck;
  expect_first_and_note(b_->alloc(100), Errc::io, "no fill today");
  EXPECT_EQ(b_->live_bytes(), 0u);
}

TEST_F(FacePolicyTest, PinnedMemoryWithoutAliasIsToldBeforeMemoryThatIsNotGivenBack) {
  b_->on_host_alias = no_alias;
  b_->on_free_pinned = stuck;
  expect_first_and_note(b_->alloc_host_pinned(64), Errc::unsupported, "no alias for this");
}

TEST_F(FacePolicyTest, RegisteredMemoryWithoutAliasIsToldBeforeARegistrationThatIsNotGivenBack) {
  std::vector<std::byte> memory(64);
  b_->on_host_alias = no_alias;
  b_->on_unregister = stuck;
  expect_first_and_note(b_->register_host(memory), Errc::unsupported, "no alias for this");
  b_->on_host_alias = nullptr;
  b_->on_unregister = nullptr;
  ASSERT_OK(b_->register_host(memory));
}

TEST_F(FacePolicyTest, PoolOrderThatFailsIsToldBeforeAnEventThatIsNotGivenBack) {
  b_->on_record_event = []() -> Result<> { return Error(Errc::io, "not recorded"); };
  b_->on_destroy_event = stuck;
  detail::FaceState face(*b_, {});
  const NativeStream stream{b_->native_stream(b_->default_stream()).value()};
  expect_first_and_note(face.pool_driver().order_after(stream, stream), Errc::io, "not recorded");
  b_->on_record_event = nullptr;
  EXPECT_ERRC(face.pool_driver().order_after(stream, stream), Errc::internal);
  b_->on_destroy_event = nullptr;
  EXPECT_TRUE(face.pool_driver().order_after(stream, stream).has_value());
}

TEST_F(FacePolicyTest, ADeviceLostWhileCleaningUpIsLatchedAllTheSame) {
  b_->on_host_alias = no_alias;
  b_->on_free_pinned = []() -> Result<> { return Error(Errc::device_lost, "it does not come back"); };
  expect_first_and_note(b_->alloc_host_pinned(64), Errc::unsupported, "no alias for this");
  const auto health = b_->health();
  ASSERT_FALSE(health);
  EXPECT_NE(health.error().message().find("it does not come back"), std::string::npos);
}

TEST_F(FacePolicyTest, FailuresOfHooksCarryTheCallersLine) {
  b_->on_alloc = [](std::uint64_t) -> Result<DevicePtr> { return Error(Errc::io, "broken"); };
  const auto result = b_->alloc(100);
  const unsigned line = __LINE__ - 1;
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().site().line(), line);
}

TEST_F(FacePolicyTest, SmCountIsAskedOnce) {
  for (int i = 0; i < 5; ++i) EXPECT_GT(b_->sm_count().value(), 0u);
  EXPECT_EQ(b_->num_sm_count, 1);
}

// ---- captures ----

TEST_F(FacePolicyTest, AFailedDriverQueryCountsAsCapturing) {
  const StreamHandle s = b_->create_stream().value();
  EXPECT_FALSE(b_->stream_is_capturing(s));
  b_->on_is_capturing = []() -> Result<bool> { return Error(Errc::internal, "the driver does not know"); };
  EXPECT_TRUE(b_->stream_is_capturing(s));
}

TEST_F(FacePolicyTest, ACaptureOfTheDriverThatTheFaceDidNotBeginCounts) {
  const StreamHandle s = b_->create_stream().value();
  b_->on_is_capturing = []() -> Result<bool> { return true; };
  EXPECT_TRUE(b_->stream_is_capturing(s));
}

TEST_F(FacePolicyTest, UnsafeCallsAreRefusedBeforeTheDriverIsAsked) {
  const DevicePtr ptr = b_->alloc(100).value();
  const StreamHandle s = b_->create_stream().value();
  b_->num_alloc = 0;
  b_->num_sync = 0;
  ASSERT_OK(b_->begin_capture(s));
  EXPECT_ERRC(b_->alloc(100), Errc::capture_unsafe);
  EXPECT_ERRC(b_->free(ptr), Errc::capture_unsafe);
  EXPECT_ERRC(b_->synchronize(s), Errc::capture_unsafe);
  EXPECT_EQ(b_->num_alloc, 0);
  EXPECT_EQ(b_->num_free, 0);
  EXPECT_EQ(b_->num_sync, 0);
  ASSERT_OK(b_->end_capture(s));
}

TEST_F(FacePolicyTest, AGraphThatCannotBeMadeNamesNothing) {
  const DevicePtr ptr = b_->alloc(100).value();
  const StreamHandle s = b_->create_stream().value();
  b_->on_end_capture = [&](NativeGraph) -> Result<NativeGraph> { return Error(Errc::internal, "instantiation failed"); };
  ASSERT_OK(b_->begin_capture(s));
  ASSERT_OK(b_->memset_async(ptr, 1, 100, s));
  EXPECT_ERRC(b_->end_capture(s), Errc::internal);
  EXPECT_FALSE(b_->stream_is_capturing(s));
  EXPECT_EQ(b_->live_graph_count(), 0u);
  ASSERT_OK(b_->free(ptr));
}

TEST_F(FacePolicyTest, AddressesThatOnlyTheDriverSeesAreNamed) {
  const DevicePtr seen = b_->alloc(100).value();
  const DevicePtr hidden = b_->alloc(100).value();
  const DevicePtr unused = b_->alloc(100).value();
  const StreamHandle s = b_->create_stream().value();
  b_->graph_addresses = [&] { return std::vector<DevicePtr>{hidden.offset(50), seen, {0x10}}; };
  ASSERT_OK(b_->begin_capture(s));
  ASSERT_OK(b_->memset_async(seen, 1, 100, s));
  const GraphHandle graph = b_->end_capture(s).value();
  EXPECT_EQ(b_->graph_memory(graph).value().size(), 2u);
  EXPECT_ERRC(b_->free(hidden), Errc::in_use);
  EXPECT_ERRC(b_->free(seen), Errc::in_use);
  ASSERT_OK(b_->free(unused));
  ASSERT_OK(b_->destroy_graph(graph));
  ASSERT_OK(b_->free(hidden));
  ASSERT_OK(b_->free(seen));
}

TEST_F(FacePolicyTest, BatchesTellWhetherTheyAreCaptured) {
  const DevicePtr ptr = b_->alloc(100).value();
  const StreamHandle s = b_->create_stream().value();
  const CopyDesc copy{.dst = ptr, .src = ptr.offset(50), .bytes = 10};
  ASSERT_OK(b_->copy_batch_async({&copy, 1}, s));
  ASSERT_OK(b_->begin_capture(s));
  ASSERT_OK(b_->copy_batch_async({&copy, 1}, s));
  ASSERT_OK(b_->end_capture(s));
  EXPECT_EQ(b_->batches_capturing, (std::vector<bool>{false, true}));
}

// ---- faults ----

Error lost(const char* why) { return Error(Errc::device_lost, why); }

TEST_F(FacePolicyTest, BackendsOfOneDeviceShareItsFault) {
  auto first = Scripted::make_one({}, "shared device");
  auto second = Scripted::make_one({}, "shared device");
  first->on_alloc = [](std::uint64_t) -> Result<DevicePtr> { return lost("it burned down"); };
  EXPECT_ERRC(first->alloc(100), Errc::device_lost);
  const auto health = second->health();
  ASSERT_FALSE(health);
  EXPECT_NE(health.error().message().find("it burned down"), std::string::npos);
  EXPECT_ERRC(second->alloc(100), Errc::device_lost);
  EXPECT_EQ(second->num_alloc, 0) << "a hook ran on a lost device";
  EXPECT_TRUE(b_->health().has_value()) << "another device is fine";
}

TEST_F(FacePolicyTest, ALostPeerIsNotThisDevice) {
  const std::unique_ptr<Scripted> peer = Scripted::make_one();
  const DevicePtr src = peer->alloc(64).value();
  const DevicePtr dst = b_->alloc(64).value();
  peer->on_alloc = [](std::uint64_t) -> Result<DevicePtr> { return Error(Errc::device_lost, "burnt"); };
  EXPECT_ERRC(peer->alloc(64), Errc::device_lost);
  const Result<> copied = b_->copy_peer_async(dst, *peer, src, 64, b_->default_stream());
  EXPECT_ERRC(copied, Errc::invalid_argument);
  EXPECT_NE(copied.error().message().find("burnt"), std::string::npos) << copied.error().to_string();
  ASSERT_OK(b_->health());
}

TEST_F(FacePolicyTest, CallsWithoutObjectsLatchALostDeviceToo) {
  for (const bool binds : {false, true}) {
    const std::unique_ptr<Scripted> backend = Scripted::make_one();
    backend->on_has_module = backend->on_bind_to_thread = []() -> Result<> { return Error(Errc::device_lost, "burnt"); };
    const auto call = [&](std::source_location site) -> Result<> {
      if (binds) return backend->bind_to_thread(site);
      if (auto has = backend->has_module("m", site); !has) return Error(std::move(has).error());
      return {};
    };
    const std::source_location here = std::source_location::current();
    const Result<> told = call(here);
    EXPECT_ERRC(told, Errc::device_lost);
    EXPECT_EQ(told.error().site().line(), here.line());
    EXPECT_ERRC(backend->health(), Errc::device_lost);
  }
}

TEST_F(FacePolicyTest, ADeviceStaysLostForTheProcess) {
  {
    auto b = Scripted::make_one({}, "stays lost");
    b->on_alloc = [](std::uint64_t) -> Result<DevicePtr> { return lost("first"); };
    EXPECT_ERRC(b->alloc(1), Errc::device_lost);
  }
  const auto health = Scripted::make_one({}, "stays lost")->health();
  ASSERT_FALSE(health);
  EXPECT_NE(health.error().message().find("first"), std::string::npos);
}

TEST_F(FacePolicyTest, TheFirstReasonStaysAndIsLoggedOnce) {
  b_->on_alloc = [](std::uint64_t) -> Result<DevicePtr> { return lost("first"); };
  EXPECT_ERRC(b_->alloc(1), Errc::device_lost);
  b_->on_alloc = [](std::uint64_t) -> Result<DevicePtr> { return lost("second"); };
  const auto later = b_->alloc(1);
  ASSERT_FALSE(later);
  EXPECT_NE(later.error().message().find("first"), std::string::npos);
  EXPECT_EQ(later.error().message().find("second"), std::string::npos);
  EXPECT_EQ(b_->num_alloc, 1);
  const std::string& text = log_.text();
  const std::size_t told = text.find("is lost");
  ASSERT_NE(told, std::string::npos);
  EXPECT_EQ(text.find("is lost: alloc", told + 1), std::string::npos);
}

TEST_F(FacePolicyTest, ReleasingOnALostDeviceAsksNoHook) {
  const DevicePtr ptr = b_->alloc(100).value();
  b_->on_alloc = [](std::uint64_t) -> Result<DevicePtr> { return lost("gone"); };
  EXPECT_ERRC(b_->alloc(1), Errc::device_lost);
  ASSERT_OK(b_->free(ptr));
  EXPECT_EQ(b_->num_free, 0);
  EXPECT_EQ(b_->abandoned_bytes(), 100u);
}

TEST_F(FacePolicyTest, SweepOnALostDeviceAsksNothingOfThePoolsEvents) {
  const auto mock = test::make_mock();
  mock::MockControl& control = mock::control(*mock);
  const StreamHandle s = mock->create_stream().value();
  const DevicePtr ptr = mock->alloc_async(3u << 20, s).value();
  // Shared: the stream's thread may look once more after this case has ended.
  const auto open = std::make_shared<std::atomic<bool>>(false);
  ASSERT_OK(mock->enqueue_host(s, [open] {
    while (!*open) std::this_thread::yield();
  }));
  ASSERT_OK(mock->free_async(ptr, s));
  ASSERT_OK(mock->destroy_stream(s));
  control.lose_device("gone");
  EXPECT_ERRC(mock->alloc(1), Errc::device_lost);
  control.reset();
  EXPECT_TRUE(mock->sweep_unreleased().has_value());
  EXPECT_EQ(control.counts().hook_calls, 0u);
  EXPECT_EQ(mock->pool_reserved_bytes(), 0u);
  *open = true;
}

TEST_F(FacePolicyTest, ShutdownGoesOnAfterAFailureAndReportsIt) {
  const DevicePtr ptr = b_->alloc(100).value();
  static_cast<void>(ptr);
  b_->on_unload = []() -> Result<> { return Error(Errc::internal, "a module would not go"); };
  EXPECT_ERRC(b_->shutdown(), Errc::internal);
  EXPECT_EQ(b_->live_bytes(), 0u);
  EXPECT_TRUE(b_->shutdown().has_value());
  EXPECT_ERRC(b_->health(), Errc::device_lost);
}

}  // namespace
}  // namespace metrale
