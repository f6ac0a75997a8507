// SPDX-License-Identifier: Apache-2.0
//
// Kernels of module "decoder" on the device against the host's: attention over paged caches of both types, rotary embedding,
// convolution and gated delta rule with their states, and the last step to a token.
#include <fmt/format.h>

#include <numeric>

#include "gpu/parity.h"
#include "metrale/models/sampler.h"

namespace metrale::test {
namespace {

using models::Ops;

class DecoderParity : public Parity {
 protected:
  /// Runs `body` on the host and on the device; both give the same list of results, compared under these names.
  template <class Body>
  void compare(const std::vector<std::string>& names, double tolerance, Body&& body) {
    const std::vector<std::vector<float>> expected = body(want());
    want().end_case();
    const std::vector<std::vector<float>> got = body(exact());
    exact().end_case();
    ASSERT_EQ(expected.size(), names.size());
    for (std::size_t i = 0; i < names.size(); ++i) expect_close(names[i], got[i], expected[i], tolerance);
  }
};

// ---- attention ----

struct AttentionCase {
  std::uint32_t num_heads, num_kv_heads, head_dim;
  std::int32_t position;
  std::uint32_t m;
  DType cache;
  bool gated = false;
  std::uint32_t block_tokens = 16;
};

void PrintTo(const AttentionCase& c, std::ostream* to) {
  *to << c.num_heads << " heads on " << c.num_kv_heads << " of " << c.head_dim << ", " << c.m << " tokens at " << c.position
      << ", cache " << to_string(c.cache) << " in blocks of " << c.block_tokens << (c.gated ? ", gated" : "");
}

/// What decides how a kernel goes about a case: the head sizes that have a fast way, and a context that several clusters share.
std::string kind_of(std::string_view test, const AttentionCase& c) {
  const bool fast = c.head_dim == 64 || c.head_dim == 128 || c.head_dim == 256;
  const std::string size = c.position > 1000 ? "far" : fast ? std::to_string(c.head_dim) : "any size";
  return fmt::format("{} {} {} {}", test, to_string(c.cache), c.m == 1 ? "one" : "many", size);
}

std::vector<AttentionCase> attention_cases() {
  std::vector<AttentionCase> cases;
  for (const DType cache : {DType::f32, DType::bf16}) {
    for (const auto& [heads, kv, dim] : {std::array{9U, 3U, 64U}, std::array{32U, 8U, 128U}, std::array{16U, 4U, 256U},
                                         std::array{4U, 2U, 48U}, std::array{8U, 1U, 80U}, std::array{24U, 2U, 128U}}) {
      for (const std::int32_t position : {200, 0, 1, 15, 16, 1500})
        cases.push_back({heads, kv, dim, position, 1, cache, dim == 256});
      for (const auto& [position, m] : {std::pair{37, 64U}, std::pair{0, 7U}, std::pair{0, 130U}, std::pair{500, 33U}})
        cases.push_back({heads, kv, dim, position, m, cache, dim == 256});
    }
    cases.push_back({32, 8, 128, 9000, 1, cache});
    cases.push_back({16, 4, 256, 5000, 1, cache, true, 32});
    cases.push_back({9, 3, 64, 300, 1, cache, true, 8});
    cases.push_back({9, 3, 64, 100, 40, cache, true, 1});
  }
  return cases;
}

class Attention : public DecoderParity {
 protected:
  struct Inputs {
    StepHeader header;
    std::vector<std::int32_t> table;
    std::vector<float> q, k, v, q_norm, k_norm;
    std::vector<float> keys, values;  ///< The pools before the step, [blocks, block_tokens, kv_heads, head_dim]
    CacheLayout layout;
    std::uint32_t q_stride = 0;
  };
  static constexpr std::uint32_t kSpareBlocks = 3;

  Inputs inputs(const AttentionCase& c) {
    Inputs in;
    in.header = {.position = c.position, .slot = 0};
    const auto tokens = static_cast<std::uint32_t>(c.position) + c.m;
    const auto blocks = static_cast<std::uint32_t>(div_ceil(tokens, c.block_tokens));
    in.table.resize(blocks + kSpareBlocks);
    std::iota(in.table.begin(), in.table.end(), 0);
    std::shuffle(in.table.begin(), in.table.end(), random);
    const std::uint32_t token_stride = c.num_kv_heads * c.head_dim;
    in.layout = {.dtype = id(c.cache),
                 .block_tokens = c.block_tokens,
                 .block_stride = std::uint64_t{c.block_tokens} * token_stride,
                 .token_stride = token_stride,
                 .head_stride = c.head_dim};
    in.q_stride = c.gated ? 2 * c.head_dim : c.head_dim;
    in.q = normal(std::size_t{c.m} * c.num_heads * in.q_stride);
    in.k = normal(std::size_t{c.m} * token_stride);
    in.v = normal(std::size_t{c.m} * token_stride);
    in.keys = normal(in.table.size() * in.layout.block_stride);
    in.values = normal(in.table.size() * in.layout.block_stride);
    return in;
  }
  Ops::Cache upload(Side& side, const Inputs& in, DType dtype) {
    const std::vector<StepHeader> header{in.header};
    return {side.in(stored(in.keys, dtype)), side.in(stored(in.values, dtype)), side.in(header), side.in(in.table)};
  }
  /// A pool as numbers.
  std::vector<float> read_pool(Side& side, DevicePtr pool, const Inputs& in, DType dtype) {
    const std::vector<std::byte> bytes = side.read<std::byte>(pool, in.keys.size() * (dtype == DType::f32 ? 4 : 2));
    std::vector<float> values(in.keys.size());
    ok(dequantise(dtype, bytes, values));
    return values;
  }
  /// The rows of a pool that the step writes, [m, kv_heads * head_dim].
  static std::vector<float> step_rows(const std::vector<float>& pool, const Inputs& in, const AttentionCase& c) {
    std::vector<float> rows;
    for (std::uint32_t i = 0; i < c.m; ++i) {
      const std::uint32_t t = static_cast<std::uint32_t>(c.position) + i;
      const auto at = pool.begin() + static_cast<std::ptrdiff_t>(in.table[t / c.block_tokens] * in.layout.block_stride +
                                                                 t % c.block_tokens * in.layout.token_stride);
      rows.insert(rows.end(), at, at + in.layout.token_stride);
    }
    return rows;
  }
  /// How many elements of a pool differ from what was there before, beyond the step's rows.
  static std::size_t strays(std::vector<float> pool, std::vector<float> before, const Inputs& in, const AttentionCase& c) {
    for (std::uint32_t i = 0; i < c.m; ++i) {
      const std::uint32_t t = static_cast<std::uint32_t>(c.position) + i;
      const auto at = static_cast<std::ptrdiff_t>(in.table[t / c.block_tokens] * in.layout.block_stride +
                                                  t % c.block_tokens * in.layout.token_stride);
      std::fill_n(pool.begin() + at, in.layout.token_stride, 0.0F);
      std::fill_n(before.begin() + at, in.layout.token_stride, 0.0F);
    }
    std::size_t count = 0;
    for (std::size_t i = 0; i < pool.size(); ++i) count += pool[i] != before[i] ? 1 : 0;
    return count;
  }
  RotateStoreParams rotate_params(const AttentionCase& c, const Inputs& in, std::uint32_t pairs, bool interleaved) {
    return {.m = c.m,
            .num_heads = c.num_heads,
            .num_kv_heads = c.num_kv_heads,
            .head_dim = c.head_dim,
            .pairs = pairs,
            .interleaved = interleaved,
            .ld_q = c.num_heads * in.q_stride,
            .q_head_stride = in.q_stride,
            .ld_kv = in.layout.token_stride,
            .norm_eps = 1e-6F,
            .cache = in.layout};
  }
  AttendParams attend_params(const AttentionCase& c, const Inputs& in) {
    return {.m = c.m,
            .num_heads = c.num_heads,
            .num_kv_heads = c.num_kv_heads,
            .head_dim = c.head_dim,
            .ld_q = c.num_heads * in.q_stride,
            .q_head_stride = in.q_stride,
            .gated = c.gated,
            .scale = 1.0F / std::sqrt(static_cast<float>(c.head_dim)),
            .cache = in.layout};
  }
  /// cos and sin for the step's positions, the same for both sides.
  std::vector<float> rotary_table(const AttentionCase& c, std::uint32_t pairs) {
    std::vector<float> table(std::size_t{c.m} * 2 * pairs);
    for (std::uint32_t i = 0; i < c.m; ++i) {
      for (std::uint32_t j = 0; j < pairs; ++j) {
        const double angle = (c.position + static_cast<double>(i)) * std::pow(10000.0, -static_cast<double>(j) / pairs);
        table[(std::size_t{i} * 2) * pairs + j] = static_cast<float>(std::cos(angle));
        table[(std::size_t{i} * 2 + 1) * pairs + j] = static_cast<float>(std::sin(angle));
      }
    }
    return table;
  }
  /// Float32 caches are summed in float32; keys and values in bf16 meet queries and weights in bf16.
  static double attend_tolerance(DType cache) { return cache == DType::f32 ? 2e-5 : 1e-2; }
};

TEST_F(Attention, Attend) {
  for (const AttentionCase& c : attention_cases()) {
    if (!wanted(kind_of("attend", c))) continue;
    SCOPED_TRACE(::testing::PrintToString(c));
    const Inputs in = inputs(c);
    const std::string name = fmt::format("{} {}", c.m == 1 ? "attend_one" : "attend", to_string(c.cache));
    compare({name}, attend_tolerance(c.cache), [&](Side& side) -> std::vector<std::vector<float>> {
      const Ops::Cache cache = upload(side, in, c.cache);
      const std::uint64_t count = std::uint64_t{c.m} * c.num_heads * c.head_dim;
      const DevicePtr out = side.out(count * 4);
      ok(side.ops.attend(side.in(in.q), cache, out, attend_params(c, in)));
      return {side.read<float>(out, count)};
    });
  }
}

TEST_F(Attention, RotateStore) {
  bool interleaved = false;
  for (const AttentionCase& c : attention_cases()) {
    if (!wanted(kind_of("rotate_store", c))) continue;
    SCOPED_TRACE(::testing::PrintToString(c));
    Inputs in = inputs(c);
    interleaved = !interleaved;
    const std::uint32_t pairs = c.gated ? c.head_dim / 8 : c.head_dim / 2;
    if (c.gated) in.q_norm = normal(c.head_dim), in.k_norm = normal(c.head_dim);
    const std::vector<float> table = rotary_table(c, pairs);
    const double tolerance = c.cache == DType::f32 ? 1e-5 : 1e-3;
    compare({"rotate_store q", "rotate_store k", "rotate_store v"}, tolerance, [&](Side& side) -> std::vector<std::vector<float>> {
      const Ops::Cache cache = upload(side, in, c.cache);
      const DevicePtr q = side.in(in.q);
      ok(side.ops.rotate_store({q, side.in(in.k), side.in(in.v), side.maybe(in.q_norm), side.maybe(in.k_norm), side.in(table)},
                               cache, rotate_params(c, in, pairs, interleaved)));
      const std::vector<float> keys = read_pool(side, cache.keys, in, c.cache), values = read_pool(side, cache.values, in, c.cache);
      std::vector<float> before(in.keys.size());
      ok(dequantise(c.cache, stored(in.keys, c.cache), before));
      EXPECT_EQ(strays(keys, before, in, c), 0U);
      ok(dequantise(c.cache, stored(in.values, c.cache), before));
      EXPECT_EQ(strays(values, before, in, c), 0U);
      return {side.read<float>(q, in.q.size()), step_rows(keys, in, c), step_rows(values, in, c)};
    });
  }
}

TEST_F(Attention, RotateAttend) {
  if (!exact().ops.has_rotate_attend()) GTEST_SKIP() << "the backend has no rotate_attend";
  bool interleaved = false;
  for (const AttentionCase& c : attention_cases()) {
    if (c.m != 1 || !wanted(kind_of("rotate_attend", c))) continue;
    SCOPED_TRACE(::testing::PrintToString(c));
    Inputs in = inputs(c);
    interleaved = !interleaved;
    const std::uint32_t pairs = c.gated ? c.head_dim / 8 : c.head_dim / 2;
    if (c.gated) in.q_norm = normal(c.head_dim), in.k_norm = normal(c.head_dim);
    const std::vector<float> table = rotary_table(c, pairs);
    const std::string name = fmt::format("rotate_attend {}", to_string(c.cache));
    compare({name, "rotate_attend k", "rotate_attend v"}, attend_tolerance(c.cache),
            [&](Side& side) -> std::vector<std::vector<float>> {
              const Ops::Cache cache = upload(side, in, c.cache);
              const DevicePtr q = side.in(in.q);
              const Ops::RotateStore tensors{
                  q, side.in(in.k), side.in(in.v), side.maybe(in.q_norm), side.maybe(in.k_norm), side.in(table)};
              const std::uint64_t count = std::uint64_t{c.num_heads} * c.head_dim;
              const RotateStoreParams rotate = rotate_params(c, in, pairs, interleaved);
              const AttendParams attend = attend_params(c, in);
              const DevicePtr out = side.out(count * 4);
              if (side.ops.has_rotate_attend()) {
                const std::uint64_t bytes = side.ops.plans().attend_scratch_bytes(c.num_heads, c.num_kv_heads, c.head_dim);
                const DevicePtr scratch = side.out(bytes);
                ok(side.ops.clear(scratch, bytes));
                // Twice, since a launch must leave its scratch as it found it.
                for (int i = 0; i < 2; ++i)
                  ok(side.ops.rotate_attend(tensors, cache, scratch, out, {rotate, attend.gated, attend.scale}));
                EXPECT_EQ(side.read<float>(q, in.q.size()), in.q) << "queries are to stay as they were";
              } else {
                ok(side.ops.rotate_store(tensors, cache, rotate));
                ok(side.ops.attend(q, cache, out, attend));
              }
              return {side.read<float>(out, count), step_rows(read_pool(side, cache.keys, in, c.cache), in, c),
                      step_rows(read_pool(side, cache.values, in, c.cache), in, c)};
            });
  }
}

TEST_F(DecoderParity, Rotary) {
  for (const std::uint32_t pairs : {1U, 20U, 32U, 64U, 128U}) {
    for (const auto& [position, m] : {std::pair{0, 1U}, std::pair{100, 33U}, std::pair{131000, 5U}}) {
      if (!wanted(fmt::format("rotary {}", m == 1))) continue;
      SCOPED_TRACE(fmt::format("{} pairs at {}", pairs, position));
      std::vector<float> frequencies(pairs);
      for (std::uint32_t j = 0; j < pairs; ++j) frequencies[j] = std::pow(10000.0F, -static_cast<float>(j) / pairs);
      const std::vector<StepHeader> header{{.position = position, .slot = 0}};
      compare({"rotary"}, 1e-5, [&](Side& side) -> std::vector<std::vector<float>> {
        const std::uint64_t count = std::uint64_t{m} * 2 * pairs;
        const DevicePtr table = side.out(count * 4);
        ok(side.ops.rotary(side.in(header), side.in(frequencies), table, {.m = m, .pairs = pairs}));
        return {side.read<float>(table, count)};
      });
    }
  }
}

// ---- recurrence ----

TEST_F(DecoderParity, Conv) {
  constexpr std::uint32_t kSlots = 3;
  for (const std::uint32_t kernel : {2U, 3U, 4U, 7U}) {
    for (const std::uint32_t channels : {64U, 100U, 768U, 8192U}) {
      for (const std::uint32_t m : {1U, 2U, 3U, 9U, 70U}) {
        if (!wanted(fmt::format("conv {} {}", kernel, m < kernel ? 0 : m))) continue;
        SCOPED_TRACE(fmt::format("kernel {}, channels {}, m {}", kernel, channels, m));
        const std::vector<StepHeader> header{{.position = 5, .slot = 1}};
        const std::vector<float> x = normal(std::size_t{m} * channels), weight = normal(std::size_t{kernel} * channels),
                                 state = normal(std::size_t{kSlots} * (kernel - 1) * channels);
        compare({"conv", "conv state"}, 1e-5, [&](Side& side) -> std::vector<std::vector<float>> {
          const DevicePtr in_place = side.in(x), kept = side.in(state);
          ok(side.ops.conv(in_place, side.in(weight), kept, side.in(header),
                           {.m = m, .channels = channels, .kernel = kernel, .ld_x = channels}));
          return {side.read<float>(in_place, x.size()), side.read<float>(kept, state.size())};
        });
      }
    }
  }
}

TEST_F(DecoderParity, Delta) {
  constexpr std::uint32_t kSlots = 2;
  struct Size {
    std::uint32_t key_heads, value_heads, key_dim, value_dim;
  };
  for (const Size s : {Size{1, 2, 128, 128}, Size{16, 32, 128, 128}, Size{2, 4, 64, 32}, Size{3, 3, 40, 24}}) {
    for (const std::uint32_t m : {1U, 2U, 16U, 17U, 130U}) {
      for (const std::uint32_t tiled : {0U, 1U}) {
        if (!wanted(fmt::format("delta {} {} {}", s.key_dim == 128, m < 33 ? std::min(m, 2U) : m, tiled))) continue;
        SCOPED_TRACE(fmt::format("{} and {} heads of {} and {}, m {}, tiled {}", s.key_heads, s.value_heads, s.key_dim, s.value_dim,
                                 m, tiled));
        const std::uint32_t width = 2 * s.key_heads * s.key_dim + s.value_heads * s.value_dim,
                            out_width = s.value_heads * s.value_dim;
        const std::vector<StepHeader> header{{.position = 9, .slot = 1}};
        const std::vector<float> qkv = normal(std::size_t{m} * width), z = normal(std::size_t{m} * out_width),
                                 a = normal(std::size_t{m} * s.value_heads), b = normal(std::size_t{m} * s.value_heads),
                                 dt_bias = normal(s.value_heads), norm = normal(s.value_dim),
                                 state = normal(std::size_t{kSlots} * s.value_heads * s.key_dim * s.value_dim, 0.1F);
        std::vector<float> decay = normal(s.value_heads);
        for (float& d : decay) d = -std::exp(d);
        compare({"delta", "delta state"}, 1e-4, [&](Side& side) -> std::vector<std::vector<float>> {
          const DevicePtr out = side.out(std::uint64_t{m} * out_width * 4), kept = side.in(state);
          ok(side.ops.delta({side.in(qkv), side.in(z), side.in(a), side.in(b), side.in(decay), side.in(dt_bias), side.in(norm),
                             kept, side.in(header), out},
                            {.m = m,
                             .num_key_heads = s.key_heads,
                             .num_value_heads = s.value_heads,
                             .key_dim = s.key_dim,
                             .value_dim = s.value_dim,
                             .tiled = tiled,
                             .ld_qkv = width,
                             .ld_z = out_width,
                             .ld_ab = s.value_heads,
                             .norm_eps = 1e-6F}));
          return {side.read<float>(out, std::uint64_t{m} * out_width), side.read<float>(kept, state.size())};
        });
      }
    }
  }
}

// ---- weights and tokens ----

TEST_F(DecoderParity, Widen) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const WidenOp op : {WidenOp::copy, WidenOp::plus_one, WidenOp::negative_exp}) {
      for (const auto& [rows, cols, transpose] : {std::array{1U, 5000U, 0U}, std::array{768U, 4U, 1U}, std::array{37U, 11U, 1U}}) {
        if (!wanted(fmt::format("widen {} {}", to_string(dtype), transpose))) continue;
        SCOPED_TRACE(fmt::format("{} op {}, [{}, {}]", to_string(dtype), static_cast<int>(op), rows, cols));
        const std::vector<std::byte> from = stored(normal(std::size_t{rows} * cols), dtype);
        compare({"widen"}, 1e-6, [&](Side& side) -> std::vector<std::vector<float>> {
          const DevicePtr to = side.out(std::uint64_t{rows} * cols * 4);
          ok(side.ops.widen(side.in(from), to, {.rows = rows, .cols = cols, .dtype = id(dtype), .op = op, .transpose = transpose}));
          return {side.read<float>(to, std::uint64_t{rows} * cols)};
        });
      }
    }
  }
}

TEST_F(DecoderParity, ArgmaxIsEqual) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const std::uint32_t n : {1U, 2U, 31U, 1000U, 4097U, 49152U, 151936U}) {
    for (const std::uint32_t rows : {1U, 5U}) {
      if (!wanted(fmt::format("argmax {} {}", rows, n > 512))) continue;
      SCOPED_TRACE(fmt::format("{} rows of {}", rows, n));
      std::vector<float> logits = normal(std::size_t{rows} * n);
      if (rows == 5) {
        // Row 1 has its largest twice, 2 a NaN, 3 an infinity, 4 nothing but -inf and one number.
        const float top = 100;
        logits[n + n / 3] = logits[n + n - 1] = top;
        logits[2 * n + n / 2] = std::numeric_limits<float>::quiet_NaN();
        logits[3 * n + n - 1] = infinity;
        std::fill_n(logits.begin() + 4 * n, n, -infinity);
        logits[4 * n + n / 2] = -7;
      }
      const auto ids = [&](Side& side) {
        const DevicePtr out = side.out(rows * 4);
        ok(side.ops.argmax(side.in(logits), out, {.rows = rows, .n = n, .ld = n}));
        auto result = side.read<std::int32_t>(out, rows);
        side.end_case();
        return result;
      };
      EXPECT_EQ(ids(exact()), ids(want()));
      ++ParityReport::lines()["argmax"].cases;
    }
  }
}

/// The device draws what the host's Sampler draws with the same number, every time.
TEST_F(DecoderParity, SampleDrawsAsTheHostDoes) {
  const float infinity = std::numeric_limits<float>::infinity();
  int differ_from_greedy = 0, cases = 0;
  for (const std::uint32_t n : {33U, 1U, 5U, 1000U, 49152U, 151936U}) {
    std::vector<float> logits = normal(n, 3);
    if (n == 1000) {
      for (float& x : logits) x = std::round(x);  // many equal ones, and both zeros
      for (std::uint32_t i = 0; i < n; i += 7) logits[i] = -infinity;
    }
    const auto best = static_cast<std::int32_t>(ok(argmax(logits)));
    for (const float temperature : {1.0F, 0.05F, 8.0F}) {
      for (const std::uint32_t top_k : {0U, 1U, 2U, 50U, 900U, 200000U}) {
        for (const float top_p : {1.0F, 0.95F, 0.3F, 1e-6F}) {
          const char* filter = top_k != 0 ? "top_k" : top_p < 1 ? "top_p" : "none";
          if (!wanted(fmt::format("sample {} {}", n > 512, filter))) continue;
          ++cases;
          SCOPED_TRACE(fmt::format("{} logits, temperature {}, top_k {}, top_p {}", n, temperature, top_k, top_p));
          const SamplerOptions options{.temperature = temperature, .top_k = top_k, .top_p = top_p, .seed = random()};
          Sampler oracle = ok(Sampler::create(options)), numbers = ok(Sampler::create(options));
          constexpr std::uint32_t kDraws = 3;
          std::vector<std::byte> inputs(sizeof(SamplingInputs) + kDraws * sizeof(double));
          const SamplingInputs head{numbers.inverse_temperature(), top_p, top_k};
          std::memcpy(inputs.data(), &head, sizeof(head));
          for (std::uint32_t i = 0; i < kDraws; ++i) {
            const double draw = numbers.uniform();
            std::memcpy(inputs.data() + sizeof(head) + i * sizeof(draw), &draw, sizeof(draw));
          }
          Side& side = exact();
          const DevicePtr on_device = side.in(logits), at = side.in(inputs), scratch = side.out(std::uint64_t{n} * 8);
          for (std::uint32_t i = 0; i < kDraws; ++i) {
            const DevicePtr token = side.in(std::vector<std::int32_t>{best});
            ok(side.ops.sample(on_device, at, token, scratch, {.n = n, .draw = i}));
            const std::int32_t drawn = side.read<std::int32_t>(token, 1)[0];
            EXPECT_EQ(drawn, ok(oracle.next(logits))) << "draw " << i;
            differ_from_greedy += drawn != best ? 1 : 0;
            ++ParityReport::lines()["sample"].cases;
          }
          // Logits that are not finite were found by argmax.
          const DevicePtr refused = side.in(std::vector<std::int32_t>{-1});
          ok(side.ops.sample(on_device, at, refused, scratch, {.n = n, .draw = 0}));
          EXPECT_EQ(side.read<std::int32_t>(refused, 1)[0], -1);
          side.end_case();
        }
      }
    }
  }
  EXPECT_GT(differ_from_greedy, cases / 2);
}

TEST_F(DecoderParity, Advance) {
  for (const std::int32_t token : {17, 0, -1}) {
    const auto run = [&](Side& side) {
      const DevicePtr step = side.in(std::vector<StepHeader>{{.position = 41, .slot = 3}}), ids = side.out(4),
                      tokens = side.out(16);
      ok(side.ops.advance(side.in(std::vector<std::int32_t>{token}), step, ids, tokens, {.index = 2}));
      std::vector<std::int32_t> all = side.read<std::int32_t>(tokens, 4);
      all.push_back(side.read<std::int32_t>(ids, 1)[0]);
      const StepHeader header = side.read<StepHeader>(step, 1)[0];
      all.insert(all.end(), {header.position, header.slot});
      side.end_case();
      return all;
    };
    EXPECT_EQ(run(exact()), (std::vector<std::int32_t>{-1, -1, token, -1, std::max(token, 0), 42, 3}));
    EXPECT_EQ(run(want()), run(exact()));
    ++ParityReport::lines()["advance"].cases;
  }
}

TEST_F(DecoderParity, Score) {
  for (const std::uint32_t n : {1U, 31U, 1000U, 49152U, 151936U}) {
    for (const std::uint32_t rows : {1U, 7U}) {
      if (!wanted(fmt::format("score {} {}", rows, n > 512))) continue;
      SCOPED_TRACE(fmt::format("{} rows of {}", rows, n));
      const std::vector<float> logits = normal(std::size_t{rows} * n, 5);
      std::vector<std::int32_t> targets(rows);
      for (std::int32_t& t : targets) t = static_cast<std::int32_t>(random() % n);
      const auto scores = [&](Side& side) {
        const DevicePtr out = side.out(rows * sizeof(RowScore));
        ok(side.ops.score(side.in(logits), side.in(targets), out, {.rows = rows, .n = n, .ld = n}));
        auto result = side.read<RowScore>(out, rows);
        side.end_case();
        return result;
      };
      const auto got = scores(exact()), expected = scores(want());
      for (std::uint32_t i = 0; i < rows; ++i) {
        EXPECT_EQ(got[i].best, expected[i].best);
        EXPECT_NEAR(got[i].loss, expected[i].loss, 1e-4);
      }
      ++ParityReport::lines()["score"].cases;
    }
  }
}

}  // namespace
}  // namespace metrale::test
