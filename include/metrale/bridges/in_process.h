// SPDX-License-Identifier: Apache-2.0
//
// Communicators of one process for backends whose host functions of different streams run at the same time: host and mock. Each
// rank is driven by a thread of its own, on a backend of its own. A call copies to pinned memory, meets the others in a host
// function on the stream, and copies back; sums are taken in the order of the ranks, so that every rank has the same bits.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <vector>

#include "metrale/bridges/communicator.h"

namespace metrale::in_process {

struct Options {
  /// How long a rank waits for the others in one call.
  std::chrono::milliseconds timeout{60'000};
};

/// Most ranks of one world.
inline constexpr std::size_t kMaxRanks = 64;

/// Makes the communicators of a world, one for each backend, in the order of the ranks. Each goes to the thread of its rank.
/// Errors: invalid_argument (no backend, more than kMaxRanks, a null one, one twice, no time), unsupported (a backend whose host
///   functions may wait for each other, or one without streams or pinned memory).
Result<std::vector<std::unique_ptr<Communicator>>> create(std::span<GpuBackend* const> backends, const Options& options = {});

}  // namespace metrale::in_process
