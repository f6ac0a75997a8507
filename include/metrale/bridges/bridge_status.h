// SPDX-License-Identifier: Apache-2.0
//
// Whether a bridge to another library can be used here, and why not.
#pragma once

#include <string>
#include <string_view>

namespace metrale {

struct BridgeStatus {
  std::string_view library;
  bool is_available = false;
  std::string text;  ///< What is used: version and file. Or why it is not: the names tried, or what the build lacked.
};

}  // namespace metrale
