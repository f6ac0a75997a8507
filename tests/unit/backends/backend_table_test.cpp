// SPDX-License-Identifier: Apache-2.0
#include "metrale/backends.h"

#include "host_kernels.h"
#include "support.h"

namespace metrale::test {
namespace {

TEST(BackendTable, EveryRowCreatesABackendOfItsName) {
  ASSERT_FALSE(backends().empty());
  for (const BackendInfo& info : backends()) {
    if (info.unavailable()) continue;
    const auto backend = take(create_backend(info.name));
    EXPECT_EQ(backend->name(), info.name);
    EXPECT_EQ(backend->capabilities().has(Capability::computes), info.computes);
  }
}

TEST(BackendTable, AutoTakesOneThatComputes) {
  EXPECT_TRUE(take(create_backend("auto"))->capabilities().has(Capability::computes));
}

TEST(BackendTable, WhatIsNotBuiltIsNamedWithWhatIs) {
  EXPECT_EQ(find_backend("vulkan"), nullptr);
  const auto missing = create_backend("vulkan");
  ASSERT_FALSE(missing.has_value());
  EXPECT_EQ(missing.error().code(), Errc::not_found);
  EXPECT_NE(missing.error().message().find("host"), std::string::npos);
  EXPECT_NE(missing.error().message().find("not built"), std::string::npos);
}

TEST(BackendTable, PassesTheHostsOptionsOn) {
  BackendOptions options;
  options.host_threads = 3;
  options.host_kernels = {kKernels};
  const auto backend = take(create_backend("host", options));
  EXPECT_EQ(take(backend->sm_count()), 3u);
  EXPECT_OK(backend->kernel("test", "store"));
}

}  // namespace
}  // namespace metrale::test
