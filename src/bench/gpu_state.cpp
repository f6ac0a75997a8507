// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_state.h"

#include <dlfcn.h>

#include <array>
#include <utility>

namespace metrale::bench {
namespace {

// What is used of NVML, declared here because CUDA's headers do not have it.
using Device = void*;
constexpr unsigned kSmClock = 1;
constexpr unsigned kMemoryClock = 2;
constexpr unsigned kGpuSensor = 0;

struct Nvml {
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*by_uuid)(const char*, Device*) = nullptr;
  int (*name)(Device, char*, unsigned) = nullptr;
  int (*driver)(char*, unsigned) = nullptr;
  int (*clock)(Device, unsigned, unsigned*) = nullptr;
  int (*power)(Device, unsigned*) = nullptr;
  int (*temperature)(Device, unsigned, unsigned*) = nullptr;
  int (*reasons)(Device, unsigned long long*) = nullptr;
};

template <class Function>
bool find(void* library, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, symbol));
  return function != nullptr;
}

/// The library stays loaded: the driver keeps threads in it.
const Nvml* nvml() {
  static const std::optional<Nvml> loaded = []() -> std::optional<Nvml> {
    void* library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return std::nullopt;
    Nvml n;
    const bool complete = find(library, "nvmlInit_v2", n.init) && find(library, "nvmlShutdown", n.shutdown) &&
                          find(library, "nvmlDeviceGetHandleByUUID", n.by_uuid) && find(library, "nvmlDeviceGetName", n.name) &&
                          find(library, "nvmlSystemGetDriverVersion", n.driver) &&
                          find(library, "nvmlDeviceGetClockInfo", n.clock) && find(library, "nvmlDeviceGetPowerUsage", n.power) &&
                          find(library, "nvmlDeviceGetTemperature", n.temperature);
    if (!complete) return std::nullopt;
    // The name changed with driver 535.
    if (!find(library, "nvmlDeviceGetCurrentClocksEventReasons", n.reasons)) {
      static_cast<void>(find(library, "nvmlDeviceGetCurrentClocksThrottleReasons", n.reasons));
    }
    return n;
  }();
  return loaded ? &*loaded : nullptr;
}

}  // namespace

std::vector<std::string> clock_limit_names(std::uint64_t reasons) {
  static constexpr std::array<std::pair<std::uint64_t, const char*>, 9> kNames{{{0x1, "idle"},
                                                                                {0x2, "application clocks"},
                                                                                {0x4, "software power cap"},
                                                                                {0x8, "hardware slowdown"},
                                                                                {0x10, "sync boost"},
                                                                                {0x20, "software thermal slowdown"},
                                                                                {0x40, "hardware thermal slowdown"},
                                                                                {0x80, "hardware power brake"},
                                                                                {0x100, "display clocks"}}};
  std::vector<std::string> names;
  for (const auto& [bit, name] : kNames) {
    if ((reasons & bit) != 0) names.emplace_back(name);
  }
  return names;
}

std::optional<GpuState> read_gpu_state(const std::string& uuid) {
  const Nvml* n = nvml();
  if (n == nullptr || n->init() != 0) return std::nullopt;
  std::optional<GpuState> state;
  if (Device device = nullptr; n->by_uuid(uuid.c_str(), &device) == 0) {
    state.emplace();
    std::array<char, 96> text{};
    if (n->name(device, text.data(), text.size()) == 0) state->name = text.data();
    if (n->driver(text.data(), text.size()) == 0) state->driver = text.data();
    unsigned value = 0;
    if (n->clock(device, kSmClock, &value) == 0) state->sm_mhz = value;
    if (n->clock(device, kMemoryClock, &value) == 0) state->memory_mhz = value;
    if (n->power(device, &value) == 0) state->power_watts = value / 1000.0;
    if (n->temperature(device, kGpuSensor, &value) == 0) state->temperature_celsius = value;
    unsigned long long reasons = 0;
    if (n->reasons != nullptr && n->reasons(device, &reasons) == 0) state->clock_limits = clock_limit_names(reasons);
  }
  n->shutdown();
  return state;
}

}  // namespace metrale::bench
