// SPDX-License-Identifier: Apache-2.0
//
// The bridge over a table of the library's functions, which tests replace.
#pragma once

#include <memory>
#include <source_location>
#include <string>

#include "bridges/cublaslt/api.h"
#include "metrale/bridges/cublaslt.h"

namespace metrale::cublaslt {

/// What scratch of the op cache is for.
inline constexpr std::string_view kWorkspaceTag = "cublaslt.workspace";
inline constexpr std::string_view kScalesTag = "cublaslt.scales";
inline constexpr std::string_view kRowsTag = "cublaslt.rows";

/// `api` outlives the bridge. `identity`: device, driver and library version in one line, for files; empty: no file is kept.
Result<std::unique_ptr<CublasLt>> make_bridge(GpuBackend& backend, const Api& api, std::string version, std::string identity,
                                              Options options, std::source_location site = std::source_location::current());

}  // namespace metrale::cublaslt
