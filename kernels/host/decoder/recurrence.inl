// SPDX-License-Identifier: Apache-2.0
//
// Causal convolution and gated delta rule, for one instruction set: included by ops_<isa>.cpp after attention.inl.
#pragma once

namespace metrale::host::decoder::METRALE_ISA {

METRALE_INLINE float silu_one(float x) { return x * sigmoid(x); }

static void conv(const ConvCall& c) {
  const ConvParams& p = c.p;
  const std::uint32_t first = c.tile * kConvTile;
  const std::uint32_t width = p.channels - first < kConvTile ? p.channels - first : kConvTile;
  const std::uint32_t kept = p.kernel - 1;
  // A kernel of one keeps nothing and may come without a state.
  float* state = kept == 0 ? nullptr : c.state + static_cast<std::size_t>(c.step->slot) * kept * p.channels + first;
  float* x = c.x + first;
  float* before = c.shared;                                          // [kept, width]: inputs before this step
  float* sum = before + static_cast<std::size_t>(kept) * kConvTile;  // [width]
  for (std::uint32_t j = 0; j < kept; ++j)
    std::memcpy(before + static_cast<std::size_t>(j) * kConvTile, state + static_cast<std::size_t>(j) * p.channels,
                width * sizeof(float));

  // The state is the last `kept` inputs, taken before x is overwritten.
  for (std::uint32_t j = 0; j < kept; ++j) {
    const std::uint32_t from = p.m + j;  // in [before, x]
    const float* row =
        from < kept ? before + static_cast<std::size_t>(from) * kConvTile : x + static_cast<std::size_t>(from - kept) * p.ld_x;
    std::memcpy(state + static_cast<std::size_t>(j) * p.channels, row, width * sizeof(float));
  }

  // Last token first, so that a token's inputs are still there when it is computed.
  for (std::uint32_t t = p.m; t-- > 0;) {
    for (std::uint32_t i = 0; i < width; ++i) sum[i] = 0;
    for (std::uint32_t j = 0; j < p.kernel; ++j) {
      const std::uint32_t from = t + j;
      const float* row =
          from < kept ? before + static_cast<std::size_t>(from) * kConvTile : x + static_cast<std::size_t>(from - kept) * p.ld_x;
      const float* weight = c.weight + static_cast<std::size_t>(j) * p.channels + first;
      for (std::uint32_t i = 0; i < width; ++i) sum[i] += weight[i] * row[i];
    }
    float* out = x + static_cast<std::size_t>(t) * p.ld_x;
    std::uint32_t i = 0;
    for (; i + kLanes <= width; i += kLanes) store(out + i, silu(load(sum + i)));
    for (; i < width; ++i) out[i] = silu_one(sum[i]);
  }
}

/// Columns [j, j + kLanes * vectors) of one head's state through `count` tokens. With the decay e, the state before S and the
/// change d = beta (v - e k S): the new state is e S + k d, and q times it is e (q S) + (q k) d, so one pass over S serves
/// both sums.
template <int vectors>
METRALE_INLINE void delta_columns(float* state, std::uint32_t key_dim, std::uint32_t value_dim, std::uint32_t j,
                                  std::uint32_t count, const float* queries, const float* keys, const float* values,
                                  std::size_t ld_values, const float* decays, const float* betas, const float* products,
                                  float* out) {
  Vec change[vectors] = {};
  float decay = 1.0f;
  const float* previous = keys;
  for (std::uint32_t t = 0; t < count; ++t) {
    const float* q = queries + static_cast<std::size_t>(t) * key_dim;
    const float* k = keys + static_cast<std::size_t>(t) * key_dim;
    Vec by_key[vectors] = {}, by_query[vectors] = {};
    for (std::uint32_t i = 0; i < key_dim; ++i) {
      float* row = state + static_cast<std::size_t>(i) * value_dim + j;
      for (int v = 0; v < vectors; ++v) {
        Vec s = load(row + kLanes * v);
        if (t != 0) {
          s = s * decay + change[v] * previous[i];
          store(row + kLanes * v, s);
        }
        by_key[v] += s * k[i];
        by_query[v] += s * q[i];
      }
    }
    decay = decays[t];
    for (int v = 0; v < vectors; ++v) {
      const Vec value = load(values + t * ld_values + j + kLanes * v);
      change[v] = (value - by_key[v] * decay) * betas[t];
      store(out + static_cast<std::size_t>(t) * value_dim + j + kLanes * v, by_query[v] * decay + change[v] * products[t]);
    }
    previous = k;
  }
  for (std::uint32_t i = 0; i < key_dim; ++i) {
    float* row = state + static_cast<std::size_t>(i) * value_dim + j;
    for (int v = 0; v < vectors; ++v) store(row + kLanes * v, load(row + kLanes * v) * decay + change[v] * previous[i]);
  }
}

/// The same for one column, for head sizes that are no multiple of a vector.
static void delta_column(float* state, std::uint32_t key_dim, std::uint32_t value_dim, std::uint32_t j, std::uint32_t count,
                         const float* queries, const float* keys, const float* values, std::size_t ld_values, const float* decays,
                         const float* betas, const float* products, float* out) {
  for (std::uint32_t t = 0; t < count; ++t) {
    const float* q = queries + static_cast<std::size_t>(t) * key_dim;
    const float* k = keys + static_cast<std::size_t>(t) * key_dim;
    float by_key = 0, by_query = 0;
    for (std::uint32_t i = 0; i < key_dim; ++i) {
      const float s = state[static_cast<std::size_t>(i) * value_dim + j];
      by_key += s * k[i];
      by_query += s * q[i];
    }
    const float change = (values[t * ld_values + j] - by_key * decays[t]) * betas[t];
    out[static_cast<std::size_t>(t) * value_dim + j] = by_query * decays[t] + change * products[t];
    for (std::uint32_t i = 0; i < key_dim; ++i) {
      float* s = state + static_cast<std::size_t>(i) * value_dim + j;
      *s = *s * decays[t] + change * k[i];
    }
  }
}

/// Copies a query or key, scaled to length `length`.
METRALE_INLINE void unit_vector(const float* from, std::uint32_t n, float length, float* to) {
  double sum = 0;
  for (std::uint32_t i = 0; i < n; ++i) sum += static_cast<double>(from[i]) * from[i];
  const float scale = inverse_sqrt(sum + 1e-6) * length;
  for (std::uint32_t i = 0; i < n; ++i) to[i] = from[i] * scale;
}

static void delta(const DeltaCall& c) {
  const DeltaParams& p = c.p;
  const std::uint32_t group = p.num_value_heads / p.num_key_heads;
  const std::uint32_t key_head = p.tiled ? c.head % p.num_key_heads : c.head / group;
  const std::size_t key_width = static_cast<std::size_t>(p.num_key_heads) * p.key_dim;
  float* state = c.state + (static_cast<std::size_t>(c.step->slot) * p.num_value_heads + c.head) * p.key_dim * p.value_dim;
  const float* weights = c.norm;

  float* queries = c.shared;
  float* keys = queries + static_cast<std::size_t>(kDeltaTile) * p.key_dim;
  float* out = keys + static_cast<std::size_t>(kDeltaTile) * p.key_dim;
  float* decays = out + static_cast<std::size_t>(kDeltaTile) * p.value_dim;
  float* betas = decays + kDeltaTile;
  float* products = betas + kDeltaTile;
  const float query_length = inverse_sqrt(p.key_dim);

  for (std::uint32_t first = 0; first < p.m; first += kDeltaTile) {
    const std::uint32_t count = p.m - first < kDeltaTile ? p.m - first : kDeltaTile;
    const float* rows = c.qkv + static_cast<std::size_t>(first) * p.ld_qkv;
    for (std::uint32_t t = 0; t < count; ++t) {
      const float* q = rows + static_cast<std::size_t>(t) * p.ld_qkv + static_cast<std::size_t>(key_head) * p.key_dim;
      float* query = queries + static_cast<std::size_t>(t) * p.key_dim;
      float* key = keys + static_cast<std::size_t>(t) * p.key_dim;
      unit_vector(q, p.key_dim, query_length, query);
      unit_vector(q + key_width, p.key_dim, 1.0f, key);
      products[t] = dot(query, key, p.key_dim);
      const std::size_t at = static_cast<std::size_t>(first + t) * p.ld_ab + c.head;
      decays[t] = exponential(c.decay[c.head] * softplus(c.a[at] + c.dt_bias[c.head]));
      betas[t] = sigmoid(c.b[at]);
    }
    const float* values = rows + 2 * key_width + static_cast<std::size_t>(c.head) * p.value_dim;
    std::uint32_t j = 0;
    for (; j + 4 * kLanes <= p.value_dim; j += 4 * kLanes)
      delta_columns<4>(state, p.key_dim, p.value_dim, j, count, queries, keys, values, p.ld_qkv, decays, betas, products, out);
    for (; j + kLanes <= p.value_dim; j += kLanes)
      delta_columns<1>(state, p.key_dim, p.value_dim, j, count, queries, keys, values, p.ld_qkv, decays, betas, products, out);
    for (; j < p.value_dim; ++j)
      delta_column(state, p.key_dim, p.value_dim, j, count, queries, keys, values, p.ld_qkv, decays, betas, products, out);

    for (std::uint32_t t = 0; t < count; ++t) {
      const float* o = out + static_cast<std::size_t>(t) * p.value_dim;
      const float* gate = c.z + static_cast<std::size_t>(first + t) * p.ld_z + static_cast<std::size_t>(c.head) * p.value_dim;
      float* to = c.out + (static_cast<std::size_t>(first + t) * p.num_value_heads + c.head) * p.value_dim;
      double sum = 0;
      for (std::uint32_t i = 0; i < p.value_dim; ++i) sum += static_cast<double>(o[i]) * o[i];
      const float scale = inverse_sqrt(sum / p.value_dim + p.norm_eps);
      for (std::uint32_t i = 0; i < p.value_dim; ++i) to[i] = weights[i] * (o[i] * scale) * silu_one(gate[i]);
    }
  }
}

}  // namespace metrale::host::decoder::METRALE_ISA
