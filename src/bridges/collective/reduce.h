// SPDX-License-Identifier: Apache-2.0
//
// Sums and the like of the ranks' memory on the host. Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "metrale/bridges/communicator.h"
#include "metrale/dtype.h"

namespace metrale::in_process {

/// `to` becomes the sources together, each of `count` elements, taken in their order: small floats are added up in float32 and
/// rounded once. `dtype` is one that `check` takes for a reduction; nothing needs to be aligned. `to` overlaps no source.
void reduce(ReduceOp op, DType dtype, std::span<const std::byte* const> from, std::byte* to, std::uint64_t count) noexcept;

}  // namespace metrale::in_process
