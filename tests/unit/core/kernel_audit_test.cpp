// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "metrale/kernel_registry.h"

namespace metrale {
namespace {

TEST(KernelAuditTest, CountsMissesThatNobodyDeclaredAbsent) {
  KernelAudit audit;
  EXPECT_EQ(audit.num_required_missing(), 0u);
  audit.misses.push_back({.module = "norm", .function = "rms", .site = {}, .count = 3, .declared_absent = false});
  audit.misses.push_back({.module = "norm", .function = "fast_rms", .site = {}, .count = 1, .declared_absent = true});
  audit.misses.push_back({.module = "gemm", .function = "bf16", .site = {}, .count = 1, .declared_absent = false});
  EXPECT_EQ(audit.num_required_missing(), 2u);
}

}  // namespace
}  // namespace metrale
