// SPDX-License-Identifier: Apache-2.0
//
// What a benchmark found: rows with both sides' samples, the figure that is judged and what it has to reach; and the same as a
// table or as JSON. Values; any thread. The page is html.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "bench/gpu_state.h"
#include "bench/statistics.h"

namespace metrale::bench {

/// One side of a row, in the order in which its samples were taken.
struct Series {
  std::string name;  ///< "cuLaunchKernel", "launch_typed"
  std::vector<double> samples;

  Summary summary() const { return summarise(samples); }
};

/// What is judged, made of the two medians.
enum class Measure : std::uint8_t {
  ours,            ///< the figure of our side by itself
  ratio,           ///< ours / theirs
  difference,      ///< ours - theirs
  speedup,         ///< theirs / ours: for times, how many times faster we are
  share_of_limit,  ///< `figure`, a part of what the device can do
};
std::string_view to_string(Measure measure) noexcept;

enum class Better : std::uint8_t { smaller, larger };

/// What a row has to reach; either may be absent.
struct Target {
  std::optional<double> minimum{};
  std::optional<double> goal{};
};

enum class Status : std::uint8_t {
  not_judged,  ///< Nothing to reach, or no figure.
  missed,      ///< Worse than the minimum, or, where there is none, than the goal.
  minimum,     ///< As good as the minimum, not as the goal.
  goal,
};
std::string_view to_string(Status status) noexcept;

struct Row {
  std::string suite{};
  std::string name{};
  std::string unit{};  ///< Of the samples: "ns", "us", "ms", "GB/s", "tokens/s".
  std::optional<Series> ours{};
  std::optional<Series> theirs{};
  Measure measure = Measure::ours;
  /// Of `share_of_limit`.
  std::optional<double> figure{};
  Better better = Better::smaller;
  Target target{};
  std::string note{};

  /// The figure that is judged; nullopt where a side that it needs is absent or, as a divisor, 0.
  std::optional<double> judged() const;
  Status status() const;
};

/// A kernel of one decode step, all its launches together.
struct KernelShare {
  std::string kernel;
  std::uint32_t launches = 0;
  double total_us = 0;
  std::uint64_t weight_bytes = 0;  ///< Of the matrices that the launches read; 0 where it is not a matrix kernel.

  double gb_per_second() const noexcept { return total_us > 0 ? static_cast<double>(weight_bytes) / total_us / 1e3 : 0; }
};

/// Where a decode step spends its time; `kernels` from the most to the least.
struct Profile {
  std::string model;
  double step_us = 0;  ///< One token as it is generated, by the host's clock.
  /// The same step launch by launch, queued up beforehand, with an event after each: the sum of `kernels`.
  double launched_us = 0;
  double event_us = 0;  ///< What an event costs by itself; a part of each launch.
  std::vector<KernelShare> kernels;
};

struct Report {
  std::string version{};
  std::string command{};
  std::string date{};  ///< UTC, ISO 8601.
  std::string backend{};
  std::string device{};
  int driver_version = 0;  ///< As cuDriverGetVersion counts; 0: no driver.
  std::uint32_t rounds = 0;
  std::optional<GpuState> before{};
  std::optional<GpuState> after{};
  std::vector<Row> rows{};
  std::vector<Profile> profiles{};
  std::vector<std::string> failures{};  ///< Suites that did not end, each with its error.

  std::uint64_t count(Status status) const;
};

nlohmann::json to_json(const Report& report);
/// A line for each row, for terminals.
std::string to_table(const Report& report);
/// `value` with the digits that a reader can use: 3 or 4 that count.
std::string format_figure(double value);

}  // namespace metrale::bench
