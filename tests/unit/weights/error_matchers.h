// SPDX-License-Identifier: Apache-2.0
//
// What every failure of a weight parser must look like.
#pragma once

#include <gmock/gmock.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "metrale/result.h"

namespace metrale::test {

/// The value, or a failed test with the error's text.
template <class T>
T value_of(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().to_string());
  return std::move(*result);
}

/// Expects a failure with `code` whose message is one printable line that holds every one of `parts`.
template <class T>
void expect_error(const Result<T>& result, Errc code, const std::vector<std::string>& parts) {
  ASSERT_FALSE(result) << "expected " << to_string(code);
  EXPECT_EQ(result.error().code(), code) << result.error().to_string();
  const std::string& message = result.error().message();
  for (const std::string& part : parts) EXPECT_THAT(message, testing::HasSubstr(part));
  for (const char c : message) ASSERT_GE(static_cast<unsigned char>(c), 0x20) << "control character in: " << message;
  EXPECT_LT(message.size(), 700U);
}

}  // namespace metrale::test
