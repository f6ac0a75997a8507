// SPDX-License-Identifier: Apache-2.0
//
// Convolution and delta rule of module "decoder" against float64.
#pragma once

#include "cuda_decoder_support.h"

namespace bench {

inline void check_conv(Launcher& run) {
  namespace decoder = metrale::cuda::decoder;
  std::uint64_t seed = 2000;
  for (const std::uint32_t kernel : {1U, 2U, 3U, 4U, 7U}) {
    for (const std::uint32_t channels : {64U, 100U, 257U}) {
      for (const std::uint32_t m : {1U, 2U, 3U, 17U, 100U}) {
        Random random(++seed);
        const ConvParams p{.m = m, .channels = channels, .kernel = kernel, .ld_x = channels + 3};
        const std::uint32_t kept = kernel - 1;
        const std::vector<float> x = random.vector(static_cast<std::size_t>(m) * p.ld_x, 2);
        const std::vector<float> weight = random.vector(static_cast<std::size_t>(kernel) * channels);
        const std::vector<float> state = random.vector(std::size_t{3} * kept * channels, 2);
        const std::string name = text({{"taps", kernel}, {"channels", channels}, {"m", m}});
        std::vector<double> want(x.begin(), x.end());
        std::vector<double> state_want(state.begin(), state.end());
        for (std::uint32_t ch = 0; ch < channels; ++ch) {
          std::vector<double> inputs;
          for (std::uint32_t j = 0; j < kept; ++j) inputs.push_back(state[(std::size_t{1} * kept + j) * channels + ch]);
          for (std::uint32_t t = 0; t < m; ++t) inputs.push_back(x[static_cast<std::size_t>(t) * p.ld_x + ch]);
          for (std::uint32_t t = 0; t < m; ++t) {
            double sum = 0;
            for (std::uint32_t j = 0; j < kernel; ++j) sum += static_cast<double>(weight[j * channels + ch]) * inputs[t + j];
            want[static_cast<std::size_t>(t) * p.ld_x + ch] = sum / (1 + std::exp(-sum));
          }
          for (std::uint32_t j = 0; j < kept; ++j) state_want[(std::size_t{1} * kept + j) * channels + ch] = inputs[m + j];
        }
        const Dev<StepHeader> step(step_of(5, 1));
        const Dev<float> dev_x(x), dev_weight(weight), dev_state(state);
        run(conv, decoder::plan_conv(p), dev_x.ptr(), dev_weight.ptr(), dev_state.ptr(), step.ptr(), p);
        compare("conv", name, dev_x.get(), want, 1e-6);
        compare("conv", name + " state", dev_state.get(), state_want, 0);
      }
    }
  }
}

struct DeltaData {
  DeltaParams p;
  std::vector<float> qkv, z, a, b, decay, dt_bias, norm, state;
};
inline std::vector<double> delta_reference(const DeltaData& d, std::vector<double>& state) {
  const DeltaParams& p = d.p;
  std::vector<double> out(static_cast<std::size_t>(p.m) * p.num_value_heads * p.value_dim);
  parallel(p.num_value_heads, [&](std::size_t head) {
    const std::size_t key_head = p.tiled ? head % p.num_key_heads : head / (p.num_value_heads / p.num_key_heads);
    double* s = &state[(std::size_t{1} * p.num_value_heads + head) * p.key_dim * p.value_dim];
    for (std::uint32_t t = 0; t < p.m; ++t) {
      const float* row = &d.qkv[static_cast<std::size_t>(t) * p.ld_qkv];
      const float* q = row + key_head * p.key_dim;
      const float* k = q + static_cast<std::size_t>(p.num_key_heads) * p.key_dim;
      const float* v = row + std::size_t{2} * p.num_key_heads * p.key_dim + head * p.value_dim;
      double qq = 1e-6;
      double kk = 1e-6;
      for (std::uint32_t i = 0; i < p.key_dim; ++i) qq += static_cast<double>(q[i]) * q[i], kk += static_cast<double>(k[i]) * k[i];
      const double dt = static_cast<double>(d.a[t * p.ld_ab + head]) + d.dt_bias[head];
      const double e = std::exp(static_cast<double>(d.decay[head]) * std::log1p(std::exp(dt)));
      const double beta = 1 / (1 + std::exp(-static_cast<double>(d.b[t * p.ld_ab + head])));
      double* o = &out[(static_cast<std::size_t>(t) * p.num_value_heads + head) * p.value_dim];
      double squares = 0;
      for (std::uint32_t j = 0; j < p.value_dim; ++j) {
        double by_key = 0;
        for (std::uint32_t i = 0; i < p.key_dim; ++i) by_key += e * s[i * p.value_dim + j] * k[i] / std::sqrt(kk);
        const double change = beta * (v[j] - by_key);
        for (std::uint32_t i = 0; i < p.key_dim; ++i) {
          double& x = s[i * p.value_dim + j];
          x = e * x + k[i] / std::sqrt(kk) * change;
          o[j] += x * q[i] / std::sqrt(qq * p.key_dim);
        }
        squares += o[j] * o[j];
      }
      for (std::uint32_t j = 0; j < p.value_dim; ++j) {
        const double gate = d.z[static_cast<std::size_t>(t) * p.ld_z + head * p.value_dim + j];
        o[j] *= d.norm[j] / std::sqrt(squares / p.value_dim + static_cast<double>(p.norm_eps)) * gate / (1 + std::exp(-gate));
      }
    }
  });
  return out;
}

inline void check_delta(Launcher& run) {
  namespace decoder = metrale::cuda::decoder;
  struct Size {
    std::uint32_t key, value, key_heads, value_heads, tiled;
  };
  const Size sizes[] = {{128, 128, 2, 6, 0}, {128, 128, 2, 4, 1}, {64, 32, 1, 3, 0}, {40, 24, 2, 2, 1}};
  std::uint64_t seed = 3000;
  for (const Size& size : sizes) {
    for (const std::uint32_t m : {1U, 2U, 16U, 17U, 32U, 33U, 100U, 300U, 600U}) {
      Random random(++seed);
      DeltaData d;
      DeltaParams& p = d.p;
      p = {.m = m,
           .num_key_heads = size.key_heads,
           .num_value_heads = size.value_heads,
           .key_dim = size.key,
           .value_dim = size.value,
           .tiled = size.tiled,
           .ld_qkv = 2 * size.key_heads * size.key + size.value_heads * size.value + 8,
           .ld_z = size.value_heads * size.value + 1,
           .ld_ab = size.value_heads + 2,
           .norm_eps = 1e-6F};
      d.qkv = random.vector(static_cast<std::size_t>(m) * p.ld_qkv, 2);
      d.z = random.vector(static_cast<std::size_t>(m) * p.ld_z, 3);
      d.a = random.vector(static_cast<std::size_t>(m) * p.ld_ab, 4);
      d.b = random.vector(static_cast<std::size_t>(m) * p.ld_ab, 3);
      d.decay = random.vector(p.num_value_heads, 0.5F, -0.6F);
      d.dt_bias = random.vector(p.num_value_heads);
      d.norm = random.vector(p.value_dim, 0.5F, 1);
      d.state = random.vector(std::size_t{3} * p.num_value_heads * p.key_dim * p.value_dim);
      std::vector<double> state(d.state.begin(), d.state.end());
      const std::vector<double> want = delta_reference(d, state);

      const Dev<StepHeader> step(step_of(5, 1));
      const Dev<float> qkv(d.qkv), z(d.z), a(d.a), b(d.b), decay(d.decay), dt_bias(d.dt_bias), norm(d.norm), dev_state(d.state);
      const Dev<float> out(want.size());
      const std::string name =
          text({{"key_dim", p.key_dim}, {"value_dim", p.value_dim}, {"heads", p.num_value_heads}, {"tiled", p.tiled}, {"m", p.m}});
      const auto launch = [&](const DeltaParams& params, const Dev<float>& to_state, std::size_t token, float* to) {
        run(delta, decoder::plan_delta(params), qkv.ptr() + token * p.ld_qkv, z.ptr() + token * p.ld_z, a.ptr() + token * p.ld_ab,
            b.ptr() + token * p.ld_ab, decay.ptr(), dt_bias.ptr(), norm.ptr(), to_state.ptr(), step.ptr(), to, params);
      };
      launch(p, dev_state, 0, out.ptr());
      const bool chunks = decoder::has_fast_delta(p.key_dim, p.value_dim) && m > decoder::kDeltaScanTokens;
      compare(chunks ? "delta chunks" : "delta", name, out.get(), want, chunks ? 5e-5 : 1e-5);
      compare(chunks ? "delta chunks" : "delta", name + " state", dev_state.get(), state, chunks ? 5e-5 : 1e-5);
      if (m > 17) continue;
      const Dev<float> one_state(d.state), one_out(want.size());
      DeltaParams one = p;
      one.m = 1;
      for (std::uint32_t t = 0; t < m; ++t)
        launch(one, one_state, t, one_out.ptr() + static_cast<std::size_t>(t) * p.num_value_heads * p.value_dim);
      compare("delta one by one", name, one_out.get(), out.get(), 1e-6);
      compare("delta one by one", name + " state", one_state.get(), dev_state.get(), 1e-6);
    }
  }
}

}  // namespace bench
