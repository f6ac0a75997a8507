// SPDX-License-Identifier: Apache-2.0
//
// The suites: what each measures and what it has to reach. A suite adds rows to the session's report and leaves nothing on the
// device. One thread.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bench/session.h"
#include "metrale/backends/host_kernel.h"

namespace metrale::bench {

struct Options {
  std::vector<std::string> suites;  ///< Names of `suites()`, in the order in which they run.
  Scale scale;
  /// A GGUF file or a folder that suite decode measures as it is stored, beside the shapes; may be empty.
  std::string model;
  bool profile = false;  ///< Suite decode also says where a step spends its time.
};

struct Suite {
  std::string_view name;
  std::string_view about;
  Result<> (*run)(Session& session, const Options& options);
};

/// Every suite, in the order of a full run.
std::span<const Suite> suites() noexcept;

Result<> run_launch(Session& session, const Options& options);
Result<> run_alloc(Session& session, const Options& options);
Result<> run_copy(Session& session, const Options& options);
Result<> run_graph(Session& session, const Options& options);
Result<> run_gemv(Session& session, const Options& options);
Result<> run_gemm(Session& session, const Options& options);
Result<> run_grouped(Session& session, const Options& options);
Result<> run_attention(Session& session, const Options& options);
Result<> run_collective(Session& session, const Options& options);
Result<> run_decode(Session& session, const Options& options);

/// Warms up and runs the suites. A suite that fails is listed in the report and the next one goes on, unless the device is lost.
/// `raw` may be null, see Session. `progress` is told what begins; may be empty.
/// Errors: invalid_argument (a name that is no suite), not_found (the backend lacks module "bench"), and those of the warm-up.
Result<Report> run_suites(GpuBackend& backend, RawDevice* raw, const Options& options,
                          const std::function<void(std::string_view)>& progress = {});

/// Module "bench" for the host backend. Static.
std::span<const host::HostKernel> host_kernels() noexcept;

/// The raw side of the CUDA `backend`, on its device, which is `ordinal`, and in its context; null for a backend of another name.
/// Errors: unsupported (no module "bench" in this build), invalid_argument (the backend is on another device), and those of the
///   driver.
Result<std::unique_ptr<RawDevice>> open_raw_device(GpuBackend& backend, int ordinal);

}  // namespace metrale::bench
