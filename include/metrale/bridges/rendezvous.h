// SPDX-License-Identifier: Apache-2.0
//
// How processes that were started together find each other: who is which rank, and a few bytes of rank 0 that all get, such as
// NCCL's id. Nothing here needs a device. Any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/result.h"

namespace metrale {

/// One process among those that were started together.
struct ProcessPlace {
  std::uint32_t rank = 0;
  std::uint32_t size = 1;
  std::uint32_t local_rank = 0;  ///< Among those of its machine: which device it takes.
  /// Where to meet: "tcp://host:port", on which rank 0 listens, or "file:///path" on a disk that all see. Empty: nowhere.
  std::string meeting = {};
  std::string_view source = {};  ///< "torchrun" (RANK), "mpi" (OMPI_COMM_WORLD_RANK).
};

/// Most processes of one start.
inline constexpr std::uint32_t kMaxProcesses = 4096;
/// Most bytes that are shared.
inline constexpr std::size_t kMaxSharedBytes = 4096;

/// The value of an environment variable; null: not set.
using Environment = std::function<const char*(const char* name)>;
/// That of this process.
const char* process_environment(const char* name);

/// Reads what torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) or MPI (OMPI_COMM_WORLD_RANK, …_SIZE, …_LOCAL_RANK)
/// set. METRALE_RENDEZVOUS names another place to meet; without one it is MASTER_ADDR at the port after MASTER_PORT, since torchrun
/// listens on that itself. None of these variables: nullopt, a process that was started alone.
/// Errors: invalid_argument (a variable that is missing beside others, or no number in range: names it).
Result<std::optional<ProcessPlace>> process_place(const Environment& environment = process_environment);

/// Gives every rank the bytes that rank 0 brings (`mine`, which the others leave empty), once all have come.
/// Over TCP rank 0 listens at the address until all ranks have come and answered. Over a file each rank leaves a note beside it
/// with a word of its own, and believes a file only with that word in it, so that one of an earlier start is not taken. Both leave
/// nothing behind. `timeout` is for all of it; ranks may come in any order.
/// Errors: timeout (who has not come), invalid_argument (the place, the address, ranks of different sizes, one twice, no bytes or
///   too many), io (the system's words).
Result<std::vector<std::byte>> share_bytes(const ProcessPlace& place, std::span<const std::byte> mine,
                                           std::chrono::milliseconds timeout);

}  // namespace metrale
