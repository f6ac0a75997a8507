// SPDX-License-Identifier: Apache-2.0
#include "support/failing_heap.h"

#include <cstdlib>
#include <new>
#include <utility>

namespace {

thread_local std::int64_t allocations_left = -1;

[[maybe_unused]] void* take(std::size_t size) noexcept {
  if (allocations_left >= 0 && allocations_left-- == 0) return nullptr;
  return std::malloc(size == 0 ? 1 : size);
}
[[maybe_unused]] void* take(std::size_t size, std::align_val_t alignment) noexcept {
  if (allocations_left >= 0 && allocations_left-- == 0) return nullptr;
  const auto align = static_cast<std::size_t>(alignment);
  return std::aligned_alloc(align, (size + align - 1) / align * align);
}

}  // namespace

namespace metrale::test {
std::int64_t fail_allocation(std::int64_t n) noexcept { return std::exchange(allocations_left, n); }
}  // namespace metrale::test

#if !METRALE_SANITIZER_OWNS_NEW
void* operator new(std::size_t size) {
  if (void* p = take(size)) return p;
  throw std::bad_alloc();
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  if (void* p = take(size, alignment)) return p;
  throw std::bad_alloc();
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return take(size); }
void* operator new(std::size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept { return take(size, alignment); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
#endif
