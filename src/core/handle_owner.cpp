// SPDX-License-Identifier: Apache-2.0
#include "metrale/handle_owner.h"

#include "core/release_log.h"

namespace metrale::detail {

void log_release_failure(std::string_view noun, std::uint64_t value, const Error& error) noexcept {
  log_warning_noexcept("{} {:#x} was not released, the backend's sweep or shutdown has to: {}", noun, value, error.to_string());
}

}  // namespace metrale::detail
