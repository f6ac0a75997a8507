// SPDX-License-Identifier: Apache-2.0
//
// Where metrale's few log lines go. The library writes warnings and fault reports only; a host application may take them over with
// one function. Any thread; the sink is called from the thread that logs, one line at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

namespace metrale {

enum class LogLevel : std::uint8_t { debug, info, warning, error };
using LogSink = std::function<void(LogLevel, std::string_view line)>;

/// Replaces the sink; an empty function restores the default, which writes to standard error and leaves debug lines out. When this
/// returns, the sink that was there is not called any more; a sink may call it, and finishes its line. What a sink logs itself goes
/// to standard error, and what it throws is dropped.
void set_log_sink(LogSink sink);
/// Writes one line. Never throws.
void log(LogLevel level, std::string_view line);

}  // namespace metrale
