// SPDX-License-Identifier: Apache-2.0
//
// memset, memset_async.
#include "conformance/case.h"

namespace metrale::conformance {
namespace {

class Memset : public CaseNeeding<memory, copies> {};

TEST_F(Memset, FillsExactlyItsRange) {
  const DevicePtr ptr = block(1000);
  fill(ptr, 0x10, 1000);
  fill(ptr.offset(101), 0xF1, 333);
  EXPECT_TRUE(holds(ptr, 101, 0x10));
  EXPECT_TRUE(holds(ptr.offset(101), 333, 0xF1));
  EXPECT_TRUE(holds(ptr.offset(434), 566, 0x10));
}

TEST_F(Memset, AsyncFillsExactlyItsRange) {
  need({streams});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(100'003);
  must(gpu().memset_async(ptr, 0x10, 100'003, s));
  must(gpu().memset_async(ptr.offset(1), 0xF1, 100'001, s));
  settle(s);
  EXPECT_TRUE(holds(ptr, 1, 0x10));
  EXPECT_TRUE(holds(ptr.offset(1), 100'001, 0xF1));
  EXPECT_TRUE(holds(ptr.offset(100'002), 1, 0x10));
}

TEST_F(Memset, ReturnsWhenDone) {
  need({host_alias, pinned_memory});
  // Pinned memory shows what is there without a further call.
  const auto memory = must(gpu().alloc_host_pinned(4 << 20));
  const DevicePtr alias = must(gpu().host_ptr_to_device(memory.data()));
  for (const std::uint8_t value : {1, 2, 3, 4, 5, 6, 7, 8}) {
    must(gpu().memset(alias, value, memory.size()));
    ASSERT_EQ(memory.back(), std::byte{value});
    ASSERT_EQ(memory[memory.size() / 2], std::byte{value});
  }
}

TEST_F(Memset, IsOrderedAfterTheDefaultStream) {
  need({streams, host_callbacks});
  const DevicePtr ptr = block(4096);
  Gate gate(gpu(), gpu().default_stream());
  must(gpu().memset_async(ptr, 0x01, 4096, gpu().default_stream()));
  EXPECT_FALSE(returns_before(gate, [&] { must(gpu().memset(ptr, 0x02, 4096)); }))
      << "back before the default stream's earlier work";
  settle(gpu().default_stream());
  EXPECT_TRUE(holds(ptr, 4096, 0x02));
}

TEST_F(Memset, DoesNotWaitForOtherStreams) {
  need({streams, host_callbacks});
  const DevicePtr ptr = block(4096);
  Gate gate(gpu(), stream());
  fill(ptr, 0x02, 4096);  // a wait would last until the gate gives up, which fails the case
  EXPECT_TRUE(holds(ptr, 4096, 0x02));
}

TEST_F(Memset, AsyncIsOrderedOnItsStream) {
  need({streams, host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(4096);
  fill(ptr, 0x01, 4096);
  {
    Gate gate(gpu(), s);
    must(gpu().memset_async(ptr, 0x02, 4096, s));
    EXPECT_TRUE(is_held(s));
    EXPECT_TRUE(holds(ptr, 4096, 0x01)) << "ran ahead of its stream";
    must(gpu().memset_async(ptr.offset(1), 0x03, 4095, s));
  }
  settle(s);
  EXPECT_TRUE(holds(ptr, 1, 0x02));
  EXPECT_TRUE(holds(ptr.offset(1), 4095, 0x03));
}

TEST_F(Memset, AsyncIsOrderedBetweenKernels) {
  need({streams, kernels, computes});
  const StreamHandle s = stream();
  const DevicePtr log = make_log(8);
  const DevicePtr kept = block(64);
  append(log, 1, s);
  append(log, 2, s);
  must(gpu().copy_d2d_async(kept, log, 8, s));
  must(gpu().memset_async(log, 0, 36, s));
  append(log, 3, s);
  settle(s);
  EXPECT_EQ(read_log(log, 8), std::vector<std::uint32_t>{3});
  EXPECT_EQ(read<std::uint32_t>(kept, 1).front(), 2u);
}

TEST_F(Memset, RefusesRangesThatLeaveTheirBlock) {
  const DevicePtr ptr = block(1000);
  fill(ptr, 0, 1000);
  EXPECT_TRUE(refused(gpu().memset(ptr, 1, 1001), Errc::out_of_range));
  EXPECT_TRUE(refused(gpu().memset(ptr.offset(999), 1, 2), Errc::out_of_range));
  EXPECT_TRUE(refused(gpu().memset({0x10}, 1, 1), Errc::out_of_range));
  EXPECT_TRUE(refused(gpu().memset(ptr.offset(10), 1, UINT64_MAX), Errc::out_of_range));
  if (gpu().capabilities().has(streams)) {
    const StreamHandle s = stream();
    EXPECT_TRUE(refused(gpu().memset_async(ptr, 1, 1001, s), Errc::out_of_range));
    settle(s);
  }
  EXPECT_TRUE(holds(ptr, 1000, 0));
}

}  // namespace
}  // namespace metrale::conformance
