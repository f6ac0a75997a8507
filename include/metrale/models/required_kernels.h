// SPDX-License-Identifier: Apache-2.0
//
// The kernels that the reference decoders look up of a backend; `metgpu kernels --check` looks them up one by one. Any thread.
#pragma once

#include <string_view>
#include <vector>

#include "metrale/backend.h"
#include "metrale/result.h"

namespace metrale {

struct KernelName {
  std::string_view module;
  std::string_view function;
};

/// Every kernel without which no decoder is made on `backend`: the common ones, and the special forms that its plans launch in
/// their place. Kernels for some models only are not among them (decoder_kernels.h, "optional").
/// Errors: unsupported (the decoders have no kernels for that backend), and those of `sm_count`.
Result<std::vector<KernelName>> required_kernels(GpuBackend& backend);

}  // namespace metrale
