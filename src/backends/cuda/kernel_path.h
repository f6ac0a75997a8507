// SPDX-License-Identifier: Apache-2.0
//
// Modules from files: the folder that METRALE_KERNEL_PATH names. Values; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/result.h"

namespace metrale::cuda {

/// Larger files are refused.
inline constexpr std::uint64_t kMaxKernelFileBytes = std::uint64_t{1} << 30;

/// One module of the folder.
struct KernelFile {
  std::string name;  ///< The file's name up to its first full stop.
  std::string path;
  std::vector<std::byte> bytes;
};

/// Reads each `<module>.fatbin`, `<module>.cubin` and `<module>.ptx` in `folder`, sorted by name; other files are left alone.
/// Errors: not_found (no such folder), bad_format (two files for a module, an empty or too large one), io.
Result<std::vector<KernelFile>> read_kernel_path(const std::string& folder);

}  // namespace metrale::cuda
