// SPDX-License-Identifier: Apache-2.0
//
// World: where the ranks of one process meet. Its entry points are called from host functions on the ranks' streams, and wait there
// for the other ranks; none throws. Shared by the communicators and by the work that they enqueued. Any thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "metrale/bridges/communicator.h"

namespace metrale::in_process {

/// One call with its staging on the host: `from` filled when it runs, `to` filled by it.
struct StagedCall {
  Collective call;
  std::span<std::byte> from;
  std::span<std::byte> to;
};

class World {
 public:
  World(std::uint32_t size, std::chrono::milliseconds timeout) : size_(size), timeout_(timeout), left_(size, false) {}

  std::uint32_t size() const noexcept { return size_; }

  /// Runs the calls of `rank` on its `channel`-th stream, together with what the other ranks run there. On failure `to` of every
  /// call is filled with ones, which are NaN in every float type, and `failure` has the reason.
  void run(std::uint32_t rank, std::uint32_t channel, std::span<const StagedCall> calls) noexcept;

  /// The first reason; ok without one.
  Result<> failure() const;
  /// Ends every wait with this reason, unless there was another before.
  void fail(Error error) noexcept;
  /// `rank` comes no more: whoever waits for it fails.
  void leave(std::uint32_t rank) noexcept;

 private:
  /// One meeting of all ranks.
  struct Step {
    std::vector<std::span<const StagedCall>> calls;  ///< by rank; those of one that has not come are empty
    std::vector<bool> has_come;
    std::uint32_t arrived = 0;
    bool complete = false;  ///< All have come, and their calls fit.
    std::uint32_t done = 0;
  };
  struct Message {
    std::vector<std::byte> bytes;
    Collective call;
  };
  using Lock = std::unique_lock<std::mutex>;

  Result<> run_calls(std::uint32_t rank, std::uint32_t channel, std::span<const StagedCall> calls);
  Result<> meet(std::uint32_t rank, std::uint32_t channel, std::span<const StagedCall> calls);
  Result<> send(std::uint32_t rank, std::uint32_t channel, const StagedCall& call);
  Result<> receive(std::uint32_t rank, std::uint32_t channel, const StagedCall& call);
  /// Whether the calls of all ranks fit each other.
  Result<> check_step(const Step& step) const;
  /// Waits until `ready()`. `absent()` names a rank that has left and is waited for, or gives nothing; `what` is for messages.
  template <class Ready, class Absent>
  Result<> wait(Lock& lock, std::uint32_t rank, std::string_view what, Ready&& ready, Absent&& absent);
  void fail_locked(Error error) noexcept;

  const std::uint32_t size_;
  const std::chrono::milliseconds timeout_;

  mutable std::mutex mutex_;  // of the rest
  std::condition_variable changed_;
  std::vector<bool> left_;
  std::optional<Error> failure_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint64_t> next_;           ///< by (rank, channel): steps so far
  std::map<std::pair<std::uint32_t, std::uint64_t>, std::shared_ptr<Step>> steps_;  ///< by (channel, number)
  std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>, std::deque<Message>> mail_;  ///< by (channel, from, to)
};

}  // namespace metrale::in_process
