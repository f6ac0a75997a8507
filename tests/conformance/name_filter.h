// SPDX-License-Identifier: Apache-2.0
//
// Chooses names by regular expression (POSIX extended). A value; any thread may ask.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "metrale/result.h"

namespace metrale::conformance {

class NameFilter {
 public:
  /// Errors: invalid_argument (`expression` is malformed).
  static Result<NameFilter> create(const std::string& expression);

  /// Whether the expression is found in `name`; an empty one is found everywhere.
  bool matches(const std::string& name) const;

 private:
  struct Compiled;
  std::shared_ptr<Compiled> compiled_;
};

/// The expression that is found in this case's name and in no other.
std::string exact_filter(std::string_view name);

}  // namespace metrale::conformance
