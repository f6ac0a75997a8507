// SPDX-License-Identifier: Apache-2.0
//
// Loading the driver of this machine, whichever it has.
#include "backends/cuda/driver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "metrale/backends/cuda.h"
#include "support.h"

namespace metrale::test {
namespace {

TEST(CudaDriver, IsThereOrSaysWhyNotInOneLine) {
  const auto driver = cuda::load_driver();
  const auto reason = cuda::unavailable();
  ASSERT_EQ(driver.has_value(), !reason.has_value());
  if (driver) {
    EXPECT_GE((*driver)->version, cuda::kMinimumDriver);
    return;
  }
  EXPECT_EQ(driver.error().code(), Errc::unsupported);
  EXPECT_EQ(reason->find('\n'), std::string::npos) << *reason;
  EXPECT_ERRC(cuda::create(), Errc::unsupported);
  // Without the library every name is told, with the loader's words.
  if (reason->find("no CUDA driver") == std::string::npos) return;
  for (const char* name : cuda::kDriverNames) EXPECT_THAT(*reason, ::testing::HasSubstr(std::string(name) + ": "));
}

TEST(CudaDriver, AnswersTheSameEachTime) {
  const auto first = cuda::load_driver();
  const auto second = cuda::load_driver();
  ASSERT_EQ(first.has_value(), second.has_value());
  if (first) {
    EXPECT_EQ(*first, *second);
  } else {
    EXPECT_EQ(first.error().message(), second.error().message());
  }
}

}  // namespace
}  // namespace metrale::test
