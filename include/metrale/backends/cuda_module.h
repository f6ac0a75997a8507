// SPDX-License-Identifier: Apache-2.0
//
// A kernel module of the CUDA backend: what is handed over to be loaded, and what loading it took. Plain descriptions; they own no
// device state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace metrale::cuda {

/// One module: a fat binary, a cubin or PTX text. Name and bytes are not copied and outlive the backend.
struct ModuleImage {
  std::string_view name;
  std::span<const std::byte> image;
};

/// What loading modules took, since creation or the last reload.
struct LoadReport {
  struct Module {
    std::string name;
    std::string source;  ///< "built in", or the file that METRALE_KERNEL_PATH gave.
    std::uint64_t size_bytes = 0;
    std::uint32_t num_kernels = 0;
    std::uint64_t load_ns = 0;  ///< The module, and what its kernels publish.
    std::uint64_t warm_ns = 0;  ///< The code of its kernels; 0 unless `Options::warm`.
  };
  std::vector<Module> modules;  ///< Sorted by name.
  bool warm = false;
  /// Modules and kernels that a look-up had to load: none after a warm creation until modules are unloaded.
  std::uint64_t num_lazy_loads = 0;
};

}  // namespace metrale::cuda
