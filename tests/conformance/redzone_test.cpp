// SPDX-License-Identifier: Apache-2.0
//
// Guard bands: scan_redzones, poison_redzones. Overruns are made by copies that skip the check of their ends.
#include <algorithm>

#include "conformance/case.h"

namespace metrale::conformance {
namespace {

constexpr std::uint64_t kBand = 64;
constexpr std::uint8_t kFillValue = 0xEE;

class Redzones : public CaseNeeding<memory, copies, streams> {
 protected:
  void SetUp() override {
    CaseNeeding::SetUp();
    if (!IsSkipped() && !HasFatalFailure()) guard(kBand);
  }
  /// Bands of `bytes` behind each block, and copies that may reach them.
  void guard(std::uint64_t bytes) {
    CreateOptions options;
    options.face.redzone_bytes = bytes;
    options.face.unchecked_copies = true;
    remake(options);
  }
  void scribble(DevicePtr ptr, std::uint64_t bytes, std::uint8_t value = 0x77, Site site = Site::current()) {
    write(ptr, std::vector<std::byte>(bytes, std::byte{value}), site);
  }
  std::uint64_t scan(Site site = Site::current()) { return must(gpu().scan_redzones(), site); }
};

TEST_F(Redzones, CleanBandsAreNotReported) {
  for (const std::uint64_t bytes : {1, 255, 256, 4097}) {
    const DevicePtr ptr = block(bytes);
    fill(ptr, 0x55, bytes);
  }
  EXPECT_EQ(scan(), 0u);
}

TEST_F(Redzones, AreFilledBeforeAnyUse) {
  for (const std::uint64_t bytes : {1, 100, 256, 5000}) {
    const DevicePtr ptr = block(bytes);
    EXPECT_TRUE(holds(ptr.offset(bytes), kBand, kFillValue)) << bytes << " bytes";
  }
}

TEST_F(Redzones, OverrunsOfEveryKindAreFound) {
  const std::vector<DevicePtr> blocks{block(100), must(gpu().alloc_managed(100)), must(gpu().alloc_arena(100))};
  for (const DevicePtr ptr : blocks) {
    EXPECT_EQ(scan(), 0u);
    scribble(ptr.offset(100), 1);
    EXPECT_EQ(scan(), 1u);
  }
  for (const DevicePtr ptr : blocks) scribble(ptr.offset(100), 1);
  EXPECT_EQ(scan(), 3u);
}

TEST_F(Redzones, FirstAndLastByteOfTheBandCount) {
  const DevicePtr ptr = block(300);
  scribble(ptr.offset(300), 1);
  EXPECT_EQ(scan(), 1u);
  scribble(ptr.offset(300 + kBand - 1), 1);
  EXPECT_EQ(scan(), 1u);
}

TEST_F(Redzones, AreRoundedUpToSixteen) {
  guard(1);
  const DevicePtr ptr = block(100);
  EXPECT_TRUE(holds(ptr.offset(100), 16, kFillValue));
  scribble(ptr.offset(115), 1);
  EXPECT_EQ(scan(), 1u);
}

TEST_F(Redzones, AreRefilledAfterAReport) {
  const DevicePtr ptr = block(100);
  scribble(ptr.offset(100), 10);
  EXPECT_EQ(scan(), 1u);
  EXPECT_TRUE(holds(ptr.offset(100), kBand, kFillValue));
  EXPECT_EQ(scan(), 0u);
}

TEST_F(Redzones, ReportsTellSiteSizeOffsetsAndValue) {
  const DevicePtr ptr = must(gpu().alloc(1234));
  const std::string site = line_above();
  scribble(ptr.offset(1234 + 5), 3, 0x77);
  EXPECT_EQ(scan(), 1u);
  const auto lines = log_lines("red zone");
  ASSERT_EQ(lines.size(), 1u);
  for (const std::string& word : {site, std::string("1234"), std::string("+5"), std::string("+7"), std::string("0x77")}) {
    EXPECT_NE(lines[0].find(word), std::string::npos) << "'" << word << "' is missing in: " << lines[0];
  }
}

TEST_F(Redzones, PoisonMarksARangeOfCreationIndices) {
  const DevicePtr a = block(100), b = block(100), c = block(100);
  must(gpu().poison_redzones(1, 2));
  EXPECT_TRUE(holds(a.offset(100), kBand, 0x00));
  EXPECT_TRUE(holds(b.offset(100), kBand, 0xEE));
  EXPECT_TRUE(holds(c.offset(100), kBand, 0x00));
  must(gpu().poison_redzones(0, 1));
  EXPECT_TRUE(holds(a.offset(100), kBand, 0xEE));
  EXPECT_TRUE(holds(b.offset(100), kBand, 0x00));
}

TEST_F(Redzones, ScanComparesWithWhatWasLastWrittenAndRefillsWithIt) {
  const DevicePtr a = block(100), b = block(100);
  must(gpu().poison_redzones(0, 1));
  EXPECT_EQ(scan(), 0u) << "poison is no overrun";
  scribble(a.offset(100), 4, 0x00);
  scribble(b.offset(100), 4, 0xEE);
  EXPECT_EQ(scan(), 2u);
  EXPECT_TRUE(holds(a.offset(100), kBand, 0xEE));
  EXPECT_TRUE(holds(b.offset(100), kBand, 0x00)) << "refilled with another value than it had";
  EXPECT_EQ(scan(), 0u);
}

TEST_F(Redzones, BlocksKeepTheirContentsThroughPoisonAndScan) {
  const DevicePtr ptr = block(1000);
  const auto sent = pattern(1000, 2);
  write(ptr, sent);
  must(gpu().poison_redzones(0, 100));
  EXPECT_EQ(scan(), 0u);
  EXPECT_EQ(read(ptr, 1000), sent);
}

TEST_F(Redzones, ScanWaitsForTheDevice) {
  need({host_callbacks});
  const StreamHandle s = stream();
  const DevicePtr ptr = block(100);
  std::uint64_t found = 0;
  Gate gate(gpu(), s);
  must(gpu().memset_async(ptr, 0x77, 101, s));
  EXPECT_FALSE(returns_before(gate, [&] { found = must(gpu().scan_redzones()); }));
  EXPECT_EQ(found, 1u);
}

TEST_F(Redzones, DoNotCountAsLive) {
  block(100);
  EXPECT_EQ(gpu().live_bytes(), 100u);
  EXPECT_EQ(gpu().live_allocations().front().bytes, 100u);
}

TEST_F(Redzones, GoWithTheirBlocks) {
  const DevicePtr ptr = block(100);
  const DevicePtr kept = block(100);
  must(gpu().free(ptr));
  settle(gpu().default_stream());
  EXPECT_EQ(scan(), 0u);
  scribble(kept.offset(100), 1);
  EXPECT_EQ(scan(), 1u);
  must(gpu().sweep_unreleased());
  EXPECT_EQ(scan(), 0u);
}

TEST_F(Redzones, CheckedCopiesDoNotReachThem) {
  CreateOptions options;
  options.face.redzone_bytes = kBand;
  remake(options);
  const DevicePtr ptr = block(100);
  EXPECT_TRUE(refused(gpu().memset(ptr, 0, 101), Errc::out_of_range));
  EXPECT_EQ(scan(), 0u);
}

TEST_F(Redzones, OffMeansNoBands) {
  CreateOptions options;
  options.face.redzone_bytes = 0;
  remake(options);
  const DevicePtr ptr = block(100);
  EXPECT_EQ(scan(), 0u);
  EXPECT_TRUE(ok(gpu().poison_redzones(0, 100)));
  EXPECT_TRUE(ok(gpu().free(ptr)));
}

}  // namespace
}  // namespace metrale::conformance
