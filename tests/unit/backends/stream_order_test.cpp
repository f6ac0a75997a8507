// SPDX-License-Identifier: Apache-2.0
//
// Random programs of work, event records and waits over several streams, checked against what the calls promise: a stream keeps the
// order of its work, and work behind a wait comes after everything before the record.
#include <array>
#include <mutex>
#include <random>
#include <string_view>

#include "host_kernels.h"
#include "metrale/backends/mock.h"
#include "support.h"

namespace metrale::test {
namespace {

constexpr std::size_t kStreams = 4;
constexpr std::size_t kEvents = 3;
/// How much work of each stream has been enqueued or must have run.
using Clock = std::array<std::size_t, kStreams>;

class StreamOrder : public testing::TestWithParam<std::string_view> {
 protected:
  void SetUp() override {
    b_ = GetParam() == "host" ? take(host::create(host_options())) : take(mock::create());
    if (GetParam() == "mock_deferred") mock::control(*b_).defer_copies(true);
    for (StreamHandle& stream : streams_) stream = take(b_->create_stream());
    for (EventHandle& event : events_) event = take(b_->create_event());
    scratch_ = take(b_->alloc(256));
  }
  void TearDown() override { take(b_->free(scratch_)); }

  /// Work on stream `s` that notes how much had run of each stream when its turn came.
  void add_work(std::size_t s) {
    required_[s].push_back(must_have_run_[s]);
    take(b_->enqueue_host(streams_[s], [this, s] {
      std::lock_guard lock(mutex_);
      seen_[s].push_back(has_run_);
      ++has_run_[s];
    }));
    must_have_run_[s][s] = ++enqueued_[s];
  }

  std::unique_ptr<GpuBackend> b_;
  std::array<StreamHandle, kStreams> streams_;
  std::array<EventHandle, kEvents> events_;
  DevicePtr scratch_;
  Clock enqueued_{};
  std::array<Clock, kStreams> must_have_run_{};        // before the next work of each stream
  std::array<std::vector<Clock>, kStreams> required_;  // of each piece of work
  std::array<std::optional<Clock>, kEvents> marks_;
  std::mutex mutex_;
  Clock has_run_{};
  std::array<std::vector<Clock>, kStreams> seen_;
};

TEST_P(StreamOrder, HoldsInRandomPrograms) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    const auto pick = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
    for (int step = 0; step < 120; ++step) {
      const std::size_t s = pick(kStreams);
      const std::size_t e = pick(kEvents);
      switch (pick(8)) {
        case 0:
          take(b_->record_event(events_[e], streams_[s]));
          marks_[e] = must_have_run_[s];
          break;
        case 1:
          take(b_->stream_wait_event(streams_[s], events_[e]));
          if (marks_[e]) {
            for (std::size_t i = 0; i < kStreams; ++i) must_have_run_[s][i] = std::max(must_have_run_[s][i], (*marks_[e])[i]);
          }
          break;
        case 2: take(b_->memset_async(scratch_.offset(64 * s), 1, 64, streams_[s])); break;  // may run in the caller
        case 3: (void)take(b_->query(streams_[s])); break;
        default: add_work(s); break;
      }
    }
    if (pick(2) == 0) {
      for (std::size_t i = kStreams; i-- > 0;) take(b_->synchronize(streams_[i]));
    } else {
      take(b_->synchronize_device());
    }
    for (std::size_t s = 0; s < kStreams; ++s) {
      ASSERT_EQ(seen_[s].size(), required_[s].size());
      for (std::size_t i = 0; i < seen_[s].size(); ++i) {
        for (std::size_t other = 0; other < kStreams; ++other) {
          ASSERT_GE(seen_[s][i][other], required_[s][i][other])
              << "seed " << seed << ": work " << i << " of stream " << s << " against " << other;
        }
        ASSERT_EQ(seen_[s][i][s], required_[s][i][s]) << "seed " << seed << ": the order of stream " << s;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backend, StreamOrder, testing::Values("host", "mock", "mock_deferred"),
                         [](const auto& param_info) { return std::string(param_info.param); });

}  // namespace
}  // namespace metrale::test
