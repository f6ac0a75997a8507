// SPDX-License-Identifier: Apache-2.0
//
// A report as one page that needs nothing else: tables, a bar for each judged figure against what it has to reach, and each side's
// samples in the order in which they were taken. Any thread.
#pragma once

#include <string>

#include "bench/report.h"

namespace metrale::bench {

std::string to_html(const Report& report);

}  // namespace metrale::bench
