// SPDX-License-Identifier: Apache-2.0
//
// OwnerScope: whose memory it is. Blocks that this thread allocates while a scope is open carry its label on the ledger, so a
// report can say "kv cache" where a call site would only say which line. Scopes nest, the innermost counts; one thread each.
#pragma once

#include <string_view>

namespace metrale {

class OwnerScope {
 public:
  /// `label` is a literal, or outlives every block allocated under it.
  explicit OwnerScope(std::string_view label) noexcept;
  ~OwnerScope();
  OwnerScope(const OwnerScope&) = delete;
  OwnerScope& operator=(const OwnerScope&) = delete;

  /// The innermost label of this thread; empty outside every scope.
  static std::string_view current() noexcept;

 private:
  std::string_view outer_;
};

}  // namespace metrale
