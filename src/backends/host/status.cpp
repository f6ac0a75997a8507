// SPDX-License-Identifier: Apache-2.0
#include "backends/host/status.h"

#include <fmt/format.h>

#include <exception>
#include <new>
#include <string>
#include <system_error>

namespace metrale::host {

Error lost_error(std::string_view reason) {
  return Error(Errc::device_lost, fmt::format("the device is lost: {}; restart the process", reason));
}

Error memory_error(std::string_view what, std::uint64_t bytes) {
  if (bytes == 0) return Error(Errc::out_of_memory, fmt::format("{}: the host has no memory left", what));
  return Error(Errc::out_of_memory, fmt::format("{}: the host has no {} bytes left; free something or ask for less", what, bytes));
}

Error errno_error(std::string_view what, int number) {
  const std::string text = std::generic_category().message(number);
  const Errc code = number == ENOMEM ? Errc::out_of_memory : number == EAGAIN ? Errc::internal : Errc::io;
  return Error(code, fmt::format("{}: {}", what, text)).with_native(number, text);
}

Error thrown_error(std::string_view what) noexcept {
  try {
    try {
      throw;
    } catch (const std::bad_alloc&) {
      return memory_error(what, 0);
    } catch (const std::system_error& error) {
      return errno_error(what, error.code().value());
    } catch (const std::exception& error) {
      return Error(Errc::internal, fmt::format("{}: {}", what, error.what()));
    } catch (...) {
      return Error(Errc::internal, fmt::format("{}: an exception that is none of the standard library's", what));
    }
  } catch (...) {
    return Error::no_memory();
  }
}

}  // namespace metrale::host
