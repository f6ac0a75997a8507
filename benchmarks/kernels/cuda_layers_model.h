// SPDX-License-Identifier: Apache-2.0
//
// A model of random weights in the sizes of module "layers", and its steps in double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "include/layers_plan.h"
#include "metrale/models/decoder_kernels.h"

namespace bench {

using S = metrale::cuda::layers::Sizes<metrale::cuda::layers::Small>;
inline constexpr std::uint32_t kBlockTokens = 16, kVocab = 64;
inline constexpr std::uint32_t kKvWidth = S::kKvHeads * S::kHeadDim;

inline std::uint16_t to_bf16(double x) {
  const auto f = static_cast<float>(x);
  std::uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline double from_bf16(std::uint16_t x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

using Half = std::vector<std::uint16_t>;
struct Layer {
  Half q, k, v, o, gate, up, down, keys, values;
  std::vector<float> input_norm, post_norm;
};

/// A layer's entry of the kernels' table; `at` gives the address of a tensor.
template <class At>
metrale::LayerAddresses addresses_of(const Layer& l, const At& at) {
  return {at(l.q),    at(l.k),          at(l.v),         at(l.o),    at(l.gate),   at(l.up),
          at(l.down), at(l.input_norm), at(l.post_norm), at(l.keys), at(l.values), {}};
}

struct Model {
  std::mt19937 random{7};
  std::vector<Layer> layers;
  Half embedding;
  std::vector<float> frequencies;
  std::vector<std::int32_t> table;
  std::uint32_t context;

  Half normal(std::size_t n, double deviation) {
    std::normal_distribution<double> draw(0, deviation);
    Half values(n);
    for (auto& v : values) v = to_bf16(draw(random));
    return values;
  }
  std::vector<float> around_one(std::size_t n) {
    std::normal_distribution<float> draw(1, 0.1F);
    std::vector<float> values(n);
    for (auto& v : values) v = draw(random);
    return values;
  }
  Model(std::uint32_t count, std::uint32_t most_tokens) : context(most_tokens) {
    const std::uint32_t blocks = (most_tokens + kBlockTokens - 1) / kBlockTokens + 3;
    table.resize(blocks);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random);
    for (std::uint32_t l = 0; l < count; ++l) {
      const double d = 1 / std::sqrt(double{S::kHidden});
      Layer layer{normal(S::kHidden * S::kHidden, 2 * d),
                  normal(kKvWidth * S::kHidden, 2 * d),
                  normal(kKvWidth * S::kHidden, d),
                  normal(S::kHidden * S::kHidden, d),
                  normal(S::kFf * S::kHidden, d),
                  normal(S::kFf * S::kHidden, d),
                  normal(S::kFf * S::kHidden, d),
                  normal(blocks * kBlockTokens * kKvWidth, 1),
                  normal(blocks * kBlockTokens * kKvWidth, 1),
                  around_one(S::kHidden),
                  around_one(S::kHidden)};
      layers.push_back(std::move(layer));
    }
    embedding = normal(kVocab * S::kHidden, 1);
    for (std::uint32_t j = 0; j < S::kHeadDim / 2; ++j)
      frequencies.push_back(static_cast<float>(std::pow(100000.0, -2.0 * j / S::kHeadDim)));
  }
  std::size_t row(std::uint32_t token) const {
    return (std::size_t{static_cast<std::uint32_t>(table[token / kBlockTokens])} * kBlockTokens + token % kBlockTokens) * kKvWidth;
  }

  static std::vector<double> product(const Half& w, const std::vector<double>& x) {
    std::vector<double> y(w.size() / x.size());
    for (std::size_t i = 0; i < y.size(); ++i)
      for (std::size_t j = 0; j < x.size(); ++j) y[i] += from_bf16(w[i * x.size() + j]) * x[j];
    return y;
  }
  static std::vector<double> normed(const std::vector<double>& x, const std::vector<float>& w) {
    double sum = 0;
    for (const double v : x) sum += v * v;
    std::vector<double> y(x);
    for (std::size_t i = 0; i < x.size(); ++i) y[i] = x[i] * w[i] / std::sqrt(sum / static_cast<double>(x.size()) + 1e-5);
    return y;
  }
  void rotate(std::vector<double>& x, std::uint32_t position, bool interleaved) const {
    for (std::size_t head = 0; head < x.size(); head += S::kHeadDim) {
      for (std::uint32_t j = 0; j < S::kHeadDim / 2; ++j) {
        const double angle = static_cast<float>(position) * frequencies[j];
        double& a = x[head + (interleaved ? 2 * j : j)];
        double& b = x[head + (interleaved ? 2 * j + 1 : j + S::kHeadDim / 2)];
        const double c = std::cos(angle), s = std::sin(angle), first = a;
        a = first * c - b * s;
        b = b * c + first * s;
      }
    }
  }
  /// The residual stream after all layers; stores keys and values as it goes.
  std::vector<double> step(std::uint32_t token, std::uint32_t position, bool interleaved) {
    std::vector<double> x(S::kHidden);
    for (std::uint32_t i = 0; i < S::kHidden; ++i) x[i] = from_bf16(embedding[token * S::kHidden + i]);
    for (Layer& l : layers) {
      const auto n = normed(x, l.input_norm);
      auto q = product(l.q, n), k = product(l.k, n), v = product(l.v, n);
      rotate(q, position, interleaved);
      rotate(k, position, interleaved);
      for (std::uint32_t i = 0; i < kKvWidth; ++i)
        l.keys[row(position) + i] = to_bf16(k[i]), l.values[row(position) + i] = to_bf16(v[i]);
      std::vector<double> mixed(S::kHidden);
      for (std::uint32_t h = 0; h < S::kHeads; ++h) {
        const std::uint32_t at = h / S::kGroup * S::kHeadDim;
        std::vector<double> p(position + 1);
        for (std::uint32_t t = 0; t <= position; ++t)
          for (std::uint32_t d = 0; d < S::kHeadDim; ++d) p[t] += q[h * S::kHeadDim + d] * from_bf16(l.keys[row(t) + at + d]) / 8;
        const double largest = *std::max_element(p.begin(), p.end());
        double total = 0;
        for (double& w : p) w = std::exp(w - largest), total += w;
        for (std::uint32_t t = 0; t <= position; ++t)
          for (std::uint32_t d = 0; d < S::kHeadDim; ++d)
            mixed[h * S::kHeadDim + d] += p[t] / total * from_bf16(l.values[row(t) + at + d]);
      }
      const auto o = product(l.o, mixed);
      for (std::uint32_t i = 0; i < S::kHidden; ++i) x[i] += o[i];
      const auto m = normed(x, l.post_norm);
      auto gate = product(l.gate, m);
      const auto up = product(l.up, m);
      for (std::uint32_t i = 0; i < S::kFf; ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
      const auto down = product(l.down, gate);
      for (std::uint32_t i = 0; i < S::kHidden; ++i) x[i] += down[i];
    }
    return x;
  }
};

/// Relative, in L2.
inline double difference(const std::vector<double>& want, const std::vector<double>& got) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) difference += (got[i] - want[i]) * (got[i] - want[i]), norm += want[i] * want[i];
  return std::sqrt(difference / norm);
}

}  // namespace bench
