// SPDX-License-Identifier: Apache-2.0
//
// What the tests of the host matrix kernels share: random weights and a decoder of their own for them, launches of single blocks,
// and products in float64. Plain values and functions, any thread.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "kernels/host/matmul/matmul.h"

namespace metrale::host::matmul {

inline constexpr DType kTypes[] = {DType::f32,  DType::f16,  DType::bf16, DType::q4_0,
                                   DType::q4_1, DType::q8_0, DType::q4_k, DType::q6_k};

inline std::vector<Isa> isas() {
  std::vector<Isa> found;
  for (const Isa isa : {Isa::generic, Isa::avx2, Isa::avx512, Isa::amx}) {
    if (select_isa(isa) == isa) found.push_back(isa);
  }
  return found;
}

inline std::uint16_t to_half(float v) {  // truncates; what is too small becomes 0
  const auto bits = std::bit_cast<std::uint32_t>(v);
  const auto exponent = static_cast<int>(bits >> 23 & 255) - 127 + 15;
  if (exponent <= 0) return 0;
  return static_cast<std::uint16_t>((bits >> 16 & 0x8000) | static_cast<std::uint32_t>(exponent) << 10 | (bits >> 13 & 0x3ff));
}

inline double from_half(const std::byte* p) {
  std::uint16_t h;
  std::memcpy(&h, p, 2);
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const double value = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return h & 0x8000 ? -value : value;
}

inline std::uint32_t block_elements(DType type) {
  return type == DType::q4_k || type == DType::q6_k ? 256 : is_quantised(type) ? 32 : 1;
}

/// Weights as a file has them: random bytes with scales of a sensible size.
inline std::vector<std::byte> random_weights(DType type, std::uint32_t n, std::uint32_t k, std::mt19937& random) {
  std::normal_distribution<float> normal(0, 0.5f);
  std::uniform_real_distribution<float> scale(0.002f, 0.02f);
  std::vector<std::byte> w(n * row_bytes(type, k));
  for (std::byte& b : w) b = static_cast<std::byte>(random());
  const std::size_t blocks = w.size() / dtype_facts(type).block_bytes;
  for (std::size_t i = 0; i < blocks; ++i) {
    std::byte* p = w.data() + i * dtype_facts(type).block_bytes;
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
inline std::vector<double> decode_row(DType type, const std::byte* row, std::uint32_t k) {
  std::vector<double> out(k);
  const auto byte = [&](std::size_t i) { return static_cast<int>(row[i]); };
  for (std::uint32_t e = 0; e < k; ++e) {
    const std::size_t block = e / block_elements(type) * dtype_facts(type).block_bytes, i = e % block_elements(type);
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
inline const char* run(Isa isa, const Plan& plan, const Args&... args) {
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

inline std::uint64_t address(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }
template <class T>
inline std::uint64_t address(const std::vector<T>& v) {
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

inline std::vector<float> random_floats(std::size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> v(count);
  for (std::size_t i = 0; i < count; ++i) v[i] = normal(random) * (i % 97 == 5 ? 4.0f : 1.0f);  // a few large ones, as models have
  return v;
}

/// x · Wᵀ in float64; x is [m, k] with stride ld.
inline std::vector<double> product(const std::vector<double>& x, std::uint32_t m, const Weights& w) {
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

inline double relative_l2(const std::vector<float>& got, const std::vector<double>& want) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(difference / norm);
}

/// Relative L2 error that a product may have: sums of floats, and activations of 16 bits where weights are quantised.
inline double tolerance(DType type, Precision precision) {
  return activation_class(type, precision) == ActivationClass::quantised ? 1e-4 : 1e-5;
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

inline constexpr float kUntouched = -12345.0f;

/// y = x · Wᵀ through the kernels; rows have 5 spare floats that must stay as they were.
inline std::vector<float> linear(Isa isa, const Problem& problem, const Weights& w, const std::vector<float>& bias = {},
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

}  // namespace metrale::host::matmul
