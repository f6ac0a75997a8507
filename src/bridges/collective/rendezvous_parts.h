// SPDX-License-Identifier: Apache-2.0
//
// The two ways of `share_bytes`. Arguments have been checked.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "metrale/bridges/rendezvous.h"

namespace metrale::detail {

using Deadline = std::chrono::steady_clock::time_point;

/// `host` has no brackets around an address of IPv6.
Result<std::vector<std::byte>> share_by_tcp(const ProcessPlace& place, const std::string& host, std::uint16_t port,
                                            std::span<const std::byte> mine, Deadline deadline);
Result<std::vector<std::byte>> share_by_file(const ProcessPlace& place, const std::string& path, std::span<const std::byte> mine,
                                             Deadline deadline);
/// "rank 1", "ranks 1, 4": those of `is_there` that are false.
std::string missing_ranks(const std::vector<bool>& is_there);

}  // namespace metrale::detail
