// SPDX-License-Identifier: Apache-2.0
//
// The suites on the host backend, by themselves and against a raw side that only counts: what is asked of a driver, in which order,
// and which rows come of it.
#include "bench/suites.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "metrale/backends/host.h"
#include "metrale/backends/host_kernels.h"

namespace metrale::bench {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::unique_ptr<GpuBackend> make_backend(bool bench_kernels = true) {
  host::Options options;
  options.kernels = host::kernel_tables();
  if (bench_kernels) options.kernels.push_back(host_kernels());
  auto backend = host::create(std::move(options));
  EXPECT_TRUE(backend.has_value());
  return std::move(*backend);
}

/// Takes everything and does nothing.
class CountingRaw final : public RawDevice {
 public:
  std::map<std::string, std::uint64_t> calls;

  std::string device_name() const override { return "counter"; }
  std::string uuid() const override { return "GPU-none"; }
  int driver_version() const override { return 13'000; }
  Result<> synchronize() override { return note("synchronize"); }
  Result<> launch_nops(std::uint32_t count) override { return note("launch_nops", count); }
  Result<> launch_dependent(std::uint32_t count) override { return note("launch_dependent", count); }
  Result<> launch_and_wait(std::uint32_t count) override { return note("launch_and_wait", count); }
  Result<> alloc_free(std::uint64_t, std::uint32_t count) override { return note("alloc_free", count); }
  Result<> alloc_free_groups(std::uint64_t, std::uint32_t group, std::uint32_t count) override {
    return note("alloc_free_groups", std::uint64_t{group} * count);
  }
  bool has_pool() const noexcept override { return false; }
  Result<> open_pool(std::uint32_t) override { return note("open_pool"); }
  Result<double> pool_ring(std::uint32_t, std::span<const std::uint64_t>, std::uint32_t) override { return 100.0; }
  Result<> pinned_alloc_free(std::uint64_t) override { return note("pinned_alloc_free"); }
  Result<std::span<std::byte>> pinned(std::uint64_t bytes) override {
    pinned_.emplace_back(bytes);
    return std::span(pinned_.back());
  }
  Result<> to_host(std::span<const RawCopy> copies) override { return note("to_host", copies.size()); }
  Result<> to_device(std::span<const RawCopy> copies) override { return note("to_device", copies.size()); }
  Result<> to_host_blocking(std::span<const RawCopy> copies) override { return note("to_host_blocking", copies.size()); }
  Result<double> device_copy_seconds(std::uint64_t, std::uint64_t, std::uint64_t) override { return 1e-6; }
  Result<std::uint32_t> make_chain(std::uint32_t, std::uint32_t, bool) override { return 0U; }
  Result<std::optional<std::uint32_t>> make_peer(const PeerProduct&, std::string& why_not) override {
    why_not = "no library here";
    return std::nullopt;
  }
  Result<> launch_graph(std::uint32_t, std::uint32_t count) override { return note("launch_graph", count); }
  Result<double> graph_seconds(std::uint32_t) override { return 1e-6; }
  Result<> reset_marks(std::uint32_t) override {
    calls["mark"] = 0;
    return note("reset_marks");
  }
  Result<> hold(std::uint64_t, std::uint64_t) override { return note("hold"); }
  Result<> mark(std::uint64_t) override { return note("mark"); }
  Result<std::vector<double>> mark_seconds() override { return std::vector<double>(calls["mark"] - 1, 2e-6); }

 private:
  Result<> note(const std::string& what, std::uint64_t count = 1) {
    calls[what] += count;
    return {};
  }
  std::vector<std::vector<std::byte>> pinned_;
};

Options small(std::vector<std::string> names) { return {.suites = std::move(names), .scale = Scale::small(), .model = {}}; }

std::vector<std::string> names_of(const Report& report) {
  std::vector<std::string> names;
  for (const Row& row : report.rows) names.push_back(row.name);
  return names;
}

// ---- measuring ----

TEST(Session, SidesTakeTurnsAndTheFirstOfEachIsDropped) {
  const auto backend = make_backend();
  Scale scale = Scale::small();
  scale.rounds = 3;
  scale.row_seconds = 1'000;
  Session session(*backend, nullptr, scale);
  std::string order;
  double value = 0;
  const Sample ours = [&]() -> Result<double> { return order += 'A', ++value; };
  const Sample theirs = [&]() -> Result<double> { return order += 'B', ++value; };
  ASSERT_TRUE(session.measure({.ours = series("a"), .theirs = series("b")}, ours, theirs).has_value());
  EXPECT_EQ(order, "ABABABAB");
  const Row& row = session.report().rows.front();
  EXPECT_THAT(row.ours->samples, ElementsAre(3, 5, 7));
  EXPECT_THAT(row.theirs->samples, ElementsAre(4, 6, 8));
}

TEST(Session, ARowThatTakesTooLongEndsAfterThreeRounds) {
  const auto backend = make_backend();
  Scale scale = Scale::small();
  scale.rounds = 50;
  scale.row_seconds = 0;
  Session session(*backend, nullptr, scale);
  ASSERT_TRUE(session.measure({.ours = series("a"), .theirs = series("b")}, [] { return Result<double>(1.0); }, {}).has_value());
  EXPECT_EQ(session.report().rows.front().ours->samples.size(), 3U);
  EXPECT_FALSE(session.report().rows.front().theirs.has_value()) << "no samples, no side";
}

TEST(Session, ARowOfShortSamplesGoesOnToTheMostRounds) {
  const auto backend = make_backend();
  Scale scale = Scale::small();
  scale.row_seconds = scale.short_row_seconds = 1'000;
  scale.most_rounds = 40;
  Session session(*backend, nullptr, scale);
  ASSERT_TRUE(session.measure({.ours = series("a")}, [] { return Result<double>(1.0); }, {}).has_value());
  EXPECT_EQ(session.report().rows.front().ours->samples.size(), 40U);
}

TEST(Session, AFailingSampleFailsTheRow) {
  const auto backend = make_backend();
  Session session(*backend, nullptr, Scale::small());
  const Sample fails = []() -> Result<double> { return Error(Errc::internal, "no"); };
  EXPECT_FALSE(session.measure({.ours = series("a"), .theirs = series("b")}, fails, {}).has_value());
  EXPECT_THAT(session.report().rows, IsEmpty());
}

TEST(Session, FilledMemoryIsRandomAndOfModestSize) {
  const auto backend = make_backend();
  Session session(*backend, nullptr, Scale::small());
  const DeviceBuffer buffer = std::move(*DeviceBuffer::create(*backend, 64 << 10));
  ASSERT_TRUE(session.fill(buffer.ptr(), buffer.size_bytes(), 1).has_value());
  ASSERT_TRUE(backend->synchronize(backend->default_stream()).has_value());
  std::vector<std::uint16_t> values(buffer.size_bytes() / 2);
  ASSERT_TRUE(backend->copy_d2h(std::as_writable_bytes(std::span(values)), buffer.ptr()).has_value());
  std::map<std::uint16_t, int> seen;
  for (const std::uint16_t bits : values) {
    ++seen[bits];
    const unsigned exponent = bits >> 7 & 0xff;
    ASSERT_TRUE(exponent >= 0x78 && exponent <= 0x7f) << std::hex << bits;
  }
  EXPECT_GT(seen.size(), 1'500U) << "of the 2,048 values that there are";
}

// ---- suites ----

TEST(Suites, ANameThatIsNoneIsRefusedWithThoseThereAre) {
  const auto backend = make_backend();
  const auto report = run_suites(*backend, nullptr, small({"launch", "lunch"}));
  ASSERT_FALSE(report.has_value());
  EXPECT_EQ(report.error().code(), Errc::invalid_argument);
  EXPECT_THAT(report.error().message(), HasSubstr("'lunch'; there are launch, alloc, copy, graph, gemv"));
}

TEST(Suites, WithoutTheBenchKernelsNothingIsMeasured) {
  const auto backend = make_backend(false);
  const auto report = run_suites(*backend, nullptr, small({"launch"}));
  ASSERT_FALSE(report.has_value());
  EXPECT_EQ(report.error().code(), Errc::not_found);
}

TEST(Suites, EverySuiteRunsOnTheHostByItselfAndLeavesNothing) {
  const auto backend = make_backend();
  std::vector<std::string> all;
  for (const Suite& suite : suites()) all.emplace_back(suite.name);
  Options options = small(all);
  options.model = METRALE_TEST_DATA "/kjv-llama-2m";
  std::vector<std::string> told;
  const auto report = run_suites(*backend, nullptr, options, [&](std::string_view what) { told.emplace_back(what); });
  ASSERT_TRUE(report.has_value()) << report.error().to_string();
  EXPECT_THAT(report->failures, IsEmpty());
  EXPECT_THAT(told,
              ElementsAre("launch", "alloc", "copy", "graph", "gemv", "gemm", "grouped", "attention", "collective", "decode"));
  std::map<std::string, int> rows;
  for (const Row& row : report->rows) {
    ++rows[row.suite];
    EXPECT_FALSE(row.theirs.has_value()) << row.name;
    EXPECT_EQ(row.status(), Status::not_judged) << row.name << ": a host is not what the targets are for";
    EXPECT_TRUE(!row.ours || row.ours->summary().min > 0) << row.name;
  }
  for (const Suite& suite : suites()) EXPECT_GT(rows[std::string(suite.name)], 0) << suite.name;
  EXPECT_EQ(rows["sweep"], 1) << "the sweep is measured once, however many suites need it";
  EXPECT_EQ(backend->live_bytes(), 0U);
  EXPECT_EQ(backend->live_graph_count(), 0U);
}

TEST(Suites, TheRawSideIsAskedForTheSameWork) {
  const auto backend = make_backend();
  CountingRaw raw;
  Options options = small({"launch", "alloc", "copy", "graph", "gemv"});
  options.scale.row_seconds = 1'000;
  const auto report = run_suites(*backend, &raw, options);
  ASSERT_TRUE(report.has_value()) << report.error().to_string();
  EXPECT_THAT(report->failures, IsEmpty());
  EXPECT_EQ(report->device, "counter");
  const std::uint64_t samples = options.scale.rounds + 1;
  EXPECT_EQ(raw.calls["launch_nops"], samples * options.scale.launch_batch * options.scale.launch_batches);
  EXPECT_EQ(raw.calls["alloc_free"], samples * (options.scale.alloc_calls + options.scale.alloc_calls / 16));
  EXPECT_EQ(raw.calls["to_device"], samples * (options.scale.gather_blocks + 1));
  EXPECT_EQ(raw.calls["to_host_blocking"], samples * options.scale.gather_blocks);
  EXPECT_EQ(raw.calls["open_pool"], 0U) << "a driver without a pool is not asked for one";
  for (const Row& row : report->rows) {
    const bool is_product = row.suite == "gemv" && row.measure == Measure::ours;
    EXPECT_EQ(is_product, row.note == "no library here") << row.name;
  }
  EXPECT_THAT(names_of(*report), Contains("launch of 8 arguments, host cost"));
}

TEST(Suites, ASuiteThatFailsIsListedAndTheNextGoesOn) {
  const auto backend = make_backend();
  backend->set_budget(8 << 20);  // enough for the warm-up and launches, not for two large blocks
  Options options = small({"copy", "launch"});
  options.scale.device_copy_bytes = 8 << 20;
  const auto report = run_suites(*backend, nullptr, options);
  ASSERT_TRUE(report.has_value()) << report.error().to_string();
  ASSERT_EQ(report->failures.size(), 1U);
  EXPECT_THAT(report->failures[0], HasSubstr("copy: out_of_memory"));
  EXPECT_THAT(report->rows, Contains(Field(&Row::suite, "launch")));
}

TEST(Suites, AProfileNamesTheKernelsOfAStep) {
  const auto backend = make_backend();
  CountingRaw raw;
  Options options = small({"decode"});
  options.model = METRALE_TEST_DATA "/kjv-llama-2m";
  options.profile = true;
  const auto report = run_suites(*backend, &raw, options);
  ASSERT_TRUE(report.has_value()) << report.error().to_string();
  ASSERT_THAT(report->failures, IsEmpty());
  ASSERT_EQ(report->profiles.size(), 1U);
  const Profile& profile = report->profiles[0];
  std::uint32_t launches = 0;
  std::string kernels;
  for (const KernelShare& share : profile.kernels) {
    launches += share.launches;
    kernels += share.kernel + "; ";
    EXPECT_EQ(share.weight_bytes != 0, share.kernel.starts_with("matmul.") && !share.kernel.starts_with("matmul.gather"))
        << share.kernel;
  }
  EXPECT_DOUBLE_EQ(profile.launched_us, 2.0 * launches);
  EXPECT_DOUBLE_EQ(profile.event_us, 2.0);
  EXPECT_GT(profile.step_us, 0);
  for (const char* name : {"matmul.linear", "matmul.swiglu", "decoder.attend_one"}) EXPECT_THAT(kernels, HasSubstr(name));
}

TEST(Suites, TargetsAreThoseOfTheProject) {
  const auto backend = make_backend();
  CountingRaw raw;
  Options options = small({"launch", "alloc", "copy", "graph"});
  options.scale.judged = true;
  const auto report = run_suites(*backend, &raw, options);
  ASSERT_TRUE(report.has_value());
  std::map<std::string, std::pair<double, double>> targets;
  for (const Row& row : report->rows) {
    if (row.target.minimum && row.target.goal) targets[row.name] = {*row.target.minimum, *row.target.goal};
  }
  EXPECT_EQ(targets["launch of 8 arguments, host cost"], std::pair(90.0, 40.0));
  EXPECT_EQ(targets["alloc + free, 1 MiB"], std::pair(1.03, 1.01));
  EXPECT_EQ(targets["alloc_async + free_async, mixed sizes, 4 threads"], std::pair(0.5, 0.2));
  EXPECT_EQ(targets["replay of 4 nodes, host call"], std::pair(1.05, 1.02));
}

}  // namespace
}  // namespace metrale::bench
