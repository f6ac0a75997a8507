// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "host_kernels.h"
#include "support.h"

namespace metrale::test {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

std::span<const std::byte> memory(DevicePtr ptr, std::size_t bytes) {
  return {reinterpret_cast<const std::byte*>(static_cast<std::uintptr_t>(ptr.address)), bytes};
}

std::size_t num_resident_pages(DevicePtr ptr, std::size_t bytes) {
  const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages((bytes + page - 1) / page);
  if (::mincore(reinterpret_cast<void*>(static_cast<std::uintptr_t>(ptr.address)), bytes, pages.data()) != 0) return pages.size();
  return static_cast<std::size_t>(std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return (p & 1) != 0; }));
}

TEST(HostMemory, IsAlignedAndNotZero) {
  auto b = take(host::create(host_options()));
  for (const std::uint64_t bytes : {std::uint64_t{1}, std::uint64_t{1000}, 3 * kMiB, 9 * kMiB}) {
    const DevicePtr ptr = take(b->alloc(bytes));
    EXPECT_EQ(ptr.address % kDeviceAlignment, 0u);
    EXPECT_EQ(memory(ptr, bytes).front(), std::byte{0xA5});
    EXPECT_EQ(memory(ptr, bytes).back(), std::byte{0xA5});
    take(b->free(ptr));
  }
}

TEST(HostMemory, ALargeArenaIsNotMadeResident) {
  auto b = take(host::create(host_options()));
  const DevicePtr arena = take(b->alloc_arena(60 * kMiB));
  EXPECT_EQ(memory(arena, 1).front(), std::byte{0xA5});
  // One huge page at most, where the machine has them.
  EXPECT_LE(num_resident_pages(arena, 60 * kMiB) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)), 2 * kMiB);
}

TEST(HostMemory, PinnedMemoryIsZeroedAlignedAndItsOwnAlias) {
  auto b = take(host::create(host_options()));
  const std::span<std::byte> pinned = take(b->alloc_host_pinned(1000));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(pinned.data()) % kPinnedAlignment, 0u);
  EXPECT_TRUE(std::all_of(pinned.begin(), pinned.end(), [](std::byte v) { return v == std::byte{0}; }));
  EXPECT_EQ(take(b->host_ptr_to_device(pinned.data() + 8)).address, reinterpret_cast<std::uintptr_t>(pinned.data() + 8));
  EXPECT_OK(b->free_host_pinned(pinned.data(), pinned.size()));
}

TEST(HostMemory, AllocWaitsForMemoryAlreadyFreed) {
  host::Options options = host_options();
  options.memory_limit_bytes = 8 * kMiB;
  auto b = take(host::create(options));
  const StreamHandle busy = take(b->create_stream());
  const DevicePtr first = take(b->alloc(6 * kMiB));
  std::atomic<bool> ended{false};
  const auto hold = [&] {
    ended = false;
    take(b->enqueue_host(busy, [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      ended = true;
    }));
  };
  hold();
  take(b->free(first));
  const DevicePtr second = take(b->alloc(6 * kMiB));
  EXPECT_TRUE(ended) << "the block went to another before the work that may use it was done";
  hold();
  EXPECT_FALSE(b->alloc(3 * kMiB));
  EXPECT_FALSE(ended) << "nothing that is being freed would make it fit";
  take(b->free(second));
  EXPECT_EQ(take(b->alloc_host_pinned(6 * kMiB)).size(), 6 * kMiB);
}

TEST(HostMemory, TheLimitHoldsAndFreedMemoryCountsAgain) {
  host::Options options = host_options();
  options.memory_limit_bytes = 10 * kMiB;
  auto b = take(host::create(options));
  EXPECT_EQ(take(b->total_memory()), 10 * kMiB);
  const DevicePtr six = take(b->alloc(6 * kMiB));
  EXPECT_EQ(take(b->device_free_memory()), 4 * kMiB);
  EXPECT_ERRC(b->alloc(5 * kMiB), Errc::out_of_memory);
  EXPECT_ERRC(b->alloc_host_pinned(5 * kMiB), Errc::out_of_memory);
  take(b->free(six));
  EXPECT_OK(b->alloc(9 * kMiB));
}

TEST(HostMemory, AbsurdSizesAreRefused) {
  auto b = take(host::create(host_options()));
  for (const std::uint64_t bytes : {UINT64_MAX, UINT64_MAX / 2, std::uint64_t{1} << 50, take(b->total_memory()) * 2}) {
    EXPECT_ERRC(b->alloc(bytes), Errc::out_of_memory);
    EXPECT_ERRC(b->alloc_managed(bytes), Errc::out_of_memory);
    EXPECT_ERRC(b->alloc_arena(bytes), Errc::out_of_memory);
  }
}

TEST(HostMemory, FreeNeverWaitsAndHandsBackBehindWorkInFlight) {
  host::Options options = host_options();
  options.memory_limit_bytes = 10 * kMiB;
  auto b = take(host::create(options));
  const StreamHandle s = take(b->create_stream());
  const DevicePtr used = take(b->alloc(6 * kMiB));
  Gate gate(*b, s);
  take(b->memset_async(used, 1, 6 * kMiB, s));
  ASSERT_OK(b->free(used));  // s is closed: waiting for it would hang
  EXPECT_EQ(take(b->device_free_memory()), 4 * kMiB);
  EXPECT_ERRC(b->alloc(11 * kMiB), Errc::out_of_memory);
  gate.open();
  take(b->synchronize(s));
  EXPECT_OK(b->alloc(5 * kMiB));
}

TEST(HostMemory, FreeWaitsForWorkEnqueuedBeforeAndNotForLaterWork) {
  host::Options options = host_options();
  options.memory_limit_bytes = 10 * kMiB;
  auto b = take(host::create(options));
  const StreamHandle s = take(b->create_stream());
  const EventHandle passed = take(b->create_event());
  const DevicePtr block = take(b->alloc(6 * kMiB));
  Gate first(*b, s);
  take(b->record_event(passed, s));
  take(b->free(block));
  Gate second(*b, s);
  first.open();
  take(b->event_synchronize(passed));
  EXPECT_OK(b->alloc(5 * kMiB));
}

TEST(HostMemory, AWorkerThatFallsIdleHandsBackWhatWaited) {
  host::Options options = host_options();
  options.memory_limit_bytes = 10 * kMiB;
  auto b = take(host::create(options));
  const StreamHandle s = take(b->create_stream());
  const DevicePtr block = take(b->alloc(6 * kMiB));
  {
    Gate gate(*b, s);
    take(b->free(block));
  }
  bool is_back = false;
  for (int i = 0; i < 1000 && !is_back; ++i) {
    is_back = take(b->device_free_memory()) == 10 * kMiB;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(is_back);
}

TEST(HostMemory, SaysThatItSharesTheHostsMemory) {
  auto b = take(host::create(host_options()));
  EXPECT_GT(take(b->total_memory()), 0u);
  EXPECT_LE(take(b->free_memory()), take(b->total_memory()));
}

}  // namespace
}  // namespace metrale::test
