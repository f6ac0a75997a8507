// SPDX-License-Identifier: Apache-2.0
//
// Rotary embedding and attention of module "decoder" against float64.
#pragma once

#include "cuda_decoder_support.h"

namespace bench {

struct AttentionCase {
  std::uint32_t dtype;
  std::uint32_t head_dim;
  std::uint32_t kv_heads;
  std::uint32_t ratio;
  std::uint32_t m;
  std::uint32_t position;
  std::uint32_t block_tokens;
  bool gated;
  bool interleaved;
  bool norms;
  bool partial;
};

/// A cache on both sides; the host's as floats [block, token, head, d] that are NaN where nothing was stored.
struct Cache {
  CacheLayout layout;
  std::size_t elements = 0;
  std::vector<std::int32_t> table;
  bool is_bf16 = false;

  Cache(const AttentionCase& c, Random& random) {
    const std::uint32_t blocks = (c.position + c.m + c.block_tokens - 1) / c.block_tokens + 2;
    is_bf16 = c.dtype == metrale::cuda::decoder::kBf16;
    layout.dtype = c.dtype;
    layout.block_tokens = c.block_tokens;
    layout.token_stride = c.kv_heads * c.head_dim;
    layout.head_stride = c.head_dim;
    layout.block_stride = std::uint64_t{c.block_tokens} * layout.token_stride;
    elements = blocks * layout.block_stride;
    table = random.permutation(blocks);
  }
  std::size_t at(std::uint32_t token, std::uint32_t head) const {
    return static_cast<std::size_t>(table[token / layout.block_tokens]) * layout.block_stride +
           static_cast<std::size_t>(token % layout.block_tokens) * layout.token_stride +
           static_cast<std::size_t>(head) * layout.head_stride;
  }
  std::vector<float> filled(const AttentionCase& c, Random& random) const {
    std::vector<float> v(elements, NAN);
    for (std::uint32_t t = 0; t < c.position; ++t) {
      for (std::uint32_t h = 0; h < c.kv_heads; ++h) {
        for (std::uint32_t d = 0; d < c.head_dim; ++d) {
          const float x = random.next() * 2;
          v[at(t, h) + d] = is_bf16 ? float_of(bf16_of(x)) : x;
        }
      }
    }
    return v;
  }
  std::vector<std::uint8_t> bytes(const std::vector<float>& v) const {
    std::vector<std::uint8_t> b(v.size() * (is_bf16 ? 2 : 4));
    for (std::size_t i = 0; i < v.size(); ++i) {
      if (is_bf16) {
        const std::uint16_t x = std::isnan(v[i]) ? 0x7fc0 : bf16_of(v[i]);
        std::memcpy(&b[2 * i], &x, 2);
      } else {
        std::memcpy(&b[4 * i], &v[i], 4);
      }
    }
    return b;
  }
  std::vector<float> floats(const std::vector<std::uint8_t>& b) const {
    std::vector<float> v(elements);
    for (std::size_t i = 0; i < elements; ++i) {
      if (is_bf16) {
        std::uint16_t x = 0;
        std::memcpy(&x, &b[2 * i], 2);
        v[i] = float_of(x);
      } else {
        std::memcpy(&v[i], &b[4 * i], 4);
      }
    }
    return v;
  }
};

/// Norm, then rotation, of one head.
inline std::vector<double> rotated(const float* x, const std::vector<float>* norm, std::uint32_t n, float eps,
                                   const std::vector<float>& table, std::uint32_t row, std::uint32_t pairs, bool interleaved) {
  std::vector<double> y(x, x + n);
  if (norm) {
    double sum = 0;
    for (const double v : y) sum += v * v;
    const double scale = 1 / std::sqrt(sum / n + static_cast<double>(eps));
    for (std::uint32_t d = 0; d < n; ++d) y[d] *= scale * static_cast<double>((*norm)[d]);
  }
  for (std::uint32_t j = 0; j < pairs; ++j) {
    const std::uint32_t a = interleaved ? 2 * j : j;
    const std::uint32_t b = interleaved ? a + 1 : j + pairs;
    const double cosine = table[(row * 2) * pairs + j];
    const double sine = table[(row * 2 + 1) * pairs + j];
    const double first = y[a];
    const double second = y[b];
    y[a] = first * cosine - second * sine;
    y[b] = second * cosine + first * sine;
  }
  return y;
}

inline std::vector<double> attention(const AttentionCase& c, const Cache& cache, const std::vector<float>& q,
                                     const std::vector<float>& keys, const std::vector<float>& values, const AttendParams& p) {
  std::vector<double> out(static_cast<std::size_t>(c.m) * p.num_heads * c.head_dim);
  parallel(static_cast<std::size_t>(c.m) * p.num_heads, [&](std::size_t i) {
    const auto token = static_cast<std::uint32_t>(i / p.num_heads);
    const auto head = static_cast<std::uint32_t>(i % p.num_heads);
    const float* query = &q[static_cast<std::size_t>(token) * p.ld_q + static_cast<std::size_t>(head) * p.q_head_stride];
    const std::uint32_t num_keys = c.position + token + 1;
    std::vector<double> weights(num_keys);
    double top = -1e300;
    for (std::uint32_t t = 0; t < num_keys; ++t) {
      const float* k = &keys[cache.at(t, head / c.ratio)];
      double s = 0;
      for (std::uint32_t d = 0; d < c.head_dim; ++d) s += static_cast<double>(query[d]) * static_cast<double>(k[d]);
      weights[t] = s * static_cast<double>(p.scale);
      top = std::max(top, weights[t]);
    }
    double total = 0;
    double* to = &out[i * c.head_dim];
    for (std::uint32_t t = 0; t < num_keys; ++t) {
      const double w = std::exp(weights[t] - top);
      total += w;
      const float* v = &values[cache.at(t, head / c.ratio)];
      for (std::uint32_t d = 0; d < c.head_dim; ++d) to[d] += w * static_cast<double>(v[d]);
    }
    for (std::uint32_t d = 0; d < c.head_dim; ++d) {
      to[d] /= total;
      if (p.gated) to[d] /= 1 + std::exp(-static_cast<double>(query[c.head_dim + d]));
    }
  });
  return out;
}

inline void check_attention(Launcher& run, const AttentionCase& c, std::uint64_t seed) {
  namespace decoder = metrale::cuda::decoder;
  Random random(seed);
  const std::string name = text({{"bf16", c.dtype == decoder::kBf16},
                                 {"head_dim", c.head_dim},
                                 {"kv", c.kv_heads},
                                 {"ratio", c.ratio},
                                 {"m", c.m},
                                 {"position", c.position},
                                 {"block", c.block_tokens},
                                 {"gated", c.gated},
                                 {"interleaved", c.interleaved},
                                 {"norms", c.norms},
                                 {"partial", c.partial}});
  const std::uint32_t heads = c.kv_heads * c.ratio;
  const std::uint32_t q_head_stride = c.head_dim * (c.gated ? 2 : 1);
  RotateStoreParams store{.m = c.m,
                          .num_heads = heads,
                          .num_kv_heads = c.kv_heads,
                          .head_dim = c.head_dim,
                          .pairs = c.head_dim / (c.partial ? 4 : 2),
                          .interleaved = c.interleaved,
                          .ld_q = heads * q_head_stride,
                          .q_head_stride = q_head_stride,
                          .ld_kv = c.kv_heads * c.head_dim,
                          .norm_eps = 1e-5F,
                          .cache = {}};
  const Cache cache(c, random);
  store.cache = cache.layout;
  const AttendParams attend_params{.m = c.m,
                                   .num_heads = heads,
                                   .num_kv_heads = c.kv_heads,
                                   .head_dim = c.head_dim,
                                   .ld_q = store.ld_q,
                                   .q_head_stride = q_head_stride,
                                   .gated = c.gated,
                                   .scale = static_cast<float>(1.5 / std::sqrt(static_cast<double>(c.head_dim))),
                                   .cache = cache.layout};

  const std::vector<float> q = random.vector(static_cast<std::size_t>(c.m) * store.ld_q, 2);
  const std::vector<float> k = random.vector(static_cast<std::size_t>(c.m) * store.ld_kv, 2);
  const std::vector<float> v = random.vector(static_cast<std::size_t>(c.m) * store.ld_kv, 2);
  const std::vector<float> q_norm = random.vector(c.head_dim, 0.5F, 1);
  const std::vector<float> k_norm = random.vector(c.head_dim, 0.5F, 1);
  std::vector<float> frequencies(store.pairs);
  for (std::uint32_t j = 0; j < store.pairs; ++j)
    frequencies[j] = static_cast<float>(std::pow(10000.0, -static_cast<double>(j) / store.pairs));
  const std::vector<float> keys = cache.filled(c, random);
  const std::vector<float> values = cache.filled(c, random);

  const Dev<StepHeader> step(step_of(c.position, 0));
  const Dev<float> inverse(frequencies), rotary_table(static_cast<std::size_t>(c.m) * 2 * store.pairs);
  run(rotary, decoder::plan_rotary({c.m, store.pairs}), step.ptr(), inverse.ptr(), rotary_table.ptr(),
      RotaryParams{c.m, store.pairs});
  const std::vector<float> table = rotary_table.get();
  std::vector<double> table_want(table.size());
  for (std::uint32_t i = 0; i < c.m; ++i) {
    for (std::uint32_t j = 0; j < store.pairs; ++j) {
      const double angle = static_cast<double>(static_cast<float>(c.position + i) * frequencies[j]);
      table_want[static_cast<std::size_t>(i) * 2 * store.pairs + j] = std::cos(angle);
      table_want[(static_cast<std::size_t>(i) * 2 + 1) * store.pairs + j] = std::sin(angle);
    }
  }
  compare("rotary", name, table, table_want, 1e-6);

  const Dev<std::int32_t> block_table(cache.table);
  const Dev<float> dev_q(q), dev_k(k), dev_v(v), dev_q_norm(q_norm), dev_k_norm(k_norm);
  const float* q_norm_at = c.norms ? dev_q_norm.ptr() : nullptr;
  const float* k_norm_at = c.norms ? dev_k_norm.ptr() : nullptr;
  const Dev<std::uint8_t> dev_keys(cache.bytes(keys)), dev_values(cache.bytes(values));
  const std::size_t out_size = static_cast<std::size_t>(c.m) * heads * c.head_dim;

  std::vector<std::vector<float>> fused_out;
  if (c.m == 1) {
    const RotateAttendParams fused{.rotate = store, .gated = c.gated, .scale = attend_params.scale};
    Dev<float> scratch(decoder::attend_scratch_bytes(heads, c.kv_heads, c.head_dim, run.chip) / 4);
    scratch.zero();
    for (const bool has_scratch : {false, true, true}) {
      const Dev<std::uint8_t> own_keys(cache.bytes(keys)), own_values(cache.bytes(values));
      const Dev<float> out(out_size);
      run(rotate_attend, decoder::plan_rotate_attend(store, has_scratch, run.chip), dev_q.ptr(), dev_k.ptr(), dev_v.ptr(),
          q_norm_at, k_norm_at, rotary_table.ptr(), step.ptr(), block_table.ptr(), own_keys.ptr(), own_values.ptr(), out.ptr(),
          has_scratch ? scratch.ptr() : nullptr, fused);
      fused_out.push_back(out.get());
      // Everything but the step's row must be as it was; that row is compared below, through what it gives.
      std::vector<float> now = cache.floats(own_keys.get());
      bool same = true;
      for (std::uint32_t t = 0; t < c.position; ++t) {
        for (std::uint32_t h = 0; h < c.kv_heads; ++h) {
          for (std::uint32_t d = 0; d < c.head_dim; ++d) same = same && now[cache.at(t, h) + d] == keys[cache.at(t, h) + d];
        }
      }
      std::vector<float> row;
      std::vector<double> row_want;
      for (std::uint32_t h = 0; h < c.kv_heads; ++h) {
        const std::vector<double> y = rotated(&k[h * c.head_dim], c.norms ? &k_norm : nullptr, c.head_dim, store.norm_eps, table, 0,
                                              store.pairs, c.interleaved);
        for (std::uint32_t d = 0; d < c.head_dim; ++d) {
          row.push_back(now[cache.at(c.position, h) + d]);
          row_want.push_back(y[d]);
        }
      }
      expect("rotate_attend", same, name + " overwrote other rows");
      compare("rotate_attend", name + " key row", row, row_want, cache.is_bf16 ? 4e-3 : 1e-6);
    }
    const std::vector<float> left = scratch.get();
    bool zero = true;
    for (std::uint32_t i = 0; i < decoder::attend_counters(heads, c.kv_heads, c.head_dim); ++i) zero = zero && left[i] == 0;
    expect("rotate_attend", zero, name + " left counters");
  }

  run(rotate_store, decoder::plan_rotate_store(store), dev_q.ptr(), dev_k.ptr(), dev_v.ptr(), q_norm_at, k_norm_at,
      rotary_table.ptr(), step.ptr(), block_table.ptr(), dev_keys.ptr(), dev_values.ptr(), store);
  const std::vector<float> q_now = dev_q.get();
  const std::vector<float> keys_now = cache.floats(dev_keys.get());
  const std::vector<float> values_now = cache.floats(dev_values.get());
  std::vector<double> q_want(q.begin(), q.end());
  std::vector<float> rows;
  std::vector<double> rows_want;
  for (std::uint32_t i = 0; i < c.m; ++i) {
    for (std::uint32_t h = 0; h < heads; ++h) {
      const std::size_t at = static_cast<std::size_t>(i) * store.ld_q + static_cast<std::size_t>(h) * q_head_stride;
      const std::vector<double> y =
          rotated(&q[at], c.norms ? &q_norm : nullptr, c.head_dim, store.norm_eps, table, i, store.pairs, c.interleaved);
      std::copy(y.begin(), y.end(), q_want.begin() + static_cast<std::ptrdiff_t>(at));
    }
    for (std::uint32_t h = 0; h < c.kv_heads; ++h) {
      const std::size_t at = static_cast<std::size_t>(i) * store.ld_kv + static_cast<std::size_t>(h) * c.head_dim;
      const std::vector<double> y =
          rotated(&k[at], c.norms ? &k_norm : nullptr, c.head_dim, store.norm_eps, table, i, store.pairs, c.interleaved);
      for (std::uint32_t d = 0; d < c.head_dim; ++d) {
        rows.push_back(keys_now[cache.at(c.position + i, h) + d]);
        rows_want.push_back(y[d]);
        rows.push_back(values_now[cache.at(c.position + i, h) + d]);
        rows_want.push_back(static_cast<double>(v[at + d]));
      }
    }
  }
  compare("rotate_store", name + " q", q_now, q_want, 1e-6);
  compare("rotate_store", name + " rows", rows, rows_want, cache.is_bf16 ? 4e-3 : 1e-6);

  const std::vector<double> want = attention(c, cache, q_now, keys_now, values_now, attend_params);
  {
    const Dev<float> out(out_size);
    run(attend, decoder::plan_attend(attend_params), dev_q.ptr(), dev_keys.ptr(), dev_values.ptr(), step.ptr(), block_table.ptr(),
        out.ptr(), attend_params);
    const bool tensor_cores = cache.is_bf16 && decoder::has_fast_attention(c.head_dim);
    compare(tensor_cores ? "attend mma" : "attend f32", name, out.get(), want, tensor_cores ? 1.2e-2 : 5e-6);
  }
  if (c.m != 1) return;
  const Dev<float> out(out_size);
  run(attend_one, decoder::plan_attend_one(attend_params, run.chip), dev_q.ptr(), dev_keys.ptr(), dev_values.ptr(), step.ptr(),
      block_table.ptr(), out.ptr(), attend_params);
  compare(cache.is_bf16 ? "attend_one bf16" : "attend_one f32", name, out.get(), want, cache.is_bf16 ? 5e-5 : 5e-6);
  // A rounded key may fall on the other side, once in a while.
  for (const std::vector<float>& fused : fused_out) compare("rotate_attend", name, fused, want, cache.is_bf16 ? 2e-3 : 5e-6);
}

inline void check_attention(Launcher& run) {
  namespace decoder = metrale::cuda::decoder;
  struct Rows {
    std::uint32_t m;
    std::uint32_t position;
  };
  const Rows rows[] = {{1, 0}, {1, 1}, {1, 15}, {1, 511}, {1, 5000}, {2, 0}, {2, 63}, {17, 1}, {17, 5000}, {100, 0}, {100, 511}};
  const std::uint32_t ratios[] = {1, 3, 4, 8, 16};
  const std::uint32_t blocks[] = {16, 128, 7, 32};
  std::uint32_t n = 0;
  for (const std::uint32_t dtype : {decoder::kBf16, decoder::kF32}) {
    for (const std::uint32_t head_dim : {64U, 128U, 256U, 40U}) {
      for (const Rows r : rows) {
        ++n;
        check_attention(run,
                        {.dtype = dtype,
                         .head_dim = head_dim,
                         .kv_heads = 1 + n % 3,
                         .ratio = ratios[n % 5],
                         .m = r.m,
                         .position = r.position,
                         .block_tokens = blocks[n % 4],
                         .gated = n % 3 == 0,
                         .interleaved = n % 4 == 1,
                         .norms = n % 2 == 0,
                         .partial = n % 7 == 2},
                        n);
      }
    }
  }
  for (const std::uint32_t ratio : {4U, 1U})
    check_attention(run, {decoder::kBf16, 128, 2, ratio, 1, 40000, 16, false, false, false, false}, 1000 + ratio);
  check_attention(run, {decoder::kBf16, 256, 2, 4, 1, 9999, 16, true, false, true, true}, 1010);
}

}  // namespace bench
