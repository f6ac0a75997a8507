// SPDX-License-Identifier: Apache-2.0
#include "metrale/teardown.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "metrale/device_buffer.h"
#include "metrale/graph.h"
#include "metrale/op_cache.h"
#include "metrale/pinned_buffer.h"
#include "metrale/stream.h"
#include "unit/core/two_backends.h"

namespace metrale {
namespace {

using test::LogLines;
using testing::ElementsAre;
using testing::HasSubstr;

// Holds buffers, notes the order of releases, and fails on request.
class Part : public ModelResource {
 public:
  Part(std::string label, std::vector<std::string>& order) : label_(std::move(label)), order_(order) {}
  void hold(DeviceBuffer buffer) { buffers_.push_back(std::move(buffer)); }
  void hold(PinnedBuffer buffer) { pinned_.push_back(std::move(buffer)); }
  bool is_empty() const { return buffers_.empty() && pinned_.empty(); }
  void fail_with(Errc code) { failure_ = code; }

  std::string_view label() const noexcept override { return label_; }
  Result<> release(GpuBackend&) override {
    order_.push_back(label_);
    for (DeviceBuffer& buffer : buffers_) METRALE_TRY(buffer.release());
    for (PinnedBuffer& buffer : pinned_) METRALE_TRY(buffer.release());
    buffers_.clear();
    pinned_.clear();
    if (failure_) return Error(*failure_, "told to fail");
    return {};
  }

 private:
  std::string label_;
  std::vector<std::string>& order_;
  std::vector<DeviceBuffer> buffers_;
  std::vector<PinnedBuffer> pinned_;
  std::optional<Errc> failure_;
};

class TeardownTest : public test::OnBothBackends {
 protected:
  DeviceBuffer block(std::uint64_t bytes) { return std::move(*DeviceBuffer::create(*backend_, bytes)); }
  std::unique_ptr<Part> part(std::string label) { return std::make_unique<Part>(std::move(label), order_); }

  std::vector<std::string> order_;
};
METRALE_ON_BOTH_BACKENDS(TeardownTest);

std::vector<std::string> labels(const Receipt& receipt) {
  std::vector<std::string> names;
  for (const Receipt::Line& line : receipt.lines) names.push_back(line.label);
  return names;
}

TEST_P(TeardownTest, ReleasesNewestFirstAndCountsEachStep) {
  Teardown teardown(*backend_);
  auto weights = part("weight store");
  weights->hold(block(1000));
  weights->hold(block(500));
  auto cache = part("kv cache");
  cache->hold(block(300));
  Part borrowed("staging", order_);
  borrowed.hold(std::move(*PinnedBuffer::create(*backend_, 64)));
  teardown.add(std::move(weights));
  teardown.add(std::move(cache));
  teardown.add(borrowed);

  const Receipt receipt = teardown.run();
  EXPECT_THAT(order_, ElementsAre("staging", "kv cache", "weight store"));
  EXPECT_THAT(labels(receipt), ElementsAre("staging", "kv cache", "weight store", "op scratch"));
  EXPECT_EQ(receipt.lines[0].bytes, 64u);
  EXPECT_EQ(receipt.lines[0].blocks, 1u);
  EXPECT_EQ(receipt.lines[1].bytes, 300u);
  EXPECT_EQ(receipt.lines[2].bytes, 1500u);
  EXPECT_EQ(receipt.lines[2].blocks, 2u);
  EXPECT_EQ(receipt.released_bytes(), 1864u);
  EXPECT_EQ(receipt.swept_blocks, 0u);
  EXPECT_EQ(receipt.balance_bytes, 0);
  EXPECT_EQ(receipt.balance_blocks, 0);
  EXPECT_TRUE(receipt.clean()) << receipt.to_string();
  EXPECT_THAT(receipt.to_string(), HasSubstr("weight store: 1500 bytes in 2 blocks\n"));
  EXPECT_THAT(receipt.to_string(), HasSubstr("balance: 0 bytes in 0 blocks\n"));
}

TEST_P(TeardownTest, GoesOnAfterAFailureAndReportsItWithItsLabel) {
  LogLines quiet;
  Teardown teardown(*backend_);
  auto first = part("weight store");
  first->hold(block(100));
  auto second = part("kv cache");
  second->hold(block(200));
  second->fail_with(Errc::internal);
  teardown.add(std::move(first));
  teardown.add(std::move(second));
  const Receipt receipt = teardown.run();
  EXPECT_EQ(receipt.lines[0].label, "kv cache");
  EXPECT_THAT(receipt.lines[0].failure, HasSubstr("told to fail"));
  EXPECT_EQ(receipt.lines[1].bytes, 100u);
  EXPECT_EQ(receipt.lines[1].failure, "");
  EXPECT_TRUE(receipt.balanced());
  EXPECT_FALSE(receipt.clean());
  EXPECT_THAT(receipt.to_string(), HasSubstr("failed: internal: told to fail"));
}

TEST_P(TeardownTest, WhatNobodyReleasedIsSweptAndShown) {
  LogLines log;
  Teardown teardown(*backend_);
  const DevicePtr leaked = *backend_->alloc(4096);
  ASSERT_OK(backend_->alloc_arena(8192));
  ASSERT_OK(backend_->alloc_host_pinned(128));
  auto weights = part("weight store");
  weights->hold(block(100));
  teardown.add(std::move(weights));
  const Receipt receipt = teardown.run();
  EXPECT_EQ(receipt.released_bytes(), 100u);
  EXPECT_EQ(receipt.swept_blocks, 3u);
  EXPECT_EQ(receipt.swept_bytes, 4096u + 8192u + 128u);
  EXPECT_TRUE(receipt.balanced());
  EXPECT_FALSE(receipt.clean());
  EXPECT_THAT(log.text(), HasSubstr("sweep"));
  EXPECT_ERRC(backend_->free(leaked), Errc::invalid_argument);
}

TEST_P(TeardownTest, OpScratchIsReleasedWithTheBackend) {
  Teardown teardown(*backend_);
  ASSERT_OK(backend_->op_cache().scratch("splitk", backend_->default_stream(), 2048));
  const Receipt receipt = teardown.run();
  ASSERT_EQ(labels(receipt), std::vector<std::string>{"op scratch"});
  EXPECT_EQ(receipt.lines[0].bytes, 2048u);
  EXPECT_TRUE(receipt.clean()) << receipt.to_string();
}

TEST_P(TeardownTest, ModelExtentLeavesTheRestOfTheBackendAlone) {
  const DeviceBuffer other_model = block(777);
  ASSERT_OK(backend_->op_cache().scratch("splitk", backend_->default_stream(), 2048));
  Teardown teardown(*backend_, TeardownExtent::model);
  auto weights = part("weight store");
  weights->hold(block(100));
  teardown.add(std::move(weights));
  const Receipt receipt = teardown.run();
  EXPECT_TRUE(receipt.clean()) << receipt.to_string();
  EXPECT_EQ(receipt.released_bytes(), 100u);
  EXPECT_EQ(backend_->live_bytes(), 777u + 2048u);
}

TEST_P(TeardownTest, BalanceShowsWhatAModelExtentLeavesBehind) {
  Teardown teardown(*backend_, TeardownExtent::model);
  const DeviceBuffer leaked = block(100);
  const Receipt receipt = teardown.run();
  EXPECT_EQ(receipt.balance_bytes, 100);
  EXPECT_EQ(receipt.balance_blocks, 1);
  EXPECT_FALSE(receipt.clean());
}

TEST_P(TeardownTest, BalanceIsNegativeWhenTheSweepTookWhatWasThereBefore) {
  LogLines quiet;
  DeviceBuffer before = block(100);
  Teardown teardown(*backend_);
  const Receipt receipt = teardown.run();
  EXPECT_EQ(receipt.swept_bytes, 100u);
  EXPECT_EQ(receipt.balance_bytes, -100);
  EXPECT_FALSE(receipt.clean());
  before.detach();
}

TEST_P(TeardownTest, SecondRunFindsNothing) {
  Teardown teardown(*backend_);
  auto weights = part("weight store");
  weights->hold(block(100));
  teardown.add(std::move(weights));
  EXPECT_TRUE(teardown.run().clean());
  const Receipt again = teardown.run();
  EXPECT_EQ(again.released_bytes(), 0u);
  EXPECT_TRUE(again.clean()) << again.to_string();
  EXPECT_EQ(order_.size(), 1u);
}

TEST_P(TeardownTest, DestructorRunsWhenNobodyDidAndLogsWhatWentWrong) {
  LogLines log;
  {
    Teardown teardown(*backend_);
    auto weights = part("weight store");
    weights->hold(block(100));
    weights->fail_with(Errc::io);
    teardown.add(std::move(weights));
  }
  EXPECT_EQ(backend_->live_alloc_count(), 0u);
  EXPECT_THAT(log.text(), HasSubstr("unloaded by a destructor"));
  EXPECT_THAT(log.text(), HasSubstr("told to fail"));
}

TEST_P(TeardownTest, MemoryOfAReplayStillRunningIsWaitedFor) {
  LogLines log;
  Teardown teardown(*backend_);
  const Stream stream = *Stream::create(*backend_);
  auto arena = part("buffer arena");
  DeviceBuffer buffer = block(1 << 20);
  {
    CaptureScope capture = std::move(*CaptureScope::begin(*backend_, stream.handle()));
    for (int i = 0; i < 50; ++i) ASSERT_OK(backend_->memset_async(buffer.ptr(), 1, 1 << 20, stream.handle()));
    const Graph graph = std::move(*capture.end());
    ASSERT_OK(graph.launch(stream.handle()));
  }
  arena->hold(std::move(buffer));
  teardown.add(std::move(arena));
  const Receipt receipt = teardown.run();
  EXPECT_TRUE(receipt.clean()) << receipt.to_string();
  EXPECT_EQ(receipt.released_bytes(), 1u << 20);
  EXPECT_EQ(log.text(), "");
}

TEST_P(TeardownTest, ABorrowedResourceAGraphNamesIsEmptyAfterwards) {
  LogLines log;
  constexpr std::uint64_t kBytes = 5u << 20;
  Part borrowed("kv cache", order_);
  DevicePtr held;
  {
    Teardown teardown(*backend_);
    DeviceBuffer buffer = block(kBytes);
    held = buffer.ptr();
    borrowed.hold(std::move(buffer));
    const Stream stream = *Stream::create(*backend_);
    ASSERT_OK(backend_->begin_capture(stream.handle()));
    ASSERT_OK(backend_->memset_async(held, 1, 64, stream.handle()));
    const GraphHandle leftover = *backend_->end_capture(stream.handle());
    ASSERT_OK(backend_->launch_graph(leftover, stream.handle()));
    teardown.add(borrowed);
    const Receipt receipt = teardown.run();
    EXPECT_TRUE(receipt.clean()) << receipt.to_string();
    EXPECT_EQ(receipt.released_bytes(), kBytes);
  }
  EXPECT_EQ(backend_->live_graph_count(), 0u);
  const DevicePtr stranger = *backend_->alloc(kBytes);
  EXPECT_TRUE(borrowed.is_empty()) << "it would free whoever got its address";
  ASSERT_OK(borrowed.release(*backend_));
  ASSERT_OK(backend_->free(stranger));
  EXPECT_EQ(log.text(), "");
}

TEST_P(TeardownTest, FiftyCyclesOnOneBackendBalanceEachTime) {
  for (int i = 0; i < 50; ++i) {
    Teardown teardown(*backend_);
    auto weights = part("weight store");
    weights->hold(block(100'000));
    teardown.add(std::move(weights));
    ASSERT_OK(backend_->op_cache().scratch("splitk", backend_->default_stream(), 2048));
    const Receipt receipt = teardown.run();
    ASSERT_TRUE(receipt.clean()) << i << ": " << receipt.to_string();
  }
}

TEST(TeardownFailureTest, EveryRefusedDeviceCallStillEndsInBalance) {
  std::uint64_t num_calls = 0;
  const auto unload = [&](std::uint64_t fail) {
    const auto backend = test::make_mock();
    std::vector<std::string> order;
    Teardown teardown(*backend);
    for (const char* label : {"weight store", "kv cache"}) {
      auto part = std::make_unique<Part>(label, order);
      part->hold(std::move(*DeviceBuffer::create(*backend, 512)));
      part->hold(std::move(*PinnedBuffer::create(*backend, 64)));
      teardown.add(std::move(part));
    }
    EXPECT_TRUE(backend->op_cache().scratch("splitk", backend->default_stream(), 2048).has_value());
    mock::control(*backend).reset();
    if (fail != 0) mock::control(*backend).fail_any_nth(fail);
    const Receipt receipt = teardown.run();
    num_calls = mock::control(*backend).counts().hook_calls;
    EXPECT_TRUE(receipt.balanced()) << "call " << fail << ": " << receipt.to_string();
    EXPECT_EQ(backend->live_alloc_count(), 0u);
    mock::control(*backend).clear_failures();
  };
  LogLines quiet;
  unload(0);
  const std::uint64_t total = num_calls;
  ASSERT_GT(total, 4u);
  for (std::uint64_t n = 1; n <= total; ++n) unload(n);
}

TEST(TeardownFailureTest, LostDeviceGivesABalancedReceiptWithTheBytesAbandoned) {
  LogLines quiet;
  const auto backend = test::make_mock();
  std::vector<std::string> order;
  Teardown teardown(*backend);
  auto weights = std::make_unique<Part>("weight store", order);
  weights->hold(std::move(*DeviceBuffer::create(*backend, 512)));
  teardown.add(std::move(weights));
  ASSERT_OK(backend->alloc(100));
  mock::control(*backend).lose_device("fell off the bus");
  EXPECT_FALSE(backend->synchronize_device().has_value());
  const Receipt receipt = teardown.run();
  EXPECT_TRUE(receipt.balanced()) << receipt.to_string();
  EXPECT_EQ(receipt.abandoned_bytes, 612u);
  EXPECT_FALSE(receipt.clean());
  EXPECT_THAT(receipt.to_string(), HasSubstr("abandoned on the lost device: 612 bytes"));
}

}  // namespace
}  // namespace metrale
