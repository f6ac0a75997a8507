// SPDX-License-Identifier: Apache-2.0
#include "metrale/switches.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "core/switches_parse.h"

namespace metrale {
namespace {

using Environment = std::map<std::string, std::string, std::less<>>;

detail::EnvLookup lookup(Environment environment) {
  return [environment = std::move(environment)](std::string_view name) -> std::optional<std::string> {
    const auto it = environment.find(name);
    if (it == environment.end()) return std::nullopt;
    return it->second;
  };
}

SwitchReport row(const detail::ParsedSwitches& parsed, std::string_view name) {
  const auto it = std::find_if(parsed.report.begin(), parsed.report.end(), [&](const SwitchReport& r) { return r.name == name; });
  if (it == parsed.report.end()) return {name, "", "missing", "missing"};
  return *it;
}

TEST(SwitchesTest, EmptyEnvironmentGivesTheDefaults) {
  const detail::ParsedSwitches parsed = detail::parse_switches(lookup({}));
  const Switches& s = parsed.values;
  EXPECT_EQ(s.redzone_bytes, 0u);
  EXPECT_EQ(s.redzone_fill, 0xEE);
  EXPECT_EQ(s.redzone_min_idx, 0u);
  EXPECT_FALSE(s.redzone_trace_idx.has_value());
  EXPECT_FALSE(s.unchecked || s.debug_sync_kernels || s.kv_poison || s.kv_trace || s.ssm_tail_ckpt);
  EXPECT_EQ(s.host_isa, "");
  EXPECT_EQ(s.host_threads, 0u);
  EXPECT_EQ(s.kernel_path, "");
  EXPECT_EQ(s.cublaslt_cache, "");
  EXPECT_EQ(s.rendezvous, "");
  EXPECT_EQ(s.cuda_device, 0u);
  EXPECT_EQ(parsed.report.size(), 15u);
  for (const SwitchReport& r : parsed.report) {
    EXPECT_EQ(r.source, "default") << r.name;
    EXPECT_FALSE(r.summary.empty());
    EXPECT_FALSE(r.value.empty());
  }
}

TEST(SwitchesTest, EachSwitchReadsItsVariable) {
  const detail::ParsedSwitches parsed = detail::parse_switches(lookup({{"METRALE_REDZONE", "100"},
                                                                       {"METRALE_REDZONE_FILL", "171"},
                                                                       {"METRALE_REDZONE_MIN_IDX", "12"},
                                                                       {"METRALE_REDZONE_TRACE_IDX", "0"},
                                                                       {"METRALE_UNCHECKED", "1"},
                                                                       {"METRALE_DEBUG_SYNC_KERNELS", "1"},
                                                                       {"METRALE_KV_POISON", "1"},
                                                                       {"METRALE_KV_TRACE", "1"},
                                                                       {"METRALE_SSM_TAIL_CKPT", "1"},
                                                                       {"METRALE_HOST_ISA", "avx2"},
                                                                       {"METRALE_HOST_THREADS", "3"},
                                                                       {"METRALE_CUDA_DEVICE", "1"},
                                                                       {"METRALE_KERNEL_PATH", "my/kernels"},
                                                                       {"METRALE_CUBLASLT_CACHE", "my/algorithms"},
                                                                       {"METRALE_RENDEZVOUS", "file:///shared/id"}}));
  const Switches& s = parsed.values;
  EXPECT_EQ(s.redzone_bytes, 112u) << "rounded up to 16";
  EXPECT_EQ(s.redzone_fill, 171);
  EXPECT_EQ(s.redzone_min_idx, 12u);
  EXPECT_EQ(s.redzone_trace_idx, 0u);
  EXPECT_TRUE(s.unchecked && s.debug_sync_kernels && s.kv_poison && s.kv_trace && s.ssm_tail_ckpt);
  EXPECT_EQ(s.host_isa, "avx2");
  EXPECT_EQ(s.host_threads, 3u);
  EXPECT_EQ(s.cuda_device, 1u);
  EXPECT_EQ(s.kernel_path, "my/kernels");
  EXPECT_EQ(s.cublaslt_cache, "my/algorithms");
  EXPECT_EQ(s.rendezvous, "file:///shared/id");
  for (const SwitchReport& r : parsed.report) EXPECT_EQ(r.source, "environment") << r.name;
  EXPECT_EQ(row(parsed, "METRALE_REDZONE").value, "112");
  EXPECT_EQ(row(parsed, "METRALE_UNCHECKED").value, "on");
}

TEST(SwitchesTest, ValuesThatArmNothingAreIgnoredAndSaidSo) {
  for (const char* text : {"", "true", "yes", "01", "1 ", " 1", "on", "2", "-1"}) {
    const detail::ParsedSwitches parsed = detail::parse_switches(lookup({{"METRALE_UNCHECKED", text}}));
    EXPECT_FALSE(parsed.values.unchecked) << text;
    EXPECT_EQ(row(parsed, "METRALE_UNCHECKED").source, "environment, ignored") << text;
  }
  for (const char* text : {"", "x", "16k", "0x10", "-16", "1073741825", "99999999999999999999999"}) {
    const detail::ParsedSwitches parsed =
        detail::parse_switches(lookup({{"METRALE_REDZONE", text}, {"METRALE_HOST_THREADS", text}}));
    EXPECT_EQ(parsed.values.redzone_bytes, 0u) << text;
    EXPECT_EQ(parsed.values.host_threads, 0u) << text;
    EXPECT_EQ(row(parsed, "METRALE_REDZONE").source, "environment, ignored") << text;
  }
  const detail::ParsedSwitches parsed =
      detail::parse_switches(lookup({{"METRALE_REDZONE_FILL", "256"}, {"METRALE_HOST_ISA", "AVX2"}}));
  EXPECT_EQ(parsed.values.redzone_fill, 0xEE);
  EXPECT_EQ(parsed.values.host_isa, "");
}

TEST(SwitchesTest, ProcessReportListsEverySwitchOnce) {
  std::set<std::string_view> names;
  for (const SwitchReport& r : switch_report()) names.insert(r.name);
  EXPECT_EQ(names.size(), switch_report().size());
  EXPECT_EQ(names.size(), 17u);
  EXPECT_TRUE(names.contains("METRALE_HERMETIC") && names.contains("METRALE_SSM_TAIL_MIDCHUNK"));
}

detail::SetOnceSwitch midchunk() { return {"MIDCHUNK", "", true, "0"}; }
detail::SetOnceSwitch hermetic_like() { return {"HERMETIC", "", false, "1"}; }

TEST(SetOnceSwitchTest, FirstReadTakesTheEnvironmentAndKeepsIt) {
  detail::SetOnceSwitch s = midchunk();
  EXPECT_FALSE(s.read(lookup({{"MIDCHUNK", "0"}})));
  EXPECT_FALSE(s.read(lookup({}))) << "cached";
  s.publish(true);
  EXPECT_FALSE(s.read(lookup({}))) << "the first read wins over a later publication";
  EXPECT_EQ(s.report(lookup({})).source, "environment");
}

TEST(SetOnceSwitchTest, FirstPublishedValueWins) {
  detail::SetOnceSwitch s = midchunk();
  s.publish(false);
  s.publish(true);
  EXPECT_FALSE(s.read(lookup({{"MIDCHUNK", "1"}})));
  EXPECT_EQ(s.report(lookup({})).source, "program");
}

TEST(SetOnceSwitchTest, OnlyTheExactTextArms) {
  EXPECT_TRUE(midchunk().read(lookup({})));
  EXPECT_TRUE(midchunk().read(lookup({{"MIDCHUNK", "off"}})));
  EXPECT_TRUE(midchunk().read(lookup({{"MIDCHUNK", "1"}})));
  EXPECT_FALSE(hermetic_like().read(lookup({})));
  EXPECT_FALSE(hermetic_like().read(lookup({{"HERMETIC", "true"}})));
  EXPECT_TRUE(hermetic_like().read(lookup({{"HERMETIC", "1"}})));
}

TEST(SetOnceSwitchTest, ReportDoesNotFixTheValue) {
  detail::SetOnceSwitch s = hermetic_like();
  EXPECT_EQ(s.report(lookup({})).value, "off");
  EXPECT_EQ(s.report(lookup({{"HERMETIC", "maybe"}})).source, "environment, ignored");
  s.publish(true);
  EXPECT_TRUE(s.read(lookup({})));
  EXPECT_EQ(s.report(lookup({})).value, "on");
}

// One test holds both process-wide switches, since a value once read stays for the life of the process.
TEST(SetOnceSwitchTest, ProcessSwitchesPublishOnlyWhatTheirRuleAllows) {
  set_ssm_tail_midchunk(std::nullopt);
  set_ssm_tail_midchunk(false);
  set_ssm_tail_midchunk(true);
  EXPECT_FALSE(ssm_tail_midchunk());
  set_hermetic(false);
  set_hermetic(true);
  EXPECT_TRUE(hermetic());
}

TEST(SsmTailBoundaryTest, IsTheLastMultipleStrictlyBelow) {
  EXPECT_EQ(ssm_tail_boundary(17, 16), 16u);
  EXPECT_EQ(ssm_tail_boundary(32, 16), 16u);
  EXPECT_EQ(ssm_tail_boundary(33, 16), 32u);
  EXPECT_EQ(ssm_tail_boundary(16, 16), std::nullopt);
  EXPECT_EQ(ssm_tail_boundary(0, 16), std::nullopt);
  EXPECT_EQ(ssm_tail_boundary(5, 0), std::nullopt);
  EXPECT_EQ(ssm_tail_boundary(~0ull, 1), ~0ull - 1);
}

}  // namespace
}  // namespace metrale
