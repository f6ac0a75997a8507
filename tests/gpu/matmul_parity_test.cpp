// SPDX-License-Identifier: Apache-2.0
//
// Matrix kernels of the device against the host's in float32: every type of weight, as rows and packed, few rows and many, shapes
// that are no multiple of any tile.
#include <fmt/format.h>

#include "gpu/parity.h"
#include "unit/kernels/matmul_support.h"

namespace metrale::test {
namespace {

using host::matmul::random_weights;
using models::Matrix;
using models::Product;
using models::Rows;

// `exact` is float32 on both sides. `fast` may round activations to bf16, one part in 512 at most each.
constexpr double kExact = 2e-5, kFast = 5e-3;

struct Shape {
  std::uint32_t n, k;
};

class MatmulParity : public Parity {
 protected:
  struct Weights {
    DType dtype;
    std::uint32_t n, k;
    std::vector<std::byte> rows;
  };
  Weights weights(DType dtype, std::uint32_t n, std::uint32_t k) { return {dtype, n, k, random_weights(dtype, n, k, random)}; }

  static Matrix upload(Side& side, const Weights& w, bool pack) {
    Matrix matrix{side.in(w.rows), w.n, w.k, w.dtype, false};
    if (pack) ok(side.ops.repack(matrix));
    return matrix;
  }
  /// Runs `body` on the device in both precisions, with rows as they are and packed; `kernel` and the way go into the report.
  template <class Body>
  void on_device(const std::string& kernel, std::uint32_t m, const std::vector<std::vector<float>>& expected, Body&& body) {
    for (Side* side : {&exact(), &fast()}) {
      for (const bool pack : {false, true}) {
        const std::string name = fmt::format("{} {}", kernel, side == &fast() ? "fast" : "exact");
        SCOPED_TRACE(fmt::format("{}, {}", name, pack ? "packed" : "as rows"));
        const std::vector<std::vector<float>> got = body(*side, pack);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          const auto columns = static_cast<double>(expected[i].size() / m);
          expect_close(name, got[i], expected[i], side == &fast() ? kFast : kExact, columns);
        }
        side->end_case();
      }
    }
  }
  void on_host(std::vector<std::vector<float>>& expected, const auto& body) {
    expected = body(want(), false);
    want().end_case();
  }

  /// Shapes for a type: whole blocks, and for dense types also ragged ones; few rows and many.
  static std::vector<Shape> shapes(DType dtype) {
    if (dtype == DType::q4_k || dtype == DType::q6_k)
      return {{40, 1024}, {1, 256}, {37, 512}, {600, 1536}, {130, 4096}, {3300, 256}, kLarge};
    if (is_quantised(dtype)) return {{40, 1024}, {1, 32}, {37, 96}, {576, 576}, {130, 4096}, {3300, 256}, kLarge};
    return {{40, 1024}, {1, 32}, {37, 100}, {129, 70}, {576, 576}, {450, 2560}, {130, 4096}, {30, 5120}, {3300, 256}, kLarge};
  }
  /// Fills a large device with the largest tiles, for many rows of x alone: with few there are fewer tiles.
  static constexpr Shape kLarge{8500, 256};
  static bool too_few_rows(const Shape& shape, std::uint32_t m) { return shape.n == kLarge.n && m < 100; }
  /// What decides which kernel takes a product, and how.
  static std::string kind_of(std::string_view test, DType dtype, std::uint32_t m, std::uint32_t n, std::uint32_t k) {
    const char* rows = m == 1 ? "one row" : m <= 4 ? "few rows" : m <= 32 ? "some rows" : "many rows";
    const bool of_many = (m == 1 && n > 3000) || (n == kLarge.n && dtype == DType::bf16);
    return fmt::format("{} {} {}{}{}", test, to_string(dtype), rows, of_many ? ", many rows of W" : "",
                       k % 8 != 0 ? ", ragged" : "");
  }
  static constexpr std::uint32_t kRows[] = {1, 2, 7, 8, 9, 33, 130};
};

TEST_F(MatmulParity, Linear) {
  constexpr std::pair<std::uint32_t, bool> kWays[] = {{1, false}, {1, true},  {2, true},  {7, false},
                                                      {8, true},  {9, false}, {33, true}, {130, false}};
  for (const DType dtype : host::matmul::kTypes) {
    for (const Shape shape : shapes(dtype)) {
      for (const auto& [m, with_residual] : kWays) {
        if (too_few_rows(shape, m) || !wanted(kind_of("linear", dtype, m, shape.n, shape.k))) continue;
        SCOPED_TRACE(fmt::format("{} {} rows, n {}, k {}, residual {}", to_string(dtype), m, shape.n, shape.k, with_residual));
        const Weights w = weights(dtype, shape.n, shape.k);
        const std::vector<float> x = normal(std::size_t{m} * shape.k, 2);
        // Bias and norm come and go with the number of rows.
        const std::vector<float> norm = m % 2 == 1 ? normal(shape.k) : std::vector<float>{};
        const std::vector<float> bias = m % 3 != 0 ? normal(shape.n) : std::vector<float>{};
        const std::vector<float> residual = with_residual ? normal(std::size_t{m} * shape.n) : std::vector<float>{};
        const auto body = [&](Side& side, bool pack) -> std::vector<std::vector<float>> {
          const Matrix matrix = upload(side, w, pack);
          const std::uint64_t count = std::uint64_t{m} * shape.n;
          // A residual is y itself, as in a layer.
          const DevicePtr y = residual.empty() ? side.out(count * 4) : side.in(residual);
          side.ops.set_prepared(side.out(side.ops.plans().prepared_bytes(m, shape.k)));
          const Product product{&matrix, side.maybe(bias), residual.empty() ? DevicePtr{} : y, y};
          ok(side.ops.linear({side.in(x), m, shape.k, side.maybe(norm), 1e-5F}, {&product, 1}));
          return {side.read<float>(y, count)};
        };
        std::vector<std::vector<float>> expected;
        on_host(expected, body);
        on_device(fmt::format("linear {}", to_string(dtype)), m, expected, body);
      }
    }
  }
}

TEST_F(MatmulParity, LinearOfSeveralMatrices) {
  struct Case {
    std::vector<DType> types;
    std::vector<std::uint32_t> n;
    std::uint32_t k;
  };
  std::vector<Case> cases = {
      {{DType::bf16, DType::bf16, DType::bf16}, {576, 192, 192}, 576},
      {{DType::f32, DType::f32}, {37, 130}, 100},
      {{DType::f16, DType::f16, DType::f16, DType::f16}, {65, 1, 8, 8}, 192},
      {{DType::bf16, DType::bf16, DType::bf16, DType::bf16}, {768, 256, 2, 2}, 192},
      {{DType::q4_1, DType::q4_1, DType::q8_0}, {64, 33, 32}, 576},
      {{DType::q4_k, DType::q4_k, DType::q6_k}, {129, 40, 40}, 1024},
      {{DType::q4_0, DType::f32}, {64, 64}, 256},  // two classes: two launches
  };
  for (const DType dtype : host::matmul::kTypes) {
    cases.push_back({{dtype, dtype, dtype}, {150, 40, 33}, 512});
    cases.push_back({{dtype, dtype, dtype}, {3001, 200, 100}, 256});
  }
  for (const Case& c : cases) {
    for (const std::uint32_t m : kRows) {
      const bool alike = std::equal(c.types.begin() + 1, c.types.end(), c.types.begin());
      if (!wanted(kind_of(alike ? "alike" : "unlike", c.types[0], m, c.n[0], c.k))) continue;
      SCOPED_TRACE(fmt::format("{} {} rows, k {}", to_string(c.types[0]), m, c.k));
      std::vector<Weights> w;
      std::vector<std::vector<float>> bias;
      for (std::size_t i = 0; i < c.n.size(); ++i) {
        w.push_back(weights(c.types[i], c.n[i], c.k));
        bias.push_back((i + m) % 2 == 0 ? normal(c.n[i]) : std::vector<float>{});
      }
      const std::vector<float> x = normal(std::size_t{m} * c.k), norm = normal(c.k);
      const auto body = [&](Side& side, bool pack) {
        std::vector<Matrix> matrices;
        std::vector<Product> products;
        for (const Weights& each : w) matrices.push_back(upload(side, each, pack));
        for (std::size_t i = 0; i < w.size(); ++i)
          products.push_back({&matrices[i], side.maybe(bias[i]), {}, side.out(std::uint64_t{m} * c.n[i] * 4)});
        side.ops.set_prepared(side.out(side.ops.plans().prepared_bytes(m, c.k)));
        ok(side.ops.linear({side.in(x), m, c.k, side.in(norm), 1e-6F}, products));
        std::vector<std::vector<float>> y;
        for (std::size_t i = 0; i < w.size(); ++i) y.push_back(side.read<float>(products[i].y, std::uint64_t{m} * c.n[i]));
        return y;
      };
      std::vector<std::vector<float>> expected;
      on_host(expected, body);
      on_device("linear4", m, expected, body);
    }
  }
}

TEST_F(MatmulParity, SwiGlu) {
  for (const DType dtype : host::matmul::kTypes) {
    for (const Shape shape : shapes(dtype)) {
      for (const std::uint32_t m : kRows) {
        if (too_few_rows(shape, m) || !wanted(kind_of("swiglu", dtype, m, shape.n, shape.k))) continue;
        SCOPED_TRACE(fmt::format("{} {} rows, n {}, k {}", to_string(dtype), m, shape.n, shape.k));
        const Weights gate = weights(dtype, shape.n, shape.k), up = weights(dtype, shape.n, shape.k);
        // Gates near one, where silu bends.
        const std::vector<float> x = normal(std::size_t{m} * shape.k, 4.0F / std::sqrt(static_cast<float>(shape.k)));
        const std::vector<float> norm =
            m % 2 == 0 || m == 1 ? normal(shape.k, 4.0F / std::sqrt(static_cast<float>(shape.k))) : std::vector<float>{};
        const auto body = [&](Side& side, bool pack) -> std::vector<std::vector<float>> {
          const Matrix g = upload(side, gate, pack), u = upload(side, up, pack);
          const DevicePtr y = side.out(std::uint64_t{m} * shape.n * 4);
          side.ops.set_prepared(side.out(side.ops.plans().prepared_bytes(m, shape.k)));
          ok(side.ops.swiglu({side.in(x), m, shape.k, side.maybe(norm), 1e-5F}, g, u, y));
          return {side.read<float>(y, std::uint64_t{m} * shape.n)};
        };
        std::vector<std::vector<float>> expected;
        on_host(expected, body);
        on_device(fmt::format("swiglu {}", to_string(dtype)), m, expected, body);
      }
    }
  }
}

TEST_F(MatmulParity, Gather) {
  for (const DType dtype : host::matmul::kTypes) {
    for (const Shape shape : shapes(dtype)) {
      for (const std::uint32_t m : {3U, 1U, 50U}) {
        if (!wanted(fmt::format("gather {}", to_string(dtype)))) continue;
        SCOPED_TRACE(fmt::format("{} n {}, k {}", to_string(dtype), shape.n, shape.k));
        const Weights w = weights(dtype, shape.n, shape.k);
        std::vector<std::int32_t> ids(m);
        for (std::int32_t& i : ids) i = static_cast<std::int32_t>(random() % shape.n);
        ids[0] = static_cast<std::int32_t>(shape.n - 1);
        const auto body = [&](Side& side, bool pack) -> std::vector<std::vector<float>> {
          const Matrix matrix = upload(side, w, pack);
          const DevicePtr y = side.out(std::uint64_t{m} * shape.k * 4);
          ok(side.ops.gather(side.in(ids), matrix, m, y));
          return {side.read<float>(y, std::uint64_t{m} * shape.k)};
        };
        std::vector<std::vector<float>> expected;
        on_host(expected, body);
        for (const bool pack : {false, true}) {
          expect_close(fmt::format("{} {}", "gather", to_string(dtype)), body(fast(), pack)[0], expected[0], 1e-6);
          fast().end_case();
        }
      }
    }
  }
}

}  // namespace
}  // namespace metrale::test
