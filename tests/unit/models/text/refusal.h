// SPDX-License-Identifier: Apache-2.0
//
// What the words of every refusal have in common.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "metrale/result.h"

namespace metrale::test {

inline void expect_one_line(const Error& error, Errc code, const std::vector<const char*>& says) {
  EXPECT_EQ(error.code(), code) << error.to_string();
  for (const char* part : says) EXPECT_NE(error.message().find(part), std::string::npos) << part << " in: " << error.message();
  EXPECT_EQ(error.message().find('\n'), std::string::npos) << error.message();
  EXPECT_LT(error.message().size(), 400U) << error.message();
}

}  // namespace metrale::test
