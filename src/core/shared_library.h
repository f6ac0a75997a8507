// SPDX-License-Identifier: Apache-2.0
//
// A library of others, found at run time, so that programs start where it is not installed.
#pragma once

#include <span>
#include <string>

#include "metrale/result.h"

namespace metrale::detail {

/// Stays loaded: such libraries have threads and handlers that may run until the process ends. Any thread.
class SharedLibrary {
 public:
  /// The first of `names` that loads. Errors: unsupported, with the loader's words for each name.
  static Result<SharedLibrary> open(const char* what, std::span<const char* const> names);

  /// Under which name it was found.
  const char* name() const noexcept { return name_; }
  /// Null: it has no such function.
  void* find(const char* function) const noexcept;
  /// Sets `function`; notes the name in `missing` where the library lacks it.
  template <class Function>
  void find(const char* function_name, Function*& function, std::string& missing) const {
    function = reinterpret_cast<Function*>(find(function_name));
    if (function == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(function_name);
  }

 private:
  SharedLibrary(void* handle, const char* name) noexcept : handle_(handle), name_(name) {}

  void* handle_;
  const char* name_;
};

}  // namespace metrale::detail
