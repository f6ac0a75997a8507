// SPDX-License-Identifier: Apache-2.0
//
// One warning from a place that must not throw: owners' destructors.
#pragma once

#include <fmt/format.h>

#include <utility>

#include "metrale/log.h"

namespace metrale::detail {

template <class... Args>
void log_warning_noexcept(fmt::format_string<Args...> format, Args&&... args) noexcept {
  try {
    log(LogLevel::warning, fmt::format(format, std::forward<Args>(args)...));
  } catch (...) {  // NOLINT(bugprone-empty-catch): out of memory for the text; the ledger still has the block
  }
}

}  // namespace metrale::detail
