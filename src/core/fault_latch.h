// SPDX-License-Identifier: Apache-2.0
//
// The fault latch of one device in this process: the first reason wins and stays. Backends on the same device share one latch.
// Any thread.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

namespace metrale::detail {

class FaultLatch {
 public:
  /// The latch of the device named `key`, shared by all who ask for it.
  static std::shared_ptr<FaultLatch> of_device(const std::string& key);

  bool tripped() const noexcept { return tripped_.load(std::memory_order_acquire); }
  /// Keeps `reason` if it is the first; true for the caller that tripped the latch.
  bool trip(std::string_view reason);
  std::string reason() const;

 private:
  std::atomic<bool> tripped_{false};
  mutable std::mutex mutex_;
  std::string reason_;
};

extern std::atomic<unsigned> forks_so_far;
/// How often this process has been forked since its ancestor: a backend made under another count is not usable here.
inline unsigned fork_count() noexcept { return forks_so_far.load(std::memory_order_relaxed); }

}  // namespace metrale::detail
