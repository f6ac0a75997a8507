// SPDX-License-Identifier: Apache-2.0
//
// The NCCL bridge as far as it goes without a device: what it says of itself, and what it refuses.
#include "metrale/bridges/nccl.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string_view>

#include "metrale/backends/host.h"

namespace metrale::test {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<GpuBackend> host_device() {
  host::Options options;
  options.num_threads = 1;
  auto made = host::create(options);
  EXPECT_TRUE(made);
  return std::move(*made);
}

template <class T>
void expect_refusal(const Result<T>& result, Errc code, const char* part) {
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code(), code) << result.error().to_string();
  EXPECT_THAT(result.error().to_string(), HasSubstr(part));
}

TEST(Nccl, SaysWhatItIsOrWhyNot) {
  const BridgeStatus status = nccl::status();
  EXPECT_EQ(status.library, "NCCL");
  ASSERT_FALSE(status.text.empty());
  EXPECT_EQ(status.text.find('\n'), std::string::npos);
  if (status.is_available) {
    EXPECT_THAT(status.text, HasSubstr("libnccl"));
    EXPECT_GE(status.text.front(), '2');
  } else if (status.text.find("this build has no") == std::string::npos && status.text.find("is NCCL") == std::string::npos) {
    EXPECT_THAT(status.text, HasSubstr("libnccl.so.2")) << "names what was tried";
  }
}

TEST(Nccl, MulticastStaysOffUnlessTheEnvironmentAsksForIt) {
  if (!nccl::status().is_available) GTEST_SKIP() << nccl::status().text;
  const char* value = std::getenv("NCCL_NVLS_ENABLE");
  ASSERT_NE(value, nullptr);
  const char* asked = std::getenv("METRALE_TEST_NVLS");  // what the environment of this test had
  EXPECT_EQ(std::string_view(value), asked == nullptr ? "0" : asked);
}

TEST(Nccl, RanksThatCannotBeAreRefusedBeforeTheLibraryIsAsked) {
  const auto backend = host_device();
  const nccl::UniqueId id;
  expect_refusal(nccl::create(*backend, id, 2, 2), Errc::invalid_argument, "rank 2 of 2");
  expect_refusal(nccl::create(*backend, id, 0, 0), Errc::invalid_argument, "rank 0 of 0");
  expect_refusal(nccl::create(*backend, id, 0, kMaxProcesses + 1), Errc::invalid_argument, "4097");
  expect_refusal(nccl::create(*backend, id, 0, 1, {.meeting_timeout = std::chrono::milliseconds(0)}), Errc::invalid_argument,
                 "0 and");
  expect_refusal(nccl::create(*backend, id, 0, 1, {.timeout = std::chrono::milliseconds(-1)}), Errc::invalid_argument, "-1 ms");
  expect_refusal(nccl::create(*backend, id, 0, 1), Errc::unsupported, "this is the host backend");
  expect_refusal(nccl::join(*backend, {.rank = 3, .size = 2}), Errc::invalid_argument, "rank 3 of 2");
  expect_refusal(nccl::join(*backend, {.rank = 0, .size = 2}), Errc::unsupported, "this is the host backend");
}

TEST(Nccl, WorldsThatCannotBeAreRefused) {
  const auto backend = host_device();
  GpuBackend* const one[] = {backend.get()};
  GpuBackend* const none[] = {nullptr};
  expect_refusal(nccl::create_all({}), Errc::invalid_argument, "0 ranks");
  expect_refusal(nccl::create_all(none), Errc::invalid_argument, "null");
  expect_refusal(nccl::create_all(one), Errc::unsupported, "this is the host backend");
}

}  // namespace
}  // namespace metrale::test
