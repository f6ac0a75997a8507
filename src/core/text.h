// SPDX-License-Identifier: Apache-2.0
//
// Putting names from untrusted files into one-line messages, and walling off exceptions of the standard library. Pure functions,
// for any thread.
#pragma once

#include <exception>
#include <new>
#include <string>
#include <string_view>

#include "metrale/result.h"

namespace metrale::detail {

/// Whether `text` is well-formed UTF-8: no overlong forms, no surrogates, nothing beyond U+10FFFF.
bool valid_utf8(std::string_view text) noexcept;

/// `text` in double quotes, fit for one line of a message: control characters and bytes that are no UTF-8 become \xNN, and what is
/// longer than 100 bytes is cut with "…".
std::string quote(std::string_view text);

/// Calls `fn`, whose Result it returns, and turns what the standard library throws into an Error that names `label`.
template <class Fn>
auto guarded(std::string_view label, Fn&& fn) -> decltype(fn()) {
  try {
    return fn();
  } catch (const std::bad_alloc&) {
    return Error(Errc::out_of_memory, std::string(label) + ": no host memory left while reading it");
  } catch (const std::exception& e) {
    return Error(Errc::internal, std::string(label) + ": " + e.what());
  }
}

}  // namespace metrale::detail
