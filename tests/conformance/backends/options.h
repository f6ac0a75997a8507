// SPDX-License-Identifier: Apache-2.0
//
// How the backends under test are configured, for their factories and for the mutants derived from them.
#pragma once

#include "conformance/backend_under_test.h"
#include "metrale/backends/host.h"
#include "metrale/backends/mock.h"

namespace metrale::conformance {

host::Options host_options(const CreateOptions& options);

mock::Options mock_options(const CreateOptions& options);
/// Tells a mock what the test kernels publish, and which kernels the cases expect to miss: it finds all others.
void teach(mock::MockControl& control);

}  // namespace metrale::conformance
