// SPDX-License-Identifier: Apache-2.0
//
// What the decoder's resources share in `release`: they refuse a backend that is not theirs, whose addresses may be the same, and
// go on after a failure. Pure functions, for any thread.
#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "metrale/result.h"

namespace metrale {

class GpuBackend;

namespace models {

/// Errors: invalid_argument (`asked` is not `own`), naming `label`.
inline Result<> check_own_backend(const GpuBackend& own, const GpuBackend& asked, std::string_view label) {
  if (&own == &asked) return {};
  return Error(Errc::invalid_argument, fmt::format("release of the {} on another backend than the one it was made on", label));
}

/// The first of two outcomes that is a failure, so that both were tried.
inline Result<> first_failure(Result<> first, Result<> second) { return first ? std::move(second) : std::move(first); }

}  // namespace models
}  // namespace metrale
