// SPDX-License-Identifier: Apache-2.0
//
// Copies between host and device and within the device: data and order. What each refuses is in copy_bounds_test.cpp.
#include <algorithm>
#include <array>

#include "conformance/case.h"

namespace metrale::conformance {
namespace {

class Copy : public CaseNeeding<memory, copies, streams> {
 protected:
  /// Memory of the host as each way of getting it gives it, filled with `value`.
  std::span<std::byte> pinned(std::size_t bytes, std::uint8_t value, Site site = Site::current()) {
    const auto memory = must(gpu().alloc_host_pinned(bytes), site);
    std::fill(memory.begin(), memory.end(), std::byte{value});
    return memory;
  }
};

// ---- blocking ----

TEST_F(Copy, RoundTripsEveryByte) {
  for (const std::size_t bytes : {1, 2, 255, 256, 4096, 65537, (3 << 20) + 13}) {
    const DevicePtr ptr = block(bytes);
    const auto sent = pattern(bytes, static_cast<unsigned>(bytes));
    must(gpu().copy_h2d(ptr, sent));
    std::vector<std::byte> seen(bytes);
    must(gpu().copy_d2h(seen, ptr));
    EXPECT_EQ(seen, sent) << bytes << " bytes";
    must(gpu().free(ptr));
  }
}

TEST_F(Copy, D2dCopiesEveryByteAndNoMore) {
  const DevicePtr src = block(70001);
  const DevicePtr dst = block(70001);
  const auto sent = pattern(70001, 2);
  write(src, sent);
  fill(dst, 0xEE, 70001);
  must(gpu().copy_d2d(dst.offset(3), src.offset(5), 69990));
  EXPECT_EQ(read(dst.offset(3), 69990), std::vector<std::byte>(sent.begin() + 5, sent.begin() + 69995));
  EXPECT_TRUE(holds(dst, 3, 0xEE));
  EXPECT_TRUE(holds(dst.offset(69993), 8, 0xEE));
}

TEST_F(Copy, TakesInteriorAddresses) {
  const DevicePtr ptr = block(1000);
  fill(ptr, 0, 1000);
  const auto sent = pattern(10, 1);
  must(gpu().copy_h2d(ptr.offset(990), sent));
  EXPECT_EQ(read(ptr.offset(990), 10), sent);
  EXPECT_TRUE(holds(ptr, 990, 0));
}

TEST_F(Copy, H2dIsOrderedAfterTheDefaultStream) {
  need({host_callbacks});
  const DevicePtr ptr = block(4096);
  const std::vector<std::byte> sent(4096, std::byte{0x02});
  Gate gate(gpu(), gpu().default_stream());
  must(gpu().memset_async(ptr, 0x01, 4096, gpu().default_stream()));
  EXPECT_FALSE(returns_before(gate, [&] { must(gpu().copy_h2d(ptr, sent)); }));
  settle(gpu().default_stream());
  EXPECT_TRUE(holds(ptr, 4096, 0x02));
}

TEST_F(Copy, D2hIsOrderedAfterTheDefaultStream) {
  need({host_callbacks});
  const DevicePtr ptr = block(4096);
  fill(ptr, 0x01, 4096);
  std::vector<std::byte> seen(4096);
  Gate gate(gpu(), gpu().default_stream());
  must(gpu().memset_async(ptr, 0x02, 4096, gpu().default_stream()));
  EXPECT_FALSE(returns_before(gate, [&] { must(gpu().copy_d2h(seen, ptr)); }));
  EXPECT_EQ(seen, std::vector<std::byte>(4096, std::byte{0x02}));
}

TEST_F(Copy, D2dIsOrderedAfterTheDefaultStreamAndReturnsWhenDone) {
  need({host_callbacks});
  const DevicePtr src = block(4096);
  const DevicePtr dst = block(4096);
  fill(src, 0x01, 4096);
  Gate gate(gpu(), gpu().default_stream());
  must(gpu().memset_async(src, 0x02, 4096, gpu().default_stream()));
  EXPECT_FALSE(returns_before(gate, [&] { must(gpu().copy_d2d(dst, src, 4096)); }));
  EXPECT_TRUE(must(gpu().query(gpu().default_stream()))) << "back before the copy was done";
  EXPECT_TRUE(holds(dst, 4096, 0x02));
}

TEST_F(Copy, BlockingFormsDoNotWaitForOtherStreams) {
  need({host_callbacks});
  const DevicePtr a = block(4096);
  const DevicePtr b = block(4096);
  Gate gate(gpu(), stream());
  const auto sent = pattern(4096, 1);
  must(gpu().copy_h2d(a, sent));
  must(gpu().copy_d2d(b, a, 4096));
  EXPECT_EQ(read(b, 4096), sent);  // a wait would last until the gate gives up, which fails the case
}

TEST_F(Copy, D2hOnStreamSeesKernelWrites) {
  need({kernels, computes});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(100'000 * 4);
  const KernelHandle k = kernel(kFill);
  for (std::uint32_t round = 1; round <= 20; ++round) {
    launch(k, s, {KernelArg::buffer(ptr), KernelArg::value(round), KernelArg::value(std::uint64_t{100'000})}, {8, 1, 1});
    std::vector<std::uint32_t> seen(100'000);
    must(gpu().copy_d2h_on_stream(std::as_writable_bytes(std::span(seen)), ptr, s));
    ASSERT_EQ(std::count(seen.begin(), seen.end(), round), 100'000);
  }
}

TEST_F(Copy, D2hOnStreamIsOrderedAfterItsStream) {
  need({host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(4096);
  fill(ptr, 0x01, 4096);
  std::vector<std::byte> seen(4096);
  Gate gate(gpu(), s);
  must(gpu().memset_async(ptr, 0x02, 4096, s));
  EXPECT_FALSE(returns_before(gate, [&] { must(gpu().copy_d2h_on_stream(seen, ptr, s)); })) << "did not wait for its stream";
  EXPECT_EQ(seen, std::vector<std::byte>(4096, std::byte{0x02}));
}

TEST_F(Copy, D2hOnStreamDoesNotWaitForOtherStreams) {
  need({host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  fill(ptr, 0x03, 64);
  Gate gate(gpu(), gpu().default_stream());
  std::vector<std::byte> seen(64);
  must(gpu().copy_d2h_on_stream(seen, ptr, s));  // a wait would last until the gate gives up, which fails the case
  EXPECT_EQ(seen, std::vector<std::byte>(64, std::byte{0x03}));
}

// ---- asynchronous ----

TEST_F(Copy, H2dAsyncLetsAPageableSourceBeReusedAtReturn) {
  need({host_callbacks});
  const StreamHandle s = stream();
  for (const std::size_t bytes : {1, 64, 4096, 1 << 20}) {
    const DevicePtr ptr = block(bytes);
    const auto sent = pattern(bytes, 8);
    auto source = sent;
    {
      Gate gate(gpu(), s);
      must(gpu().copy_h2d_async(ptr, source, s));
      std::fill(source.begin(), source.end(), std::byte{0xDD});
    }
    settle(s);
    EXPECT_EQ(read(ptr, bytes), sent) << bytes << " bytes were read after the call";
  }
}

TEST_F(Copy, H2dAsyncLetsAStackSourceGoAtReturn) {
  need({host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(256);
  Gate gate(gpu(), s);
  const auto send = [&](std::uint8_t value) {
    std::array<std::byte, 256> local;
    local.fill(std::byte{value});
    must(gpu().copy_h2d_async(ptr, local, s));
    local.fill(std::byte{0xDD});
  };
  send(0x41);
  gate.open();
  settle(s);
  EXPECT_TRUE(holds(ptr, 256, 0x41));
}

TEST_F(Copy, H2dAsyncLetsAPinnedSourceBeReusedAtReturn) {
  need({host_callbacks, pinned_memory});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(100'000);
  const auto source = pinned(100'000, 0x42);
  {
    Gate gate(gpu(), s);
    must(gpu().copy_h2d_async(ptr, source, s));
    std::fill(source.begin(), source.end(), std::byte{0xDD});
  }
  settle(s);
  EXPECT_TRUE(holds(ptr, 100'000, 0x42));
}

TEST_F(Copy, H2dAsyncIsOrderedOnItsStream) {
  need({host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(4096);
  fill(ptr, 0x01, 4096);
  {
    Gate gate(gpu(), s);
    must(gpu().memset_async(ptr, 0x02, 4096, s));
    must(gpu().copy_h2d_async(ptr.offset(1000), std::vector<std::byte>(1000, std::byte{0x03}), s));
    must(gpu().memset_async(ptr.offset(1500), 0x04, 1000, s));
    EXPECT_TRUE(is_held(s));
    EXPECT_TRUE(holds(ptr, 4096, 0x01)) << "ran ahead of its stream";
  }
  settle(s);
  EXPECT_TRUE(holds(ptr, 1000, 0x02));
  EXPECT_TRUE(holds(ptr.offset(1000), 500, 0x03));
  EXPECT_TRUE(holds(ptr.offset(1500), 1000, 0x04));
}

TEST_F(Copy, H2dAsyncHoldsUnderManySources) {
  const StreamHandle s = stream();
  constexpr std::size_t kCount = 200;
  const DevicePtr ptr = block(kCount * 5000);
  std::vector<std::byte> source(5000);
  for (std::size_t i = 0; i < kCount; ++i) {
    std::fill(source.begin(), source.end(), static_cast<std::byte>(i));
    must(gpu().copy_h2d_async(ptr.offset(i * 5000), source, s));
  }
  settle(s);
  const auto seen = read(ptr, kCount * 5000);
  for (std::size_t i = 0; i < seen.size(); ++i) ASSERT_EQ(seen[i], static_cast<std::byte>(i / 5000)) << "byte " << i;
}

TEST_F(Copy, H2dAsyncRetainedAddsNoWait) {
  need({host_callbacks, pinned_memory});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(4096);
  const auto source = pinned(4096, 0x51);
  {
    Gate gate(gpu(), s);
    must(gpu().copy_h2d_async_retained(ptr, source, s));
    EXPECT_FALSE(must(gpu().query(s)));
  }
  settle(s);
  EXPECT_TRUE(holds(ptr, 4096, 0x51));
}

TEST_F(Copy, H2dAsyncRetainedIsOrderedOnItsStream) {
  need({host_callbacks, pinned_memory});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(4096);
  const auto source = pinned(4096, 0x51);
  fill(ptr, 0x01, 4096);
  {
    Gate gate(gpu(), s);
    must(gpu().memset_async(ptr, 0x02, 4096, s));
    must(gpu().copy_h2d_async_retained(ptr, source.subspan(0, 2000), s));
    EXPECT_TRUE(is_held(s));
    EXPECT_TRUE(holds(ptr, 4096, 0x01)) << "ran ahead of its stream";
  }
  settle(s);
  EXPECT_TRUE(holds(ptr, 2000, 0x51));
  EXPECT_TRUE(holds(ptr.offset(2000), 2096, 0x02));
}

TEST_F(Copy, D2hAsyncAddsNoWaitAndIsValidAfterTheStreamsSynchronisation) {
  need({host_callbacks, pinned_memory});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(4096);
  fill(ptr, 0x01, 4096);
  const auto destination = pinned(4096, 0);
  {
    Gate gate(gpu(), s);
    must(gpu().memset_async(ptr, 0x02, 4096, s));
    must(gpu().copy_d2h_async(destination, ptr, s));
    must(gpu().memset_async(ptr, 0x03, 4096, s));
    EXPECT_TRUE(is_held(s));
    EXPECT_EQ(destination[0], std::byte{0}) << "ran ahead of its stream";
  }
  settle(s);
  EXPECT_EQ(static_cast<std::size_t>(std::count(destination.begin(), destination.end(), std::byte{0x02})), 4096u);
}

TEST_F(Copy, D2hAsyncTakesPageableMemoryToo) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(100'000);
  const auto sent = pattern(100'000, 6);
  write(ptr, sent);
  std::vector<std::byte> seen(100'000);
  must(gpu().copy_d2h_async(seen, ptr, s));
  settle(s);
  EXPECT_EQ(seen, sent);
}

TEST_F(Copy, PageableEndsAreCounted) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  fill(ptr, 0, 64);
  std::vector<std::byte> pageable(64);
  must(gpu().copy_h2d_async_retained(ptr, pageable, s));
  EXPECT_EQ(gpu().num_pageable_copies(), 1u);
  must(gpu().copy_d2h_async(pageable, ptr, s));
  EXPECT_EQ(gpu().num_pageable_copies(), 2u);
  settle(s);
}

TEST_F(Copy, PageableDestinationsAreWarnedOfOnce) {
  const StreamHandle s = stream();
  const DevicePtr ptr = block(64);
  fill(ptr, 0, 64);
  std::vector<std::byte> pageable(64);
  for (int i = 0; i < 5; ++i) must(gpu().copy_d2h_async(pageable, ptr, s));
  settle(s);
  EXPECT_EQ(log_lines("pageable").size(), 1u);
}

TEST_F(Copy, D2dAsyncIsOrderedOnItsStream) {
  need({host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr a = block(4096);
  const DevicePtr b = block(4096);
  fill(a, 0x01, 4096);
  fill(b, 0x00, 4096);
  {
    Gate gate(gpu(), s);
    must(gpu().memset_async(a, 0x02, 4096, s));
    must(gpu().copy_d2d_async(b.offset(1), a, 4000, s));
    must(gpu().memset_async(a, 0x03, 4096, s));
    EXPECT_TRUE(is_held(s));
    EXPECT_TRUE(holds(b, 4096, 0x00)) << "ran ahead of its stream";
  }
  settle(s);
  EXPECT_TRUE(holds(b, 1, 0x00));
  EXPECT_TRUE(holds(b.offset(1), 4000, 0x02));
  EXPECT_TRUE(holds(b.offset(4001), 95, 0x00));
}

}  // namespace
}  // namespace metrale::conformance
