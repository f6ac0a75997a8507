// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/image.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <string_view>

#include "metrale/backends/cuda_kernels.h"

namespace metrale::cuda {
namespace {

template <class T>
void put(std::string& bytes, std::size_t offset, T value) {
  if (bytes.size() < offset + sizeof(T)) bytes.resize(offset + sizeof(T));
  std::memcpy(bytes.data() + offset, &value, sizeof(T));
}

/// An entry of a fat binary with eight bytes of code. `kind`: 1 PTX, 2 machine code.
std::string entry(std::uint16_t kind, std::uint32_t sm, std::uint64_t flags) {
  std::string bytes(0x40, '\0');
  put(bytes, 0, kind);
  put<std::uint32_t>(bytes, 4, 0x40);
  put<std::uint64_t>(bytes, 8, 8);
  put(bytes, 0x1C, sm);
  put(bytes, 0x28, flags);
  return bytes + "codecode";
}

std::string fatbin(std::string_view entries) {
  std::string bytes(16, '\0');
  put<std::uint32_t>(bytes, 0, 0xBA55ED50);
  put<std::uint16_t>(bytes, 4, 1);
  put<std::uint16_t>(bytes, 6, 16);
  put<std::uint64_t>(bytes, 8, entries.size());
  return bytes + std::string(entries);
}

std::span<const std::byte> view(std::string_view text) { return std::as_bytes(std::span(text.data(), text.size())); }

std::string described(std::string_view image) {
  const auto codes = codes_of(view(image));
  return codes ? describe(*codes) : "unknown";
}

constexpr std::uint64_t kExact = 0x100011;
constexpr std::uint64_t kFamily = 0x200011;

TEST(CudaImageTest, FatBinariesListTheirCodes) {
  EXPECT_EQ(described(fatbin(entry(2, 80, 0x11) + entry(1, 80, 0x8011) + entry(2, 90, kExact) + entry(2, 100, kFamily))),
            "sm_80, PTX for sm_80, sm_90a, sm_100f");
  EXPECT_EQ(described(fatbin("")), "nothing");
}

TEST(CudaImageTest, TruncatedFatBinariesAreUnknownNotRead) {
  const std::string whole = fatbin(entry(2, 80, 0x11) + entry(2, 90, kExact));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_EQ(described(std::string_view(whole).substr(0, size)), "unknown") << size << " of " << whole.size() << " bytes";
  }
}

TEST(CudaImageTest, LengthsBeyondTheImageAreUnknown) {
  for (const std::size_t field : {std::size_t{8}, std::size_t{16 + 8}}) {
    std::string lies = fatbin(entry(2, 80, 0x11));
    put<std::uint64_t>(lies, field, ~std::uint64_t{0});
    EXPECT_EQ(described(lies), "unknown") << field;
  }
  std::string endless = fatbin(entry(2, 80, 0x11));
  put<std::uint32_t>(endless, 16 + 4, 0);
  put<std::uint64_t>(endless, 16 + 8, 0);
  EXPECT_EQ(described(endless), "unknown") << "an entry of no bytes would never end";
}

TEST(CudaImageTest, CubinsSayTheirNumberOnly) {
  std::string cubin(64, '\0');
  std::memcpy(cubin.data(), "\177ELF", 4);
  put<std::uint16_t>(cubin, 18, 190);
  put<std::uint8_t>(cubin, 8, 8);
  put<std::uint32_t>(cubin, 48, 0x6005A04);
  EXPECT_EQ(described(cubin), "sm_90");
  put<std::uint16_t>(cubin, 18, 62);
  EXPECT_EQ(described(cubin), "unknown") << "of another machine";
}

TEST(CudaImageTest, PtxSaysItsTarget) {
  EXPECT_EQ(described("//\n// made by hand\n.version 9.0\n.target sm_90a\n.address_size 64\n"), "PTX for sm_90a");
  EXPECT_EQ(described(".version 8.0\n.target sm_80"), "PTX for sm_80");
  EXPECT_EQ(described(".version 8.0\n"), "unknown");
  EXPECT_TRUE(is_ptx(view(".version 8.0\n")));
  EXPECT_FALSE(is_ptx(view(std::string_view("\0\1.version 8.0\n", 15))));
  EXPECT_EQ(described(""), "unknown");
}

TEST(CudaImageTest, CodeRunsWhereItsTargetSays) {
  const auto runs = [](bool ptx, unsigned sm, char variant, int major, int minor) {
    return runs_on({.is_ptx = ptx, .sm = sm, .variant = variant}, major, minor);
  };
  // Machine code: later devices of the same major number.
  EXPECT_TRUE(runs(false, 80, '\0', 8, 0));
  EXPECT_TRUE(runs(false, 80, '\0', 8, 6));
  EXPECT_FALSE(runs(false, 86, '\0', 8, 0));
  EXPECT_FALSE(runs(false, 80, '\0', 9, 0));
  EXPECT_TRUE(runs(false, 100, '\0', 10, 3));
  // PTX: every later device.
  EXPECT_TRUE(runs(true, 80, '\0', 8, 0));
  EXPECT_TRUE(runs(true, 80, '\0', 12, 1));
  EXPECT_FALSE(runs(true, 90, '\0', 8, 9));
  // With a: that device alone, PTX too. With f: its family.
  EXPECT_TRUE(runs(false, 90, 'a', 9, 0));
  EXPECT_FALSE(runs(false, 90, 'a', 10, 0));
  EXPECT_FALSE(runs(true, 90, 'a', 10, 0));
  EXPECT_FALSE(runs(false, 100, 'a', 10, 3));
  EXPECT_TRUE(runs(true, 100, 'f', 10, 3));
  EXPECT_FALSE(runs(true, 100, 'f', 12, 0));
}

TEST(CudaImageTest, ModulesOfThisBuildAreForItsTargets) {
  if (kernel_modules().empty()) GTEST_SKIP() << "this build has no CUDA kernels";
  for (const ModuleImage& module : kernel_modules()) {
    const auto codes = codes_of(module.image);
    ASSERT_TRUE(codes.has_value()) << module.name;
    ASSERT_FALSE(codes->empty()) << module.name;
    // Every code is of a target, and named as the target is; "common" is sm_80 and its PTX.
    for (const ImageCode& code : *codes) {
      const std::string name = describe(std::span(&code, 1));
      const bool is_common = name == "sm_80" || name == "PTX for sm_80";
      EXPECT_NE(kernel_targets().find(is_common ? "common" : name), std::string_view::npos) << module.name << ": " << name;
    }
  }
}

}  // namespace
}  // namespace metrale::cuda
