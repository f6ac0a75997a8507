// SPDX-License-Identifier: Apache-2.0
#include "bench/report.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace metrale::bench {
namespace {

using nlohmann::json;

json to_json(const Summary& s) {
  return {{"count", s.count}, {"min", s.min}, {"p10", s.p10}, {"median", s.median}, {"p90", s.p90}, {"max", s.max}};
}

json to_json(const std::optional<Series>& series) {
  if (!series) return nullptr;
  json all = to_json(series->summary());
  all["name"] = series->name;
  all["samples"] = series->samples;
  return all;
}

json to_json(const std::optional<double>& value) { return value ? json(*value) : json(nullptr); }

json to_json(const std::optional<GpuState>& state) {
  if (!state) return nullptr;
  return {{"name", state->name},
          {"driver", state->driver},
          {"sm_mhz", state->sm_mhz},
          {"memory_mhz", state->memory_mhz},
          {"power_watts", state->power_watts},
          {"temperature_celsius", state->temperature_celsius},
          {"clock_limits", state->clock_limits}};
}

json to_json(const Row& row) {
  return {{"suite", row.suite},
          {"name", row.name},
          {"unit", row.unit},
          {"ours", to_json(row.ours)},
          {"theirs", to_json(row.theirs)},
          {"measure", to_string(row.measure)},
          {"better", row.better == Better::smaller ? "smaller" : "larger"},
          {"figure", to_json(row.judged())},
          {"minimum", to_json(row.target.minimum)},
          {"goal", to_json(row.target.goal)},
          {"status", to_string(row.status())},
          {"note", row.note}};
}

json to_json(const Profile& profile) {
  json kernels = json::array();
  for (const KernelShare& share : profile.kernels) {
    kernels.push_back({{"kernel", share.kernel},
                       {"launches", share.launches},
                       {"total_us", share.total_us},
                       {"weight_bytes", share.weight_bytes}});
  }
  return {{"model", profile.model},
          {"step_us", profile.step_us},
          {"launched_us", profile.launched_us},
          {"event_us", profile.event_us},
          {"kernels", std::move(kernels)}};
}

std::string side(const std::optional<Series>& series) {
  if (!series) return "-";
  const Summary s = series->summary();
  return fmt::format("{} [{} {}]", format_figure(s.median), format_figure(s.p10), format_figure(s.p90));
}

std::string figure(const std::optional<double>& value) { return value ? format_figure(*value) : "-"; }

}  // namespace

std::string_view to_string(Measure measure) noexcept {
  switch (measure) {
    case Measure::ours: return "ours";
    case Measure::ratio: return "ours / theirs";
    case Measure::difference: return "ours - theirs";
    case Measure::speedup: return "theirs / ours";
    case Measure::share_of_limit: return "share of limit";
  }
  return "?";
}

std::string_view to_string(Status status) noexcept {
  switch (status) {
    case Status::not_judged: return "-";
    case Status::missed: return "missed";
    case Status::minimum: return "met";
    case Status::goal: return "goal";
  }
  return "?";
}

std::optional<double> Row::judged() const {
  if (measure == Measure::share_of_limit) return figure;
  if (!ours || ours->samples.empty()) return std::nullopt;
  const double own = ours->summary().median;
  if (measure == Measure::ours) return own;
  if (!theirs || theirs->samples.empty()) return std::nullopt;
  const double other = theirs->summary().median;
  if (measure == Measure::difference) return own - other;
  const auto [above, below] = measure == Measure::ratio ? std::pair(own, other) : std::pair(other, own);
  if (below == 0) return std::nullopt;
  return above / below;
}

Status Row::status() const {
  const std::optional<double> value = judged();
  if (!value || (!target.minimum && !target.goal)) return Status::not_judged;
  if (std::isnan(*value)) return Status::missed;
  const auto reaches = [&](double bound) { return better == Better::smaller ? *value <= bound : *value >= bound; };
  if (target.goal && reaches(*target.goal)) return Status::goal;
  if (target.minimum && reaches(*target.minimum)) return Status::minimum;
  return Status::missed;
}

std::uint64_t Report::count(Status status) const {
  return static_cast<std::uint64_t>(std::ranges::count_if(rows, [&](const Row& row) { return row.status() == status; }));
}

std::string format_figure(double value) {
  const double size = std::fabs(value);
  if (size >= 1000) return fmt::format("{:.0f}", value);
  if (size >= 100) return fmt::format("{:.1f}", value);
  if (size >= 10) return fmt::format("{:.2f}", value);
  return fmt::format("{:.3f}", value);
}

nlohmann::json to_json(const Report& report) {
  json all = {{"version", report.version}, {"command", report.command},        {"date", report.date},
              {"backend", report.backend}, {"device", report.device},          {"driver_version", report.driver_version},
              {"rounds", report.rounds},   {"before", to_json(report.before)}, {"after", to_json(report.after)},
              {"rows", json::array()},     {"profiles", json::array()},        {"failures", report.failures}};
  for (const Row& row : report.rows) all["rows"].push_back(to_json(row));
  for (const Profile& profile : report.profiles) all["profiles"].push_back(to_json(profile));
  return all;
}

std::string to_table(const Report& report) {
  std::string text = fmt::format("{:<7} {:<52} {:<9} {:<24} {:<24} {:<15} {:>8} {:>8} {:>8}  {}\n", "suite", "what", "unit",
                                 "ours [p10 p90]", "theirs [p10 p90]", "judged", "figure", "minimum", "goal", "status");
  for (const Row& row : report.rows) {
    text += fmt::format("{:<7} {:<52} {:<9} {:<24} {:<24} {:<15} {:>8} {:>8} {:>8}  {}\n", row.suite, row.name, row.unit,
                        side(row.ours), side(row.theirs), to_string(row.measure), figure(row.judged()), figure(row.target.minimum),
                        figure(row.target.goal), to_string(row.status()));
  }
  for (const Profile& profile : report.profiles) {
    text += fmt::format("\n{}: a step is {:.1f} us as a graph; launched one by one {:.1f} us, of it {:.2f} us an event\n",
                        profile.model, profile.step_us, profile.launched_us, profile.event_us);
    for (const KernelShare& share : profile.kernels) {
      text += fmt::format("  {:<60} {:>5} launches {:>10.1f} us {:>8.2f} us each{}\n", share.kernel, share.launches, share.total_us,
                          share.launches == 0 ? 0.0 : share.total_us / share.launches,
                          share.weight_bytes == 0 ? "" : fmt::format(" {:>8.0f} GB/s", share.gb_per_second()));
    }
  }
  for (const std::string& failure : report.failures) text += fmt::format("failed: {}\n", failure);
  return text;
}

}  // namespace metrale::bench
