// SPDX-License-Identifier: Apache-2.0
#include "skeleton_backend.h"

#include <array>
#include <fstream>
#include <iterator>
#include <string>

#include "support.h"

namespace metrale::test {
namespace {

// Tests run in the top folder of the project.
constexpr const char* kGuide = "docs/adding-a-backend.md";

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.is_open()) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Skeleton, CompilesStartsAndAnswersUnsupportedWithItsReason) {
  const auto b = take(skeleton::create());
  EXPECT_EQ(b->name(), "skeleton");
  for (std::size_t i = 0; i < kNumCapabilities; ++i) {
    EXPECT_FALSE(b->capabilities().has(static_cast<Capability>(i)));
    EXPECT_FALSE(b->capabilities().why_not(static_cast<Capability>(i)).empty());
  }
  EXPECT_FALSE(b->default_stream());
  EXPECT_OK(b->health());
  EXPECT_ERRC(b->alloc(16), Errc::unsupported);
  EXPECT_ERRC(b->alloc_host_pinned(16), Errc::unsupported);
  EXPECT_ERRC(b->create_stream(), Errc::unsupported);
  EXPECT_ERRC(b->create_event(), Errc::unsupported);
  EXPECT_ERRC(b->kernel("m", "f"), Errc::unsupported);
  EXPECT_ERRC(b->free_memory(), Errc::unsupported);
  EXPECT_ERRC(b->sm_count(), Errc::unsupported);
  EXPECT_EQ(b->kernel_registry(), nullptr);
  EXPECT_EQ(b->live_bytes(), 0u);
  EXPECT_OK(b->shutdown());
}

TEST(Skeleton, TheGuideShowsWhatTheFileSays) {
  const std::string guide = read_file(kGuide);
  const std::string fence = "```cpp file=";
  std::size_t num_blocks = 0;
  for (std::size_t at = guide.find(fence); at != std::string::npos; at = guide.find(fence, at)) {
    at += fence.size();
    const std::size_t begin = guide.find('\n', at) + 1;
    const std::size_t end = guide.find("```", begin);
    ASSERT_NE(end, std::string::npos);
    const std::string path = guide.substr(at, begin - 1 - at);
    EXPECT_NE(read_file(path).find(guide.substr(begin, end - begin)), std::string::npos)
        << "docs/adding-a-backend.md shows code that is not in " << path << ":\n"
        << guide.substr(begin, end - begin);
    ++num_blocks;
  }
  EXPECT_EQ(num_blocks, 2u);
}

TEST(Skeleton, TheGuideNamesEveryCapabilityThatHasHooks) {
  const std::string guide = read_file(kGuide);
  for (std::size_t i = 0; i < kNumCapabilities; ++i) {
    const auto capability = static_cast<Capability>(i);
    // Arguments of other hooks, or a property of the whole.
    if (capability == Capability::stream_priorities || capability == Capability::cooperative_launch ||
        capability == Capability::cluster_launch || capability == Capability::dependent_launch ||
        capability == Capability::computes) {
      continue;
    }
    EXPECT_NE(guide.find('`' + std::string(to_string(capability)) + '`'), std::string::npos) << to_string(capability);
  }
}

}  // namespace
}  // namespace metrale::test
