// SPDX-License-Identifier: Apache-2.0
//
// The host matrix kernels of every instruction set that this machine runs, against float64 sums over weights that the test decodes
// itself from the file formats. Tolerances are relative L2 over all outputs: 1e-5 where everything is f32, 1.5e-2 where activations
// are rounded to int8 blocks (usually 6e-3), 4e-3 where both sides are rounded to bf16.
#include "kernels/host/matmul/matmul.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

namespace metrale::host::matmul {
namespace {

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16, DType::q4_0, DType::q4_1, DType::q8_0, DType::q4_k, DType::q6_k};

std::vector<Isa> isas() {
  std::vector<Isa> found;
  for (const Isa isa : {Isa::generic, Isa::avx2, Isa::avx512, Isa::amx}) {
    if (select_isa(isa) == isa) found.push_back(isa);
  }
  return found;
}

std::uint16_t to_half(float v) {  // truncates; what is too small becomes 0
  const auto bits = std::bit_cast<std::uint32_t>(v);
  const auto exponent = static_cast<int>(bits >> 23 & 255) - 127 + 15;
  if (exponent <= 0) return 0;
  return static_cast<std::uint16_t>((bits >> 16 & 0x8000) | static_cast<std::uint32_t>(exponent) << 10 | (bits >> 13 & 0x3ff));
}

double from_half(const std::byte* p) {
  std::uint16_t h;
  std::memcpy(&h, p, 2);
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const double value = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return h & 0x8000 ? -value : value;
}

std::uint32_t block_elements(DType type) { return type == DType::q4_k || type == DType::q6_k ? 256 : is_quantised(type) ? 32 : 1; }

/// Weights as a file has them: random bytes with scales of a sensible size.
std::vector<std::byte> random_weights(DType type, std::uint32_t n, std::uint32_t k, std::mt19937& random) {
  std::normal_distribution<float> normal(0, 0.5f);
  std::uniform_real_distribution<float> scale(0.002f, 0.02f);
  std::vector<std::byte> w(n * row_bytes(type, k));
  for (std::byte& b : w) b = static_cast<std::byte>(random());
  const std::size_t blocks = w.size() / facts(type).block_bytes;
  for (std::size_t i = 0; i < blocks; ++i) {
    std::byte* p = w.data() + i * facts(type).block_bytes;
    const auto put = [&](std::size_t at, float v) {
      const std::uint16_t h = to_half(v);
      std::memcpy(p + at, &h, 2);
    };
    switch (type) {
      case DType::f32: {
        const float v = normal(random);
        std::memcpy(p, &v, 4);
        break;
      }
      case DType::f16: put(0, normal(random) + 1e-3f); break;
      case DType::bf16: {
        const auto v = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(normal(random)) >> 16);
        std::memcpy(p, &v, 2);
        break;
      }
      case DType::q4_0:
      case DType::q8_0: put(0, scale(random)); break;
      case DType::q4_1:
      case DType::q4_k:
        put(0, scale(random));
        put(2, (type == DType::q4_1 ? -8 : 1) * scale(random));
        break;
      default: put(208, scale(random) / 32); break;
    }
  }
  return w;
}

/// One row as numbers, straight from the format's description.
std::vector<double> decode_row(DType type, const std::byte* row, std::uint32_t k) {
  std::vector<double> out(k);
  const auto byte = [&](std::size_t i) { return static_cast<int>(row[i]); };
  for (std::uint32_t e = 0; e < k; ++e) {
    const std::size_t block = e / block_elements(type) * facts(type).block_bytes, i = e % block_elements(type);
    const std::byte* p = row + block;
    switch (type) {
      case DType::f32: {
        float v;
        std::memcpy(&v, p, 4);
        out[e] = v;
        break;
      }
      case DType::f16: out[e] = from_half(p); break;
      case DType::bf16: {
        std::uint16_t v;
        std::memcpy(&v, p, 2);
        out[e] = std::bit_cast<float>(std::uint32_t{v} << 16);
        break;
      }
      case DType::q4_0: out[e] = from_half(p) * ((byte(block + 2 + i % 16) >> (i / 16 * 4) & 15) - 8); break;
      case DType::q4_1: out[e] = from_half(p) * (byte(block + 4 + i % 16) >> (i / 16 * 4) & 15) + from_half(p + 2); break;
      case DType::q8_0: out[e] = from_half(p) * static_cast<std::int8_t>(byte(block + 2 + i)); break;
      case DType::q4_k: {
        const std::size_t j = i / 32, s = block + 4;
        const int scale = j < 4 ? byte(s + j) % 64 : byte(s + j + 4) % 16 + byte(s + j - 4) / 64 * 16;
        const int min = j < 4 ? byte(s + j + 4) % 64 : byte(s + j + 4) / 16 + byte(s + j) / 64 * 16;
        const int q = byte(block + 16 + j / 2 * 32 + i % 32) >> (j % 2 * 4) & 15;
        out[e] = from_half(p) * scale * q - from_half(p + 2) * min;
        break;
      }
      default: {
        const std::size_t half = i / 128, quarter = i % 128 / 32, l = i % 32;
        const int low = byte(block + 64 * half + quarter % 2 * 32 + l) >> (quarter / 2 * 4) & 15;
        const int high = byte(block + 128 + 32 * half + l) >> (2 * quarter) & 3;
        out[e] = from_half(p + 208) * static_cast<std::int8_t>(byte(block + 192 + i / 16)) * (low + 16 * high - 32);
        break;
      }
    }
  }
  return out;
}

/// Runs every block of a launch, last block first, with exactly the planned shared memory. Returns the fault, or null.
template <class... Args>
const char* run(Isa isa, const Plan& plan, const Args&... args) {
  const void* params[] = {static_cast<const void*>(&args)...};
  for (const HostKernel& kernel : kernels(isa)) {
    if (kernel.module != kModule || kernel.function != plan.function) continue;
    EXPECT_EQ(kernel.param_bytes.size(), sizeof...(args));
    const std::size_t sizes[] = {sizeof(args)...};
    for (std::size_t i = 0; i < sizeof...(args); ++i) EXPECT_EQ(kernel.param_bytes[i], sizes[i]) << "argument " << i;
    const char* fault = nullptr;
    for (std::uint32_t b = plan.grid.x; b-- > 0;) {
      // A fresh block each time, so that the address sanitizer sees both ends.
      std::vector<std::byte> memory(plan.shared_bytes + 64, std::byte{0xa5});
      auto* shared = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(memory.data()), 64));
      kernel.fn({plan.grid, {1, 1, 1}, {b, 0, 0}, {shared, plan.shared_bytes}, params, &fault});
    }
    return fault;
  }
  ADD_FAILURE() << "no kernel " << plan.function;
  return "missing";
}

std::uint64_t address(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }
template <class T>
std::uint64_t address(const std::vector<T>& v) {
  return v.empty() ? 0 : address(v.data());
}

struct Weights {
  DType type;
  std::uint32_t n, k;
  std::vector<std::byte> rows;    ///< As the file has them.
  std::vector<std::byte> stored;  ///< What the kernel reads: `rows`, or repacked.
  bool packed = false;

  Weights(DType t, std::uint32_t n_, std::uint32_t k_, bool pack, std::mt19937& random)
      : type(t), n(n_), k(k_), rows(random_weights(t, n_, k_, random)) {
    stored = rows;
    if (!pack) return;
    packed = true;
    EXPECT_EQ(run(Isa::generic, plan_repack(type, n, k), address(stored), RepackParams{n, k, static_cast<std::uint32_t>(type)}),
              nullptr);
  }
  Matrix matrix(std::uint32_t ld_y) const { return {n, static_cast<std::uint32_t>(type), packed, ld_y}; }
};

std::vector<float> random_floats(std::size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> v(count);
  for (std::size_t i = 0; i < count; ++i) v[i] = normal(random) * (i % 97 == 5 ? 4.0f : 1.0f);  // a few large ones, as models have
  return v;
}

/// x · Wᵀ in float64; x is [m, k] with stride ld.
std::vector<double> product(const std::vector<double>& x, std::uint32_t m, const Weights& w) {
  std::vector<double> y(std::size_t{m} * w.n);
  for (std::uint32_t j = 0; j < w.n; ++j) {
    const std::vector<double> row = decode_row(w.type, w.rows.data() + j * row_bytes(w.type, w.k), w.k);
    for (std::uint32_t i = 0; i < m; ++i) {
      double sum = 0;
      for (std::uint32_t e = 0; e < w.k; ++e) sum += x[std::size_t{i} * w.k + e] * row[e];
      y[std::size_t{i} * w.n + j] = sum;
    }
  }
  return y;
}

double relative_l2(const std::vector<float>& got, const std::vector<double>& want) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(difference / norm);
}

double tolerance(Isa isa, DType type, Precision precision, std::uint32_t m) {
  if (activation_class(type, precision) != ActivationClass::quantised) return 1e-5;
  return isa == Isa::amx && m > kFusedRows ? 4e-3 : 1.5e-2;
}

/// What one product of the tests is made of; `ld_x` and `ld_y` are larger than the rows.
struct Problem {
  std::uint32_t m, k;
  Precision precision = Precision::fast;
  std::vector<float> x;
  std::vector<float> norm;
  float eps = 1e-5f, norm_add = 0;
  bool force_prepare = false;

  std::uint32_t ld_x() const { return k + 3; }
  Problem(std::uint32_t m_, std::uint32_t k_, std::mt19937& random)
      : m(m_), k(k_), x(random_floats(std::size_t{m_} * (k_ + 3), random)) {}

  std::vector<double> normalised() const {
    std::vector<double> out(std::size_t{m} * k);
    for (std::uint32_t i = 0; i < m; ++i) {
      double squares = 0;
      for (std::uint32_t e = 0; e < k; ++e) squares += double{x[i * ld_x() + e]} * x[i * ld_x() + e];
      const double scale = norm.empty() ? 1 : 1 / std::sqrt(squares / k + double{eps});
      for (std::uint32_t e = 0; e < k; ++e)
        out[std::size_t{i} * k + e] = x[i * ld_x() + e] * scale * (norm.empty() ? 1.0 : double{norm_add} + norm[e]);
    }
    return out;
  }
  LinearParams params() const {
    LinearParams p;
    p.m = m, p.k = k, p.ld_x = ld_x(), p.precision = static_cast<std::uint32_t>(precision);
    p.norm_dtype = static_cast<std::uint32_t>(DType::f32), p.norm_eps = eps, p.norm_add = norm_add;
    return p;
  }
};

/// The x and norm arguments of a launch, through `prepare` where the rows ask for it.
struct Operand {
  std::uint64_t x, norm;
  std::vector<float> prepared;

  Operand(Isa isa, const Problem& problem, LinearParams& p) : x(address(problem.x)), norm(address(problem.norm)) {
    if (p.m <= kFusedRows && !problem.force_prepare) return;
    prepared.resize(prepared_bytes(p.m, p.k) / 4 + 16);
    const std::uint64_t out = round_up(address(prepared), 64);
    EXPECT_EQ(run(isa, plan_prepare(p.m, p.k), x, norm, out, p), nullptr);
    x = out, norm = 0, p.prepared = 1;
  }
};

constexpr float kUntouched = -12345.0f;

/// y = x · Wᵀ through the kernels; rows have 5 spare floats that must stay as they were.
std::vector<float> linear(Isa isa, const Problem& problem, const Weights& w, const std::vector<float>& bias = {},
                          const std::vector<float>& residual = {}, std::optional<std::uint32_t> blocks = {}) {
  const std::uint32_t ld = w.n + 5;
  LinearParams p = problem.params();
  p.w[0] = w.matrix(ld);
  const Operand operand(isa, problem, p);
  std::vector<float> y(std::size_t{p.m} * ld, kUntouched);
  for (std::uint32_t i = 0; i < p.m && !residual.empty(); ++i) std::copy_n(residual.begin() + i * w.n, w.n, y.begin() + i * ld);
  Plan plan = plan_linear("linear", p, 2);
  if (blocks) plan.grid.x = *blocks;
  EXPECT_EQ(
      run(isa, plan, operand.x, operand.norm, address(w.stored), address(bias), residual.empty() ? 0 : address(y), address(y), p),
      nullptr);
  std::vector<float> dense(std::size_t{p.m} * w.n);
  for (std::uint32_t i = 0; i < p.m; ++i) {
    std::copy_n(y.begin() + i * ld, w.n, dense.begin() + i * w.n);
    for (std::uint32_t j = w.n; j < ld; ++j) EXPECT_EQ(y[i * ld + j], kUntouched) << "row " << i << " wrote past its columns";
  }
  return dense;
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
    EXPECT_LT(error, tolerance(isa(), type(), Precision::fast, m)) << m << " rows";
  }
}

TEST_P(MatmulOn, LinearIsWithinItsToleranceForEveryDepth) {
  const std::uint32_t step = block_elements(type()) == 1 ? 32 : block_elements(type());
  for (const std::uint32_t k : {step, 2 * step, 3 * step, 5 * step, 1536u, 2304u, 4096u + 256u}) {
    const Weights w(type(), 20, k, true, random_);
    for (const std::uint32_t m : {1u, 36u}) {
      const Problem problem(m, k, random_);
      EXPECT_LT(relative_l2(linear(isa(), problem, w), product(problem.normalised(), m, w)),
                tolerance(isa(), type(), Precision::fast, m))
          << "k " << k << " m " << m;
    }
  }
}

TEST_P(MatmulOn, ManyRowsCrossTheRowBlocksOfAPanel) {
  const std::uint32_t k = 768, m = 1030;
  const Weights w(type(), 17, k, true, random_);
  const Problem problem(m, k, random_);
  EXPECT_LT(relative_l2(linear(isa(), problem, w), product(problem.normalised(), m, w)),
            tolerance(isa(), type(), Precision::fast, m));
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
    EXPECT_LT(relative_l2(linear(isa(), problem, w, bias, residual), want), tolerance(isa(), type(), Precision::fast, m))
        << m << " rows";
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
      EXPECT_LT(relative_l2(y, want), 2 * tolerance(isa(), type(), precision, m)) << m << " rows";
    }
  }
}

TEST_P(MatmulOn, FewPreparedRowsAreAllowed) {
  const std::uint32_t k = 512;
  const Weights w(type(), 64, k, true, random_);
  for (const std::uint32_t m : {1u, 8u}) {
    Problem problem(m, k, random_);
    problem.force_prepare = true;
    EXPECT_LT(relative_l2(linear(isa(), problem, w), product(problem.normalised(), m, w)),
              tolerance(isa(), type(), Precision::fast, m));
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
