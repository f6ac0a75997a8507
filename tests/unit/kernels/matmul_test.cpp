// SPDX-License-Identifier: Apache-2.0
//
// The host matrix kernels of every instruction set that this machine runs, against float64 sums over weights that the test decodes
// itself from the file formats. Tolerances are relative L2 over all outputs.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "matmul_support.h"

namespace metrale::host::matmul {
namespace {

// `row_bytes` and `can_repack` repeat the block sizes of metrale/dtype.h, since they must be static.
TEST(MatmulPlans, RowBytesAreThoseOfTheType) {
  constexpr auto kLast = static_cast<std::uint8_t>(DType::q6_k);
  int supported = 0;
  for (std::uint8_t i = 0; i <= kLast; ++i) {
    const auto type = static_cast<DType>(i);
    if (!supports(type)) continue;
    ++supported;
    const std::uint32_t block = dtype_facts(type).block_elements;
    for (const std::uint64_t blocks : {1u, 2u, 3u, 7u, 16u, 1000003u}) {
      const std::uint64_t k = blocks * block;
      EXPECT_EQ(row_bytes(type, k), size_bytes(type, k)) << to_string(type) << " k " << k;
    }
    EXPECT_TRUE(can_repack(type, 256)) << to_string(type);
    EXPECT_EQ(can_repack(type, 32), block <= 32) << to_string(type);
    EXPECT_FALSE(can_repack(type, 48)) << to_string(type);
  }
  EXPECT_EQ(supported, static_cast<int>(std::size(kTypes)));
}

class MatmulOn : public testing::TestWithParam<std::tuple<Isa, DType>> {
 protected:
  Isa isa() const { return std::get<0>(GetParam()); }
  DType type() const { return std::get<1>(GetParam()); }
  std::mt19937 random_{7};
};

INSTANTIATE_TEST_SUITE_P(, MatmulOn, testing::Combine(testing::ValuesIn(isas()), testing::ValuesIn(kTypes)), [](const auto& param) {
  return std::string(to_string(std::get<0>(param.param))) + "_" + std::string(to_string(std::get<1>(param.param)));
});

TEST_P(MatmulOn, LinearIsWithinItsToleranceForEveryRowCount) {
  const std::uint32_t k = block_elements(type()) == 256 ? 768 : 672;
  const Weights w(type(), 83, k, true, random_);  // five groups and three single rows
  for (const std::uint32_t m : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 9u, 16u, 17u, 33u, 70u}) {
    const Problem problem(m, k, random_);
    const double error = relative_l2(linear(isa(), problem, w), product(problem.normalised(), m, w));
    EXPECT_LT(error, tolerance(type(), Precision::fast)) << m << " rows";
  }
}

TEST_P(MatmulOn, LinearIsWithinItsToleranceForEveryDepth) {
  const std::uint32_t step = block_elements(type()) == 1 ? 32 : block_elements(type());
  for (const std::uint32_t k : {step, 2 * step, 3 * step, 5 * step, 1536u, 2304u, 4096u + 256u}) {
    const Weights w(type(), 20, k, true, random_);
    for (const std::uint32_t m : {1u, 36u}) {
      const Problem problem(m, k, random_);
      EXPECT_LT(relative_l2(linear(isa(), problem, w), product(problem.normalised(), m, w)), tolerance(type(), Precision::fast))
          << "k " << k << " m " << m;
    }
  }
}

TEST_P(MatmulOn, ManyRowsCrossTheRowBlocksOfAPanel) {
  const std::uint32_t k = 768, m = 1030;
  const Weights w(type(), 17, k, true, random_);
  const Problem problem(m, k, random_);
  EXPECT_LT(relative_l2(linear(isa(), problem, w), product(problem.normalised(), m, w)), tolerance(type(), Precision::fast));
}

TEST_P(MatmulOn, RowsAsTheFileHasThemGiveTheSame) {
  const std::uint32_t k = 512;
  Weights w(type(), 50, k, true, random_);
  for (const std::uint32_t m : {1u, 3u, 20u}) {
    const Problem problem(m, k, random_);
    const std::vector<float> packed = linear(isa(), problem, w);
    Weights plain = w;
    plain.stored = plain.rows, plain.packed = false;
    EXPECT_EQ(linear(isa(), problem, plain), packed) << m << " rows";
  }
}

TEST_P(MatmulOn, ExactIsAFloatProductOfTheDecodedWeights) {
  const std::uint32_t k = 768;
  const Weights w(type(), 40, k, true, random_);
  for (const std::uint32_t m : {1u, 8u, 35u}) {
    Problem problem(m, k, random_);
    problem.precision = Precision::exact;
    EXPECT_LT(relative_l2(linear(isa(), problem, w), product(problem.normalised(), m, w)), 1e-6) << m << " rows";
  }
}

TEST_P(MatmulOn, NormBiasAndResidualAreApplied) {
  const std::uint32_t k = 512;
  const Weights w(type(), 83, k, true, random_);
  for (const std::uint32_t m : {1u, 5u, 40u}) {
    Problem problem(m, k, random_);
    problem.norm = random_floats(k, random_);
    problem.norm_add = 1;
    const std::vector<float> bias = random_floats(w.n, random_), residual = random_floats(std::size_t{m} * w.n, random_);
    std::vector<double> want = product(problem.normalised(), m, w);
    for (std::size_t i = 0; i < want.size(); ++i) want[i] += double{bias[i % w.n]} + residual[i];
    EXPECT_LT(relative_l2(linear(isa(), problem, w, bias, residual), want), tolerance(type(), Precision::fast)) << m << " rows";
  }
}

TEST_P(MatmulOn, EveryGridGivesTheSameBits) {
  const std::uint32_t k = 768;
  const Weights w(type(), 100, k, true, random_);
  for (const std::uint32_t m : {1u, 20u}) {
    const Problem problem(m, k, random_);
    const std::vector<float> one = linear(isa(), problem, w, {}, {}, 1);
    for (const std::uint32_t blocks : {2u, 3u, 7u, 9u, 64u})
      EXPECT_EQ(linear(isa(), problem, w, {}, {}, blocks), one) << blocks << " blocks, " << m << " rows";
  }
}

TEST_P(MatmulOn, Linear4IsFourLinears) {
  const std::uint32_t k = 512;
  const Weights q(type(), 96, k, true, random_), kk(type(), 23, k, true, random_), v(type(), 32, k, false, random_),
      g(type(), 5, k, true, random_);
  const std::vector<float> bias = random_floats(kk.n, random_);
  for (const std::uint32_t m : {1u, 8u, 33u}) {
    Problem problem(m, k, random_);
    problem.norm = random_floats(k, random_);
    LinearParams p = problem.params();
    p.w[0] = q.matrix(q.n), p.w[1] = kk.matrix(kk.n), p.w[2] = v.matrix(v.n), p.w[3] = g.matrix(g.n);
    const Operand operand(isa(), problem, p);
    std::vector<float> yq(std::size_t{m} * q.n), yk(std::size_t{m} * kk.n), yv(std::size_t{m} * v.n), yg(std::size_t{m} * g.n);
    const std::uint64_t none = 0;
    ASSERT_EQ(
        run(isa(), plan_linear("linear4", p, 2), operand.x, operand.norm, address(q.stored), address(kk.stored), address(v.stored),
            address(g.stored), none, address(bias), none, none, address(yq), address(yk), address(yv), address(yg), p),
        nullptr);
    EXPECT_EQ(yq, linear(isa(), problem, q)) << m << " rows";
    EXPECT_EQ(yk, linear(isa(), problem, kk, bias)) << m << " rows";
    EXPECT_EQ(yv, linear(isa(), problem, v)) << m << " rows";
    EXPECT_EQ(yg, linear(isa(), problem, g)) << m << " rows";
  }
}

TEST_P(MatmulOn, SwigluIsSiluOfGateTimesUp) {
  const std::uint32_t k = 768;
  const Weights gate(type(), 19, k, true, random_), up(type(), 19, k, true, random_);
  for (const Precision precision : {Precision::fast, Precision::exact}) {
    for (const std::uint32_t m : {1u, 6u, 40u, 530u}) {
      if (m > 100 && precision == Precision::exact) continue;
      Problem problem(m, k, random_);
      problem.precision = precision;
      problem.norm = random_floats(k, random_);
      for (float& v : problem.norm) v *= 0.1f;
      LinearParams p = problem.params();
      p.w[0] = gate.matrix(gate.n), p.w[1] = up.matrix(up.n);
      const Operand operand(isa(), problem, p);
      std::vector<float> y(std::size_t{m} * gate.n);
      ASSERT_EQ(
          run(isa(), plan_linear("swiglu", p, 2), operand.x, operand.norm, address(gate.stored), address(up.stored), address(y), p),
          nullptr);
      std::vector<double> want = product(problem.normalised(), m, gate);
      const std::vector<double> factor = product(problem.normalised(), m, up);
      for (std::size_t i = 0; i < want.size(); ++i) want[i] = want[i] / (1 + std::exp(-want[i])) * factor[i];
      EXPECT_LT(relative_l2(y, want), 2 * tolerance(type(), precision)) << m << " rows";
    }
  }
}

TEST_P(MatmulOn, FewPreparedRowsAreAllowed) {
  const std::uint32_t k = 512;
  const Weights w(type(), 64, k, true, random_);
  for (const std::uint32_t m : {1u, 8u}) {
    Problem problem(m, k, random_);
    problem.force_prepare = true;
    EXPECT_LT(relative_l2(linear(isa(), problem, w), product(problem.normalised(), m, w)), tolerance(type(), Precision::fast));
  }
}

TEST_P(MatmulOn, GatherReadsRowsBackExactly) {
  const std::uint32_t k = 512, n = 37;
  for (const bool packed : {false, true}) {
    const Weights w(type(), n, k, packed, random_);
    const std::vector<std::int32_t> ids{36, 0, 15, 16, 31, 32, 7};
    const auto m = static_cast<std::uint32_t>(ids.size());
    std::vector<float> y(m * k);
    ASSERT_EQ(run(isa(), plan_gather(m), address(ids), address(w.stored), address(y),
                  GatherParams{m, n, k, static_cast<std::uint32_t>(type()), packed, k}),
              nullptr);
    for (std::uint32_t i = 0; i < m; ++i) {
      const std::vector<double> want =
          decode_row(type(), w.rows.data() + static_cast<std::uint32_t>(ids[i]) * row_bytes(type(), k), k);
      for (std::uint32_t e = 0; e < k; ++e)
        ASSERT_NEAR(y[i * k + e], want[e], 1e-6 * std::abs(want[e]) + 1e-7) << "row " << ids[i] << " element " << e;
    }
  }
}

TEST_P(MatmulOn, RepackMovesBytesAndAddsNone) {
  const std::uint32_t k = 512, n = 35;
  const Weights w(type(), n, k, true, random_);
  ASSERT_EQ(w.stored.size(), w.rows.size());
  const std::size_t grouped = 32 * row_bytes(type(), k);
  EXPECT_TRUE(std::equal(w.stored.begin() + static_cast<std::ptrdiff_t>(grouped), w.stored.end(),
                         w.rows.begin() + static_cast<std::ptrdiff_t>(grouped)))
      << "rows behind the last group must stay";
  if (type() == DType::q8_0) return;  // values change sign representation
  std::vector<std::byte> a = w.stored, b = w.rows;
  std::sort(a.begin(), a.end());
  std::sort(b.begin(), b.end());
  EXPECT_EQ(a, b);
}

class MatmulIsa : public testing::TestWithParam<Isa> {
 protected:
  std::mt19937 random_{11};
};
INSTANTIATE_TEST_SUITE_P(, MatmulIsa, testing::ValuesIn(isas()),
                         [](const auto& param) { return std::string(to_string(param.param)); });

TEST_P(MatmulIsa, DenseRowsMayHaveAnyLength) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    for (const std::uint32_t k : {1u, 7u, 31u, 33u, 100u, 515u}) {
      const Weights w(type, 19, k, false, random_);
      for (const std::uint32_t m : {1u, 20u}) {
        const Problem problem(m, k, random_);
        EXPECT_LT(relative_l2(linear(GetParam(), problem, w), product(problem.normalised(), m, w)), 1e-5)
            << "k " << k << " m " << m;
      }
    }
  }
}

TEST_P(MatmulIsa, RoundsFewActivationsAsPlainCodeDoes) {
  for (const DType type : kTypes) {
    const Weights w(type, 40, 768, true, random_);
    const Problem problem(5, 768, random_);
    const std::vector<float> plain = linear(Isa::generic, problem, w);
    EXPECT_LT(relative_l2(linear(GetParam(), problem, w), {plain.begin(), plain.end()}), 1e-6) << to_string(type);
  }
}

TEST_P(MatmulIsa, NormMayBeBf16) {
  const std::uint32_t k = 96, m = 2;
  const Weights w(DType::f32, 32, k, true, random_);
  Problem problem(m, k, random_);
  std::vector<std::uint16_t> stored(k);
  problem.norm.resize(k);
  for (std::uint32_t i = 0; i < k; ++i) {
    stored[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(random_floats(6, random_)[0]) >> 16);
    problem.norm[i] = std::bit_cast<float>(std::uint32_t{stored[i]} << 16);
  }
  LinearParams p = problem.params();
  p.norm_dtype = static_cast<std::uint32_t>(DType::bf16);
  p.w[0] = w.matrix(w.n);
  std::vector<float> y(std::size_t{m} * w.n);
  const std::uint64_t none = 0;
  ASSERT_EQ(run(GetParam(), plan_linear("linear", p, 2), address(problem.x), address(stored), address(w.stored), none, none,
                address(y), p),
            nullptr);
  EXPECT_LT(relative_l2(y, product(problem.normalised(), m, w)), 1e-5);
}

TEST_P(MatmulIsa, ZeroActivationsGiveZero) {
  const Weights w(DType::q4_1, 32, 64, true, random_);
  for (const std::uint32_t m : {1u, 20u}) {
    Problem problem(m, 64, random_);
    std::fill(problem.x.begin(), problem.x.end(), 0.0f);
    EXPECT_EQ(linear(GetParam(), problem, w), std::vector<float>(std::size_t{m} * w.n, 0.0f));
  }
}

TEST_P(MatmulIsa, Q8WeightsOfMinus128DoNotSaturate) {
  Weights w(DType::q8_0, 16, 64, false, random_);
  for (std::size_t i = 0; i < w.rows.size(); ++i) {
    if (i % 34 >= 2) w.rows[i] = std::byte{0x80};
  }
  w.stored = w.rows;
  Problem problem(2, 64, random_);
  std::fill(problem.x.begin(), problem.x.end(), 3.0f);
  EXPECT_LT(relative_l2(linear(GetParam(), problem, w), product(problem.normalised(), 2, w)), 1e-3);
}

TEST_P(MatmulIsa, WrongLaunchesAreFaults) {
  const Weights w(DType::q4_1, 32, 64, true, random_);
  const Problem problem(9, 64, random_);
  std::vector<float> y(9 * 32, kUntouched);
  const std::uint64_t none = 0;
  const auto launch = [&](const LinearParams& p, std::optional<std::uint32_t> shared = {}) {
    Plan plan = plan_linear("linear", p, 1);
    if (shared) plan.shared_bytes = *shared;
    return run(GetParam(), plan, address(problem.x), none, address(w.stored), none, none, address(y), p);
  };
  LinearParams good = problem.params();
  good.m = 8, good.w[0] = w.matrix(32);
  LinearParams p = good;
  p.m = 9;
  EXPECT_STREQ(launch(p), "matmul: more than 8 rows need prepare");
  p = good, p.k = 48;
  EXPECT_STREQ(launch(p), "matmul: k is no whole number of weight blocks");
  p = good, p.w[0].dtype = static_cast<std::uint32_t>(DType::i8);
  EXPECT_STREQ(launch(p), "matmul: weights of this type are not supported");
  p = good, p.w[0].dtype = 200;
  EXPECT_STREQ(launch(p), "matmul: weights of this type are not supported");
  p = good, p.m = 0;
  EXPECT_STREQ(launch(p), "matmul: m and k must be positive");
  p = good, p.precision = 7;
  EXPECT_STREQ(launch(p), "matmul: unknown precision");
  EXPECT_STREQ(launch(good, 100), "matmul: too little shared memory");
  EXPECT_EQ(y, std::vector<float>(9 * 32, kUntouched));
  EXPECT_EQ(launch(good), nullptr);

  p = good, p.w[1] = {32, static_cast<std::uint32_t>(DType::bf16), 0, 32};
  EXPECT_STREQ(run(GetParam(), plan_linear("linear4", p, 1), address(problem.x), none, address(w.stored), address(w.stored), none,
                   none, none, none, none, none, address(y), address(y), none, none, p),
               "matmul: the weights of one launch need different activations");
  for (const std::int32_t id : {-1, 32}) {
    const std::vector<std::int32_t> ids{id};
    EXPECT_STREQ(run(GetParam(), plan_gather(1), address(ids), address(w.stored), address(y),
                     GatherParams{1, 32, 64, good.w[0].dtype, 1, 64}),
                 "matmul gather: an id is outside the matrix");
  }
}

TEST(MatmulSelect, NeverExceedsTheLimit) {
  for (const Isa limit : {Isa::generic, Isa::avx2, Isa::avx512, Isa::amx}) EXPECT_LE(select_isa(limit), limit);
  EXPECT_EQ(select_isa(Isa::generic), Isa::generic);
}

TEST(MatmulSelect, EveryTableHasTheSameKernelsWithTheSameArguments) {
  const auto reference = kernels(Isa::generic);
  for (const Isa isa : isas()) {
    const auto table = kernels(isa);
    ASSERT_EQ(table.size(), reference.size());
    for (std::size_t i = 0; i < table.size(); ++i) {
      EXPECT_EQ(table[i].function, reference[i].function);
      EXPECT_TRUE(std::ranges::equal(table[i].param_bytes, reference[i].param_bytes));
      EXPECT_NE(table[i].fn, nullptr);
    }
  }
}

TEST(MatmulFacts, RowBytesAgreeWithTheTypeTable) {
  for (const DType type : kTypes) EXPECT_EQ(row_bytes(type, 512), size_bytes(type, 512)) << to_string(type);
}

}  // namespace
}  // namespace metrale::host::matmul
