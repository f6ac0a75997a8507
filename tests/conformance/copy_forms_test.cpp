// SPDX-License-Identifier: Apache-2.0
//
// Copies of rectangles, of lists, and between devices.
#include <algorithm>
#include <array>

#include "conformance/case.h"

namespace metrale::conformance {
namespace {

class CopyRectangle : public CaseNeeding<memory, copies, streams> {};

TEST_F(CopyRectangle, CopiesTheRectangleAndNothingElse) {
  const StreamHandle s = stream();
  constexpr std::size_t kWidth = 37, kHeight = 11, kSrcPitch = 50, kDstPitch = 64;
  const DevicePtr src = block(kSrcPitch * kHeight);
  const DevicePtr dst = block(kDstPitch * kHeight);
  const auto sent = pattern(kSrcPitch * kHeight, 12);
  write(src, sent);
  fill(dst, 0xEE, kDstPitch * kHeight);
  must(gpu().copy_d2d_2d_async({dst, src, kDstPitch, kSrcPitch, kWidth, kHeight}, s));
  settle(s);
  const auto seen = read(dst, kDstPitch * kHeight);
  for (std::size_t row = 0; row < kHeight; ++row) {
    for (std::size_t column = 0; column < kDstPitch; ++column) {
      const std::byte expected = column < kWidth ? sent[row * kSrcPitch + column] : std::byte{0xEE};
      ASSERT_EQ(seen[row * kDstPitch + column], expected) << "row " << row << ", column " << column;
    }
  }
}

TEST_F(CopyRectangle, TakesAWiderSourceThanDestination) {
  const StreamHandle s = stream();
  const DevicePtr src = block(128 * 4);
  const DevicePtr dst = block(16 * 4);
  const auto sent = pattern(128 * 4, 13);
  write(src, sent);
  must(gpu().copy_d2d_2d_async({dst, src.offset(8), 16, 128, 16, 4}, s));
  settle(s);
  const auto seen = read(dst, 64);
  for (std::size_t i = 0; i < 64; ++i) ASSERT_EQ(seen[i], sent[i / 16 * 128 + 8 + i % 16]) << "byte " << i;
}

TEST_F(CopyRectangle, NeedsTheLastRowInsideNotItsPitch) {
  const StreamHandle s = stream();
  const DevicePtr src = block(100 * 3 + 10);
  const DevicePtr dst = block(64 * 3 + 10);
  write(src, pattern(310, 1));
  EXPECT_TRUE(ok(gpu().copy_d2d_2d_async({dst, src, 64, 100, 10, 4}, s)));
  settle(s);
  EXPECT_EQ(read(dst.offset(192), 10), read(src.offset(300), 10));
  EXPECT_TRUE(refused(gpu().copy_d2d_2d_async({dst, src, 64, 100, 11, 4}, s), Errc::out_of_range));
  EXPECT_TRUE(refused(gpu().copy_d2d_2d_async({dst, src, 64, 100, 10, 5}, s), Errc::out_of_range));
}

TEST_F(CopyRectangle, RefusesAWidthOverAPitch) {
  const StreamHandle s = stream();
  const DevicePtr src = block(10'000);
  const DevicePtr dst = block(10'000);
  EXPECT_TRUE(refused(gpu().copy_d2d_2d_async({dst, src, 32, 64, 33, 4}, s), Errc::invalid_argument));
  EXPECT_TRUE(refused(gpu().copy_d2d_2d_async({dst, src, 64, 32, 33, 4}, s), Errc::invalid_argument));
  EXPECT_TRUE(ok(gpu().copy_d2d_2d_async({dst, src, 33, 33, 33, 4}, s)));
  settle(s);
}

TEST_F(CopyRectangle, IsOrderedOnItsStream) {
  need({host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr src = block(1024);
  const DevicePtr dst = block(1024);
  fill(src, 0x01, 1024);
  fill(dst, 0x00, 1024);
  {
    Gate gate(gpu(), s);
    must(gpu().memset_async(src, 0x02, 1024, s));
    must(gpu().copy_d2d_2d_async({dst, src, 32, 32, 16, 32}, s));
    EXPECT_TRUE(is_held(s));
    EXPECT_TRUE(holds(dst, 1024, 0x00)) << "ran ahead of its stream";
  }
  settle(s);
  EXPECT_TRUE(holds(dst, 16, 0x02));
  EXPECT_TRUE(holds(dst.offset(16), 16, 0x00));
}

// ---- batch ----

class CopyBatch : public CaseNeeding<memory, copies, streams> {};

TEST_F(CopyBatch, MakesEveryCopyOfItsList) {
  need({pinned_memory});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(100 * 64);
  const DevicePtr other = block(100 * 64);
  const auto sent = pattern(100 * 64, 3);
  const auto source = must(gpu().alloc_host_pinned(100 * 64));
  std::copy(sent.begin(), sent.end(), source.begin());
  std::vector<CopyDesc> list;
  for (std::size_t i = 0; i < 100; ++i)
    list.push_back({.dst = ptr.offset(i * 64), .src = {}, .host_src = source.data() + i * 64, .bytes = 64});
  must(gpu().copy_batch_async(list, s));
  settle(s);
  EXPECT_EQ(read(ptr, 100 * 64), sent);

  list.clear();
  for (std::size_t i = 0; i < 100; ++i)
    list.push_back({.dst = other.offset((99 - i) * 64), .src = ptr.offset(i * 64), .bytes = 64});
  must(gpu().copy_batch_async(list, s));
  settle(s);
  const auto back = must(gpu().alloc_host_pinned(100 * 64));
  list.clear();
  for (std::size_t i = 0; i < 100; ++i)
    list.push_back({.dst = {}, .src = other.offset((99 - i) * 64), .host_dst = back.data() + i * 64, .bytes = 64});
  must(gpu().copy_batch_async(list, s));
  settle(s);
  EXPECT_EQ(std::vector<std::byte>(back.begin(), back.end()), sent);
}

TEST_F(CopyBatch, IsOrderedOnItsStream) {
  need({host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr a = block(256);
  const DevicePtr b = block(256);
  fill(a, 0x01, 256);
  fill(b, 0x00, 256);
  {
    Gate gate(gpu(), s);
    must(gpu().memset_async(a, 0x02, 256, s));
    const std::array<CopyDesc, 2> list{CopyDesc{.dst = b, .src = a, .bytes = 100},
                                       CopyDesc{.dst = b.offset(128), .src = a, .bytes = 100}};
    must(gpu().copy_batch_async(list, s));
    EXPECT_TRUE(is_held(s));
    EXPECT_TRUE(holds(b, 256, 0x00)) << "ran ahead of its stream";
  }
  settle(s);
  EXPECT_TRUE(holds(b, 100, 0x02));
  EXPECT_TRUE(holds(b.offset(100), 28, 0x00));
  EXPECT_TRUE(holds(b.offset(128), 100, 0x02));
}

TEST_F(CopyBatch, EnqueuesNothingWhenOneIsWrongAndNamesItsIndex) {
  const StreamHandle s = stream();
  const DevicePtr a = block(256);
  const DevicePtr b = block(256);
  fill(a, 0x01, 256);
  fill(b, 0x00, 256);
  std::vector<CopyDesc> list(4, CopyDesc{.dst = b, .src = a, .bytes = 64});
  list[2].bytes = 257;
  EXPECT_TRUE(refused(gpu().copy_batch_async(list, s), Errc::out_of_range, {"2"}));
  settle(s);
  EXPECT_TRUE(holds(b, 256, 0x00));
}

TEST_F(CopyBatch, CopiesOfNoBytesDoNothingWhereverTheirEndsAre) {
  const StreamHandle s = stream();
  const DevicePtr a = block(256);
  const DevicePtr b = block(256);
  fill(a, 0x01, 256);
  fill(b, 0x00, 256);
  std::byte pageable{};
  const std::array<CopyDesc, 4> list{
      CopyDesc{.dst = b.offset(256), .src = {}, .bytes = 0}, CopyDesc{.dst = b, .src = a, .bytes = 64},
      CopyDesc{.dst = {}, .src = {}, .host_dst = &pageable, .bytes = 0}, CopyDesc{.dst = {}, .src = a.offset(1000), .bytes = 0}};
  must(gpu().copy_batch_async(list, s));
  settle(s);
  EXPECT_TRUE(holds(b, 64, 0x01));
  EXPECT_TRUE(holds(b.offset(64), 192, 0x00));
  EXPECT_EQ(gpu().num_pageable_copies(), 0u);
  must(gpu().copy_batch_async({list.data(), 1}, s));
}

// ---- between devices ----

class CopyPeer : public CaseNeeding<memory, copies, streams, peer_copies> {};

TEST_F(CopyPeer, CopiesFromAnotherDevice) {
  auto other = make();
  const DevicePtr src = must(other->alloc(10'000));
  const auto sent = pattern(10'000, 21);
  must(other->copy_h2d(src, sent));
  const StreamHandle s = stream();
  const DevicePtr dst = block(10'000);
  fill(dst, 0, 10'000);
  must(gpu().copy_peer_async(dst, *other, src, 9'999, s));
  settle(s);
  EXPECT_EQ(read(dst, 9'999), std::vector<std::byte>(sent.begin(), sent.end() - 1));
  EXPECT_TRUE(holds(dst.offset(9'999), 1, 0));
}

TEST_F(CopyPeer, IsOrderedOnItsStream) {
  need({host_callbacks});
  auto other = make();
  const DevicePtr src = must(other->alloc(64));
  must(other->memset(src, 0x05, 64));
  const StreamHandle s = stream();
  const DevicePtr dst = block(64);
  fill(dst, 0x01, 64);
  {
    Gate gate(gpu(), s);
    must(gpu().memset_async(dst, 0x02, 64, s));
    must(gpu().copy_peer_async(dst, *other, src, 32, s));
    EXPECT_TRUE(is_held(s));
    EXPECT_TRUE(holds(dst, 64, 0x01)) << "ran ahead of its stream";
  }
  settle(s);
  EXPECT_TRUE(holds(dst, 32, 0x05));
  EXPECT_TRUE(holds(dst.offset(32), 32, 0x02));
}

TEST_F(CopyPeer, SourceIsNotHandedBackBeforeTheCopyIsDone) {
  need({host_callbacks});
  constexpr std::size_t kBytes = 48 << 10;
  auto other = make();
  const DevicePtr src = must(other->alloc(kBytes));
  must(other->memset(src, 0x05, kBytes));
  const StreamHandle s = stream();
  const DevicePtr dst = block(kBytes);
  Gate gate(gpu(), s);
  must(gpu().copy_peer_async(dst, *other, src, kBytes, s));
  Background freeing([&] { must(other->free(src)); });
  freeing.is_back();
  for (int i = 0; i < 4; ++i) must(other->memset(must(other->alloc(kBytes)), 0x77, kBytes));
  gate.open();
  freeing.join();
  settle(s);
  EXPECT_TRUE(holds(dst, kBytes, 0x05)) << "the source went to someone else on its own device";
}

TEST_F(CopyPeer, ChecksBothEnds) {
  auto other = make();
  const DevicePtr src = must(other->alloc(64));
  const StreamHandle s = stream();
  const DevicePtr dst = block(128);
  EXPECT_TRUE(refused(gpu().copy_peer_async(dst, *other, src, 65, s), Errc::out_of_range));
  EXPECT_TRUE(refused(gpu().copy_peer_async(dst.offset(100), *other, src, 64, s), Errc::out_of_range));
}

TEST_F(CopyPeer, ALostOrClosedPeerDoesNotLoseThisDevice) {
  auto other = make();
  const DevicePtr src = must(other->alloc(64));
  const DevicePtr dst = block(64);
  must(other->shutdown());
  EXPECT_TRUE(refused(gpu().copy_peer_async(dst, *other, src, 64, stream()), Errc::invalid_argument, {"shut down"}));
  EXPECT_TRUE(ok(gpu().health()));
  EXPECT_TRUE(ok(gpu().memset(dst, 1, 64)));
}

}  // namespace
}  // namespace metrale::conformance
