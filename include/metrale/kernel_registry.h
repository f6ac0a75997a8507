// SPDX-License-Identifier: Apache-2.0
//
// Kernels by (module, function): what a kernel publishes about itself, the globals of modules, and the audit of look-ups that
// failed. Facts and audit entries are values; the registry belongs to its backend. Any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/result.h"
#include "metrale/types.h"

namespace metrale {

/// What a kernel publishes. Read once at look-up.
struct KernelFacts {
  std::vector<std::uint32_t> param_bytes;  ///< Size of each argument in order; 8 for a Buffer.
  std::optional<std::uint32_t> n_tile{};   ///< Output-column tile width, from `<entry>_n_tile`.
  bool casts_a_to_e4m3 = false;            ///< From `<entry>_a_e4m3`: the bf16 A operand is cast to E4M3 without a scale.
  bool waits_for_dependency = false;       ///< Waits for its predecessor itself, so dependent launch is allowed.
  bool takes_any_arguments = false;        ///< Publishes no signature: typed arguments are not compared. On the mock only.
};

/// The address and size of a module's global.
struct DeviceSymbol {
  DevicePtr ptr;
  std::uint64_t bytes = 0;
};

/// What loading the modules of a backend took, since creation or their last loading.
struct LoadReport {
  struct Module {
    std::string name;
    std::string source;  ///< "built in", or the file it came from.
    std::uint64_t size_bytes = 0;
    std::uint32_t num_kernels = 0;
    std::uint64_t load_ns = 0;  ///< The module, and what its kernels publish.
    std::uint64_t warm_ns = 0;  ///< The code of its kernels; 0 where each is loaded by its first look-up.
  };
  std::vector<Module> modules;  ///< Sorted by name.
  /// Modules and kernels that a look-up had to load: none after a warm creation until modules are unloaded.
  std::uint64_t num_lazy_loads = 0;
};

/// The module set of a backend.
class KernelRegistry {
 public:
  struct Entry {
    std::string module;
    std::string function;
    KernelFacts facts;
  };

  virtual ~KernelRegistry() = default;
  /// Every kernel of every module, sorted by module and function.
  virtual Result<std::vector<Entry>> entries() const = 0;
  /// What loading the modules took. Empty where kernels are part of the program, which is the default.
  virtual LoadReport load_report() const { return {}; }
  /// The global `name` (linker name) of `module`; known to copies from then on.
  /// Errors: not_found, unsupported (Capability::device_symbols).
  virtual Result<DeviceSymbol> device_symbol(std::string_view module, std::string_view name,
                                             std::source_location site = std::source_location::current()) = 0;
};

/// One failed look-up.
struct LookupMiss {
  std::string module;
  std::string function;
  std::source_location site;  ///< The first caller that asked.
  std::uint64_t count = 0;    ///< How often it was asked for.
  bool declared_absent = false;
};

/// Look-ups so far: what was found is counted, what was missed is listed.
struct KernelAudit {
  std::uint64_t num_hits = 0;
  bool sealed = false;
  std::vector<LookupMiss> misses;  ///< In the order of their first miss.
  /// Misses that nobody declared absent.
  std::uint64_t num_required_missing() const noexcept;
};

}  // namespace metrale
