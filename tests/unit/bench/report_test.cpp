// SPDX-License-Identifier: Apache-2.0
#include "bench/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace metrale::bench {
namespace {

using ::testing::HasSubstr;

Row row(Measure measure, std::vector<double> ours, std::vector<double> theirs, Target target, Better better = Better::smaller) {
  return {.suite = "launch",
          .name = "a row",
          .unit = "ns",
          .ours = Series{.name = "ours", .samples = std::move(ours)},
          .theirs = Series{.name = "theirs", .samples = std::move(theirs)},
          .measure = measure,
          .better = better,
          .target = target};
}

TEST(Report, EachMeasureIsMadeOfTheMedians) {
  const std::vector<double> ours{30, 10, 20};
  const std::vector<double> theirs{40, 44, 1};
  EXPECT_DOUBLE_EQ(*row(Measure::ours, ours, theirs, {}).judged(), 20);
  EXPECT_DOUBLE_EQ(*row(Measure::ratio, ours, theirs, {}).judged(), 0.5);
  EXPECT_DOUBLE_EQ(*row(Measure::difference, ours, theirs, {}).judged(), -20);
  EXPECT_DOUBLE_EQ(*row(Measure::speedup, ours, theirs, {}).judged(), 2);
  Row share = row(Measure::share_of_limit, ours, theirs, {});
  EXPECT_FALSE(share.judged().has_value());
  share.figure = 0.75;
  EXPECT_DOUBLE_EQ(*share.judged(), 0.75);
}

TEST(Report, SmallerMeetsItsBoundsFromBelow) {
  const auto status = [](double ours) { return row(Measure::ours, {ours}, {}, {.minimum = 90, .goal = 40}).status(); };
  EXPECT_EQ(status(40), Status::goal);
  EXPECT_EQ(status(40.1), Status::minimum);
  EXPECT_EQ(status(90), Status::minimum);
  EXPECT_EQ(status(90.1), Status::missed);
}

TEST(Report, LargerMeetsItsBoundsFromAbove) {
  const auto status = [](double ours) {
    return row(Measure::ours, {ours}, {}, {.minimum = 235, .goal = 275}, Better::larger).status();
  };
  EXPECT_EQ(status(275), Status::goal);
  EXPECT_EQ(status(274), Status::minimum);
  EXPECT_EQ(status(235), Status::minimum);
  EXPECT_EQ(status(234), Status::missed);
}

TEST(Report, WithoutAMinimumTheGoalDecides) {
  EXPECT_EQ(row(Measure::ours, {0.9}, {}, {.minimum = {}, .goal = 0.91}, Better::larger).status(), Status::missed);
  EXPECT_EQ(row(Measure::ours, {0.92}, {}, {.minimum = {}, .goal = 0.91}, Better::larger).status(), Status::goal);
}

TEST(Report, WhatCannotBeComparedIsNotJudged) {
  EXPECT_EQ(row(Measure::ratio, {1}, {}, {.minimum = 1, .goal = 1}).status(), Status::not_judged);
  EXPECT_EQ(row(Measure::ratio, {}, {1}, {.minimum = 1, .goal = 1}).status(), Status::not_judged);
  EXPECT_EQ(row(Measure::ratio, {1}, {0}, {.minimum = 1, .goal = 1}).status(), Status::not_judged);
  EXPECT_EQ(row(Measure::ratio, {1}, {1}, {}).status(), Status::not_judged);
  EXPECT_EQ(row(Measure::ours, {std::nan("")}, {}, {.minimum = 1, .goal = 1}).status(), Status::missed);
}

TEST(Report, JsonKeepsTheSamplesInTheirOrder) {
  Report report{.version = "1", .command = "metgpu bench", .date = "2030-01-01T00:00:00Z", .backend = "cuda", .device = "GPU"};
  report.rows.push_back(row(Measure::difference, {130, 110, 120}, {80, 70, 75}, {.minimum = 90, .goal = 40}));
  report.rows.back().theirs->name = "cuLaunchKernel";
  report.profiles.push_back({.model = "m", .step_us = 10, .launched_us = 20, .event_us = 1, .kernels = {{"k", 2, 6.0, 24'000}}});
  const nlohmann::json json = nlohmann::json::parse(to_json(report).dump());
  const nlohmann::json& first = json["rows"][0];
  EXPECT_EQ(first["ours"]["samples"], nlohmann::json({130, 110, 120}));
  EXPECT_EQ(first["ours"]["median"], 120);
  EXPECT_EQ(first["theirs"]["name"], "cuLaunchKernel");
  EXPECT_EQ(first["figure"], 45);
  EXPECT_EQ(first["minimum"], 90);
  EXPECT_EQ(first["status"], "met");
  EXPECT_EQ(json["profiles"][0]["kernels"][0]["launches"], 2);
  EXPECT_TRUE(json["before"].is_null());
}

TEST(Report, JsonHasTheStateOfTheCard) {
  Report report;
  report.after = GpuState{.name = "GPU", .driver = "580", .sm_mhz = 1980, .memory_mhz = 3201, .power_watts = 401.5};
  const nlohmann::json json = to_json(report);
  EXPECT_EQ(json["after"]["sm_mhz"], 1980);
  EXPECT_EQ(json["after"]["power_watts"], 401.5);
}

TEST(Report, TheTableHasALineForEachRowAndFailure) {
  Report report;
  report.rows.push_back(row(Measure::ratio, {1}, {2}, {.minimum = 1, .goal = 0.1}));
  report.rows.push_back(row(Measure::ours, {1}, {}, {}));
  report.failures.emplace_back("graph: device_lost: gone");
  const std::string table = to_table(report);
  EXPECT_THAT(table, HasSubstr("ours / theirs"));
  EXPECT_THAT(table, HasSubstr("0.500"));
  EXPECT_THAT(table, HasSubstr("met"));
  EXPECT_THAT(table, HasSubstr("failed: graph: device_lost: gone\n"));
  EXPECT_EQ(std::ranges::count(table, '\n'), 4);
  EXPECT_EQ(report.count(Status::minimum), 1U);
  EXPECT_EQ(report.count(Status::not_judged), 1U);
}

TEST(Report, FiguresHaveThreeOrFourDigits) {
  EXPECT_EQ(format_figure(1234.5), "1234");
  EXPECT_EQ(format_figure(123.45), "123.5");
  EXPECT_EQ(format_figure(12.345), "12.35");
  EXPECT_EQ(format_figure(1.2345), "1.234");
  EXPECT_EQ(format_figure(-0.5), "-0.500");
}

}  // namespace
}  // namespace metrale::bench
