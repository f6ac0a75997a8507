// SPDX-License-Identifier: Apache-2.0
#include "metrale/byte_source.h"

#include <sys/stat.h>

#include <filesystem>
#include <vector>

#include "support/byte_writer.h"
#include "unit/weights/error_matchers.h"

namespace metrale {
namespace {

using test::expect_error;
using test::TempFolder;

TEST(FileSource, ReadsAnyRangeOfTheFile) {
  TempFolder folder;
  const std::vector<std::byte> bytes = test::pattern_bytes(10000);
  test::write_file(folder / "f", bytes);
  auto source = FileSource::open(folder / "f");
  ASSERT_TRUE(source) << source.error().to_string();
  EXPECT_EQ((*source)->size_bytes(), 10000U);
  EXPECT_EQ((*source)->label(), (folder / "f").native());
  std::vector<std::byte> part(77);
  ASSERT_TRUE((*source)->read(9923, part));
  EXPECT_TRUE(std::equal(part.begin(), part.end(), bytes.begin() + 9923));
  (*source)->drop_cached(0, 10000);
  ASSERT_TRUE((*source)->read(0, part));
  EXPECT_TRUE(std::equal(part.begin(), part.end(), bytes.begin()));
}

TEST(FileSource, RefusesRangesBeyondTheEndAndLeavesTheDestinationAlone) {
  TempFolder folder;
  test::write_file(folder / "f", test::pattern_bytes(100));
  auto source = FileSource::open(folder / "f");
  ASSERT_TRUE(source);
  std::vector<std::byte> part(10, std::byte{0x5A});
  expect_error((*source)->read(91, part), Errc::out_of_range, {"f", "10 bytes", "91"});
  expect_error((*source)->read(UINT64_MAX - 3, part), Errc::out_of_range, {"f"});
  EXPECT_EQ(part, std::vector<std::byte>(10, std::byte{0x5A}));
  EXPECT_TRUE((*source)->read(100, {}));
}

TEST(FileSource, ReportsAFileThatShrankAfterOpening) {
  TempFolder folder;
  test::write_file(folder / "f", test::pattern_bytes(100));
  auto source = FileSource::open(folder / "f");
  ASSERT_TRUE(source);
  std::filesystem::resize_file(folder / "f", 40);
  std::vector<std::byte> part(100);
  expect_error((*source)->read(0, part), Errc::io, {"f", "40", "100"});
}

TEST(FileSource, NamesWhatIsNotThereAndWhatIsNoFile) {
  TempFolder folder;
  expect_error(FileSource::open(folder / "none"), Errc::not_found, {"none", "no such file"});
  expect_error(FileSource::open(folder.path()), Errc::invalid_argument, {"a folder"});
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  expect_error(FileSource::open(folder / "pipe"), Errc::invalid_argument, {"pipe"});
  expect_error(FileSource::open("/dev/null"), Errc::invalid_argument, {"/dev/null", "device"});
}

TEST(MemorySource, BehavesLikeAFile) {
  const std::vector<std::byte> bytes = test::pattern_bytes(50);
  const MemorySource source(bytes, "block");
  std::vector<std::byte> part(20);
  ASSERT_TRUE(source.read(30, part));
  EXPECT_TRUE(std::equal(part.begin(), part.end(), bytes.begin() + 30));
  expect_error(source.read(31, part), Errc::out_of_range, {"block"});
}

}  // namespace
}  // namespace metrale
