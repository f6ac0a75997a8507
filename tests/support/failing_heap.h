// SPDX-License-Identifier: Apache-2.0
//
// Makes one heap allocation of a thread fail. Linking failing_heap.cpp replaces the global operator new, which the address and
// thread sanitizers want for themselves: nothing fails there.
#pragma once

#include <cstdint>

#include "support/heap_counter.h"

namespace metrale::test {

/// Whether this build can fail allocations; tests that need it skip where it cannot.
inline constexpr bool kFailsAllocations = METRALE_SANITIZER_OWNS_NEW == 0;
/// Fails this thread's allocation number `n` from now, counted from 0; -1: none. Returns how many the last request had still to go,
/// negative when it was met or was none.
std::int64_t fail_allocation(std::int64_t n) noexcept;

}  // namespace metrale::test
