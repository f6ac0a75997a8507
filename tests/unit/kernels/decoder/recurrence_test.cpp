// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "host_launch.h"

namespace metrale::host::decoder::testing {
namespace {

double silu(double x) { return x / (1 + std::exp(-x)); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

class Convolution : public EachIsa {};

TEST_P(Convolution, ChunksOfAnySizeGiveTheDirectSum) {
  constexpr std::uint32_t kTokens = 23, kSlots = 2;
  for (const std::uint32_t channels : {64U, 150U}) {
    for (const std::uint32_t kernel : {1U, 2U, 4U, 7U}) {
      for (const std::uint32_t chunk : {1U, 2U, 3U, 5U, 23U}) {
        const auto x = random_floats(std::size_t{kTokens} * channels, 1);
        const auto weight = random_floats(std::size_t{kernel} * channels, 2);
        auto state = std::vector<float>(std::size_t{kSlots} * (kernel - 1) * channels);
        std::vector<float> y;
        const StepHeader step{.position = 0, .slot = 1};
        for (std::uint32_t first = 0; first < kTokens; first += chunk) {
          const std::uint32_t m = std::min(chunk, kTokens - first);
          const std::uint32_t ld = channels + 3;
          std::vector<float> part(std::size_t{m} * ld, 9.0F);
          for (std::uint32_t t = 0; t < m; ++t)
            std::copy_n(&x[(std::size_t{first} + t) * channels], channels, &part[std::size_t{t} * ld]);
          const Dim3 grid{static_cast<std::uint32_t>(div_ceil(channels, kConvTile)), 1, 1};
          ASSERT_EQ(launch.run("conv", grid, conv_shared_bytes(kernel), part.data(), weight.data(), state.data(), &step,
                               ConvParams{m, channels, kernel, ld}),
                    "");
          for (std::uint32_t t = 0; t < m; ++t)
            y.insert(y.end(), &part[std::size_t{t} * ld], &part[std::size_t{t} * ld] + channels);
        }
        for (std::uint32_t t = 0; t < kTokens; ++t) {
          for (std::uint32_t c = 0; c < channels; ++c) {
            double sum = 0;
            for (std::uint32_t j = 0; j < kernel; ++j) {
              if (t + j + 1 >= kernel)
                sum +=
                    static_cast<double>(weight[std::size_t{j} * channels + c]) * x[std::size_t{t + j + 1 - kernel} * channels + c];
            }
            ASSERT_NEAR(y[std::size_t{t} * channels + c], silu(sum), 1e-6) << channels << ' ' << kernel << ' ' << chunk << ' ' << t;
          }
        }
        for (std::size_t i = 0; i < state.size() / kSlots; ++i) ASSERT_EQ(state[i], 0.0F) << "slot 0 belongs to another sequence";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Convolution, ::testing::ValuesIn(all_isas()), isa_name);

class DeltaRule : public EachIsa {
 protected:
  void compare(std::uint32_t key_heads, std::uint32_t value_heads, std::uint32_t key_dim, std::uint32_t value_dim,
               std::uint32_t tiled, std::uint32_t tokens, std::uint32_t chunk) {
    const std::uint32_t key_width = key_heads * key_dim, value_width = value_heads * value_dim, width = 2 * key_width + value_width;
    const auto qkv = random_floats(std::size_t{tokens} * width, 1);
    const auto z = random_floats(std::size_t{tokens} * value_width, 2, 2.0F);
    const auto a = random_floats(std::size_t{tokens} * value_heads, 3, 2.0F), b = random_floats(a.size(), 4, 2.0F);
    auto decay = random_floats(value_heads, 5);
    for (float& x : decay) x = -std::abs(x) - 0.1F;
    const auto dt_bias = random_floats(value_heads, 6), norm = random_floats(value_dim, 7);
    const std::size_t state_size = std::size_t{value_heads} * key_dim * value_dim;
    std::vector<float> state(2 * state_size);
    std::vector<float> out(std::size_t{tokens} * value_width);
    const StepHeader step{.position = 0, .slot = 1};
    for (std::uint32_t first = 0; first < tokens; first += chunk) {
      const std::uint32_t m = std::min(chunk, tokens - first);
      const DeltaParams params{m, key_heads, value_heads, key_dim, value_dim, tiled, width, value_width, value_heads, 1e-6F};
      ASSERT_EQ(launch.run("delta", {value_heads, 1, 1}, delta_shared_bytes(key_dim, value_dim), &qkv[std::size_t{first} * width],
                           &z[std::size_t{first} * value_width], &a[std::size_t{first} * value_heads],
                           &b[std::size_t{first} * value_heads], decay.data(), dt_bias.data(), norm.data(), state.data(), &step,
                           &out[std::size_t{first} * value_width], params),
                "");
    }

    std::vector<double> S(state_size);
    for (std::uint32_t t = 0; t < tokens; ++t) {
      for (std::uint32_t h = 0; h < value_heads; ++h) {
        const std::uint32_t kh = tiled ? h % key_heads : h / (value_heads / key_heads);
        const float* row = &qkv[std::size_t{t} * width];
        std::vector<double> q(row + kh * key_dim, row + (kh + 1) * key_dim);
        std::vector<double> k(row + key_width + kh * key_dim, row + key_width + (kh + 1) * key_dim);
        for (auto* x : {&q, &k}) {
          double sum = 1e-6;
          for (const double e : *x) sum += e * e;
          for (double& e : *x) e /= std::sqrt(sum);
        }
        for (double& e : q) e /= std::sqrt(static_cast<double>(key_dim));
        const double g = decay[h] * std::log1p(std::exp(static_cast<double>(a[std::size_t{t} * value_heads + h]) + dt_bias[h]));
        const double beta = sigmoid(b[std::size_t{t} * value_heads + h]);
        double* s = &S[std::size_t{h} * key_dim * value_dim];
        std::vector<double> o(value_dim);
        double sum = 0;
        for (std::uint32_t j = 0; j < value_dim; ++j) {
          double memory = 0;
          for (std::uint32_t i = 0; i < key_dim; ++i) {
            s[std::size_t{i} * value_dim + j] *= std::exp(g);
            memory += k[i] * s[std::size_t{i} * value_dim + j];
          }
          const double change = beta * (row[2 * key_width + h * value_dim + j] - memory);
          for (std::uint32_t i = 0; i < key_dim; ++i) {
            s[std::size_t{i} * value_dim + j] += k[i] * change;
            o[j] += q[i] * s[std::size_t{i} * value_dim + j];
          }
          sum += o[j] * o[j];
        }
        for (std::uint32_t j = 0; j < value_dim; ++j) {
          const std::size_t at = std::size_t{t} * value_width + h * value_dim + j;
          const double want = norm[j] * o[j] / std::sqrt(sum / value_dim + 1e-6) * silu(z[at]);
          ASSERT_NEAR(out[at], want, 2e-5) << "token " << t << " head " << h << " column " << j;
        }
      }
    }
    for (std::size_t i = 0; i < state_size; ++i) ASSERT_NEAR(state[state_size + i], S[i], 1e-5);
    for (std::size_t i = 0; i < state_size; ++i) ASSERT_EQ(state[i], 0.0F) << "slot 0 belongs to another sequence";
  }
};

TEST_P(DeltaRule, OneTokenAtATime) { compare(1, 2, 128, 128, 0, 20, 1); }
TEST_P(DeltaRule, WholePromptAtOnce) { compare(1, 2, 128, 128, 0, 70, 70); }
TEST_P(DeltaRule, UnevenChunks) { compare(2, 4, 64, 64, 0, 45, 17); }
TEST_P(DeltaRule, TiledValueHeads) { compare(2, 4, 32, 64, 1, 9, 4); }
TEST_P(DeltaRule, HeadSizesOfNoWholeVector) { compare(2, 2, 24, 90, 0, 19, 6); }

INSTANTIATE_TEST_SUITE_P(Isa, DeltaRule, ::testing::ValuesIn(all_isas()), isa_name);

}  // namespace
}  // namespace metrale::host::decoder::testing
