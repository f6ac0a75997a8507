// SPDX-License-Identifier: Apache-2.0
#include "core/fault_latch.h"

#include <pthread.h>

#include <unordered_map>
#include <vector>

namespace metrale::detail {
namespace {

// The registry names devices, it owns nothing of them. A tripped latch is kept for good: a lost device stays lost for the process,
// also after the last backend on it is gone.
struct LatchRegistry {
  std::mutex mutex;
  std::unordered_map<std::string, std::weak_ptr<FaultLatch>> known;
  std::vector<std::shared_ptr<FaultLatch>> tripped;
};
LatchRegistry& registry() {
  static LatchRegistry instance;
  return instance;
}

// Counts from the start of the program: every call of every backend reads the count, so it is no place to ask whether it runs.
[[maybe_unused]] const int kCountsForks =
    pthread_atfork(nullptr, nullptr, [] { forks_so_far.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

constinit std::atomic<unsigned> forks_so_far{0};

std::shared_ptr<FaultLatch> FaultLatch::of_device(const std::string& key) {
  LatchRegistry& r = registry();
  std::lock_guard lock(r.mutex);
  std::erase_if(r.known, [](const auto& entry) { return entry.second.expired(); });
  if (auto latch = r.known[key].lock()) return latch;
  auto latch = std::make_shared<FaultLatch>();
  r.known[key] = latch;
  return latch;
}

bool FaultLatch::trip(std::string_view reason) {
  {
    std::lock_guard lock(mutex_);
    if (tripped_.load(std::memory_order_relaxed)) return false;
    reason_ = reason;
    tripped_.store(true, std::memory_order_release);
  }
  LatchRegistry& r = registry();
  std::lock_guard lock(r.mutex);
  for (const auto& [key, latch] : r.known) {
    if (auto mine = latch.lock(); mine.get() == this) r.tripped.push_back(std::move(mine));
  }
  return true;
}

std::string FaultLatch::reason() const {
  std::lock_guard lock(mutex_);
  return reason_;
}

}  // namespace metrale::detail
