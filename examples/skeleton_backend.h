// SPDX-License-Identifier: Apache-2.0
//
// The smallest backend there is: it can do nothing and says so. docs/adding-a-backend.md starts from it.
#pragma once

#include <memory>

#include "metrale/backend.h"

namespace skeleton {

struct Options {
  metrale::FaceOptions face;
};

/// Makes a backend. Errors: unsupported (no such device on this machine).
metrale::Result<std::unique_ptr<metrale::GpuBackend>> create(Options options = {});

}  // namespace skeleton
