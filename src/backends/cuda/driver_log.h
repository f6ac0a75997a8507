// SPDX-License-Identifier: Apache-2.0
//
// What the driver logs about errors, where it can (cuLogsRegisterCallback): its last lines, of the whole process, for the notes of
// fatal faults. Any thread, the driver's own too.
#pragma once

#include <string>

#include "backends/cuda/driver.h"

namespace metrale::cuda {

/// Listens to a driver from now on; once for each driver, further calls do nothing. A driver without logs is left alone.
void listen_to_log(const Driver& driver);

/// While it lives, what the driver logs in this thread is not kept: a call is made that it refuses by way of answer.
class ExpectedRefusal {
 public:
  ExpectedRefusal() noexcept { ++num_on_thread(); }
  ~ExpectedRefusal() { --num_on_thread(); }
  ExpectedRefusal(const ExpectedRefusal&) = delete;
  ExpectedRefusal& operator=(const ExpectedRefusal&) = delete;

  static int& num_on_thread() noexcept;
};

/// The last lines, oldest first, as one line of text; empty when there are none.
std::string last_log_lines();

}  // namespace metrale::cuda
