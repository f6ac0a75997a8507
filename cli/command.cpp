// SPDX-License-Identifier: Apache-2.0
#include "command.h"

#include <cstdio>

#include <fmt/format.h>

#include "metrale/backends.h"
#include "metrale/backends/host_kernels.h"
#include "metrale/switches.h"

namespace metrale::cli {

void add_backend_option(CLI::App& command, std::string& backend, const std::string& fallback) {
  std::string names = "auto";
  for (const BackendInfo& row : backends()) names += fmt::format(", {}", row.name);
  backend = fallback;
  command.add_option("--backend", backend, "Where to run: " + names)->capture_default_str();
}

Result<std::unique_ptr<GpuBackend>> open_backend(const std::string& name) {
  BackendOptions options;
  options.host_threads = switches().host_threads;
  options.host_kernels = host::kernel_tables();
  return create_backend(name, options);
}

ExitCode fail(const Error& error) {
  // The call site is for programmers; a user needs the kind, the message and what it happened under.
  std::string line = fmt::format("metgpu: {}: {}", to_string(error.code()), error.message());
  if (error.native_code() != 0) line += fmt::format(" [{}: {}]", error.native_code(), error.native_text());
  for (const std::string& note : error.notes()) line += "; " + note;
  fmt::print(stderr, "{}\n", line);
  return ExitCode::failed;
}

}  // namespace metrale::cli
