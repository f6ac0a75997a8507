// SPDX-License-Identifier: Apache-2.0
//
// What the suite knows of one backend: how to make it, what the suite cannot ask through the interface, and which cases do not
// apply. A backend's file in backends/ makes one of these. Values; registered before the suite runs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/backend.h"

namespace metrale::conformance {

/// What a case may ask of the backend it runs on.
struct CreateOptions {
  FaceOptions face = {};
  /// The device has this much memory in all; only where `BackendUnderTest::limits_memory`.
  std::optional<std::uint64_t> memory_limit_bytes = {};
  /// The backend is made without these; only where `BackendUnderTest::drops_capabilities`.
  std::vector<Capability> without = {};
};

/// Cases that do not apply. `pattern` is a whole name, "Suite.Case", or "Suite.*".
struct Exclusion {
  std::string_view pattern;
  std::string_view because;  ///< One line.
};

struct BackendUnderTest {
  std::string_view name;
  /// Makes a fresh backend with the test kernels of test_kernels.h. Errors: unsupported (this machine cannot run it).
  std::function<Result<std::unique_ptr<GpuBackend>>(const CreateOptions&)> create;

  // ---- what no capability tells ----
  bool fills_pattern = false;       ///< Fresh memory holds a pattern, so that code relying on zeros fails.
  bool limits_memory = false;       ///< Obeys CreateOptions::memory_limit_bytes.
  bool drops_capabilities = false;  ///< Obeys CreateOptions::without.
  bool packs_chunks = false;        ///< The driver packs small blocks into 2 MiB chunks: `chunk_slack_bytes` has a value.

  /// Memory that the device reaches and this library never gave out; kept for the life of the process. Null: an address will do,
  /// because the device only records what is done with it.
  std::function<DevicePtr(std::uint64_t bytes)> foreign_memory;

  std::vector<Exclusion> unsupported;        ///< Never, because.
  std::vector<Exclusion> expected_failures;  ///< Not yet, because.
};

/// Every backend known to the suite. A program may append its own before it runs the suite.
std::vector<BackendUnderTest>& backends_under_test();

/// The backend whose cases run now.
const BackendUnderTest& under_test();

/// Defined in backends/: one function for each backend that this build has.
BackendUnderTest cuda_under_test();
BackendUnderTest host_under_test();
BackendUnderTest mock_under_test();

}  // namespace metrale::conformance
