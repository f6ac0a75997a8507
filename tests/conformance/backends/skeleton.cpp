// SPDX-License-Identifier: Apache-2.0
#include "conformance/backends/skeleton.h"

#include "skeleton_backend.h"

namespace metrale::conformance {

BackendUnderTest skeleton_under_test() {
  BackendUnderTest backend;
  backend.name = "skeleton";
  backend.create = [](const CreateOptions& options) { return skeleton::create({options.face}); };
  return backend;
}

}  // namespace metrale::conformance
