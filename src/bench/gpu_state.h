// SPDX-License-Identifier: Apache-2.0
//
// Clocks, power and temperature of a GPU at one moment, read from NVML where the machine has it. Reads only: no setting of the card
// is ever changed. Any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace metrale::bench {

struct GpuState {
  std::string name;
  std::string driver;  ///< "580.95"
  std::uint32_t sm_mhz = 0;
  std::uint32_t memory_mhz = 0;
  double power_watts = 0;
  std::uint32_t temperature_celsius = 0;
  /// What holds the clocks down at this moment, in words; empty: nothing.
  std::vector<std::string> clock_limits{};
};

/// The state of the GPU with `uuid` ("GPU-…"), or nullopt where there is no NVML or it does not know the card. A figure that it
/// does not give stays 0.
std::optional<GpuState> read_gpu_state(const std::string& uuid);

/// The bits of nvmlDeviceGetCurrentClocksEventReasons in words.
std::vector<std::string> clock_limit_names(std::uint64_t reasons);

}  // namespace metrale::bench
