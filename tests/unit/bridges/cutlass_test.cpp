// SPDX-License-Identifier: Apache-2.0
//
// The CUTLASS bridge without a device: what is refused, and with which words.
#include "metrale/bridges/cutlass.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "metrale/backends/host.h"
#include "metrale/backends/mock.h"

namespace metrale::cutlass {
namespace {

using ::testing::HasSubstr;

DenseCall sound_dense(Precision precision = Precision::bf16) {
  const bool fp8 = precision == Precision::fp8_block;
  return {.precision = precision,
          .m = 7,
          .n = 72,
          .k = 48,
          .act = {0x10000},
          .weight = {0x20000},
          .out = {0x30000},
          .act_scales = fp8 ? DevicePtr{0x40004} : DevicePtr{},
          .weight_scales = fp8 ? DevicePtr{0x50008} : DevicePtr{}};
}

GroupedCall sound_grouped(Precision precision = Precision::bf16) {
  const bool fp8 = precision == Precision::fp8_block;
  return {.precision = precision,
          .experts = 3,
          .rows = 12,
          .tokens = 5,
          .n = 72,
          .k = 48,
          .act = {0x10000},
          .weight = {0x20000},
          .out = {0x40000},
          .act_scales = fp8 ? DevicePtr{0x50004} : DevicePtr{},
          .weight_scales = fp8 ? DevicePtr{0x60008} : DevicePtr{},
          .row_index = {0x70004},
          .offsets = {0x80004},
          .host_offsets = {}};
}

template <class Call>
struct Bad {
  const char* words;
  std::function<void(Call&)> spoil;
};

template <class Call>
void expect_refused(const Call& sound, const std::vector<Bad<Call>>& bads) {
  ASSERT_TRUE(check(sound)) << check(sound).error().to_string();
  for (const Bad<Call>& bad : bads) {
    Call call = sound;
    bad.spoil(call);
    const Result<> answer = check(call);
    ASSERT_FALSE(answer) << bad.words;
    EXPECT_EQ(answer.error().code(), Errc::invalid_argument) << bad.words;
    EXPECT_THAT(answer.error().message(), HasSubstr(bad.words));
  }
}

/// What is wrong in either call.
template <class Call>
std::vector<Bad<Call>> common_faults() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  return {{"none may be 0", [](Call& c) { c.n = 0; }},
          {"none may be 0", [](Call& c) { c.k = 0; }},
          {"n is 71, which is no multiple of 8", [](Call& c) { c.n = 71; }},
          {"k is 47, which is no multiple of 8", [](Call& c) { c.k = 47; }},
          {"act is null", [](Call& c) { c.act = {}; }},
          {"weight is null", [](Call& c) { c.weight = {}; }},
          {"out is null", [](Call& c) { c.out = {}; }},
          {"act at 0x10008 is not aligned to 16", [](Call& c) { c.act = {0x10008}; }},
          {"weight at 0x20002 is not aligned to 16", [](Call& c) { c.weight = {0x20002}; }},
          {"out at 0x10010 overlaps act at 0x10000", [](Call& c) { c.out = c.act.offset(0x10); }},
          {"out at 0x20010 overlaps weight at 0x20000", [](Call& c) { c.out = c.weight.offset(0x10); }},
          {"shorter than their rows", [](Call& c) { c.act_stride = 40; }},
          {"shorter than their rows", [](Call& c) { c.out_stride = 64; }},
          {"no multiples of 16 bytes", [](Call& c) { c.act_stride = 49; }},
          {"no multiples of 16 bytes", [](Call& c) { c.out_stride = 73; }},
          {"go beyond any memory", [](Call& c) { c.act_stride = ~std::uint64_t{15}; }},
          {"go beyond any memory", [](Call& c) { c.out_stride = std::uint64_t{1} << 63; }},
          {"beyond all addresses", [](Call& c) { c.out = {~std::uint64_t{15}}; }},
          {"end at 1073741824", [](Call& c) { c.k = 0x80000000U; }},
          {"end at 1073741824", [](Call& c) { c.n = 0xFFFFFFF8U; }},
          {"precision 9 is none", [](Call& c) { c.precision = static_cast<Precision>(9); }},
          {"alpha is inf", [](Call& c) { c.alpha = kInfinity; }},
          {"alpha is nan", [](Call& c) { c.alpha = std::nanf(""); }}};
}

TEST(CutlassBridge, DenseCallsThatCannotBeMadeAreRefusedOnTheHost) {
  auto faults = common_faults<DenseCall>();
  faults.push_back({"0 rows", [](DenseCall& c) { c.m = 0; }});
  faults.push_back({"end at 1073741824", [](DenseCall& c) { c.m = 0xFFFFFFFFU; }});
  faults.push_back({"bf16 has no scales", [](DenseCall& c) { c.act_scales = {0x40000}; }});
  expect_refused(sound_dense(), faults);
}

TEST(CutlassBridge, GroupedCallsThatCannotBeMadeAreRefusedOnTheHost) {
  auto faults = common_faults<GroupedCall>();
  faults.push_back({"0 rows", [](GroupedCall& c) { c.rows = 0; }});
  faults.push_back({"of 0 tokens", [](GroupedCall& c) { c.tokens = 0; }});
  faults.push_back({"0 experts; a call has 1 to 1024", [](GroupedCall& c) { c.experts = 0; }});
  faults.push_back({"1025 experts", [](GroupedCall& c) { c.experts = 1025; }});
  faults.push_back({"need a row_index", [](GroupedCall& c) { c.row_index = {}; }});
  faults.push_back({"row_index at 0x70002 is not aligned to 4", [](GroupedCall& c) { c.row_index = {0x70002}; }});
  faults.push_back({"offsets at 0x80001 is not aligned to 4", [](GroupedCall& c) { c.offsets = {0x80001}; }});
  faults.push_back({"0 offsets for 3 experts", [](GroupedCall& c) { c.offsets = {}; }});
  faults.push_back({"experts times n end at", [](GroupedCall& c) {
                      c.experts = 1024;
                      c.n = 1U << 21;
                    }});
  faults.push_back({"a launch ends at 2^31", [](GroupedCall& c) {
                      c.experts = 1;
                      c.rows = 1U << 30;
                      c.n = 1U << 15;
                    }});
  expect_refused(sound_grouped(), faults);
}

TEST(CutlassBridge, BlockScaledFp8NeedsItsScalesAndSixteenColumns) {
  expect_refused<DenseCall>(sound_dense(Precision::fp8_block),
                            {{"act_scales is null", [](DenseCall& c) { c.act_scales = {}; }},
                             {"weight_scales is null", [](DenseCall& c) { c.weight_scales = {}; }},
                             {"act_scales at 0x40002 is not aligned to 4", [](DenseCall& c) { c.act_scales = {0x40002}; }},
                             {"k is 56, which is no multiple of 16, as fp8_block needs", [](DenseCall& c) { c.k = 56; }},
                             {"no multiples of 16 bytes", [](DenseCall& c) { c.act_stride = 56; }}});
  expect_refused<GroupedCall>(sound_grouped(Precision::fp8_block),
                              {{"weight_scales is null", [](GroupedCall& c) { c.weight_scales = {}; }}});
}

TEST(CutlassBridge, StridesOfPaddedRowsAreTaken) {
  DenseCall call = sound_dense();
  call.act_stride = 56;
  call.out_stride = 80;
  EXPECT_TRUE(check(call));
  call.m = 1;  // a single row may be followed by nothing
  EXPECT_TRUE(check(call));
}

TEST(CutlassBridge, OffsetsStartAtZeroNeverFallAndEndWithTheRows) {
  const auto answer = [](std::vector<std::int32_t> offsets, std::uint32_t experts, std::uint32_t rows) {
    const Result<> checked = check_offsets(offsets, experts, rows);
    return checked ? std::string("ok") : checked.error().message();
  };
  EXPECT_EQ(answer({0, 3, 3, 12}, 3, 12), "ok");
  EXPECT_EQ(answer({0, 0, 0, 0}, 3, 12), "ok");  // every expert may be empty
  EXPECT_EQ(answer({0, 3, 12}, 3, 12), "3 offsets for 3 experts; there is one more than experts");
  EXPECT_EQ(answer({0, 3, 3, 12, 12}, 3, 12), "5 offsets for 3 experts; there is one more than experts");
  EXPECT_EQ(answer({1, 3, 3, 12}, 3, 12), "offset 0 is 1; the first is 0");
  EXPECT_EQ(answer({-1, 3, 3, 12}, 3, 12), "offset 0 is -1; the first is 0");
  EXPECT_EQ(answer({0, 4, 3, 12}, 3, 12), "offset 2 is 3, below the 4 before it");
  EXPECT_EQ(answer({0, -4, 3, 12}, 3, 12), "offset 1 is -4, below the 0 before it");
  EXPECT_EQ(answer({0, 3, 3, 13}, 3, 12), "offsets end at 13, and there are 12 rows");
  EXPECT_EQ(answer({0, 3, 3, std::numeric_limits<std::int32_t>::max()}, 3, 12), "offsets end at 2147483647, and there are 12 rows");
}

TEST(CutlassBridge, HostOffsetsAreCheckedWithTheCall) {
  GroupedCall call = sound_grouped();
  const std::vector<std::int32_t> sound{0, 5, 5, 12};
  const std::vector<std::int32_t> falling{0, 5, 4, 12};
  call.host_offsets = sound;
  EXPECT_THAT(check(call).error().message(), HasSubstr("not both"));
  call.offsets = {};
  EXPECT_TRUE(check(call));
  call.host_offsets = falling;
  EXPECT_THAT(check(call).error().message(), HasSubstr("below the 5 before it"));
}

TEST(CutlassBridge, PackingThatCannotBeDoneIsRefusedOnTheHost) {
  expect_refused<Nvfp4Call>({.rows = 3, .cols = 32, .plain = {0x1000}, .values = {0x2008}, .scales = {0x3001}},
                            {{"0 by 32", [](Nvfp4Call& c) { c.rows = 0; }},
                             {"3 by 24", [](Nvfp4Call& c) { c.cols = 24; }},
                             {"more than a launch takes", [](Nvfp4Call& c) { c.rows = 0xFFFFFFFFU; }},
                             {"more than a launch takes", [](Nvfp4Call& c) { c.rows = c.cols = 1U << 28; }},
                             {"alpha is 0", [](Nvfp4Call& c) { c.alpha = 0; }},
                             {"alpha is nan", [](Nvfp4Call& c) { c.alpha = std::nanf(""); }},
                             {"plain at 0x1008 is not aligned to 16", [](Nvfp4Call& c) { c.plain = {0x1008}; }},
                             {"values at 0x2004 is not aligned to 8", [](Nvfp4Call& c) { c.values = {0x2004}; }},
                             {"scales is null", [](Nvfp4Call& c) { c.scales = {}; }}});
}

TEST(CutlassBridge, Nvfp4ProductsThatCannotBeMadeAreRefusedOnTheHost) {
  expect_refused<Nvfp4DenseCall>(
      {.m = 3,
       .n = 72,
       .k = 96,
       .act = {0x1000},
       .act_scales = {0x2000},
       .weight = {0x3000},
       .weight_scales = {0x4000},
       .out = {0x5000}},
      {{"none may be 0", [](Nvfp4DenseCall& c) { c.m = 0; }},
       {"k is 80, which is no multiple of 32", [](Nvfp4DenseCall& c) { c.k = 80; }},
       {"n is 71", [](Nvfp4DenseCall& c) { c.n = 71; }},
       {"each ends at 1073741824", [](Nvfp4DenseCall& c) { c.m = 0xFFFFFFFFU; }},
       {"each ends at 1073741824", [](Nvfp4DenseCall& c) { c.out_stride = std::uint64_t{1} << 40; }},
       {"no shorter than the row of 72", [](Nvfp4DenseCall& c) { c.out_stride = 64; }},
       {"it is a multiple of 8", [](Nvfp4DenseCall& c) { c.out_stride = 73; }},
       {"alpha is nan", [](Nvfp4DenseCall& c) { c.alpha = std::nanf(""); }},
       {"weight_scales is null", [](Nvfp4DenseCall& c) { c.weight_scales = {}; }},
       {"act_scales at 0x2008 is not aligned to 16", [](Nvfp4DenseCall& c) { c.act_scales = {0x2008}; }}});
}

TEST(CutlassBridge, WithoutItsBackendItSaysWhatItNeeds) {
  EXPECT_EQ(status().library, "CUTLASS");
  EXPECT_FALSE(status().text.empty());
  const auto host = host::create();
  ASSERT_TRUE(host);
  const auto mock = mock::create();
  ASSERT_TRUE(mock);
  for (GpuBackend* backend : {static_cast<GpuBackend*>(host->get()), static_cast<GpuBackend*>(mock->get())}) {
    const auto bridge = Bridge::create(*backend);
    ASSERT_FALSE(bridge);
    EXPECT_EQ(bridge.error().code(), Errc::unsupported);
    EXPECT_THAT(bridge.error().message(), HasSubstr(status().is_available ? "needs the CUDA backend" : "METRALE_CUTLASS_ROOT"));
  }
}

}  // namespace
}  // namespace metrale::cutlass
