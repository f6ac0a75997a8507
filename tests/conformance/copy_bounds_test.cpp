// SPDX-License-Identifier: Apache-2.0
//
// Both ends of each copy must lie in known memory: every copy call, each of its ends, each way to leave a block.
#include <algorithm>
#include <functional>
#include <map>

#include "conformance/case.h"

namespace metrale::conformance {
namespace {

/// A copy call with one device end under test; the other end is fine.
struct BoundsRow {
  const char* name;
  std::function<Result<>(GpuBackend&, DevicePtr end, std::uint64_t bytes, DevicePtr fine, StreamHandle)> call;
};

constexpr std::size_t kBytes = 512;

std::vector<std::byte>& scratch() {
  static std::vector<std::byte> bytes(4096);
  return bytes;
}
std::span<std::byte> host(std::uint64_t bytes) { return std::span(scratch()).first(bytes); }

const std::vector<BoundsRow>& rows() {
  static const std::vector<BoundsRow> all{
      {"CopyH2d", [](GpuBackend& b, DevicePtr p, std::uint64_t n, DevicePtr, StreamHandle) { return b.copy_h2d(p, host(n)); }},
      {"CopyD2h", [](GpuBackend& b, DevicePtr p, std::uint64_t n, DevicePtr, StreamHandle) { return b.copy_d2h(host(n), p); }},
      {"CopyD2dDestination",
       [](GpuBackend& b, DevicePtr p, std::uint64_t n, DevicePtr f, StreamHandle) { return b.copy_d2d(p, f, n); }},
      {"CopyD2dSource", [](GpuBackend& b, DevicePtr p, std::uint64_t n, DevicePtr f, StreamHandle) { return b.copy_d2d(f, p, n); }},
      {"CopyD2hOnStream",
       [](GpuBackend& b, DevicePtr p, std::uint64_t n, DevicePtr, StreamHandle s) { return b.copy_d2h_on_stream(host(n), p, s); }},
      {"CopyH2dAsync",
       [](GpuBackend& b, DevicePtr p, std::uint64_t n, DevicePtr, StreamHandle s) { return b.copy_h2d_async(p, host(n), s); }},
      {"CopyH2dAsyncRetained", [](GpuBackend& b, DevicePtr p, std::uint64_t n, DevicePtr,
                                  StreamHandle s) { return b.copy_h2d_async_retained(p, host(n), s); }},
      {"CopyD2hAsync",
       [](GpuBackend& b, DevicePtr p, std::uint64_t n, DevicePtr, StreamHandle s) { return b.copy_d2h_async(host(n), p, s); }},
      {"CopyD2dAsyncDestination",
       [](GpuBackend& b, DevicePtr p, std::uint64_t n, DevicePtr f, StreamHandle s) { return b.copy_d2d_async(p, f, n, s); }},
      {"CopyD2dAsyncSource",
       [](GpuBackend& b, DevicePtr p, std::uint64_t n, DevicePtr f, StreamHandle s) { return b.copy_d2d_async(f, p, n, s); }},
      {"Copy2DDestination", [](GpuBackend& b, DevicePtr p, std::uint64_t n, DevicePtr f,
                               StreamHandle s) { return b.copy_d2d_2d_async({p, f, n, n, n, 1}, s); }},
      {"Copy2DSource", [](GpuBackend& b, DevicePtr p, std::uint64_t n, DevicePtr f,
                          StreamHandle s) { return b.copy_d2d_2d_async({f, p, n, n, n, 1}, s); }},
      {"CopyBatchDestination",
       [](GpuBackend& b, DevicePtr p, std::uint64_t n, DevicePtr f, StreamHandle s) {
         const CopyDesc copy{.dst = p, .src = f, .bytes = n};
         return b.copy_batch_async({&copy, 1}, s);
       }},
      {"CopyBatchSource",
       [](GpuBackend& b, DevicePtr p, std::uint64_t n, DevicePtr f, StreamHandle s) {
         const CopyDesc copy{.dst = f, .src = p, .bytes = n};
         return b.copy_batch_async({&copy, 1}, s);
       }},
  };
  return all;
}

class CopyBounds : public CaseNeeding<memory, copies, streams> {
 protected:
  void for_each_row(const std::function<void(const BoundsRow&)>& body) {
    for (const BoundsRow& row : rows()) {
      SCOPED_TRACE(row.name);
      body(row);
    }
  }
  void SetUp() override {
    CaseNeeding::SetUp();
    // Made before what the cases look at: it might come to lie just behind that, or in its place once it is freed.
    if (!IsSkipped()) fine_ = block(4096);
  }
  Result<> call(const BoundsRow& row, DevicePtr end, std::uint64_t bytes) {
    return row.call(gpu(), end, bytes, fine_, gpu().default_stream());
  }
  /// A block that no other follows.
  DevicePtr last_block(std::uint64_t bytes) {
    for (;;) {
      const DevicePtr ptr = block(bytes);
      const std::vector<Allocation> known = gpu().live_allocations();
      const auto follows = [&](const Allocation& other) { return other.base.address == ptr.address + bytes; };
      if (std::ranges::none_of(known, follows)) return ptr;
    }
  }

 private:
  DevicePtr fine_;
};

TEST_F(CopyBounds, AcceptsAllOfABlockAndAnyPartOfIt) {
  const DevicePtr ptr = block(kBytes);
  for_each_row([&](const BoundsRow& row) {
    EXPECT_TRUE(ok(call(row, ptr, kBytes)));
    EXPECT_TRUE(ok(call(row, ptr.offset(1), kBytes - 1)));
    EXPECT_TRUE(ok(call(row, ptr.offset(kBytes - 1), 1)));
  });
  settle(gpu().default_stream());
}

TEST_F(CopyBounds, RefusesWhatLeavesItsBlock) {
  const DevicePtr ptr = block(kBytes);
  for_each_row([&](const BoundsRow& row) {
    EXPECT_TRUE(refused(call(row, ptr, kBytes + 1), Errc::out_of_range));
    EXPECT_TRUE(refused(call(row, ptr.offset(kBytes - 1), 2), Errc::out_of_range));
    EXPECT_TRUE(refused(call(row, ptr.offset(kBytes / 2), kBytes), Errc::out_of_range));
  });
}

TEST_F(CopyBounds, RefusesUnknownMemory) {
  const DevicePtr ptr = last_block(kBytes);
  for_each_row([&](const BoundsRow& row) {
    EXPECT_TRUE(refused(call(row, ptr.offset(kBytes), 1), Errc::out_of_range)) << "just behind a block";
    EXPECT_TRUE(refused(call(row, {ptr.address - 1}, 2), Errc::out_of_range)) << "from before a block into it";
    EXPECT_TRUE(refused(call(row, {0x40}, 1), Errc::out_of_range)) << "nowhere";
  });
}

TEST_F(CopyBounds, RefusesFreedMemory) {
  const DevicePtr ptr = block(kBytes);
  must(gpu().free(ptr));
  for_each_row([&](const BoundsRow& row) { EXPECT_TRUE(refused(call(row, ptr, 1), Errc::out_of_range)); });
}

TEST_F(CopyBounds, RefusesARangeOverTwoAdjacentBlocks) {
  // Blocks that happen to touch are still two: neither end may reach into the next.
  std::map<std::uint64_t, std::uint64_t> blocks;
  for (int i = 0; i < 64; ++i) blocks[block(256).address] = 256;
  for (const auto& [address, bytes] : blocks) {
    EXPECT_TRUE(refused(gpu().copy_h2d({address}, host(257)), Errc::out_of_range));
  }
}

TEST_F(CopyBounds, AcceptsEveryKindOfKnownMemory) {
  std::vector<DevicePtr> known{block(kBytes), must(gpu().alloc_managed(kBytes)), must(gpu().alloc_arena(kBytes))};
  if (gpu().capabilities().has(pooled_memory)) known.push_back(must(gpu().alloc_async(kBytes, gpu().default_stream())));
  if (gpu().capabilities().has(host_alias)) {
    known.push_back(must(gpu().host_ptr_to_device(must(gpu().alloc_host_pinned(kBytes)).data())));
  }
  for (const DevicePtr ptr : known) {
    for_each_row([&](const BoundsRow& row) {
      EXPECT_TRUE(ok(call(row, ptr.offset(1), kBytes - 1)));
      EXPECT_TRUE(refused(call(row, ptr.offset(1), kBytes), Errc::out_of_range));
    });
  }
  settle(gpu().default_stream());
}

TEST_F(CopyBounds, NamesTheBlockThatWasLeft) {
  const DevicePtr ptr = must(gpu().alloc(kBytes));
  const std::string site = line_above();
  for_each_row([&](const BoundsRow& row) { EXPECT_TRUE(refused(call(row, ptr, kBytes + 1), Errc::out_of_range, {site})); });
}

TEST_F(CopyBounds, LeavesTheDestinationUntouchedWhenRefused) {
  const DevicePtr ptr = block(kBytes);
  fill(ptr, 0x11, kBytes);
  std::vector<std::byte> mine(kBytes + 1, std::byte{0x22});
  EXPECT_FALSE(gpu().copy_d2h(mine, ptr).has_value());
  EXPECT_FALSE(gpu().copy_d2h_on_stream(mine, ptr, gpu().default_stream()).has_value());
  EXPECT_FALSE(gpu().copy_h2d(ptr, mine).has_value());
  EXPECT_EQ(mine, std::vector<std::byte>(kBytes + 1, std::byte{0x22}));
  EXPECT_TRUE(holds(ptr, kBytes, 0x11));
}

TEST_F(CopyBounds, UncheckedSkipsTheCheck) {
  CreateOptions options;
  options.face.redzone_bytes = 64;  // room behind the block that is ours
  options.face.unchecked_copies = true;
  remake(options);
  const DevicePtr ptr = block(kBytes);
  EXPECT_TRUE(ok(gpu().copy_h2d(ptr.offset(kBytes), host(16))));
}

}  // namespace
}  // namespace metrale::conformance
