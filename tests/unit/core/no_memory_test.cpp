// SPDX-License-Identifier: Apache-2.0
//
// Calls whose n-th heap allocation fails, for every n: each answers an error, throws nothing, and leaves nothing behind. A program
// of its own, because it replaces the global operator new (support/failing_heap.h).
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "metrale/op_cache.h"
#include "support/failing_heap.h"
#include "two_backends.h"
#ifdef METRALE_WITH_CUDA
#include "backends/cuda/cuda_backend.h"
#include "support/fake_cuda/fake_gpu.h"
#endif

namespace metrale {
namespace {

constexpr std::uint64_t kLarge = 100'000;

void nothing(const host::BlockContext&) {}
constexpr std::uint32_t kParamBytes[] = {8};
constexpr host::HostKernel kKernels[] = {{"a_module_of_kernels", "a_kernel_of_the_module", nothing, kParamBytes}};

/// A backend with one of everything that a call may need.
struct Scene {
#ifdef METRALE_WITH_CUDA
  std::unique_ptr<fake_cuda::FakeGpu> fake;  ///< The driver of the CUDA backend.
#endif
  std::unique_ptr<GpuBackend> backend;
  StreamHandle stream, captured;
  EventHandle event;
  DevicePtr block, pooled, arena, large;
  GraphHandle graph;
  KernelHandle kernel;
  std::span<std::byte> pinned;
  std::vector<std::byte> memory = std::vector<std::byte>(256);
  std::vector<std::byte> much = std::vector<std::byte>(kLarge);
};

struct Call {
  const char* name;
  bool (*run)(Scene&);  ///< Whether it succeeded.
};

// What a call made stays: the checks below look at what a failure leaves.
const Call kCalls[] = {
    {"alloc", [](Scene& s) { return s.backend->alloc(100).has_value(); }},
    {"alloc of a large block", [](Scene& s) { return s.backend->alloc(kLarge).has_value(); }},
    {"alloc of nothing", [](Scene& s) { return s.backend->alloc(0).has_value(); }},
    {"alloc_managed", [](Scene& s) { return s.backend->alloc_managed(kLarge).has_value(); }},
    {"alloc_arena", [](Scene& s) { return s.backend->alloc_arena(kLarge).has_value(); }},
    {"alloc beyond the device", [](Scene& s) { return s.backend->alloc(std::uint64_t{1} << 40).has_value(); }},
    {"alloc_async", [](Scene& s) { return s.backend->alloc_async(3 << 20, s.stream).has_value(); }},
    {"alloc_host_pinned", [](Scene& s) { return s.backend->alloc_host_pinned(100).has_value(); }},
    {"register_host", [](Scene& s) { return s.backend->register_host(s.memory).has_value(); }},
    {"create_stream", [](Scene& s) { return s.backend->create_stream().has_value(); }},
    {"create_event", [](Scene& s) { return s.backend->create_event().has_value(); }},
    {"synchronize of null", [](Scene& s) { return s.backend->synchronize({}).has_value(); }},
    {"memset_async out of range", [](Scene& s) { return s.backend->memset_async({1}, 0, 1, s.stream).has_value(); }},
    {"memset_async", [](Scene& s) { return s.backend->memset_async(s.large, 0, kLarge, s.stream).has_value(); }},
    {"memset", [](Scene& s) { return s.backend->memset(s.large, 0, kLarge).has_value(); }},
    {"copy_h2d", [](Scene& s) { return s.backend->copy_h2d(s.large, s.memory).has_value(); }},
    {"copy_h2d_async", [](Scene& s) { return s.backend->copy_h2d_async(s.large, s.memory, s.stream).has_value(); }},
    {"copy_h2d_async of much", [](Scene& s) { return s.backend->copy_h2d_async(s.large, s.much, s.stream).has_value(); }},
    {"copy_d2h_on_stream", [](Scene& s) { return s.backend->copy_d2h_on_stream(s.memory, s.large, s.stream).has_value(); }},
    {"copy_batch_async",
     [](Scene& s) {
       const CopyDesc copies[] = {{.dst = s.large, .host_src = s.pinned.data(), .bytes = 50},
                                  {.dst = s.large.offset(64), .src = s.block, .bytes = 50}};
       return s.backend->copy_batch_async(copies, s.stream).has_value();
     }},
    {"record_event", [](Scene& s) { return s.backend->record_event(s.event, s.stream).has_value(); }},
    {"synchronize", [](Scene& s) { return s.backend->synchronize(s.stream).has_value(); }},
    {"synchronize_device", [](Scene& s) { return s.backend->synchronize_device().has_value(); }},
    {"adopt",
     [](Scene& s) {
       constexpr DevicePtr kTheirs{0x7000'0000'0000};
       const bool adopted = s.backend->adopt(kTheirs, 64, "another library's memory").has_value();
       const auto left = test::fail_allocation(-1);
       EXPECT_EQ(s.backend->disown(kTheirs).has_value(), adopted);
       test::fail_allocation(left);
       return adopted;
     }},
    {"wrap_stream",
     [](Scene& s) {
       const auto native = s.backend->native_stream(s.stream);
       return native && s.backend->wrap_stream(*native).has_value();
     }},
    {"a capture of two streams and a copy",
     [](Scene& s) {
       GpuBackend& b = *s.backend;
       const auto left = test::fail_allocation(-1);
       EXPECT_TRUE(b.begin_capture(s.captured).has_value());
       test::fail_allocation(left);
       const auto record = [&]() -> Result<> {
         METRALE_TRY(b.record_event(s.event, s.captured));
         METRALE_TRY(b.stream_wait_event(s.stream, s.event));
         METRALE_TRY(b.copy_h2d_async(s.large, s.memory, s.stream));
         METRALE_TRY(b.record_event(s.event, s.stream));
         return b.stream_wait_event(s.captured, s.event);
       };
       const bool recorded = record().has_value();
       const auto still_left = test::fail_allocation(-1);
       EXPECT_TRUE(b.abort_capture_if_active(s.captured).has_value());
       EXPECT_FALSE(b.stream_is_capturing(s.captured));
       EXPECT_FALSE(b.stream_is_capturing(s.stream));
       EXPECT_TRUE(b.synchronize(s.stream).has_value());
       test::fail_allocation(still_left);
       return recorded;
     }},
    {"kernel", [](Scene& s) { return s.backend->kernel(kKernels[0].module, kKernels[0].function).has_value(); }},
    {"kernel of unloaded modules",
     [](Scene& s) {
       const auto left = test::fail_allocation(-1);
       EXPECT_TRUE(s.backend->unload_modules().has_value());
       test::fail_allocation(left);
       return s.backend->kernel(kKernels[0].module, kKernels[0].function).has_value();
     }},
    {"kernel that is missing", [](Scene& s) { return !s.backend->kernel(kKernels[0].module, "no_such_kernel_in_the_module"); }},
    {"registry entries",
     [](Scene& s) {
       KernelRegistry* registry = s.backend->kernel_registry();
       return registry != nullptr && registry->entries().has_value();
     }},
    {"launch_typed",
     [](Scene& s) {
       const KernelArg arg = KernelArg::buffer(s.block);
       return s.backend->launch_typed(s.kernel, {}, {}, 0, s.stream, {&arg, 1}).has_value();
     }},
    {"enqueue_host", [](Scene& s) { return s.backend->enqueue_host(s.stream, [] {}).has_value(); }},
    {"native_stream of null", [](Scene& s) { return !s.backend->native_stream({}); }},
    {"kernel_facts of null", [](Scene& s) { return !s.backend->kernel_facts({}); }},
    {"kernel_n_tile of null", [](Scene& s) { return !s.backend->kernel_n_tile({}); }},
    {"kernel_casts_a_to_e4m3 of null", [](Scene& s) { return !s.backend->kernel_casts_a_to_e4m3({}); }},
    {"check_e4m3_range", [](Scene& s) { return s.backend->check_e4m3_range(s.large, kLarge / 2, s.stream).has_value(); }},
    {"graph_memory", [](Scene& s) { return s.backend->graph_memory(s.graph).has_value(); }},
    {"health", [](Scene& s) { return s.backend->health().has_value(); }},
    {"kernel_registry", [](Scene& s) { return s.backend->kernel_registry() != nullptr; }},
    {"stream_is_capturing of null", [](Scene& s) { return !s.backend->stream_is_capturing({}); }},
    {"begin_capture",
     [](Scene& s) {
       const bool begun = s.backend->begin_capture(s.captured).has_value();
       const auto left = test::fail_allocation(-1);
       EXPECT_TRUE(s.backend->abort_capture_if_active(s.captured).has_value());
       test::fail_allocation(left);
       return begun;
     }},
    {"end_capture",
     [](Scene& s) {
       const auto left = test::fail_allocation(-1);
       EXPECT_TRUE(s.backend->begin_capture(s.captured).has_value());
       EXPECT_TRUE(s.backend->memset_async(s.block, 1, 64, s.captured).has_value());
       test::fail_allocation(left);
       const auto ended = s.backend->end_capture(s.captured);
       const auto still_left = test::fail_allocation(-1);
       EXPECT_FALSE(s.backend->stream_is_capturing(s.captured));
       EXPECT_EQ(s.backend->live_graph_count(), ended ? 2u : 1u);
       EXPECT_TRUE(s.backend->destroy_graph(ended.value_or(GraphHandle{})).has_value());
       test::fail_allocation(still_left);
       return ended.has_value();
     }},
    {"launch_graph", [](Scene& s) { return s.backend->launch_graph(s.graph, s.stream).has_value(); }},
    {"device_free_memory with a spare block",
     [](Scene& s) {
       const auto left = test::fail_allocation(-1);
       EXPECT_TRUE(s.backend->free(s.backend->alloc(512).value()).has_value());
       test::fail_allocation(left);
       return s.backend->device_free_memory().has_value();
     }},
    {"trim", [](Scene& s) { return s.backend->trim().has_value(); }},
    {"health", [](Scene& s) { return s.backend->health().has_value(); }},
    {"op scratch",
     [](Scene& s) { return s.backend->op_cache().scratch("a tag too long to be kept in place", s.stream, 64).has_value(); }},
    {"op scratch that grows", [](Scene& s) { return s.backend->op_cache().scratch("gemm", s.stream, kLarge).has_value(); }},
};

// These give back: after a failure they may be called again, or have done their work.
const Call kReleases[] = {
    {"free", [](Scene& s) { return s.backend->free(s.large).has_value(); }},
    {"free_arena", [](Scene& s) { return s.backend->free_arena(s.arena).has_value(); }},
    {"free_async", [](Scene& s) { return s.backend->free_async(s.pooled, s.stream).has_value(); }},
    {"free_host_pinned", [](Scene& s) { return s.backend->free_host_pinned(s.pinned.data(), s.pinned.size()).has_value(); }},
    {"free of a stranger", [](Scene& s) { return s.backend->free({0x10}).has_value(); }},
    {"destroy_event", [](Scene& s) { return s.backend->destroy_event(s.event).has_value(); }},
    {"destroy_stream", [](Scene& s) { return s.backend->destroy_stream(s.stream).has_value(); }},
    {"destroy_graph", [](Scene& s) { return s.backend->destroy_graph(s.graph).has_value(); }},
    {"op cache release", [](Scene& s) { return s.backend->op_cache().release(*s.backend).has_value(); }},
    {"sweep_unreleased", [](Scene& s) { return s.backend->sweep_unreleased().has_value(); }},
    {"shutdown", [](Scene& s) { return s.backend->shutdown().has_value(); }},
};

class NoMemory : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!test::kFailsAllocations) GTEST_SKIP() << "this sanitizer keeps operator new for itself";
  }

  Scene make() {
    Scene s;
    make_backend(s);
    GpuBackend& b = *s.backend;
    s.stream = b.create_stream().value();
    s.captured = b.create_stream().value();
    s.event = b.create_event().value();
    s.block = b.alloc(64).value();
    s.large = b.alloc(kLarge).value();
    s.arena = b.alloc_arena(kLarge).value();
    s.pooled = b.alloc_async(1000, s.stream).value();
    s.pinned = b.alloc_host_pinned(100).value();
    s.kernel = b.kernel(kKernels[0].module, kKernels[0].function).value();
    EXPECT_TRUE(b.op_cache().scratch("gemm", s.stream, 64).has_value());
    EXPECT_TRUE(b.begin_capture(s.captured).has_value());
    EXPECT_TRUE(b.memset_async(s.block, 1, 64, s.captured).has_value());
    s.graph = b.end_capture(s.captured).value();
    EXPECT_TRUE(b.launch_graph(s.graph, b.default_stream()).has_value());
    EXPECT_TRUE(b.synchronize_device().has_value());
    return s;
  }

  static void make_backend(Scene& s) {
#ifdef METRALE_WITH_CUDA
    if (GetParam() == std::string_view("cuda")) {
      s.fake = std::make_unique<fake_cuda::FakeGpu>(fake_cuda::Options{.fail_allocation = test::fail_allocation});
      cuda::Options options;
      options.modules = {s.fake->add_module(kKernels[0].module, kKernels)};
      s.backend = cuda::create_with_driver(s.fake->driver(), options).value();
      return;
    }
#endif
    host::Options options;
    options.num_threads = 1;
    options.memory_limit_bytes = 1 << 28;
    options.kernels = {kKernels};
    s.backend = GetParam() == std::string_view("mock") ? test::make_mock() : test::make_host(options);
  }

  /// Runs `call` with the n-th allocation failing, n = 0 and up, until none failed.
  void try_all(const Call& call, bool releases) {
    for (std::int64_t n = 0;; ++n) {
      SCOPED_TRACE(std::string(call.name) + ", allocation " + std::to_string(n));
      ASSERT_LT(n, 500);
      Scene s = make();
      const std::uint64_t free_before = s.backend->device_free_memory().value() + s.backend->pool_reserved_bytes();
      const std::uint64_t live_before = s.backend->live_bytes();
      const std::size_t blocks_before = s.backend->live_allocations().size();
      bool succeeded = false;
      bool thrown = false;
      test::fail_allocation(n);
      try {
        succeeded = call.run(s);
      } catch (...) {
        thrown = true;
      }
      const bool all_done = test::fail_allocation(-1) >= 0;
      ASSERT_FALSE(thrown);
      if (!succeeded && !releases) {
        EXPECT_EQ(s.backend->live_bytes(), live_before);
        EXPECT_EQ(s.backend->live_allocations().size(), blocks_before);
        EXPECT_EQ(s.backend->device_free_memory().value() + s.backend->pool_reserved_bytes(), free_before)
            << "the driver kept what the caller was refused";
      }
      if (releases && !succeeded) call.run(s);  // again: it is gone, or goes now
      EXPECT_TRUE(s.backend->destroy_graph(s.graph).has_value() || releases);
      EXPECT_TRUE(s.backend->shutdown().has_value());
      EXPECT_EQ(s.backend->live_allocations().size(), 0u);
#ifdef METRALE_WITH_CUDA
      s.backend.reset();
      if (s.fake != nullptr) {
        EXPECT_EQ(s.fake->dropped_with_context(), std::vector<std::string>()) << "the driver kept it";
      }
#endif
      if (all_done || HasFailure()) return;
    }
  }
};
METRALE_ON_BOTH_BACKENDS(NoMemory);
#ifdef METRALE_WITH_CUDA
INSTANTIATE_TEST_SUITE_P(FakeDriver, NoMemory, testing::Values("cuda"), test::backend_name);
#endif

TEST_P(NoMemory, NoCallThrowsWhicheverAllocationFails) {
  test::LogLines quiet;
  for (const Call& call : kCalls) try_all(call, false);
  for (const Call& call : kReleases) try_all(call, true);
}

TEST_P(NoMemory, AnOutOfMemoryErrorNeedsNoMemory) {
  Scene s = make();
  test::fail_allocation(0);  // the first fails, and the one for its message
  const auto refused = s.backend->alloc(0);
  test::fail_allocation(-1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::out_of_memory);
}

}  // namespace
}  // namespace metrale
