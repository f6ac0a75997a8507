// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>
#include <numeric>

#include "host_launch.h"

namespace metrale::host::decoder::testing {
namespace {

constexpr auto kF32 = static_cast<std::uint32_t>(DType::f32);
constexpr auto kBf16 = static_cast<std::uint32_t>(DType::bf16);

struct Shape {
  std::uint32_t m, position, heads, kv_heads, head_dim, block_tokens, dtype, gated;
};

/// A cache whose blocks lie in no order, with NaN wherever no token is.
struct Cache {
  CacheLayout layout;
  std::vector<std::int32_t> table;
  std::vector<float> keys, values;                // what a reader should see, [token, kv_head, head_dim]
  std::vector<std::byte> key_bytes, value_bytes;  // as stored

  Cache(const Shape& s, std::uint32_t num_tokens) {
    layout = {.dtype = s.dtype,
              .block_tokens = s.block_tokens,
              .block_stride = std::uint64_t{s.block_tokens} * s.kv_heads * s.head_dim,
              .token_stride = s.kv_heads * s.head_dim,
              .head_stride = s.head_dim};
    const auto num_blocks = static_cast<std::uint32_t>(div_ceil(num_tokens, s.block_tokens));
    table.resize(num_blocks);
    std::iota(table.begin(), table.end(), 1);
    std::mt19937 random(7);
    std::shuffle(table.begin(), table.end(), random);
    keys = random_floats(std::size_t{num_tokens} * layout.token_stride, 1);
    values = random_floats(keys.size(), 2);
    const std::size_t slots = (num_blocks + 2) * layout.block_stride;
    key_bytes = stored(s, num_tokens, slots, keys);
    value_bytes = stored(s, num_tokens, slots, values);
  }

  std::vector<std::byte> stored(const Shape& s, std::uint32_t num_tokens, std::size_t slots, std::vector<float>& logical) const {
    std::vector<float> wide(slots, std::numeric_limits<float>::quiet_NaN());
    for (std::uint32_t t = 0; t < num_tokens; ++t) {
      const auto block = static_cast<std::size_t>(table[t / s.block_tokens]);
      for (std::uint32_t i = 0; i < layout.token_stride; ++i) {
        float& x = logical[std::size_t{t} * layout.token_stride + i];
        if (s.dtype == kBf16) x = from_bf16(to_bf16(x));
        wide[block * layout.block_stride + std::size_t{t % s.block_tokens} * layout.token_stride + i] = x;
      }
    }
    std::vector<std::byte> bytes(slots * (s.dtype == kBf16 ? 2 : 4));
    for (std::size_t i = 0; i < slots; ++i) {
      if (s.dtype == kBf16) {
        const std::uint16_t h = to_bf16(wide[i]);
        std::memcpy(&bytes[2 * i], &h, 2);
      } else {
        std::memcpy(&bytes[4 * i], &wide[i], 4);
      }
    }
    return bytes;
  }
};

std::vector<float> expected_attention(const Shape& s, const Cache& cache, const std::vector<float>& q, std::uint32_t ld_q,
                                      std::uint32_t q_head_stride, float scale) {
  std::vector<float> out(std::size_t{s.m} * s.heads * s.head_dim);
  for (std::uint32_t i = 0; i < s.m; ++i) {
    for (std::uint32_t h = 0; h < s.heads; ++h) {
      const float* query = &q[std::size_t{i} * ld_q + std::size_t{h} * q_head_stride];
      const std::uint32_t kv = h / (s.heads / s.kv_heads);
      std::vector<double> weight(s.position + i + 1);
      double largest = -1e300, total = 0;
      for (std::size_t t = 0; t < weight.size(); ++t) {
        double dot = 0;
        for (std::uint32_t d = 0; d < s.head_dim; ++d)
          dot += static_cast<double>(query[d]) * cache.keys[t * cache.layout.token_stride + std::size_t{kv} * s.head_dim + d];
        weight[t] = dot * scale;
        largest = std::max(largest, weight[t]);
      }
      for (double& w : weight) total += w = std::exp(w - largest);
      for (std::uint32_t d = 0; d < s.head_dim; ++d) {
        double sum = 0;
        for (std::size_t t = 0; t < weight.size(); ++t)
          sum += weight[t] / total * cache.values[t * cache.layout.token_stride + std::size_t{kv} * s.head_dim + d];
        if (s.gated) sum /= 1 + std::exp(-static_cast<double>(query[s.head_dim + d]));
        out[(std::size_t{i} * s.heads + h) * s.head_dim + d] = static_cast<float>(sum);
      }
    }
  }
  return out;
}

double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    difference += std::pow(static_cast<double>(got[i]) - want[i], 2);
    norm += std::pow(want[i], 2);
  }
  return std::sqrt(difference / norm);
}

class Attention : public EachIsa {
 protected:
  void compare(const Shape& s, float score_size = 1.0F, double tolerance = 2e-6) {
    const Cache cache(s, s.position + s.m);
    const std::uint32_t q_head_stride = s.gated ? 2 * s.head_dim : s.head_dim;
    const std::uint32_t ld_q = s.heads * q_head_stride + 5;
    const auto q = random_floats(std::size_t{s.m} * ld_q, 3, score_size);
    const float scale = 1.0F / std::sqrt(static_cast<float>(s.head_dim));
    const StepHeader step{.position = static_cast<std::int32_t>(s.position)};
    const AttendParams params{s.m, s.heads, s.kv_heads, s.head_dim, ld_q, q_head_stride, s.gated, scale, cache.layout};
    const auto want = expected_attention(s, cache, q, ld_q, q_head_stride, scale);
    std::vector<float> got(want.size(), -7.0F);
    const Dim3 grid{s.heads, static_cast<std::uint32_t>(div_ceil(s.m, kAttendTile)), 1};
    ASSERT_EQ(launch.run("attend", grid, attend_shared_bytes(s.head_dim), q.data(), cache.key_bytes.data(),
                         cache.value_bytes.data(), &step, cache.table.data(), got.data(), params),
              "");
    EXPECT_LT(relative_error(got, want), tolerance);
    if (s.m != 1) return;
    for (std::uint32_t blocks = 1; blocks <= s.heads; ++blocks) {
      std::fill(got.begin(), got.end(), -7.0F);
      ASSERT_EQ(launch.run("attend_one", {blocks, 1, 1}, attend_one_shared_bytes(s.head_dim), q.data(), cache.key_bytes.data(),
                           cache.value_bytes.data(), &step, cache.table.data(), got.data(), params),
                "");
      EXPECT_LT(relative_error(got, want), tolerance) << blocks << " blocks";
    }
  }
};

TEST_P(Attention, OneTokenAlone) { compare({1, 0, 2, 1, 64, 16, kF32, 0}); }
TEST_P(Attention, OneTokenAfterAFullKeyTile) { compare({1, 64, 2, 2, 64, 16, kF32, 0}); }
TEST_P(Attention, OneTokenAfterManyTiles) { compare({1, 517, 6, 2, 64, 16, kF32, 0}); }
TEST_P(Attention, OneGatedTokenOverBf16) { compare({1, 199, 4, 2, 128, 32, kBf16, 1}); }
TEST_P(Attention, OneTokenWithThreeHeadsToACacheHead) { compare({1, 130, 9, 3, 64, 16, kF32, 0}); }
TEST_P(Attention, OneTokenWithFiveHeadsToACacheHead) { compare({1, 77, 10, 2, 64, 16, kBf16, 0}); }
TEST_P(Attention, PromptFromTheStart) { compare({45, 0, 6, 2, 64, 16, kF32, 0}); }
TEST_P(Attention, PromptThatFillsQueryTiles) { compare({64, 0, 3, 1, 128, 16, kF32, 0}); }
TEST_P(Attention, SecondChunkSeesTheFirst) { compare({33, 70, 4, 4, 64, 16, kF32, 0}); }
TEST_P(Attention, GatedPromptOverBf16) { compare({40, 25, 4, 2, 256, 8, kBf16, 1}); }
TEST_P(Attention, HeadSizeOfNoWholeVector) { compare({37, 11, 2, 1, 80, 16, kF32, 0}), compare({1, 90, 2, 1, 20, 16, kF32, 1}); }
TEST_P(Attention, OneTokenBlocks) { compare({5, 9, 2, 1, 64, 1, kF32, 0}); }
// Scores of several hundred: exponentials overflow unless the running maximum is taken off, and it rises late.
TEST_P(Attention, LargeScores) {
  compare({40, 100, 2, 1, 64, 16, kF32, 0}, 800.0F, 2e-5);
  compare({1, 300, 2, 1, 64, 16, kF32, 0}, 800.0F, 2e-5);
}

TEST_P(Attention, TooLittleSharedMemoryIsAFault) {
  const Shape s{1, 0, 1, 1, 64, 16, kF32, 0};
  const Cache cache(s, 1);
  const std::vector<float> q(64);
  std::vector<float> out(64);
  const StepHeader step;
  const AttendParams params{1, 1, 1, 64, 64, 64, 0, 1.0F, cache.layout};
  EXPECT_NE(launch.run("attend", {1, 1, 1}, 64, q.data(), cache.key_bytes.data(), cache.value_bytes.data(), &step,
                       cache.table.data(), out.data(), params),
            "");
}

INSTANTIATE_TEST_SUITE_P(Isa, Attention, ::testing::ValuesIn(all_isas()), isa_name);

class RotateStore : public EachIsa {
 protected:
  void compare(std::uint32_t pairs, std::uint32_t interleaved, bool norms, std::uint32_t dtype, std::uint32_t position) {
    constexpr std::uint32_t kM = 5, kHeads = 4, kKv = 2, kDim = 64;
    const std::uint32_t stride = norms ? 2 * kDim : kDim;
    auto q = random_floats(std::size_t{kM} * kHeads * stride, 1);
    auto k = random_floats(std::size_t{kM} * kKv * kDim, 2);
    const auto v = random_floats(k.size(), 3);
    const auto q_norm = random_floats(kDim, 4), k_norm = random_floats(kDim, 5);
    std::vector<float> frequencies(pairs);
    for (std::uint32_t j = 0; j < pairs; ++j) frequencies[j] = static_cast<float>(std::pow(10000.0, -2.0 * j / (2.0 * pairs)));
    const StepHeader step{.position = static_cast<std::int32_t>(position)};
    std::vector<float> rotary(std::size_t{kM} * 2 * pairs);
    ASSERT_EQ(launch.run("rotary", {kM, 1, 1}, 0, &step, frequencies.data(), rotary.data(), RotaryParams{kM, pairs}), "");

    const CacheLayout layout{dtype, 4, 2 * 4 * kKv * kDim, kDim, 4 * kDim};  // heads outside tokens, with room between blocks
    const std::vector<std::int32_t> table{3, 0, 2, 1, 5};
    const std::size_t slots = 6 * layout.block_stride;
    std::vector<std::byte> keys(slots * 4, std::byte{0x55}), values(slots * 4, std::byte{0x55});
    const auto untouched = keys;
    const auto q_before = q, k_before = k;
    const RotateStoreParams params{kM, kHeads, kKv, kDim, pairs, interleaved, kHeads * stride, stride, kKv * kDim, 1e-6F, layout};
    ASSERT_EQ(launch.run("rotate_store", {kM, 1, 1}, 0, q.data(), k.data(), v.data(), norms ? q_norm.data() : nullptr,
                         norms ? k_norm.data() : nullptr, rotary.data(), &step, table.data(), keys.data(), values.data(), params),
              "");

    auto expected = [&](const float* x, const std::vector<float>& weight, std::uint32_t token) {
      std::vector<double> y(x, x + kDim);
      if (norms) {
        double sum = 0;
        for (const double e : y) sum += e * e;
        for (std::uint32_t d = 0; d < kDim; ++d) y[d] *= weight[d] / std::sqrt(sum / kDim + 1e-6);
      }
      for (std::uint32_t j = 0; j < pairs; ++j) {
        const double angle = static_cast<double>(static_cast<float>(position + token) * frequencies[j]);
        double& a = y[interleaved ? 2 * j : j];
        double& b = y[interleaved ? 2 * j + 1 : j + pairs];
        const double a0 = a, b0 = b;
        a = a0 * std::cos(angle) - b0 * std::sin(angle);
        b = b0 * std::cos(angle) + a0 * std::sin(angle);
      }
      return y;
    };
    for (std::uint32_t t = 0; t < kM; ++t) {
      for (std::uint32_t h = 0; h < kHeads; ++h) {
        const std::size_t at = (std::size_t{t} * kHeads + h) * stride;
        const auto want = expected(&q_before[at], q_norm, t);
        for (std::uint32_t d = 0; d < kDim; ++d) ASSERT_NEAR(q[at + d], want[d], 1e-5) << t << ' ' << h << ' ' << d;
        for (std::uint32_t d = kDim; d < stride; ++d) ASSERT_EQ(q[at + d], q_before[at + d]) << "the gate is not rotated";
      }
      for (std::uint32_t h = 0; h < kKv; ++h) {
        const auto want = expected(&k_before[(std::size_t{t} * kKv + h) * kDim], k_norm, t);
        const std::uint32_t p = position + t;
        const std::size_t at =
            static_cast<std::size_t>(table[p / 4]) * layout.block_stride + std::size_t{p % 4} * kDim + std::size_t{h} * 4 * kDim;
        for (std::uint32_t d = 0; d < kDim; ++d) {
          ASSERT_NEAR(read(keys, dtype, at + d), want[d], dtype == kBf16 ? 8e-3 : 1e-5);
          const float exact = v[(std::size_t{t} * kKv + h) * kDim + d];
          ASSERT_EQ(read(values, dtype, at + d), dtype == kBf16 ? from_bf16(to_bf16(exact)) : exact);
        }
      }
    }
    std::size_t changed = 0;
    const std::size_t size = dtype == kBf16 ? 2 : 4;
    for (std::size_t i = 0; i < slots; ++i) changed += std::memcmp(&keys[i * size], &untouched[i * size], size) != 0;
    EXPECT_LE(changed, std::size_t{kM} * kKv * kDim) << "only the step's tokens are written";
  }
  static float read(const std::vector<std::byte>& bytes, std::uint32_t dtype, std::size_t i) {
    if (dtype == kBf16) {
      std::uint16_t h = 0;
      std::memcpy(&h, &bytes[2 * i], 2);
      return from_bf16(h);
    }
    float x = 0;
    std::memcpy(&x, &bytes[4 * i], 4);
    return x;
  }
};

TEST_P(RotateStore, HalvesRotateTogether) { compare(32, 0, false, kF32, 0); }
TEST_P(RotateStore, NeighboursRotateTogetherWhenInterleaved) { compare(32, 1, false, kF32, 6); }
TEST_P(RotateStore, PartOfAHeadRotatesAfterItsNorm) { compare(8, 0, true, kF32, 13); }
TEST_P(RotateStore, Bf16CacheRoundsToNearestEven) { compare(32, 0, true, kBf16, 3); }

TEST_P(RotateStore, NanStaysNanInABf16Cache) {
  // A payload in the low half only: rounding alone would carry it into the exponent and on to infinity or zero.
  std::vector<float> q(16), k(16), v(16);
  const std::uint32_t bits = 0x7fffffff;
  std::memcpy(&v[0], &bits, 4);
  const std::uint32_t low = 0x7f800001;
  std::memcpy(&v[1], &low, 4);
  const std::vector<float> rotary(2, 1.0F);
  const StepHeader step;
  const std::int32_t table = 0;
  std::vector<std::uint16_t> keys(16), values(16);
  const RotateStoreParams params{1, 1, 1, 16, 0, 0, 16, 16, 16, 1e-6F, {kBf16, 1, 16, 16, 16}};
  ASSERT_EQ(launch.run("rotate_store", {1, 1, 1}, 0, q.data(), k.data(), v.data(), (float*)nullptr, (float*)nullptr, rotary.data(),
                       &step, &table, keys.data(), values.data(), params),
            "");
  EXPECT_TRUE(std::isnan(from_bf16(values[0])));
  EXPECT_TRUE(std::isnan(from_bf16(values[1])));
}

INSTANTIATE_TEST_SUITE_P(Isa, RotateStore, ::testing::ValuesIn(all_isas()), isa_name);

}  // namespace
}  // namespace metrale::host::decoder::testing
