// SPDX-License-Identifier: Apache-2.0
//
// The bridge to NCCL, which is loaded at run time: communicators between CUDA backends of one process or of several, on one machine
// or on many. They do not block: making one, and each call's first connection, end in time where a rank does not come. A call
// outside captures costs a thread of NCCL's for that; in a replayed graph it costs nothing more than NCCL's kernels.
//
// NVLink multicast stays off: where NCCL_NVLS_ENABLE is not set, loading the library sets it to 0 for this process, and a value
// that is set is left as it is. NCCL_COMM_BLOCKING=1, which NCCL reads itself, makes calls block, without their time limits.
//
// NCCL takes its buffers from the driver itself, outside the ledger and the budget: `residual_bytes` is what the device lost by it.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <source_location>
#include <span>
#include <vector>

#include "metrale/bridges/bridge_status.h"
#include "metrale/bridges/communicator.h"
#include "metrale/bridges/rendezvous.h"
#include "metrale/result.h"

namespace metrale::nccl {

/// The oldest library that is used, as NCCL counts: 2.18.1.
inline constexpr int kMinVersion = 21801;

/// The library as this process finds it; loads it.
BridgeStatus status();

/// What the ranks of one communicator share, made by one of them. Serves one communicator.
struct UniqueId {
  std::array<std::byte, 128> bytes{};
};
/// Errors: unsupported (no library; names what was tried), io (no network interface that NCCL takes: its words).
Result<UniqueId> make_unique_id();

struct Options {
  /// How long the ranks may take to find each other, and a call to connect.
  std::chrono::milliseconds meeting_timeout{60'000};
  /// How long `Communicator::synchronize` waits before it takes a rank for lost: longer than any work between two waits.
  std::chrono::milliseconds timeout{600'000};
};

/// Makes rank `rank` of `size`, once all have come with the same id.
/// Ordering: not legal on a thread that holds a capture.
/// Errors: unsupported (no library, an older one, a backend that is not of CUDA), invalid_argument (the rank, the timeouts; NCCL's
///   own, such as two ranks on one device), timeout (a rank did not come), io and internal with NCCL's words.
Result<std::unique_ptr<Communicator>> create(GpuBackend& backend, const UniqueId& id, std::uint32_t rank, std::uint32_t size,
                                             const Options& options = {},
                                             std::source_location site = std::source_location::current());
/// The same for all ranks of a world in this process, one for each backend, each on a device of its own.
/// Lifetime: the backends outlive all of the ranks, which end together with the last of them.
Result<std::vector<std::unique_ptr<Communicator>>> create_all(std::span<GpuBackend* const> backends, const Options& options = {},
                                                              std::source_location site = std::source_location::current());
/// The same for a process that was started with others: rank 0 makes the id, and `share_bytes` gives it to all.
/// Errors: also those of `share_bytes`.
Result<std::unique_ptr<Communicator>> join(GpuBackend& backend, const ProcessPlace& place, const Options& options = {},
                                           std::source_location site = std::source_location::current());

/// Bytes that the device had less free after the communicator was made than before: NCCL's own. Others that allocated meanwhile are
/// in it. 0 for a communicator of another kind.
std::uint64_t residual_bytes(const Communicator& communicator) noexcept;

}  // namespace metrale::nccl
