// SPDX-License-Identifier: Apache-2.0
//
// Counts heap allocations of a thread, for tests that promise none. Linking heap_counter.cpp replaces the global operator new.
#pragma once

#include <cstdint>

namespace metrale::test {

/// Calls of operator new on this thread so far; aligned forms are not counted.
std::uint64_t num_heap_allocations() noexcept;

}  // namespace metrale::test
