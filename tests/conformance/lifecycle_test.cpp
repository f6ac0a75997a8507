// SPDX-License-Identifier: Apache-2.0
//
// The life of a backend: name, health, shutdown, fork, several at once.
#include <dirent.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>

#include "conformance/case.h"
#include "metrale/op_cache.h"

namespace metrale::conformance {
namespace {

class Lifecycle : public Case {
 protected:
  /// Entries of a folder of /proc/self: open files, threads.
  static std::size_t count_entries(const char* folder) {
    std::size_t count = 0;
    DIR* dir = opendir(folder);
    if (dir == nullptr) return 0;
    while (readdir(dir) != nullptr) ++count;
    closedir(dir);
    return count;
  }
};

TEST_F(Lifecycle, HasItsNameAndIsHealthy) {
  EXPECT_EQ(gpu().name(), under_test().name);
  EXPECT_TRUE(ok(gpu().health()));
}

TEST_F(Lifecycle, ShutdownIsIdempotent) {
  EXPECT_TRUE(ok(gpu().shutdown()));
  EXPECT_TRUE(ok(gpu().shutdown()));
}

TEST_F(Lifecycle, CallsAfterShutdownAnswerDeviceLostAndReleasingDoesNothing) {
  need({memory, copies, streams, events});
  const StreamHandle s = stream();
  const EventHandle e = event();
  const DevicePtr ptr = block(64);
  std::vector<std::byte> host(64);
  must(gpu().shutdown());
  EXPECT_TRUE(refused(gpu().health(), Errc::device_lost, {"shut down"}));
  EXPECT_TRUE(refused(gpu().alloc(64), Errc::device_lost));
  EXPECT_TRUE(refused(gpu().copy_d2h(host, ptr), Errc::device_lost));
  EXPECT_TRUE(refused(gpu().memset_async(ptr, 0, 64, s), Errc::device_lost));
  EXPECT_TRUE(refused(gpu().synchronize(s), Errc::device_lost));
  EXPECT_TRUE(refused(gpu().event_query(e), Errc::device_lost));
  EXPECT_TRUE(refused(gpu().create_stream(), Errc::device_lost));
  EXPECT_TRUE(refused(gpu().sm_count(), Errc::device_lost));
  EXPECT_TRUE(refused(gpu().native_stream(s), Errc::device_lost));
  EXPECT_TRUE(refused(gpu().bind_to_thread(), Errc::device_lost));
  EXPECT_TRUE(ok(gpu().free(ptr)));
  EXPECT_TRUE(ok(gpu().destroy_event(e)));
  EXPECT_TRUE(ok(gpu().destroy_stream(s)));
  EXPECT_EQ(must(gpu().sweep_unreleased()), 0u);
}

TEST_F(Lifecycle, ShutdownSweepsWhatIsLeft) {
  need({memory});
  block(1000);
  must(gpu().alloc_arena(1000));
  must(gpu().shutdown());
  EXPECT_EQ(gpu().live_bytes(), 0u);
  EXPECT_TRUE(gpu().live_allocations().empty());
  EXPECT_EQ(log_lines("sweep").size(), 1u);
  EXPECT_EQ(gpu().abandoned_bytes(), 0u) << "memory was dropped where it should have been freed";
}

TEST_F(Lifecycle, ShutdownWaitsForWorkInFlight) {
  need({memory, copies, streams, host_callbacks, pinned_memory});
  const StreamHandle s = stream();
  // Shared: a backend that drops the wait runs the function after this case has ended.
  const auto ran = std::make_shared<std::atomic<bool>>(false);
  Gate gate(gpu(), s);
  must(gpu().enqueue_host(s, [ran] { *ran = true; }));
  EXPECT_FALSE(returns_before(gate, [&] { must(gpu().shutdown()); }));
  EXPECT_TRUE(*ran) << "work in flight was dropped";
}

TEST_F(Lifecycle, ShutdownEndsOpenCaptures) {
  need({memory, streams, graphs});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  must(gpu().begin_capture(s));
  must(gpu().memset_async(ptr, 1, 64, s));
  EXPECT_TRUE(ok(gpu().shutdown()));
  EXPECT_EQ(gpu().live_bytes(), 0u);
}

TEST_F(Lifecycle, ShutdownReleasesScratchThatALiveGraphNames) {
  need({memory, streams, graphs});
  const StreamHandle s = stream();
  const DevicePtr scratch = must(gpu().op_cache().scratch("test", s, 1000));
  must(gpu().begin_capture(s));
  must(gpu().memset_async(scratch, 1, 64, s));
  must(gpu().end_capture(s));
  EXPECT_TRUE(ok(gpu().shutdown()));
  EXPECT_EQ(gpu().live_bytes(), 0u);
  EXPECT_TRUE(log_lines("sweep").empty());
}

TEST_F(Lifecycle, DestructorShutsDown) {
  need({memory, streams});
  auto other = make();
  must(other->alloc(1000));
  const StreamHandle s = must(other->create_stream());
  must(other->memset_async(must(other->alloc(64)), 1, 64, s));
  other.reset();
  EXPECT_EQ(log_lines("sweep").size(), 1u);
}

TEST_F(Lifecycle, BackendsDoNotShareState) {
  need({memory, copies});
  auto other = make();
  const DevicePtr mine = block(1000);
  fill(mine, 0x01, 1000);
  const DevicePtr theirs = must(other->alloc(500));
  must(other->memset(theirs, 0x02, 500));
  EXPECT_EQ(gpu().live_bytes(), 1000u);
  EXPECT_EQ(other->live_bytes(), 500u);
  EXPECT_EQ(must(other->sweep_unreleased()), 1u);
  EXPECT_EQ(gpu().live_bytes(), 1000u);
  EXPECT_TRUE(holds(mine, 1000, 0x01));
  must(other->shutdown());
  EXPECT_TRUE(ok(gpu().health()));
  EXPECT_TRUE(holds(mine, 1000, 0x01));
}

TEST_F(Lifecycle, BackendsMayBeMadeAndDestroyedManyTimes) {
  need({memory, copies, streams});
  const auto cycle = [&] {
    auto other = make();
    const StreamHandle s = must(other->create_stream());
    const DevicePtr ptr = must(other->alloc(4096));
    must(other->memset_async(ptr, 1, 4096, s));
    must(other->synchronize_for(s, kPatience));
    must(other->free(ptr));
  };
  cycle();
  const std::size_t files = count_entries("/proc/self/fd");
  const std::size_t threads = count_entries("/proc/self/task");
  for (int i = 0; i < 15; ++i) cycle();
  EXPECT_LE(count_entries("/proc/self/fd"), files);
  EXPECT_TRUE(eventually([&] { return count_entries("/proc/self/task") <= threads; })) << "threads were left behind";
}

TEST_F(Lifecycle, AfterForkTheChildsCallsAnswerDeviceLost) {
  need({memory, copies, streams});
  const DevicePtr ptr = block(64);
  const StreamHandle s = stream();
  fill(ptr, 0x01, 64);
  const pid_t pid = fork();
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    // The child has this thread alone: nothing here may wait for another.
    const auto lost = [](const auto& result) { return !result && result.error().code() == Errc::device_lost; };
    std::array<std::byte, 64> host{};
    int wrong = 0;
    const std::array<bool, 10> answers{lost(gpu().health()),
                                       lost(gpu().alloc(64)),
                                       lost(gpu().copy_d2h(host, ptr)),
                                       lost(gpu().copy_h2d(ptr, host)),
                                       lost(gpu().memset_async(ptr, 0, 64, s)),
                                       lost(gpu().synchronize(s)),
                                       lost(gpu().synchronize_device()),
                                       lost(gpu().create_stream()),
                                       lost(gpu().create_event()),
                                       gpu().free(ptr).has_value() && gpu().destroy_stream(s).has_value()};
    for (std::size_t i = 0; i < answers.size(); ++i) {
      if (!answers[i]) wrong = static_cast<int>(i + 1);
    }
    _exit(wrong);
  }
  int status = 0;
  const bool ended = eventually([&] { return waitpid(pid, &status, WNOHANG) == pid; });
  if (!ended) {
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    FAIL() << "the child hung";
  }
  ASSERT_TRUE(WIFEXITED(status)) << "the child was ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0) << "the number of the call that was not refused";
  EXPECT_TRUE(ok(gpu().health())) << "the parent goes on";
  EXPECT_TRUE(holds(ptr, 64, 0x01));
  EXPECT_TRUE(ok(gpu().free(ptr)));
}

TEST_F(Lifecycle, AForkedChildNeverWaitsForALock) {
  need({memory});
  const DevicePtr kept = block(64);
  std::atomic<bool> stop{false};
  const auto churn = [&] {
    while (!stop) {
      for (const std::uint64_t bytes : {100, 100'000}) {
        const auto ptr = gpu().alloc(bytes);
        if (ptr) (void)gpu().free(*ptr).has_value();
      }
    }
  };
  Background first(churn), second(churn);
  int num_hung = 0;
  int num_wrong = 0;
  const auto end = std::chrono::steady_clock::now() + kPatience;
  for (int i = 0; i < 150 && num_hung == 0 && std::chrono::steady_clock::now() < end; ++i) {
    const pid_t pid = fork();
    if (pid < 0) break;
    if (pid == 0) {
      bool right =
          gpu().free(kept).has_value() && gpu().sweep_unreleased().has_value() && gpu().op_cache().release(gpu()).has_value();
      right = right && gpu().live_allocations().empty() && gpu().live_graph_count() == 0;
      (void)gpu().live_bytes();
      (void)gpu().live_alloc_count();
      (void)gpu().alloc_report();
      (void)gpu().chunk_slack_bytes();
      (void)gpu().pool_reserved_bytes();
      right = right && gpu().shutdown().has_value();
      _exit(right ? 0 : 1);
    }
    int status = 0;
    if (!eventually([&] { return waitpid(pid, &status, WNOHANG) == pid; })) {
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
      ++num_hung;
    } else if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      ++num_wrong;
    }
  }
  stop = true;
  first.join();
  second.join();
  EXPECT_EQ(num_hung, 0) << "a child waited for a lock that another thread held at the fork";
  EXPECT_EQ(num_wrong, 0);
  EXPECT_TRUE(ok(gpu().free(kept))) << "the parent goes on";
}

}  // namespace
}  // namespace metrale::conformance
