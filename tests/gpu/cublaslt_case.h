// SPDX-License-Identifier: Apache-2.0
//
// One product on the device with its operands on the host too: random, the output poisoned with NaN, the result compared with
// float64 in relative L2 and in norm. One thread.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpu/gpu_fixture.h"
#include "metrale/backend.h"
#include "metrale/bridges/cublaslt.h"
#include "metrale/device_buffer.h"

namespace metrale::test {

template <class T>
T must(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().to_string());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

inline float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

inline float from_e4m3(std::uint8_t bits) {
  const int exponent = bits >> 3 & 15;
  const float mantissa = static_cast<float>(bits & 7) / 8;
  const float size = exponent == 0 ? std::ldexp(mantissa, -6) : std::ldexp(1 + mantissa, exponent - 7);
  return (bits & 0x80) != 0 ? -size : size;
}

struct Difference {
  double relative_l2 = 0;
  double norm_ratio = 0;
};

class CublasLtCase {
 public:
  /// What `shape` leaves to the test is made: addresses are of this case's memory; those of bias and residual where `with_bias` and
  /// `with_residual`.
  CublasLtCase(GpuBackend& backend, cublaslt::Call shape, unsigned seed, bool with_bias = false, bool with_residual = false)
      : call(shape), backend_(backend), random_(seed) {
    using cublaslt::Precision;
    const bool fp8 = shape.precision != Precision::bf16;
    const std::uint64_t rows = shape.rows_padded ? round_up(shape.m, cublaslt::kBlockRows) : shape.m;
    act_stride_ = shape.act_stride != 0 ? shape.act_stride : shape.k;
    out_stride_ = shape.out_stride != 0 ? shape.out_stride : shape.n;
    residual_stride_ = shape.residual_stride != 0 ? shape.residual_stride : out_stride_;
    const std::uint64_t more = shape.batch - std::uint64_t{1};
    act_ = make((rows - 1) * act_stride_ + shape.k + more * shape.act_batch_stride, fp8);
    weight_ = make(std::uint64_t{shape.n} * shape.k + more * shape.weight_batch_stride, fp8);
    call.act = upload(act_memory_, act_);
    call.weight = upload(weight_memory_, weight_);
    out_elements_ = (rows - 1) * out_stride_ + shape.n + more * shape.out_batch_stride;
    out_memory_ = must(DeviceBuffer::create(backend, out_elements_ * out_bytes() + kGuardBytes));
    call.out = out_memory_.ptr();
    const bool f32 = shape.out_type == DType::f32;
    if (with_bias) call.bias = values(bias_, bias_memory_, shape.n, f32);
    if (with_residual) {
      call.residual = values(residual_, residual_memory_,
                             (shape.m - std::uint64_t{1}) * residual_stride_ + shape.n + more * shape.residual_batch_stride, f32);
    }
    const std::uint64_t blocks = div_ceil(shape.k, cublaslt::kScaleBlock);
    if (shape.precision == Precision::fp8_row) make_scales(shape.m, shape.n);
    if (shape.precision == Precision::fp8_block) {
      make_scales(shape.m * blocks, div_ceil(shape.n, cublaslt::kScaleBlock) * blocks);
      if (shape.scales_transposed) {
        const auto wanted = cublaslt::transpose_scales(act_scales_, shape.m, static_cast<std::uint32_t>(blocks));
        call.act_scales = upload(act_scales_memory_, wanted);
      }
    }
    poison();
  }

  void poison() { must(backend_.memset(call.out, 0xFF, out_elements_ * out_bytes() + kGuardBytes)); }

  /// The bytes of the output and of the guard behind it, behind the work on `stream`.
  std::vector<std::byte> output(StreamHandle stream) const {
    std::vector<std::byte> bytes(out_elements_ * out_bytes() + kGuardBytes);
    must(backend_.copy_d2h_on_stream(bytes, call.out, stream));
    return bytes;
  }
  /// The bytes of row `row` of `output`.
  std::span<const std::byte> row(const std::vector<std::byte>& output, std::uint64_t row) const {
    return std::span(output).subspan(row * out_stride_ * out_bytes(), call.n * out_bytes());
  }

  Difference compare(StreamHandle stream) const {
    const auto bytes = output(stream);
    double error = 0;
    double mine = 0;
    double theirs = 0;
    std::vector<bool> written(bytes.size() / out_bytes());
    for (std::uint64_t b = 0; b < call.batch; ++b) {
      for (std::uint64_t i = 0; i < call.m; ++i) {
        for (std::uint64_t j = 0; j < call.n; ++j) {
          const std::uint64_t at = b * call.out_batch_stride + i * out_stride_ + j;
          const double got = element(bytes, at);
          const double want = reference(b, i, j);
          error += (got - want) * (got - want);
          mine += got * got;
          theirs += want * want;
          written[at] = true;
        }
      }
    }
    for (std::uint64_t at = 0; at < written.size(); ++at) {
      const bool is_pad_row = call.rows_padded && at >= (call.m - std::uint64_t{1}) * out_stride_ + call.n && at < out_elements_;
      if (written[at] || is_pad_row) continue;
      for (std::uint64_t i = 0; i < out_bytes(); ++i) {
        EXPECT_EQ(bytes[at * out_bytes() + i], std::byte{0xFF}) << "written outside the output, at element " << at;
        if (bytes[at * out_bytes() + i] != std::byte{0xFF}) return {1, 0};
      }
    }
    return {std::sqrt(error / theirs), std::sqrt(mine / theirs)};
  }

  cublaslt::Call call;

 private:
  static constexpr std::uint64_t kGuardBytes = 512;

  std::uint64_t out_bytes() const { return call.out_type == DType::f32 ? 4 : 2; }
  double element(std::span<const std::byte> bytes, std::uint64_t at) const {
    if (call.out_type == DType::f32) {
      float value = 0;
      std::memcpy(&value, bytes.data() + at * 4, 4);
      return value;
    }
    std::uint16_t bits = 0;
    std::memcpy(&bits, bytes.data() + at * 2, 2);
    return from_bf16(bits);
  }

  double reference(std::uint64_t b, std::uint64_t i, std::uint64_t j) const {
    using cublaslt::Precision;
    const float* x = act_values_.data() + b * call.act_batch_stride + i * act_stride_;
    const float* w = weight_values_.data() + b * call.weight_batch_stride + j * call.k;
    const std::uint64_t blocks = div_ceil(call.k, cublaslt::kScaleBlock);
    double sum = 0;
    for (std::uint64_t from = 0; from < call.k; from += cublaslt::kScaleBlock) {
      double part = 0;
      for (std::uint64_t t = from; t < std::min<std::uint64_t>(from + cublaslt::kScaleBlock, call.k); ++t) {
        part += static_cast<double>(x[t]) * w[t];
      }
      if (call.precision == Precision::fp8_block) {
        const std::uint64_t block = from / cublaslt::kScaleBlock;
        part *= static_cast<double>(act_scales_[i * blocks + block]) * weight_scales_[j / cublaslt::kScaleBlock * blocks + block];
      }
      sum += part;
    }
    if (call.precision == Precision::fp8_row) sum *= static_cast<double>(act_scales_[i]) * weight_scales_[j];
    double y = call.alpha * sum;
    if (!bias_.empty()) y += bias_[j];
    if (!residual_.empty()) y += call.beta * residual_[b * call.residual_batch_stride + i * residual_stride_ + j];
    if (call.epilogue == cublaslt::Epilogue::relu) return std::max(y, 0.0);
    if (call.epilogue == cublaslt::Epilogue::gelu) {
      return 0.5 * y * (1 + std::tanh(std::sqrt(2 / 3.14159265358979) * (y + 0.044715 * y * y * y)));
    }
    return y;
  }

  std::uint32_t bits() { return static_cast<std::uint32_t>(random_()); }

  /// Elements of act or weight, as they are stored; the same as numbers in `act_values_`, then in `weight_values_`.
  std::vector<std::byte> make(std::uint64_t count, bool fp8) {
    std::vector<std::byte> stored(count * (fp8 ? 1 : 2));
    std::vector<float> numbers(count);
    for (std::uint64_t i = 0; i < count; ++i) {
      if (fp8) {
        const auto code = static_cast<std::uint8_t>(bits() & 0xBF);  // below 2, and no NaN
        stored[i] = std::byte{code};
        numbers[i] = from_e4m3(code);
      } else {
        const auto code = static_cast<std::uint16_t>((bits() & 0x81FF) | 0x3E00);  // 0.125 to 2 either way
        std::memcpy(stored.data() + i * 2, &code, 2);
        numbers[i] = from_bf16(code);
      }
    }
    (act_values_.empty() ? act_values_ : weight_values_) = std::move(numbers);
    return stored;
  }

  template <class T>
  DevicePtr upload(DeviceBuffer& memory, const std::vector<T>& from) {
    memory = must(DeviceBuffer::create(backend_, from.size() * sizeof(T)));
    must(backend_.copy_h2d(memory.ptr(), std::as_bytes(std::span(from))));
    return memory.ptr();
  }

  DevicePtr values(std::vector<float>& numbers, DeviceBuffer& memory, std::uint64_t count, bool f32) {
    std::vector<std::uint16_t> stored(count);
    numbers.resize(count);
    for (std::uint64_t i = 0; i < count; ++i) {
      stored[i] = static_cast<std::uint16_t>((bits() & 0x81FF) | 0x3E00);
      numbers[i] = from_bf16(stored[i]) * 16;
      stored[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(numbers[i]) >> 16);
    }
    return f32 ? upload(memory, numbers) : upload(memory, stored);
  }

  /// Far apart, so that one in the place of another shows.
  void make_scales(std::uint64_t num_act, std::uint64_t num_weight) {
    const auto fill = [&](std::vector<float>& scales, std::uint64_t count) {
      scales.resize(count);
      for (float& scale : scales) scale = std::exp2(static_cast<float>(bits() % 1024) / 256 - 2);
    };
    fill(act_scales_, num_act);
    fill(weight_scales_, num_weight);
    call.act_scales = upload(act_scales_memory_, act_scales_);
    call.weight_scales = upload(weight_scales_memory_, weight_scales_);
  }

  GpuBackend& backend_;
  std::mt19937 random_;
  std::uint64_t act_stride_ = 0, out_stride_ = 0, residual_stride_ = 0, out_elements_ = 0;
  std::vector<std::byte> act_, weight_;
  std::vector<float> act_values_, weight_values_, bias_, residual_, act_scales_, weight_scales_;
  DeviceBuffer act_memory_, weight_memory_, out_memory_, bias_memory_, residual_memory_, act_scales_memory_, weight_scales_memory_;
};

}  // namespace metrale::test
