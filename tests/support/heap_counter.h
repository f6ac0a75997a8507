// SPDX-License-Identifier: Apache-2.0
//
// Counts heap allocations of a thread, for tests that promise none. Linking heap_counter.cpp replaces the global operator new,
// which the address and thread sanitizers want for themselves: nothing is counted there.
#pragma once

#include <cstdint>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define METRALE_SANITIZER_OWNS_NEW 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define METRALE_SANITIZER_OWNS_NEW 1
#endif
#endif
#ifndef METRALE_SANITIZER_OWNS_NEW
#define METRALE_SANITIZER_OWNS_NEW 0
#endif

namespace metrale::test {

/// Whether this build counts; tests that promise no allocation skip where it does not.
inline constexpr bool kCountsHeapAllocations = METRALE_SANITIZER_OWNS_NEW == 0;
/// Calls of operator new on this thread so far; aligned forms are not counted.
std::uint64_t num_heap_allocations() noexcept;

}  // namespace metrale::test
