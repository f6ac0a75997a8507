// SPDX-License-Identifier: Apache-2.0
#include "bench/html.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace metrale::bench {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::size_t count(const std::string& text, std::string_view part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

Report sample() {
  Report report{
      .version = "1", .command = "metgpu bench --suite launch", .date = "d", .backend = "cuda", .device = "A <GPU> & more"};
  report.rows.push_back({.suite = "launch",
                         .name = "cost \"x\"",
                         .unit = "ns",
                         .ours = Series{.name = "launch_typed", .samples = {120, 130, 125}},
                         .theirs = Series{.name = "cuLaunchKernel", .samples = {100, 105, 95}},
                         .measure = Measure::difference,
                         .target = {.minimum = 90, .goal = 40}});
  report.rows.push_back({.suite = "sweep", .name = "sweep", .unit = "GB/s", .ours = Series{.name = "touch", .samples = {4'500}}});
  return report;
}

TEST(Html, TextOfTheReportCannotBecomeMarkup) {
  const std::string page = to_html(sample());
  EXPECT_THAT(page, HasSubstr("A &lt;GPU&gt; &amp; more"));
  EXPECT_THAT(page, HasSubstr("cost &quot;x&quot;"));
  EXPECT_THAT(page, Not(HasSubstr("<GPU>")));
}

TEST(Html, TheDriversVersionIsWrittenAsPeopleWriteIt) {
  Report report = sample();
  EXPECT_THAT(to_html(report), HasSubstr("no driver"));
  report.driver_version = 12'040;
  EXPECT_THAT(to_html(report), HasSubstr("driver for CUDA 12.4,"));
}

TEST(Html, JudgedRowsHaveABarWithBothBounds) {
  const std::string page = to_html(sample());
  EXPECT_EQ(count(page, "<rect "), 1U) << "a bar for the row that has bounds, none for the sweep";
  EXPECT_THAT(page, HasSubstr("minimum 90"));
  EXPECT_THAT(page, HasSubstr("goal 40"));
}

TEST(Html, SeriesOfSeveralSamplesAreDrawnForBothSides) { EXPECT_EQ(count(to_html(sample()), "<polyline "), 2U); }

TEST(Html, ThePageNeedsNothingElse) {
  const std::string page = to_html(sample());
  for (const char* outside : {"http:", "https:", "<script", "<link", "src="}) EXPECT_THAT(page, Not(HasSubstr(outside)));
  for (const char* tag : {"svg", "table", "figure", "style"}) {
    EXPECT_EQ(count(page, std::string("<") + tag), count(page, std::string("</") + tag)) << tag;
  }
}

TEST(Html, ProfilesAndFailuresAreShown) {
  Report report = sample();
  report.failures.emplace_back("copy: internal: <no>");
  report.profiles.push_back(
      {.model = "m", .step_us = 10, .launched_us = 20, .event_us = 1, .kernels = {{"matmul.linear", 2, 6.0, 24'000}}});
  const std::string page = to_html(report);
  EXPECT_THAT(page, HasSubstr("failed: copy: internal: &lt;no&gt;"));
  EXPECT_THAT(page, HasSubstr("matmul.linear"));
  EXPECT_THAT(page, HasSubstr("<td class=n>4<td>")) << "24,000 bytes in 6 us";
}

TEST(Html, AFigureOfZeroOrBelowHasABarToo) {
  Report report = sample();
  report.rows[0].ours->samples = {90};
  report.rows[0].theirs->samples = {100};
  const std::string page = to_html(report);
  EXPECT_THAT(page, HasSubstr("-10"));
  EXPECT_THAT(page, Not(HasSubstr("nan")));
  EXPECT_THAT(page, Not(HasSubstr("width=-")));
}

}  // namespace
}  // namespace metrale::bench
