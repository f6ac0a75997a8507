// SPDX-License-Identifier: Apache-2.0
#include "bench/html.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace metrale::bench {
namespace {

constexpr double kBarWidth = 420;
constexpr double kPlotWidth = 420;
constexpr double kPlotHeight = 90;

constexpr std::string_view kStyle = R"(
body{font:14px/1.45 system-ui,sans-serif;margin:24px auto;max-width:1200px;padding:0 16px;color:#1b1f24;background:#fff}
table{border-collapse:collapse;width:100%;margin:8px 0 24px}
th,td{text-align:left;padding:4px 8px;border-bottom:1px solid #d8dee4;vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.missed{color:#b42318;font-weight:600}.met{color:#8a5a00;font-weight:600}.goal{color:#1a7f37;font-weight:600}
.note{color:#57606a}
figure{display:inline-block;margin:0 24px 20px 0;vertical-align:top}
figcaption{max-width:420px}
svg{display:block;overflow:visible}
svg text{font:11px system-ui,sans-serif;fill:#57606a}
)";

std::string escape(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

std::string figure(const std::optional<double>& value) { return value ? format_figure(*value) : ""; }

std::string side(const std::optional<Series>& series) {
  if (!series) return "<td></td><td class=n></td>";
  const Summary s = series->summary();
  return fmt::format(
      "<td>{}</td><td class=n title=\"min {} p10 {} p90 {} max {}, {} samples\">{} <span class=note>{}–{}</span></td>",
      escape(series->name), format_figure(s.min), format_figure(s.p10), format_figure(s.p90), format_figure(s.max), s.count,
      format_figure(s.median), format_figure(s.p10), format_figure(s.p90));
}

std::string table(const Report& report) {
  std::string html =
      "<table><tr><th>suite<th>what<th>unit<th>ours<th class=n>median, p10–p90<th>theirs<th class=n>median, p10–p90<th>judged"
      "<th class=n>figure<th class=n>minimum<th class=n>goal<th>status</tr>\n";
  for (const Row& row : report.rows) {
    const std::string_view status = to_string(row.status());
    html += fmt::format("<tr><td>{}<td>{}{}<td>{}{}{}<td>{}<td class=n>{}<td class=n>{}<td class=n>{}<td class=\"{}\">{}</tr>\n",
                        escape(row.suite), escape(row.name),
                        row.note.empty() ? "" : fmt::format("<br><span class=note>{}</span>", escape(row.note)), escape(row.unit),
                        side(row.ours), side(row.theirs), to_string(row.measure), figure(row.judged()), figure(row.target.minimum),
                        figure(row.target.goal), status, status);
  }
  return html + "</table>\n";
}

/// A bar for the figure and a mark for each bound, on one scale that starts at 0 or below.
std::string bar(const Row& row) {
  const double value = *row.judged();
  double low = std::min(0.0, value);
  double high = std::max(0.0, value);
  for (const auto& bound : {row.target.minimum, row.target.goal}) {
    if (!bound) continue;
    low = std::min(low, *bound);
    high = std::max(high, *bound);
  }
  const double range = high > low ? (high - low) * 1.05 : 1;
  const auto x = [&](double v) { return (v - low) / range * kBarWidth; };
  const char* colour = row.status() == Status::goal ? "#1a7f37" : row.status() == Status::minimum ? "#bf8700" : "#b42318";
  std::string svg = fmt::format("<svg width={:.0f} height=44><rect x={:.1f} y=14 width={:.1f} height=14 fill=\"{}\"/>", kBarWidth,
                                std::min(x(0), x(value)), std::fabs(x(value) - x(0)), colour);
  const auto line = [&](const std::optional<double>& bound, const char* dash, const char* name, int y) {
    if (!bound) return;
    svg += fmt::format(
        "<line x1={0:.1f} x2={0:.1f} y1=8 y2=34 stroke=\"#1b1f24\" stroke-dasharray=\"{1}\"/><text x={0:.1f} y={2} "
        "text-anchor=middle>{3} {4}</text>",
        x(*bound), dash, y, name, format_figure(*bound));
  };
  line(row.target.minimum, "3 2", "minimum", 44);
  line(row.target.goal, "none", "goal", 6);
  return svg + "</svg>";
}

std::string bars(const Report& report) {
  std::string html;
  for (const Row& row : report.rows) {
    if (row.status() == Status::not_judged) continue;
    html += fmt::format("<figure>{}<figcaption>{}: {} {} <span class=\"{}\">{}</span></figcaption></figure>\n", bar(row),
                        escape(row.name), to_string(row.measure), format_figure(*row.judged()), to_string(row.status()),
                        to_string(row.status()));
  }
  return html;
}

std::string polyline(const Series& series, double high, const char* colour) {
  const std::size_t count = series.samples.size();
  std::string points;
  for (std::size_t i = 0; i < count; ++i) {
    const double x = count == 1 ? 0 : kPlotWidth * static_cast<double>(i) / static_cast<double>(count - 1);
    points += fmt::format("{:.1f},{:.1f} ", x, kPlotHeight - series.samples[i] / high * kPlotHeight);
  }
  return fmt::format("<polyline points=\"{}\" fill=none stroke=\"{}\" stroke-width=1.5 />", points, colour);
}

/// Both sides' samples over the rounds, from 0 up.
std::string lines(const Row& row) {
  constexpr const char* kOurs = "#0969da";
  constexpr const char* kTheirs = "#8250df";
  double high = row.ours->summary().max;
  if (row.theirs) high = std::max(high, row.theirs->summary().max);
  if (!(high > 0)) return {};
  std::string svg = fmt::format(
      "<svg width={0:.0f} height={1:.0f}><line x1=0 x2={0:.0f} y1={1:.0f} y2={1:.0f} stroke=\"#d8dee4\"/><text x=0 y=-2>{2} "
      "{3}</text>",
      kPlotWidth, kPlotHeight, format_figure(high), escape(row.unit));
  svg += polyline(*row.ours, high, kOurs);
  std::string legend = fmt::format("<span style=\"color:{}\">{}</span>", kOurs, escape(row.ours->name));
  if (row.theirs) {
    svg += polyline(*row.theirs, high, kTheirs);
    legend += fmt::format(", <span style=\"color:{}\">{}</span>", kTheirs, escape(row.theirs->name));
  }
  return fmt::format("<figure>{}</svg><figcaption>{}: {}</figcaption></figure>\n", svg, escape(row.name), legend);
}

std::string state(std::string_view when, const std::optional<GpuState>& s) {
  if (!s) return {};
  std::string limits;
  for (const std::string& limit : s->clock_limits) limits += (limits.empty() ? "" : ", ") + limit;
  return fmt::format(
      "<tr><td>{}<td>{} (driver {})<td class=n>{} MHz<td class=n>{} MHz<td class=n>{:.0f} W<td class=n>{} °C<td>{}</tr>\n", when,
      escape(s->name), escape(s->driver), s->sm_mhz, s->memory_mhz, s->power_watts, s->temperature_celsius, escape(limits));
}

std::string driver(int version) {
  return version == 0 ? "no driver" : fmt::format("driver for CUDA {}.{}", version / 1000, version % 1000 / 10);
}

std::string profile(const Profile& p) {
  std::string html = fmt::format(
      "<h3>{}</h3><p>A token takes {:.1f} µs; launch by launch, with an event of {:.2f} µs after each, {:.1f} µs.</p>\n"
      "<table><tr><th>kernel<th class=n>launches<th class=n>µs in all<th class=n>µs each<th class=n>GB/s of weights<th></tr>\n",
      escape(p.model), p.step_us, p.event_us, p.launched_us);
  for (const KernelShare& k : p.kernels) {
    const double share = p.launched_us > 0 ? k.total_us / p.launched_us : 0;
    html += fmt::format(
        "<tr><td>{}<td class=n>{}<td class=n>{:.1f}<td class=n>{:.2f}<td class=n>{}<td><svg width=200 height=12><rect width={:.0f} "
        "height=12 "
        "fill=\"#0969da\"/></svg></tr>\n",
        escape(k.kernel), k.launches, k.total_us, k.launches == 0 ? 0.0 : k.total_us / k.launches,
        k.weight_bytes == 0 ? "" : fmt::format("{:.0f}", k.gb_per_second()), 200 * share);
  }
  return html + "</table>\n";
}

}  // namespace

std::string to_html(const Report& report) {
  std::string html = fmt::format(
      "<!doctype html>\n<html lang=en><meta charset=utf-8><title>metgpu bench, {}</title><style>{}</style>\n<h1>metgpu bench</h1>\n"
      "<p>{}, {} backend, {}, {} · metrale {} · up to {} rounds, both sides in turn<br><code>{}</code></p>\n",
      escape(report.device), kStyle, escape(report.device), escape(report.backend), driver(report.driver_version),
      escape(report.date), escape(report.version), report.rounds, escape(report.command));
  if (report.before || report.after) {
    html +=
        "<table><tr><th><th>GPU<th class=n>SM clock<th class=n>memory clock<th class=n>power<th class=n>temperature<th>limited by"
        "</tr>\n" +
        state("before", report.before) + state("after", report.after) + "</table>\n";
  }
  html += "<h2>Rows</h2>\n" + table(report);
  for (const std::string& failure : report.failures) html += fmt::format("<p class=missed>failed: {}</p>\n", escape(failure));
  html += "<h2>Figures against what they have to reach</h2>\n" + bars(report);
  html += "<h2>Samples in the order they were taken</h2>\n";
  for (const Row& row : report.rows) {
    if (row.ours && row.ours->samples.size() > 1) html += lines(row);
  }
  if (!report.profiles.empty()) html += "<h2>Where a decode step spends its time</h2>\n";
  for (const Profile& p : report.profiles) html += profile(p);
  return html + "</html>\n";
}

}  // namespace metrale::bench
