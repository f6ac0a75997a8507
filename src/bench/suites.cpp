// SPDX-License-Identifier: Apache-2.0
#include "bench/suites.h"

#include <algorithm>
#include <array>
#include <ctime>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace metrale::bench {
namespace {

constexpr std::array<Suite, 10> kSuites{{{"launch", "kernel launches, host cost", &run_launch},
                                         {"alloc", "device, pooled and pinned memory", &run_alloc},
                                         {"copy", "gather, scatter and large copies", &run_copy},
                                         {"graph", "replay of captured work, gaps between nodes", &run_graph},
                                         {"gemv", "one row times a bf16 matrix", &run_gemv},
                                         {"gemm", "products through cuBLASLt", &run_gemm},
                                         {"grouped", "products of a mixture of experts through CUTLASS", &run_grouped},
                                         {"attention", "FlashInfer through its bridge", &run_attention},
                                         {"collective", "all-reduce between two devices through NCCL", &run_collective},
                                         {"decode", "tokens a second of whole models", &run_decode}}};

const Suite* find_suite(std::string_view name) {
  const auto* found = std::ranges::find(kSuites, name, &Suite::name);
  return found == kSuites.end() ? nullptr : found;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday, parts.tm_hour,
                     parts.tm_min, parts.tm_sec);
}

}  // namespace

std::span<const Suite> suites() noexcept { return kSuites; }

Result<Report> run_suites(GpuBackend& backend, RawDevice* raw, const Options& options,
                          const std::function<void(std::string_view)>& progress) {
  const auto tell = [&](std::string_view text) {
    if (progress) progress(text);
  };
  for (const std::string& name : options.suites) {
    if (find_suite(name) != nullptr) continue;
    std::vector<std::string_view> known;
    for (const Suite& suite : kSuites) known.push_back(suite.name);
    return Error(Errc::invalid_argument, fmt::format("there is no suite '{}'; there are {}", name, fmt::join(known, ", ")));
  }
  Session session(backend, raw, options.scale);
  Report& report = session.report();
  report.date = utc_now();
  report.backend = backend.name();
  report.device = raw != nullptr ? raw->device_name() : std::string(backend.name());
  report.driver_version = raw != nullptr ? raw->driver_version() : 0;
  report.rounds = options.scale.rounds;
  const auto state = [&] { return raw != nullptr ? read_gpu_state(raw->uuid()) : std::nullopt; };

  METRALE_TRY(session.warm_up());
  report.before = state();
  for (const std::string& name : options.suites) {
    tell(name);
    Result<> done = session.warm_up();
    if (done) done = find_suite(name)->run(session, options);
    if (done) continue;
    report.failures.push_back(fmt::format("{}: {}", name, done.error().to_string()));
    if (!backend.health()) break;
  }
  report.after = state();
  if (raw == nullptr || !options.scale.judged) {
    for (Row& row : report.rows) row.target = {};
  }
  return std::move(report);
}

}  // namespace metrale::bench
