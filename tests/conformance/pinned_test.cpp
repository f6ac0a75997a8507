// SPDX-License-Identifier: Apache-2.0
//
// alloc_host_pinned, free_host_pinned, register_host, unregister_host, host_ptr_to_device, is_pinned.
#include <algorithm>
#include <cstring>

#include "conformance/case.h"

namespace metrale::conformance {
namespace {

class Pinned : public CaseNeeding<pinned_memory> {
 protected:
  std::span<std::byte> pinned(std::uint64_t bytes, Site site = Site::current()) {
    return must(gpu().alloc_host_pinned(bytes, site), site);
  }
};

TEST_F(Pinned, IsZeroedInFull) {
  for (const std::size_t bytes : {1, 63, 64, 100, 4097, 1 << 20}) {
    // What a block held before must not show through.
    for (int round = 0; round < 3; ++round) {
      const auto memory = pinned(bytes);
      ASSERT_EQ(memory.size(), bytes);
      EXPECT_EQ(static_cast<std::size_t>(std::count(memory.begin(), memory.end(), std::byte{0})), bytes);
      std::fill(memory.begin(), memory.end(), std::byte{0xFF});
      must(gpu().free_host_pinned(memory.data(), bytes));
    }
  }
}

TEST_F(Pinned, IsAlignedTo64) {
  for (const std::size_t bytes : {1, 3, 65, 1000, 70000}) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(pinned(bytes).data()) % kPinnedAlignment, 0u);
  }
}

TEST_F(Pinned, IsInThePinnedTable) {
  const auto memory = pinned(1000);
  EXPECT_TRUE(gpu().is_pinned(memory));
  EXPECT_TRUE(gpu().is_pinned(memory.subspan(999)));
  EXPECT_TRUE(gpu().is_pinned(memory.subspan(100, 50)));
  EXPECT_FALSE(gpu().is_pinned({memory.data() + 999, 2}));
  std::vector<std::byte> other(10);
  EXPECT_FALSE(gpu().is_pinned(other));
  EXPECT_FALSE(gpu().is_pinned({}));
  must(gpu().free_host_pinned(memory.data(), 1000));
  EXPECT_FALSE(gpu().is_pinned(memory));
}

TEST_F(Pinned, IsOutsideLiveBytesAndReportedUnderItsOwnHeading) {
  const auto memory = pinned(2 << 20);
  EXPECT_EQ(gpu().live_bytes(), 0u);
  EXPECT_EQ(gpu().live_alloc_count(), 0u);
  EXPECT_NE(gpu().alloc_report().find("pinned"), std::string::npos) << gpu().alloc_report();
  must(gpu().free_host_pinned(memory.data(), memory.size()));
  EXPECT_EQ(gpu().alloc_report().find("pinned"), std::string::npos) << gpu().alloc_report();
}

TEST_F(Pinned, IsReportedWhereItHasNoAliasToo) {
  if (gpu().capabilities().has(host_alias)) {
    need(under_test().drops_capabilities, "it always has one: shown by the cases beside this");
    remake({.without = {host_alias}});
  }
  pinned(2 << 20);
  ASSERT_EQ(gpu().live_allocations().size(), 1u);
  EXPECT_EQ(gpu().live_allocations().front().kind, MemoryKind::pinned);
  EXPECT_NE(gpu().alloc_report().find("pinned"), std::string::npos) << gpu().alloc_report();
}

TEST_F(Pinned, IsListedWithItsKindAndCaller) {
  must(gpu().alloc_host_pinned(123));
  const std::uint32_t line = __LINE__ - 1;
  const auto blocks = gpu().live_allocations();
  const auto found = std::find_if(blocks.begin(), blocks.end(), [&](const Allocation& a) { return a.site.line() == line; });
  ASSERT_NE(found, blocks.end());
  EXPECT_EQ(found->kind, MemoryKind::pinned);
  EXPECT_EQ(found->bytes, 123u);
}

TEST_F(Pinned, FreeWantsTheSizeThatWasAskedFor) {
  const auto memory = pinned(1000);
  EXPECT_TRUE(refused(gpu().free_host_pinned(memory.data(), 1001), Errc::invalid_argument, {"1001", "1000"}));
  EXPECT_TRUE(refused(gpu().free_host_pinned(memory.data(), 0), Errc::invalid_argument));
  EXPECT_TRUE(gpu().is_pinned(memory)) << "a refused free changed the table";
  memory[999] = std::byte{1};
  EXPECT_TRUE(ok(gpu().free_host_pinned(memory.data(), 1000)));
}

TEST_F(Pinned, FreeRefusesWhatIsNotTheStart) {
  const auto memory = pinned(1000);
  EXPECT_TRUE(refused(gpu().free_host_pinned(memory.data() + 64, 936), Errc::invalid_argument));
  must(gpu().free_host_pinned(memory.data(), 1000));
  EXPECT_TRUE(refused(gpu().free_host_pinned(memory.data(), 1000), Errc::invalid_argument));
  std::vector<std::byte> other(64);
  EXPECT_TRUE(refused(gpu().free_host_pinned(other.data(), 64), Errc::invalid_argument));
}

TEST_F(Pinned, RefusesZeroBytes) { EXPECT_TRUE(refused(gpu().alloc_host_pinned(0), Errc::invalid_argument)); }

TEST_F(Pinned, IsNotHandedBackBeforeEarlierWorkIsDone) {
  need({memory, copies, streams, host_callbacks});
  constexpr std::size_t kBytes = 48 << 10;
  const StreamHandle s = stream();
  const DevicePtr dst = block(kBytes);
  const auto source = pinned(kBytes);
  std::fill(source.begin(), source.end(), std::byte{0x5A});
  Gate gate(gpu(), s);
  must(gpu().copy_h2d_async_retained(dst, source, s));
  Background freeing([&] { must(gpu().free_host_pinned(source.data(), kBytes)); });
  freeing.is_back();
  for (int i = 0; i < 4; ++i) {
    const auto next = pinned(kBytes);
    std::fill(next.begin(), next.end(), std::byte{0x77});
  }
  gate.open();
  freeing.join();
  settle(s);
  EXPECT_TRUE(holds(dst, kBytes, 0x5A)) << "the source of a pending copy was handed to someone else";
}

TEST_F(Pinned, CopiesFromItAreNotCountedAsPageable) {
  need({memory, copies, streams});
  const auto memory = pinned(256);
  const DevicePtr dst = block(256);
  const StreamHandle s = stream();
  must(gpu().copy_h2d_async_retained(dst, memory, s));
  must(gpu().copy_d2h_async(memory, dst, s));
  settle(s);
  EXPECT_EQ(gpu().num_pageable_copies(), 0u);
}

// ---- aliases ----

TEST_F(Pinned, HasADeviceAliasInteriorPointersIncluded) {
  need({host_alias});
  const auto memory = pinned(1000);
  const DevicePtr base = must(gpu().host_ptr_to_device(memory.data()));
  EXPECT_TRUE(base);
  EXPECT_EQ(must(gpu().host_ptr_to_device(memory.data() + 1)), base.offset(1));
  EXPECT_EQ(must(gpu().host_ptr_to_device(memory.data() + 999)), base.offset(999));
}

TEST_F(Pinned, AliasReachesTheSameBytes) {
  need({host_alias, memory, copies});
  const auto memory = pinned(1000);
  const auto sent = pattern(1000, 9);
  std::copy(sent.begin(), sent.end(), memory.begin());
  const DevicePtr alias = must(gpu().host_ptr_to_device(memory.data()));
  const DevicePtr ptr = block(1000);
  must(gpu().copy_d2d(ptr, alias, 1000));
  EXPECT_EQ(read(ptr, 1000), sent);
  fill(alias.offset(10), 0x33, 20);
  EXPECT_EQ(memory[9], sent[9]);
  EXPECT_EQ(memory[10], std::byte{0x33});
  EXPECT_EQ(memory[29], std::byte{0x33});
  EXPECT_EQ(memory[30], sent[30]);
}

TEST_F(Pinned, AliasOfOtherMemoryIsRefused) {
  need({host_alias});
  std::vector<std::byte> pageable(64);
  EXPECT_TRUE(refused(gpu().host_ptr_to_device(pageable.data()), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().host_ptr_to_device(nullptr), Errc::invalid_argument));
  const auto memory = pinned(100);
  must(gpu().free_host_pinned(memory.data(), 100));
  EXPECT_TRUE(refused(gpu().host_ptr_to_device(memory.data()), Errc::invalid_argument));
}

TEST_F(Pinned, KernelsReachTheAlias) {
  need({host_alias, kernels, computes, streams});
  const auto memory = pinned(64 * sizeof(std::uint32_t));
  const DevicePtr alias = must(gpu().host_ptr_to_device(memory.data()));
  const StreamHandle s = stream();
  launch(kernel(kFill), s,
         {KernelArg::buffer(alias), KernelArg::value(std::uint32_t{0x01020304}), KernelArg::value(std::uint64_t{64})});
  settle(s);
  std::uint32_t last = 0;
  std::memcpy(&last, memory.data() + 63 * sizeof(last), sizeof(last));
  EXPECT_EQ(last, 0x01020304u);
}

// ---- registered memory ----

TEST_F(Pinned, RegisterPinsExistingMemory) {
  need({host_registration});
  std::vector<std::byte> mine(8192, std::byte{7});
  must(gpu().register_host(mine));
  EXPECT_TRUE(gpu().is_pinned(mine));
  EXPECT_EQ(mine[0], std::byte{7}) << "registering must leave the bytes alone";
  EXPECT_EQ(gpu().live_bytes(), 0u);
  must(gpu().unregister_host(mine.data()));
  EXPECT_FALSE(gpu().is_pinned(mine));
  mine[8191] = std::byte{8};
}

TEST_F(Pinned, RegisteredMemoryHasAnAlias) {
  need({host_registration, host_alias, memory, copies});
  std::vector<std::byte> mine = pattern(8192, 4);
  must(gpu().register_host(mine));
  const DevicePtr alias = must(gpu().host_ptr_to_device(mine.data() + 100));
  const DevicePtr ptr = block(1000);
  must(gpu().copy_d2d(ptr, alias, 1000));
  EXPECT_EQ(read(ptr, 1000), std::vector<std::byte>(mine.begin() + 100, mine.begin() + 1100));
  must(gpu().unregister_host(mine.data()));
  EXPECT_TRUE(refused(gpu().host_ptr_to_device(mine.data()), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().copy_d2d(ptr, alias, 1000), Errc::out_of_range));
}

TEST_F(Pinned, RegisterRefusesNothingAndOverlaps) {
  need({host_registration});
  EXPECT_TRUE(refused(gpu().register_host({}), Errc::invalid_argument));
  std::vector<std::byte> mine(8192);
  must(gpu().register_host(mine));
  EXPECT_TRUE(refused(gpu().register_host(mine), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().register_host(std::span(mine).subspan(4096, 10)), Errc::invalid_argument));
  const auto memory = pinned(100);
  EXPECT_TRUE(refused(gpu().register_host(memory.subspan(10)), Errc::invalid_argument));
  EXPECT_TRUE(ok(gpu().unregister_host(mine.data())));
}

TEST_F(Pinned, RegisterRefusesDeviceMemory) {
  need({host_registration, host_alias, memory});
  std::vector<std::byte> mine(4096);
  must(gpu().register_host(mine));
  const bool same = must(gpu().host_ptr_to_device(mine.data())).address == reinterpret_cast<std::uintptr_t>(mine.data());
  must(gpu().unregister_host(mine.data()));
  need(same, "its aliases are no host addresses, so host memory is never a device block");
  const DevicePtr ptr = block(4096);
  const std::span<std::byte> seen_by_host(reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(ptr.address)), 4096);
  EXPECT_TRUE(refused(gpu().register_host(seen_by_host), Errc::invalid_argument, {"register_host"}));
  EXPECT_TRUE(refused(gpu().register_host(seen_by_host.subspan(100, 8)), Errc::invalid_argument));
  EXPECT_FALSE(gpu().is_pinned(seen_by_host));
  ASSERT_EQ(gpu().live_allocations().size(), 1u);
  EXPECT_EQ(gpu().live_allocations().front().kind, MemoryKind::device) << "the block's entry was written over";
  EXPECT_TRUE(ok(gpu().free(ptr)));
  EXPECT_EQ(gpu().live_bytes(), 0u);
}

TEST_F(Pinned, UnregisterWaitsForEarlierWork) {
  need({host_registration, memory, copies, streams, host_callbacks});
  const DevicePtr src = block(64);
  fill(src, 0x55, 64);
  for (const bool is_destroyed : {false, true}) {
    std::vector<std::byte> mine(4096);
    must(gpu().register_host(mine));
    const StreamHandle s = stream();
    Gate gate(gpu(), s);
    must(gpu().copy_d2h_async(std::span(mine).first(64), src, s));
    if (is_destroyed) must(gpu().destroy_stream(s));
    EXPECT_FALSE(returns_before(gate, [&] { must(gpu().unregister_host(mine.data())); }));
    EXPECT_EQ(mine[63], std::byte{0x55}) << "the memory is still to be written when its owner may free it";
  }
}

TEST_F(Pinned, UnregisterRefusesWhatWasNotRegistered) {
  need({host_registration});
  std::vector<std::byte> mine(8192);
  EXPECT_TRUE(refused(gpu().unregister_host(mine.data()), Errc::invalid_argument));
  must(gpu().register_host(mine));
  EXPECT_TRUE(refused(gpu().unregister_host(mine.data() + 1), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().free_host_pinned(mine.data(), 8192), Errc::invalid_argument));
  must(gpu().unregister_host(mine.data()));
  EXPECT_TRUE(refused(gpu().unregister_host(mine.data()), Errc::invalid_argument));
  const auto memory = pinned(100);
  EXPECT_TRUE(refused(gpu().unregister_host(memory.data()), Errc::invalid_argument));
}

}  // namespace
}  // namespace metrale::conformance
