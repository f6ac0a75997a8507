// SPDX-License-Identifier: Apache-2.0
//
// A kernel module of the CUDA backend, before it is loaded. A plain description; it owns nothing.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace metrale::cuda {

/// One module: a fat binary, a cubin or PTX text. Name and bytes are not copied and outlive the backend.
struct ModuleImage {
  std::string_view name;
  std::span<const std::byte> image;
};

}  // namespace metrale::cuda
