// SPDX-License-Identifier: Apache-2.0
//
// What is said where the CUDA driver is missing or not good enough. Each case runs a program of its own with another libcuda in
// reach; the programs lie beside this one in the build folder.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <string>

namespace metrale::test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class CudaLoader : public ::testing::Test {
 protected:
  /// What the program prints with the libcuda of `way` in reach; empty: with none but the machine's.
  static std::string said(const std::string& way) {
    const std::filesystem::path folder =
        std::filesystem::canonical("/proc/self/exe").parent_path() / ".." / ".." / "support" / "fake_libcuda";
    const std::string command = (way.empty() ? std::string() : "LD_LIBRARY_PATH=" + (folder / way).string() + " ") +
                                (folder / "say_cuda_unavailable").string() + " 2>&1";
    std::string text;
    FILE* pipe = popen(command.c_str(), "r");
    if (pipe == nullptr) return "popen failed";
    std::array<char, 4096> chunk{};
    while (const std::size_t n = std::fread(chunk.data(), 1, chunk.size(), pipe)) text.append(chunk.data(), n);
    const int status = pclose(pipe);
    return status == 0 ? text : text + "\nexit status " + std::to_string(status);
  }
  /// Two lines: why it is unavailable, and the error of `create`, which tells the same.
  static void expect_both(const std::string& text, const std::vector<std::string>& parts) {
    const std::size_t end = text.find('\n');
    ASSERT_NE(end, std::string::npos) << text;
    const std::string reason = text.substr(0, end);
    for (const std::string& part : parts) EXPECT_THAT(reason, HasSubstr(part));
    EXPECT_THAT(text.substr(end + 1), StartsWith("unsupported: " + reason));
  }
};

TEST_F(CudaLoader, WithoutADriverEachNameIsListedWithTheLoadersWords) {
  const std::string text = said("");
  if (text.starts_with("available")) GTEST_SKIP() << "this machine has a driver";
  expect_both(text, {"libcuda.so.1: cannot open", "libcuda.so: cannot open", "install the NVIDIA driver"});
}

TEST_F(CudaLoader, ADriverBeforeProcAddressIsCalledTooOld) {
  expect_both(said("without_proc_address"), {"libcuda.so.1", "too old", "cuGetProcAddress_v2", "12.4"});
}

TEST_F(CudaLoader, AnOldDriverIsToldItsVersionAndTheOneItNeeds) { expect_both(said("too_old"), {"libcuda.so.1", "11.8", "12.4"}); }

TEST_F(CudaLoader, MissingFunctionsAreListedButNotOptionalOnes) {
  const std::string text = said("incomplete");
  expect_both(text, {"cuLaunchKernelEx", "cuMemAlloc", "13.0"});
  EXPECT_EQ(text.find("cuMemcpyBatchAsync"), std::string::npos) << text;
}

TEST_F(CudaLoader, ADriverThatDoesNotStartIsQuoted) {
  expect_both(said("does_not_start"), {"does not start", "cuInit", "as the test has it"});
}

TEST_F(CudaLoader, ADriverWithoutADeviceIsUnavailable) { expect_both(said("without_device"), {"libcuda.so.1", "no device"}); }

}  // namespace
}  // namespace metrale::test
