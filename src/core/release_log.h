// SPDX-License-Identifier: Apache-2.0
//
// What owners' destructors share: they must not throw, and nobody can call them again.
#pragma once

#include <fmt/format.h>

#include <utility>

#include "metrale/backend.h"
#include "metrale/log.h"

namespace metrale::detail {

template <class... Args>
void log_warning_noexcept(fmt::format_string<Args...> format, Args&&... args) noexcept {
  try {
    log(LogLevel::warning, fmt::format(format, std::forward<Args>(args)...));
  } catch (...) {  // NOLINT(bugprone-empty-catch): out of memory for the text; the ledger still has the block
  }
}

/// Releases memory for the last time. A graph that was destroyed still names its memory while a replay runs, which is common when
/// an error unwinds: then waits for the device once and tries again.
template <class Release>
Result<> release_for_good(GpuBackend& backend, Release&& release) {
  Result<> result = release();
  if (result || result.error().code() != Errc::in_use || !backend.synchronize_device()) return result;
  return release();
}

}  // namespace metrale::detail
