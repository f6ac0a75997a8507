// SPDX-License-Identifier: Apache-2.0
//
// LaunchTrace: finds the host value that changes between two passes over the same work. A captured graph replays the values of its
// capture, so a pass whose launches differ from those of the pass before cannot be replayed for it. Attach one to a backend, mark
// the same region in two passes, and read what differed. It holds its backend by reference, and is detached before either dies. It
// records what the thread that began a region enqueues; begin and end it on that thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "metrale/backend.h"
#include "metrale/observer.h"
#include "metrale/result.h"

namespace metrale {

class LaunchTrace final : public Observer {
 public:
  /// An operation that is not what it was in the region before.
  struct Difference {
    std::size_t index = 0;  ///< In the order of the region.
    std::string what;       ///< "decoder.rotary", "copy_d2d_async"; of the earlier region where the later has none.
    std::string how;        ///< "argument 2, word 0: 0x7 became 0x8", "grid (4, 1, 1) became (8, 1, 1)".
  };

  explicit LaunchTrace(const GpuBackend& backend) noexcept : backend_(backend) {}

  /// Begins a region; one that is open is dropped.
  void begin();
  /// Ends the region, compares its launches, copies and fills with those of the region that ended before, and keeps it for the
  /// next. Empty when there was none before.
  /// Errors: invalid_argument (no region is open on this thread), out_of_memory (a record was lost; the region is dropped).
  Result<std::vector<Difference>> end_and_diff();

  void on_op(const OpRecord& record) noexcept override;
  void on_launch_args(const OpRecord& record, std::span<const KernelArg> args) noexcept override;

 private:
  struct Step {
    Op op{};
    KernelHandle kernel{};
    Dim3 grid{0, 0, 0};
    Dim3 block{0, 0, 0};
    std::uint32_t shared_bytes = 0;
    std::vector<std::vector<std::uint64_t>> words;  ///< Of each argument; of a copy or fill: ends and bytes.
  };

  std::string name_of(const Step& step) const;
  std::string difference(const Step& before, const Step& now) const;

  const GpuBackend& backend_;
  std::atomic<std::thread::id> owner_{};  ///< The thread whose region is open; none otherwise.
  bool lost_record_ = false;
  std::vector<Step> steps_;
  std::optional<std::vector<Step>> before_;
  std::vector<std::vector<std::uint64_t>> args_;  ///< Of the launch whose `on_op` follows.
};

}  // namespace metrale
