// SPDX-License-Identifier: Apache-2.0
//
// How the host's failures become errors: bad_alloc, errno, a lost device.
#pragma once

#include <new>
#include <string>
#include <string_view>
#include <system_error>

#include "metrale/result.h"

namespace metrale::host {

Error lost_error(std::string_view reason);
Error memory_error(std::string_view what, std::uint64_t bytes);
Error errno_error(std::string_view what, int number);

/// Runs `body`, which returns a Result, and turns the exceptions of the standard library into errors.
template <class Body>
auto guarded(std::string_view what, Body&& body) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return memory_error(what, 0);
  } catch (const std::system_error& error) {
    return errno_error(what, error.code().value());
  } catch (const std::exception& error) {
    return Error(Errc::internal, std::string(what) + ": " + error.what());
  }
}

}  // namespace metrale::host
