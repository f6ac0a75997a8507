// SPDX-License-Identifier: Apache-2.0
//
// metgpu info: backends, devices, memory, capabilities, kernel modules, bridges to other libraries, environment switches.
#include <set>

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "command.h"
#include "metrale/backends.h"
#include "metrale/bridges/cublaslt.h"
#include "metrale/bridges/cutlass.h"
#include "metrale/bridges/flashinfer.h"
#include "metrale/bridges/nccl.h"
#include "metrale/switches.h"

namespace metrale::cli {
namespace {

using nlohmann::json;

/// The backends that metrale knows; one that is not in the table was not built.
constexpr std::string_view kKnownBackends[] = {"cuda", "metal", "host", "mock"};

json describe_backend(std::string_view name) {
  json row = {{"name", name}};
  const BackendInfo* info = find_backend(name);
  if (info == nullptr) {
    row["available"] = false;
    row["reason"] = "not built";
    return row;
  }
  row["description"] = info->description;
  if (const auto reason = info->unavailable()) {
    row["available"] = false;
    row["reason"] = *reason;
    return row;
  }
  auto backend = open_backend(std::string(name));
  if (!backend) {
    row["available"] = false;
    row["reason"] = backend.error().message();
    return row;
  }
  row["available"] = true;
  GpuBackend& device = **backend;
  if (const auto total = device.total_memory()) row["total_bytes"] = *total;
  if (const auto free = device.free_memory()) row["free_bytes"] = *free;
  if (const auto count = device.sm_count()) row["processors"] = *count;
  json present = json::array();
  json absent = json::object();
  for (std::size_t i = 0; i < kNumCapabilities; ++i) {
    const auto capability = static_cast<Capability>(i);
    if (device.capabilities().has(capability)) {
      present.push_back(to_string(capability));
    } else {
      absent[std::string(to_string(capability))] = device.capabilities().why_not(capability);
    }
  }
  row["capabilities"] = present;
  row["lacks"] = absent;
  json modules = json::object();
  if (KernelRegistry* registry = device.kernel_registry()) {
    if (const auto entries = registry->entries()) {
      for (const auto& entry : *entries) modules[entry.module] = modules.value(entry.module, 0) + 1;
    }
  }
  row["kernel_modules"] = modules;
  return row;
}

json describe() {
  json all = {{"version", METRALE_VERSION}, {"backends", json::array()}, {"bridges", json::array()}, {"switches", json::array()}};
  for (const std::string_view name : kKnownBackends) all["backends"].push_back(describe_backend(name));
  for (const BridgeStatus& bridge : {cublaslt::status(), cutlass::status(), flashinfer::status(), nccl::status()}) {
    all["bridges"].push_back({{"library", bridge.library}, {"available", bridge.is_available}, {"text", bridge.text}});
  }
  for (const SwitchReport& s : switch_report()) {
    all["switches"].push_back({{"name", s.name}, {"value", s.value}, {"source", s.source}, {"summary", s.summary}});
  }
  return all;
}

void print(const json& all) {
  fmt::print("metrale {}\n\nbackends\n", all["version"].get<std::string>());
  for (const json& row : all["backends"]) {
    const std::string name = row["name"];
    if (!row["available"].get<bool>()) {
      fmt::print("  {:<6} not available: {}\n", name, row["reason"].get<std::string>());
      continue;
    }
    fmt::print("  {:<6} {}\n", name, row["description"].get<std::string>());
    if (row.contains("total_bytes")) {
      fmt::print("         memory: {:.1f} GiB, {:.1f} GiB free\n", row["total_bytes"].get<double>() / (1 << 30),
                 row.value("free_bytes", 0.0) / (1 << 30));
    }
    if (row.contains("processors")) fmt::print("         processors: {}\n", row["processors"].get<int>());
    std::string can;
    for (const json& c : row["capabilities"]) can += (can.empty() ? "" : ", ") + c.get<std::string>();
    fmt::print("         can: {}\n", can);
    for (const auto& [capability, reason] : row["lacks"].items()) {
      fmt::print("         cannot {}: {}\n", capability, reason.get<std::string>());
    }
    for (const auto& [module, count] : row["kernel_modules"].items()) {
      fmt::print("         module {}: {} kernels\n", module, count.get<int>());
    }
  }
  fmt::print("\nbridges\n");
  for (const json& row : all["bridges"]) {
    fmt::print("  {:<10} {}{}\n", row["library"].get<std::string>(),
               row["available"].get<bool>() ? "" : "not available: ", row["text"].get<std::string>());
  }
  fmt::print("\nenvironment switches\n");
  for (const json& s : all["switches"]) {
    fmt::print("  {:<28} {:<10} ({}) {}\n", s["name"].get<std::string>(), s["value"].get<std::string>(),
               s["source"].get<std::string>(), s["summary"].get<std::string>());
  }
}

}  // namespace

void add_info_command(CLI::App& app, ExitCode&) {
  auto as_json = std::make_shared<bool>(false);
  CLI::App* command =
      app.add_subcommand("info", "Show backends, memory, capabilities, kernel modules, bridges and environment switches");
  command->add_flag("--json", *as_json, "Print JSON");
  command->callback([as_json] {
    const json all = describe();
    if (*as_json) {
      print_json(all, 2);
    } else {
      print(all);
    }
  });
}

}  // namespace metrale::cli
