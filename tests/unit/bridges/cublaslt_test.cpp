// SPDX-License-Identifier: Apache-2.0
//
// The cuBLASLt bridge without a device: what is refused, and with which words; classes of rows; scales.
#include "metrale/bridges/cublaslt.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "metrale/backends/host.h"
#include "metrale/backends/mock.h"

namespace metrale::cublaslt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Call sound(Precision precision = Precision::bf16) {
  const bool fp8 = precision != Precision::bf16;
  Call call;
  call.precision = precision;
  call.m = 8;
  call.n = 72;
  call.k = 512;
  call.act = {0x10000};
  call.weight = {0x20000};
  call.out = {0x40000};
  if (fp8) call.act_scales = {0x50000};
  if (fp8) call.weight_scales = {0x60000};
  return call;
}

struct Bad {
  const char* words;
  std::function<void(Call&)> spoil;
};

void expect_refused(const Call& call, const std::vector<Bad>& bads) {
  ASSERT_TRUE(check(call)) << check(call).error().to_string();
  for (const Bad& bad : bads) {
    Call spoilt = call;
    bad.spoil(spoilt);
    const Result<> answer = check(spoilt);
    ASSERT_FALSE(answer) << bad.words;
    EXPECT_EQ(answer.error().code(), Errc::invalid_argument) << bad.words;
    EXPECT_THAT(answer.error().message(), HasSubstr(bad.words));
  }
}

TEST(CublasLtCheck, Bf16) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  expect_refused(sound(),
                 {{"m is 0", [](Call& c) { c.m = 0; }},
                  {"n is 0", [](Call& c) { c.n = 0; }},
                  {"k is 0", [](Call& c) { c.k = 0; }},
                  {"batch is 0", [](Call& c) { c.batch = 0; }},
                  {"m is 4294967295", [](Call& c) { c.m = ~0U; }},
                  {"k is 516; in bf16 it is a multiple of 8", [](Call& c) { c.k = 516; }},
                  {"act is null", [](Call& c) { c.act = {}; }},
                  {"weight is null", [](Call& c) { c.weight = {}; }},
                  {"out is null", [](Call& c) { c.out = {}; }},
                  {"act at 0x10008 is not aligned to 16", [](Call& c) { c.act = {0x10008}; }},
                  {"out at 0x40002 is not aligned to 16", [](Call& c) { c.out = {0x40002}; }},
                  {"bias at 0x70004 is not aligned", [](Call& c) { c.bias = {0x70004}; }},
                  {"residual at 0x70004 is not aligned", [](Call& c) { c.residual = {0x70004}; }},
                  {"bf16 has no scales", [](Call& c) { c.act_scales = {0x50000}; }},
                  {"act_stride 504", [](Call& c) { c.act_stride = 504; }},
                  {"act_stride 515", [](Call& c) { c.act_stride = 515; }},
                  {"out_stride 71 must be at least n, 72", [](Call& c) { c.out_stride = 71; }},
                  {"residual_stride 8 must be at least n", [](Call& c) { c.residual = {0x70000}, c.residual_stride = 8; }},
                  {"out_stride 18446744073709551608", [](Call& c) { c.out_stride = ~std::uint64_t{7}; }},
                  {"larger than any memory", [](Call& c) { c.m = 1U << 30, c.act_stride = 1U << 30; }},
                  {"out_batch_stride 0 must be at least 576", [](Call& c) { c.batch = 2; }},
                  {"must be multiples of 8", [](Call& c) { c.batch = 2, c.out_batch_stride = 576, c.weight_batch_stride = 4; }},
                  {"a batch stride of", [](Call& c) { c.batch = 2, c.out_batch_stride = ~std::uint64_t{0}; }},
                  {"alpha inf", [](Call& c) { c.alpha = kInfinity; }},
                  {"beta nan", [](Call& c) { c.beta = std::nanf(""); }},
                  {"out of type f16", [](Call& c) { c.out_type = DType::f16; }},
                  {"overlaps act", [](Call& c) { c.out = {0x11ff0}; }},
                  {"overlaps weight", [](Call& c) { c.out = {0x20000}; }},
                  {"overlaps residual", [](Call& c) { c.residual = {0x40010}; }},
                  {"overlaps residual", [](Call& c) { c.residual = c.out, c.residual_stride = 80; }},
                  {"ends beyond all addresses", [](Call& c) { c.out = {~std::uint64_t{0xF}}; }},
                  {"weight at 0xfffffffffffffff0 ends beyond", [](Call& c) { c.weight = {~std::uint64_t{0xF}}; }}});
}

TEST(CublasLtCheck, TheResidualMayBeTheOutputAndF32AndStridesAreSound) {
  Call call = sound();
  call.residual = call.out;
  EXPECT_TRUE(check(call));
  call.out_stride = call.residual_stride = 80;
  call.act_stride = 520;
  call.out_type = DType::f32;
  call.epilogue = Epilogue::gelu;
  EXPECT_TRUE(check(call)) << check(call).error().to_string();
  call.n = 71;
  EXPECT_TRUE(check(call)) << "bf16 takes any n";
}

TEST(CublasLtCheck, Fp8) {
  for (const Precision precision : {Precision::fp8_row, Precision::fp8_block}) {
    expect_refused(sound(precision), {{"k is 520; in fp8", [](Call& c) { c.k = 520; }},
                                      {"n is 76; in fp8", [](Call& c) { c.n = 76; }},
                                      {"act_scales is null", [](Call& c) { c.act_scales = {}; }},
                                      {"weight_scales is null", [](Call& c) { c.weight_scales = {}; }},
                                      {"weight_scales at 0x60004", [](Call& c) { c.weight_scales = {0x60004}; }},
                                      {"act_scales at 0x50002", [](Call& c) { c.act_scales = {0x50002}; }},
                                      {"overlaps weight_scales", [](Call& c) { c.weight_scales = {0x40000}; }},
                                      {"out of type f32", [](Call& c) { c.out_type = DType::f32; }},
                                      {"has no batch, residual or epilogue", [](Call& c) { c.batch = 2; }},
                                      {"has no batch, residual or epilogue", [](Call& c) { c.residual = {0x70000}; }},
                                      {"has no batch, residual or epilogue", [](Call& c) { c.epilogue = Epilogue::relu; }},
                                      {"act_stride 520", [](Call& c) { c.act_stride = 520; }}});
  }
  expect_refused(sound(Precision::fp8_block),
                 {{"k is 640, that is 5 scales to a row", [](Call& c) { c.k = 640; }},
                  {"k is 128, that is 1 scales to a row", [](Call& c) { c.k = 128; }},
                  {"act_scales at 0x50004", [](Call& c) { c.scales_transposed = true, c.act_scales = {0x50004}; }}});
  Call call = sound(Precision::fp8_block);
  call.k = 400;
  call.act_scales = {0x50004};
  EXPECT_TRUE(check(call)) << "four blocks, the last of them short; the bridge reads the scales itself";
}

TEST(CublasLtRows, ClassesAreAtMostAQuarterLarger) {
  for (std::uint32_t m = 1; m < 5'000; ++m) {
    const std::uint32_t top = m_class(m);
    ASSERT_GE(top, m);
    ASSERT_LE(top * 4, m * 5) << m;
    ASSERT_EQ(m_class(top), top) << "the largest of a class is in it";
  }
  EXPECT_THAT((std::vector{m_class(1), m_class(8), m_class(9), m_class(33), m_class(2'048), m_class(2'049)}),
              ElementsAre(1, 8, 10, 40, 2'048, 2'560));
}

TEST(CublasLtScales, AreTransposedAndPaddedWithZeros) {
  const std::vector<float> scales{1, 2, 3, 4, 5, 6};  // 3 rows of 2
  EXPECT_THAT(transpose_scales(scales, 3, 2), ElementsAre(1, 3, 5, 0, 2, 4, 6, 0));
  EXPECT_THAT(transpose_scales(scales, 2, 2), IsEmpty());
}

TEST(CublasLtScales, BothLayoutsCoincideAtFewPlaces) {
  std::vector<float> scales(64 * 40);
  for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<float>(i);
  const std::vector<float> transposed = transpose_scales(scales, 64, 40);
  ASSERT_EQ(transposed.size(), scales.size());
  int same = 0;
  for (std::size_t i = 0; i < scales.size(); ++i) same += scales[i] == transposed[i];
  EXPECT_EQ(same, 4);
}

TEST(CublasLtBridge, OtherBackendsAreRefused) {
  for (const bool host : {true, false}) {
    auto backend = host ? host::create({}) : mock::create();
    ASSERT_TRUE(backend);
    const auto bridge = CublasLt::create(**backend);
    ASSERT_FALSE(bridge);
    EXPECT_EQ(bridge.error().code(), Errc::unsupported);
    EXPECT_FALSE(bridge.error().message().empty());
  }
  EXPECT_EQ(status().library, "cuBLASLt");
  EXPECT_FALSE(status().text.empty());
}

}  // namespace
}  // namespace metrale::cublaslt
