// SPDX-License-Identifier: Apache-2.0
//
// How the host's failures become errors: bad_alloc, errno, a lost device.
#pragma once

#include <string_view>

#include "metrale/result.h"

namespace metrale::host {

Error lost_error(std::string_view reason);
Error memory_error(std::string_view what, std::uint64_t bytes);
Error errno_error(std::string_view what, int number);

/// The error for the exception in flight. Needs no memory.
Error thrown_error(std::string_view what) noexcept;

/// Runs `body`, which returns a Result, and turns exceptions into errors.
template <class Body>
auto guarded(std::string_view what, Body&& body) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (...) {
    return thrown_error(what);
  }
}

}  // namespace metrale::host
