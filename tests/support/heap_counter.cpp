// SPDX-License-Identifier: Apache-2.0
#include "support/heap_counter.h"

#include <cstdlib>
#include <new>

namespace {
thread_local std::uint64_t num_allocations = 0;
}  // namespace

namespace metrale::test {
std::uint64_t num_heap_allocations() noexcept { return num_allocations; }
}  // namespace metrale::test

#if !METRALE_SANITIZER_OWNS_NEW
void* operator new(std::size_t size) {
  ++num_allocations;
  if (void* p = std::malloc(size == 0 ? 1 : size)) return p;
  throw std::bad_alloc();
}
// std::stable_sort asks this form first; left to a sanitizer's allocator, the block would come back through ours.
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  ++num_allocations;
  return std::malloc(size == 0 ? 1 : size);
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
#endif
