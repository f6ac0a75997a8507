// SPDX-License-Identifier: Apache-2.0
#include "metrale/op_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <thread>
#include <vector>

#include "metrale/graph.h"
#include "metrale/stream.h"
#include "support/heap_counter.h"
#include "unit/core/two_backends.h"

namespace metrale {
namespace {

using testing::HasSubstr;

// ---- kernels ----

class OpCacheKernelTest : public testing::Test {
 protected:
  std::unique_ptr<GpuBackend> backend_ = test::make_mock();
  mock::MockControl& control_ = mock::control(*backend_);
  OpCache& cache_ = backend_->op_cache();
};

TEST_F(OpCacheKernelTest, LooksAKernelUpOnceAndKeepsItsFacts) {
  KernelFacts facts;
  facts.param_bytes = {8, 4};
  facts.n_tile = 64;
  control_.set_kernel_facts("gemm", "bf16", facts);
  const Result<OpCache::Kernel> first = cache_.kernel("gemm", "bf16");
  ASSERT_OK(first);
  const Result<OpCache::Kernel> second = cache_.kernel("gemm", "bf16");
  ASSERT_OK(second);
  EXPECT_EQ(first->handle, second->handle);
  EXPECT_EQ(second->facts->n_tile, 64u);
  EXPECT_EQ(control_.lookups().size(), 1u);
  EXPECT_EQ(backend_->kernel_audit().num_hits, 1u);
}

TEST_F(OpCacheKernelTest, KeysDoNotRunTogether) {
  const Result<OpCache::Kernel> a = cache_.kernel("ab", "c");
  const Result<OpCache::Kernel> b = cache_.kernel("a", "bc");
  ASSERT_OK(a);
  ASSERT_OK(b);
  EXPECT_NE(a->handle, b->handle);
}

TEST_F(OpCacheKernelTest, MissIsAskedForAgain) {
  control_.deny_kernel("gemm", "fp4");
  EXPECT_ERRC(cache_.kernel("gemm", "fp4"), Errc::not_found);
  EXPECT_ERRC(cache_.kernel("gemm", "fp4"), Errc::not_found);
  ASSERT_EQ(backend_->kernel_audit().misses.size(), 1u);
  EXPECT_EQ(backend_->kernel_audit().misses[0].count, 2u);
}

TEST_F(OpCacheKernelTest, HitTouchesNoHeap) {
  if (!test::kCountsHeapAllocations) GTEST_SKIP() << "a sanitizer owns operator new in this build";
  ASSERT_OK(cache_.kernel("a module with a long name", "a function with a long name"));
  const std::uint64_t before = test::num_heap_allocations();
  const Result<OpCache::Kernel> hit = cache_.kernel("a module with a long name", "a function with a long name");
  EXPECT_EQ(test::num_heap_allocations(), before);
  ASSERT_OK(hit);
}

TEST_F(OpCacheKernelTest, ForgottenKernelsAreLookedUpAfresh) {
  ASSERT_OK(cache_.kernel("gemm", "bf16"));
  cache_.forget_kernels();
  ASSERT_OK(cache_.kernel("gemm", "bf16"));
  EXPECT_EQ(control_.lookups().size(), 2u);
}

TEST_F(OpCacheKernelTest, ALookUpAcrossAForgettingIsNotRemembered) {
  struct Forgets : Observer {
    explicit Forgets(OpCache& c) : cache(c) {}
    void on_op(const OpRecord& record) noexcept override {
      if (record.op == Op::kernel) cache.forget_kernels();
    }
    OpCache& cache;
  } forgets(cache_);
  backend_->attach(forgets);
  ASSERT_OK(cache_.kernel("gemm", "bf16"));
  backend_->detach(forgets);
  ASSERT_OK(cache_.kernel("gemm", "bf16"));
  EXPECT_EQ(control_.lookups().size(), 2u) << "the handle may be of modules that were unloaded since";
}

// ---- scratch ----

class OpCacheTest : public test::OnBothBackends {
 protected:
  OpCache& cache_ = backend_->op_cache();
  Stream stream_ = std::move(*Stream::create(*backend_));

  DevicePtr scratch(std::uint64_t bytes) {
    const Result<DevicePtr> ptr = cache_.scratch("splitk", stream_.handle(), bytes);
    EXPECT_TRUE(ptr.has_value()) << ptr.error().to_string();
    return ptr.value_or(DevicePtr{});
  }
};
METRALE_ON_BOTH_BACKENDS(OpCacheTest);

TEST_P(OpCacheTest, SmallerRequestGetsTheSamePointer) {
  const DevicePtr ptr = scratch(4096);
  EXPECT_EQ(scratch(4096), ptr);
  EXPECT_EQ(scratch(1), ptr);
  EXPECT_EQ(backend_->live_alloc_count(), 1u);
  EXPECT_EQ(backend_->live_bytes(), 4096u);
  EXPECT_EQ(cache_.scratch_bytes(), 4096u);
  EXPECT_EQ(backend_->live_allocations().at(0).owner, "op scratch");
}

TEST_P(OpCacheTest, HitTouchesNoHeap) {
  if (!test::kCountsHeapAllocations) GTEST_SKIP() << "a sanitizer owns operator new in this build";
  ASSERT_OK(cache_.scratch("an operation with a long name", stream_.handle(), 64));
  const std::uint64_t before = test::num_heap_allocations();
  const Result<DevicePtr> hit = cache_.scratch("an operation with a long name", stream_.handle(), 64);
  EXPECT_EQ(test::num_heap_allocations(), before);
  ASSERT_OK(hit);
}

TEST_P(OpCacheTest, TagsAndStreamsHaveTheirOwnBlocks) {
  const Stream other = std::move(*Stream::create(*backend_));
  const DevicePtr a = scratch(64);
  const Result<DevicePtr> b = cache_.scratch("norm", stream_.handle(), 64);
  const Result<DevicePtr> c = cache_.scratch("splitk", other.handle(), 64);
  ASSERT_OK(b);
  ASSERT_OK(c);
  EXPECT_NE(a, *b);
  EXPECT_NE(a, *c);
  EXPECT_NE(*b, *c);
}

TEST_P(OpCacheTest, NothingAskedForIsRefused) {
  EXPECT_ERRC(cache_.scratch("splitk", stream_.handle(), 0), Errc::invalid_argument);
  EXPECT_ERRC(cache_.scratch("splitk", {}, 64), Errc::invalid_argument);
  EXPECT_EQ(backend_->live_alloc_count(), 0u);
}

TEST_P(OpCacheTest, OutgrownBlockIsFreedOnceItsStreamHasPassed) {
  const DevicePtr small = scratch(64);
  ASSERT_OK(backend_->memset_async(small, 1, 64, stream_.handle()));
  const DevicePtr large = scratch(8192);
  EXPECT_NE(large, small);
  ASSERT_OK(stream_.synchronize());
  EXPECT_EQ(cache_.collect(), 0u);
  EXPECT_EQ(backend_->live_bytes(), 8192u);
}

TEST_P(OpCacheTest, OutgrownBlockStaysWhileItsStreamIsBusyAndNobodyWaits) {
  std::atomic<bool> go{false};
  const DevicePtr small = scratch(64);
  ASSERT_OK(backend_->enqueue_host(stream_.handle(), [&] {
    while (!go.load()) std::this_thread::yield();
  }));
  ASSERT_OK(backend_->memset_async(small, 1, 64, stream_.handle()));
  const DevicePtr large = scratch(8192);
  EXPECT_EQ(cache_.collect(), 1u);
  EXPECT_EQ(cache_.scratch_bytes(), 64u + 8192u);
  EXPECT_EQ(backend_->live_bytes(), 64u + 8192u);
  go = true;
  ASSERT_OK(stream_.synchronize());
  EXPECT_EQ(cache_.collect(), 0u);
  EXPECT_EQ(backend_->live_bytes(), 8192u);
  EXPECT_EQ(scratch(8192), large);
}

TEST_P(OpCacheTest, OutgrownBlockThatAGraphNamesStaysUntilTheGraphIsGone) {
  const DevicePtr small = scratch(64);
  CaptureScope capture = std::move(*CaptureScope::begin(*backend_, stream_.handle()));
  ASSERT_OK(backend_->memset_async(small, 9, 64, stream_.handle()));
  Graph graph = std::move(*capture.end());
  scratch(8192);
  EXPECT_EQ(cache_.collect(), 1u);
  ASSERT_OK(graph.launch(stream_.handle()));
  std::array<std::byte, 64> seen{};
  ASSERT_OK(backend_->copy_d2h_on_stream(seen, small, stream_.handle()));
  EXPECT_EQ(seen[63], std::byte{9}) << "the replay still has its memory";
  ASSERT_OK(graph.release());
  EXPECT_EQ(cache_.collect(), 0u);
  EXPECT_EQ(backend_->live_bytes(), 8192u);
}

TEST_P(OpCacheTest, GrowthInACaptureIsRefusedClearlyAndTheCaptureGoesOn) {
  const DevicePtr small = scratch(64);
  CaptureScope capture = std::move(*CaptureScope::begin(*backend_, stream_.handle()));
  EXPECT_EQ(scratch(64), small) << "what fits is given";
  const Result<DevicePtr> grown = cache_.scratch("splitk", stream_.handle(), 128);
  EXPECT_ERRC(grown, Errc::capture_unsafe);
  EXPECT_THAT(grown.error().to_string(), HasSubstr("request the largest size once before capturing"));
  // Growth for a stream that is not captured, on the thread that holds the capture.
  const Result<DevicePtr> elsewhere = cache_.scratch("splitk", backend_->default_stream(), 128);
  EXPECT_ERRC(elsewhere, Errc::capture_unsafe);
  EXPECT_THAT(elsewhere.error().to_string(), HasSubstr("request the largest size once before capturing"));
  // Growth for the captured stream, on another thread.
  std::thread([&] { EXPECT_ERRC(cache_.scratch("splitk", stream_.handle(), 128), Errc::capture_unsafe); }).join();
  EXPECT_EQ(cache_.collect(), 0u);
  ASSERT_OK(backend_->memset_async(small, 1, 64, stream_.handle()));
  ASSERT_OK(capture.end());
  EXPECT_EQ(backend_->live_alloc_count(), 1u);
  scratch(128);
}

TEST_P(OpCacheTest, RetiredStreamGivesItsBlocksBack) {
  ASSERT_OK(cache_.scratch("norm", stream_.handle(), 100));
  ASSERT_OK(cache_.scratch("norm", backend_->default_stream(), 10));
  scratch(64);
  ASSERT_OK(cache_.retire_stream(stream_.handle()));
  ASSERT_OK(stream_.release());
  ASSERT_OK(backend_->synchronize_device());
  EXPECT_EQ(cache_.collect(), 0u);
  EXPECT_EQ(backend_->live_bytes(), 10u);
}

TEST_P(OpCacheTest, ReleaseFreesEverythingAndAgainDoesNothing) {
  const DevicePtr small = scratch(64);
  ASSERT_OK(backend_->memset_async(small, 1, 64, stream_.handle()));
  scratch(8192);
  ASSERT_OK(cache_.scratch("norm", stream_.handle(), 100));
  ASSERT_OK(cache_.release(*backend_));
  EXPECT_EQ(backend_->live_alloc_count(), 0u);
  EXPECT_EQ(cache_.scratch_bytes(), 0u);
  ASSERT_OK(cache_.release(*backend_));
  scratch(32);
  EXPECT_EQ(backend_->live_bytes(), 32u) << "it works on after a release";
}

TEST_P(OpCacheTest, ReleaseKeepsWhatAGraphNamesForTheNextCall) {
  const DevicePtr ptr = scratch(64);
  CaptureScope capture = std::move(*CaptureScope::begin(*backend_, stream_.handle()));
  ASSERT_OK(backend_->memset_async(ptr, 9, 64, stream_.handle()));
  Graph graph = std::move(*capture.end());
  ASSERT_OK(cache_.scratch("norm", stream_.handle(), 100));
  EXPECT_ERRC(cache_.release(*backend_), Errc::in_use);
  EXPECT_EQ(backend_->live_bytes(), 64u);
  ASSERT_OK(graph.release());
  ASSERT_OK(cache_.release(*backend_));
  EXPECT_EQ(backend_->live_alloc_count(), 0u);
}

TEST_P(OpCacheTest, ReleaseOnAnotherBackendDoesNothing) {
  const auto other = test::make_mock();
  scratch(64);
  EXPECT_ERRC(cache_.release(*other), Errc::invalid_argument);
  EXPECT_EQ(backend_->live_bytes(), 64u);
}

TEST_P(OpCacheTest, ThreadsWithTheirOwnKeysGrowAtTheSameTime) {
  std::vector<std::thread> threads;
  std::atomic<int> num_wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const Result<Stream> stream = Stream::create(*backend_);
      const std::string tag = "op" + std::to_string(t);
      for (std::uint64_t i = 1; i <= 50; ++i) {
        const auto ptr = cache_.scratch(tag, stream->handle(), i * 100);
        const bool filled = ptr && backend_->memset_async(*ptr, static_cast<std::uint8_t>(t), i * 100, stream->handle());
        std::byte last{};
        const bool read = filled && backend_->copy_d2h_on_stream({&last, 1}, ptr->offset(i * 100 - 1), stream->handle());
        if (!read || last != static_cast<std::byte>(t)) ++num_wrong;
        if (i % 10 == 0) cache_.collect();
      }
      if (!cache_.retire_stream(stream->handle())) ++num_wrong;
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(num_wrong.load(), 0);
  ASSERT_OK(backend_->synchronize_device());
  EXPECT_EQ(cache_.collect(), 0u);
  EXPECT_EQ(backend_->live_alloc_count(), 0u);
}

TEST_P(OpCacheTest, ShutdownReleasesScratchBeforeItSweeps) {
  test::LogLines log;
  scratch(64);
  scratch(8192);
  ASSERT_OK(backend_->shutdown());
  EXPECT_EQ(log.text(), "") << "nothing was left to the sweep";
  EXPECT_EQ(backend_->live_alloc_count(), 0u);
}

TEST(OpCacheFailureTest, GrowthThatFailsAtAnyStepKeepsTheOldBlock) {
  for (std::uint64_t n = 1;; ++n) {
    const auto backend = test::make_mock();
    OpCache& cache = backend->op_cache();
    mock::MockControl& control = mock::control(*backend);
    const StreamHandle stream = backend->default_stream();
    const DevicePtr old = *cache.scratch("splitk", stream, 64);
    control.reset();
    control.fail_any_nth(n);
    const Result<DevicePtr> grown = cache.scratch("splitk", stream, 8192);
    const bool failure_was_reached = n <= control.counts().hook_calls;
    control.clear_failures();
    if (!grown) {
      EXPECT_EQ(*cache.scratch("splitk", stream, 64), old) << "call " << n;
      EXPECT_EQ(backend->live_alloc_count(), 1u) << "call " << n;
      EXPECT_TRUE(cache.scratch("splitk", stream, 8192).has_value()) << "call " << n;
    }
    ASSERT_OK(backend->synchronize(stream));
    cache.collect();
    EXPECT_TRUE(cache.release(*backend).has_value()) << "call " << n;
    EXPECT_EQ(backend->live_alloc_count(), 0u) << "call " << n;
    const bool create_failed = !grown && grown.error().message().starts_with("create_event");
    EXPECT_EQ(control.num_calls(Op::destroy_event) + (create_failed ? 1 : 0), control.num_calls(Op::create_event)) << "call " << n;
    if (!failure_was_reached) {
      ASSERT_GT(n, 3u);
      break;
    }
  }
}

TEST(OpCacheFailureTest, ScratchOnALostDeviceSaysSo) {
  const auto backend = test::make_mock();
  const StreamHandle gone = *backend->create_stream();
  ASSERT_OK(backend->destroy_stream(gone));
  EXPECT_ERRC(backend->op_cache().scratch("splitk", gone, 64), Errc::invalid_argument);
  ASSERT_OK(backend->op_cache().scratch("splitk", backend->default_stream(), 64));
  test::LogLines quiet;
  mock::control(*backend).lose_device("fell off the bus");
  EXPECT_FALSE(backend->synchronize_device().has_value());
  EXPECT_ERRC(backend->op_cache().scratch("splitk", backend->default_stream(), 8192), Errc::device_lost);
}

TEST(OpCacheFailureTest, BackendWithoutEventsStillRetiresInOrder) {
  mock::Options options;
  options.without = {Capability::events, Capability::timed_events};
  const auto backend = test::make_mock(options);
  OpCache& cache = backend->op_cache();
  ASSERT_OK(cache.scratch("splitk", backend->default_stream(), 64));
  ASSERT_OK(cache.scratch("splitk", backend->default_stream(), 128));
  EXPECT_EQ(cache.collect(), 0u);
  EXPECT_EQ(backend->live_bytes(), 128u);
}

TEST(OpCacheFailureTest, ReleaseGoesOnAfterARefusedFree) {
  const auto backend = test::make_mock();
  OpCache& cache = backend->op_cache();
  for (const char* tag : {"a", "b", "c"}) ASSERT_OK(cache.scratch(tag, backend->default_stream(), 64));
  mock::control(*backend).fail_nth(Op::free, 1);
  EXPECT_ERRC(cache.release(*backend), Errc::internal);
  EXPECT_EQ(backend->live_alloc_count(), 0u);
  ASSERT_OK(cache.release(*backend));
}

}  // namespace
}  // namespace metrale
