// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/kernel_path.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "support/byte_writer.h"

namespace metrale::cuda {
namespace {

class CudaKernelPathTest : public testing::Test {
 protected:
  void write(const std::string& name, std::string_view bytes) const { test::write_file(folder_ / name, bytes); }
  Result<std::vector<KernelFile>> read() { return read_kernel_path(folder_.string()); }
  void refused(Errc code, const std::string& text) {
    const auto files = read();
    ASSERT_FALSE(files.has_value());
    EXPECT_EQ(files.error().code(), code);
    EXPECT_THAT(files.error().message(), testing::HasSubstr(text));
  }

  const test::TempFolder temporary_;
  const std::filesystem::path folder_ = temporary_.path();
};

TEST_F(CudaKernelPathTest, ReadsModulesSortedAndLeavesOtherFilesAlone) {
  write("matmul.ptx", "text");
  write("decoder.fatbin", "bytes");
  write("attend.cubin", "elf");
  write("decoder.cu", "source");
  write("notes", "x");
  write(".fatbin", "no name");
  write("decoder.old.fatbin", "another ending");
  std::filesystem::create_directories(folder_ / "folder");
  const auto files = read();
  ASSERT_TRUE(files.has_value()) << files.error().to_string();
  ASSERT_EQ(files->size(), 3u);
  EXPECT_EQ((*files)[0].name, "attend");
  EXPECT_EQ((*files)[1].name, "decoder");
  EXPECT_EQ((*files)[2].name, "matmul");
  EXPECT_EQ((*files)[1].path, (folder_ / "decoder.fatbin").string());
  EXPECT_EQ((*files)[1].bytes.size(), 5u);
  EXPECT_EQ(std::memcmp((*files)[1].bytes.data(), "bytes", 5), 0);
}

TEST_F(CudaKernelPathTest, AnEmptyFolderHasNoModules) {
  const auto files = read();
  ASSERT_TRUE(files.has_value());
  EXPECT_TRUE(files->empty());
}

TEST_F(CudaKernelPathTest, AMissingFolderIsNotFound) {
  const auto files = read_kernel_path((folder_ / "absent").string());
  ASSERT_FALSE(files.has_value());
  EXPECT_EQ(files.error().code(), Errc::not_found);
  EXPECT_THAT(files.error().message(), testing::HasSubstr("METRALE_KERNEL_PATH"));
  write("file", "x");
  EXPECT_EQ(read_kernel_path((folder_ / "file").string()).error().code(), Errc::not_found);
}

TEST_F(CudaKernelPathTest, TwoFilesForAModuleAreRefused) {
  write("decoder.ptx", "a");
  write("decoder.cubin", "b");
  refused(Errc::bad_format, "module decoder");
}

TEST_F(CudaKernelPathTest, EmptyFilesAreRefused) {
  write("decoder.fatbin", "");
  refused(Errc::bad_format, "decoder.fatbin");
}

TEST_F(CudaKernelPathTest, FilesTooLargeAreRefusedUnread) {
  write("decoder.fatbin", "x");
  std::filesystem::resize_file(folder_ / "decoder.fatbin", kMaxKernelFileBytes + 1);  // sparse
  refused(Errc::bad_format, "decoder.fatbin");
}

}  // namespace
}  // namespace metrale::cuda
