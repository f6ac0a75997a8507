// SPDX-License-Identifier: Apache-2.0
//
// Any thread may call, several at once.
#include <array>
#include <atomic>

#include "conformance/case.h"
#include "metrale/observer.h"

namespace metrale::conformance {
namespace {

class Threads : public CaseNeeding<memory, copies, streams> {};

/// Calls `body` on another thread again and again until `end`, or until the case leaves early.
class Repeating {
 public:
  explicit Repeating(std::function<void()> body)
      : thread_([this, body = std::move(body)] {
          while (!stop_) body();
        }) {}
  ~Repeating() { stop_ = true; }
  Repeating(const Repeating&) = delete;
  Repeating& operator=(const Repeating&) = delete;

  void end() {
    stop_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  Background thread_;
};

TEST_F(Threads, NeedNoBinding) {
  on_thread([&] {
    const DevicePtr ptr = block(256);
    fill(ptr, 0x01, 256);
    const StreamHandle s = stream();
    must(gpu().memset_async(ptr, 0x02, 256, s));
    settle(s);
    EXPECT_TRUE(holds(ptr, 256, 0x02));
    must(gpu().destroy_stream(s));
    must(gpu().free(ptr));
  });
  EXPECT_EQ(gpu().live_bytes(), 0u);
}

TEST_F(Threads, MayBindAllTheSame) {
  EXPECT_TRUE(ok(gpu().bind_to_thread()));
  on_thread([&] {
    EXPECT_TRUE(ok(gpu().bind_to_thread()));
    EXPECT_TRUE(ok(gpu().bind_to_thread()));
    EXPECT_TRUE(ok(gpu().alloc(64)));
  });
}

TEST_F(Threads, ShareHandlesOfEachOther) {
  StreamHandle s;
  DevicePtr ptr;
  on_thread([&] {
    s = stream();
    ptr = block(256);
    must(gpu().memset_async(ptr, 0x05, 256, s));
  });
  on_thread([&] {
    settle(s);
    EXPECT_TRUE(holds(ptr, 256, 0x05));
  });
}

TEST_F(Threads, AllocateAndFreeAtOnceWithAnExactLedger) {
  on_threads(8, [&](std::size_t t) {
    std::vector<std::pair<DevicePtr, std::uint64_t>> mine;
    for (std::size_t i = 0; i < 200; ++i) {
      const std::uint64_t bytes = 1 + (i * 131 + t * 17) % 3000;
      mine.emplace_back(must(gpu().alloc(bytes)), bytes);
      if (mine.size() > 10) {
        must(gpu().free(mine.front().first));
        mine.erase(mine.begin());
      }
    }
    for (const auto& [ptr, bytes] : mine) must(gpu().free(ptr));
  });
  EXPECT_EQ(gpu().live_bytes(), 0u);
  EXPECT_EQ(gpu().live_alloc_count(), 0u);
  EXPECT_TRUE(gpu().live_allocations().empty());
}

TEST_F(Threads, ObeyTheBudgetTogether) {
  gpu().set_budget(50'000);
  std::atomic<int> num_refused{0};
  on_threads(8, [&](std::size_t) {
    for (int i = 0; i < 20; ++i) {
      if (!gpu().alloc(1000)) ++num_refused;
    }
  });
  EXPECT_EQ(gpu().live_bytes(), 50'000u) << "allocations made at once passed together";
  EXPECT_LE(gpu().peak_bytes(), 50'000u + (1u << 20));
  EXPECT_EQ(num_refused, 8 * 20 - 50);
}

TEST_F(Threads, NeverShareABlock) {
  constexpr std::size_t kThreads = 4;
  on_threads(kThreads, [&](std::size_t t) {
    const StreamHandle s = must(gpu().create_stream());
    for (std::size_t i = 0; i < 60; ++i) {
      const DevicePtr ptr = must(gpu().alloc(2000));
      const auto value = static_cast<std::uint8_t>(1 + t * 60 + i);
      must(gpu().memset_async(ptr, value, 2000, s));
      std::vector<std::byte> seen(2000);
      must(gpu().copy_d2h_on_stream(seen, ptr, s));
      if (seen != std::vector<std::byte>(2000, std::byte{value})) fail(Site::current(), "a block belonged to two threads");
      must(gpu().free(ptr));
    }
  });
}

TEST_F(Threads, EnqueueOnOneStreamAtOnce) {
  need({host_callbacks});
  const StreamHandle s = stream();
  std::atomic<int> count{0};
  std::atomic<int> inside{0};
  std::atomic<bool> overlapped{false};
  on_threads(4, [&](std::size_t) {
    for (int i = 0; i < 100; ++i) {
      must(gpu().enqueue_host(s, [&] {
        if (++inside > 1) overlapped = true;
        ++count;
        --inside;
      }));
    }
  });
  settle(s);
  EXPECT_EQ(count, 400);
  EXPECT_FALSE(overlapped) << "one stream ran two things at a time";
}

TEST_F(Threads, LaunchOnOneStreamAtOnce) {
  need({kernels, computes});
  const StreamHandle s = stream();
  const DevicePtr log = make_log(400);
  const KernelHandle k = kernel(kAppend);
  on_threads(4, [&](std::size_t t) {
    for (std::uint32_t i = 0; i < 100; ++i) {
      launch(k, s, {KernelArg::buffer(log), KernelArg::value(static_cast<std::uint32_t>(t * 1000 + i))});
    }
  });
  settle(s);
  const auto seen = read_log(log, 400);
  ASSERT_EQ(seen.size(), 400u);
  std::array<std::uint32_t, 4> next{};
  for (const std::uint32_t value : seen) {
    ASSERT_LT(value / 1000, 4u);
    EXPECT_EQ(value % 1000, next[value / 1000]++) << "a thread's own launches changed places";
  }
}

TEST_F(Threads, RecordAndWaitForEventsAtOnce) {
  need({events});
  on_threads(4, [&](std::size_t) {
    const StreamHandle a = must(gpu().create_stream());
    const StreamHandle b = must(gpu().create_stream());
    const DevicePtr ptr = must(gpu().alloc(4096));
    for (int i = 0; i < 40; ++i) {
      const EventHandle e = must(gpu().create_event());
      const auto value = static_cast<std::uint8_t>(i + 1);
      must(gpu().memset_async(ptr, value, 4096, a));
      must(gpu().record_event(e, a));
      must(gpu().stream_wait_event(b, e));
      std::vector<std::byte> seen(4096);
      must(gpu().copy_d2h_on_stream(seen, ptr, b));
      if (seen != std::vector<std::byte>(4096, std::byte{value})) fail(Site::current(), "an event did not order two streams");
      must(gpu().destroy_event(e));
    }
  });
}

TEST_F(Threads, LookUpKernelsAtOnce) {
  need({kernels});
  on_threads(4, [&](std::size_t) {
    for (int i = 0; i < 100; ++i) {
      must(gpu().kernel(kModule, kFill));
      if (gpu().kernel(kModule, "absent").has_value()) fail(Site::current(), "found what is not there");
    }
  });
  const KernelAudit audit = gpu().kernel_audit();
  EXPECT_EQ(audit.num_hits, 400u);
  ASSERT_EQ(audit.misses.size(), 1u);
  EXPECT_EQ(audit.misses[0].count, 400u);
}

TEST_F(Threads, ReportWhileOthersAllocate) {
  Repeating reading([&] {
    static_cast<void>(gpu().alloc_report());
    static_cast<void>(gpu().live_allocations());
    static_cast<void>(gpu().live_bytes());
    std::this_thread::yield();
  });
  on_threads(2, [&](std::size_t) {
    for (int i = 0; i < 200; ++i) must(gpu().free(must(gpu().alloc(1000))));
  });
  reading.end();
  EXPECT_EQ(gpu().live_bytes(), 0u);
}

TEST_F(Threads, ScanAndPoisonWhileOthersFree) {
  if (isolated()) return;  // reading memory that was given back may end the process
  CreateOptions options;
  options.face.redzone_bytes = 64;
  remake(options);
  for (int i = 0; i < 500; ++i) block(256);
  // One size that goes back to the system at once, and one that the next allocation gets.
  Repeating freeing_large([&] { must(gpu().free(must(gpu().alloc(5 << 20)))); });
  Repeating freeing_small([&] { must(gpu().free(must(gpu().alloc(1000)))); });
  for (std::uint64_t i = 0; i < 100; ++i) {
    must(gpu().poison_redzones(0, 5 * i));
    ASSERT_EQ(must(gpu().scan_redzones()), 0u) << "round " << i;
  }
  freeing_large.end();
  freeing_small.end();
  EXPECT_EQ(gpu().live_alloc_count(), 500u);
}

TEST_F(Threads, AttachAndDetachObserversWhileOthersCall) {
  class Counting : public Observer {
   public:
    void on_op(const OpRecord&) noexcept override { ++count; }
    std::atomic<int> count{0};
  };
  Repeating calling([&] { must(gpu().free(must(gpu().alloc(64)))); });
  for (int i = 0; i < 50; ++i) {
    Counting observer;
    gpu().attach(observer);
    if (i == 0) {
      EXPECT_TRUE(eventually([&] { return observer.count > 0; }));
    }
    gpu().detach(observer);
  }
  calling.end();
}

TEST_F(Threads, ReplayGraphsWhileOthersCapture) {
  need({graphs});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  must(gpu().begin_capture(s));
  must(gpu().memset_async(ptr, 0x09, 64, s));
  const GraphHandle graph = must(gpu().end_capture(s));
  const StreamHandle others = stream();
  Repeating capturing([&] {
    must(gpu().begin_capture(others));
    must(gpu().memset_async(ptr, 0x09, 64, others));
    must(gpu().destroy_graph(must(gpu().end_capture(others))));
  });
  for (int i = 0; i < 100; ++i) {
    must(gpu().launch_graph(graph, s));
    settle(s);
  }
  capturing.end();
  EXPECT_TRUE(holds(ptr, 64, 0x09));
}

TEST_F(Threads, DestroyOneGraphAtOnce) {
  need({graphs});
  const StreamHandle s = stream();
  for (int i = 0; i < 2000; ++i) {
    const DevicePtr ptr = block(64);
    must(gpu().begin_capture(s));
    must(gpu().memset_async(ptr, 1, 64, s));
    const GraphHandle graph = must(gpu().end_capture(s));
    std::atomic<int> num_ready{0};
    std::atomic<int> num_destroyed{0};
    std::atomic<int> num_refused{0};
    on_threads(2, [&](std::size_t) {
      ++num_ready;
      for (int spins = 0; num_ready < 2; ++spins) {
        if (spins > 10'000) std::this_thread::yield();
      }
      const Result<> destroyed = gpu().destroy_graph(graph);
      if (destroyed) ++num_destroyed;
      if (!destroyed && destroyed.error().code() == Errc::invalid_argument) ++num_refused;
    });
    ASSERT_EQ(num_destroyed, 1);
    ASSERT_EQ(num_refused, 1);
    ASSERT_TRUE(ok(gpu().free(ptr))) << "the names of the graph were lost";
  }
}

}  // namespace
}  // namespace metrale::conformance
