// SPDX-License-Identifier: Apache-2.0
#include "conformance/name_filter.h"

#include <fmt/format.h>
#include <regex.h>

#include <array>

namespace metrale::conformance {

struct NameFilter::Compiled {
  regex_t expression{};
  bool is_compiled = false;
  ~Compiled() {
    if (is_compiled) regfree(&expression);
  }
};

Result<NameFilter> NameFilter::create(const std::string& expression) {
  NameFilter filter;
  filter.compiled_ = std::make_shared<Compiled>();
  // An empty expression is undefined in POSIX.
  const char* text = expression.empty() ? ".*" : expression.c_str();
  if (const int status = regcomp(&filter.compiled_->expression, text, REG_EXTENDED | REG_NOSUB); status != 0) {
    std::array<char, 128> why{};
    regerror(status, &filter.compiled_->expression, why.data(), why.size());
    return Error(Errc::invalid_argument, fmt::format("'{}' is no regular expression: {}", expression, why.data()));
  }
  filter.compiled_->is_compiled = true;
  return filter;
}

bool NameFilter::matches(const std::string& name) const {
  return regexec(&compiled_->expression, name.c_str(), 0, nullptr, 0) == 0;
}

std::string exact_filter(std::string_view name) {
  std::string filter = "^";
  for (const char c : name) filter += c == '.' || c == '/' ? fmt::format("[{}]", c) : std::string(1, c);
  return filter + "$";
}

}  // namespace metrale::conformance
