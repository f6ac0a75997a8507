// SPDX-License-Identifier: Apache-2.0
//
// A build without the CUDA backend has no raw side.
#include "bench/suites.h"

namespace metrale::bench {

Result<std::unique_ptr<RawDevice>> open_raw_device(GpuBackend&, int) { return std::unique_ptr<RawDevice>(); }

}  // namespace metrale::bench
