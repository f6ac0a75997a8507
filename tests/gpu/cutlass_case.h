// SPDX-License-Identifier: Apache-2.0
//
// A call of the CUTLASS bridge with its data on both sides, and its result in float64. Outputs are NaN beforehand, padding too,
// so that what was not written, and what was written beside the matrix, shows.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <source_location>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "metrale/backend.h"
#include "metrale/bridges/cutlass.h"
#include "metrale/device_buffer.h"

namespace metrale::test {

using cutlass::DenseCall;
using cutlass::GroupedCall;
using cutlass::Precision;

template <class T>
T must(Result<T> result, std::source_location site = std::source_location::current()) {
  if (!result) {
    ADD_FAILURE_AT(site.file_name(), static_cast<int>(site.line())) << result.error().to_string();
    throw std::runtime_error(result.error().to_string());
  }
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

inline float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
inline std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline float from_e4m3(std::uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                        : std::ldexp(1.0F + static_cast<float>(mantissa) / 8.0F, exponent - 7);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

/// A matrix as it lies in memory, and its values.
struct CutlassMatrix {
  std::vector<std::byte> bytes;
  std::vector<float> values;  ///< [rows, columns], without padding.
};

struct CutlassShape {
  Precision precision = Precision::bf16;
  std::vector<std::int32_t> counts;  ///< Rows of each expert.
  std::uint32_t n = 0;
  std::uint32_t k = 0;
  std::uint32_t tokens = 0;   ///< 0: no index, as many as rows.
  std::uint32_t act_pad = 0;  ///< Elements after each row.
  std::uint32_t out_pad = 0;
  std::uint32_t spare_rows = 0;  ///< Of the output, which no expert has.
  float alpha = 1;
};

/// The data of a call, on both sides.
class CutlassCase {
 public:
  CutlassCase(GpuBackend& backend, CutlassShape shape, std::uint32_t seed)
      : backend_(backend), shape_(std::move(shape)), random_(seed) {
    offsets_.push_back(0);
    for (const std::int32_t count : shape_.counts) offsets_.push_back(offsets_.back() + count);
    rows_ = static_cast<std::uint32_t>(offsets_.back()) + shape_.spare_rows;
    tokens_ = shape_.tokens != 0 ? shape_.tokens : rows_;
    blocks_ = div_ceil(shape_.k, cutlass::kScaleBlock);
    const std::uint64_t experts = shape_.counts.size();
    act_ = matrix(tokens_, shape_.k, shape_.act_pad);
    weight_ = matrix(experts * shape_.n, shape_.k, 0);
    for (std::uint32_t i = 0; i < rows_; ++i) index_.push_back(static_cast<std::int32_t>(random_() % tokens_));
    if (shape_.precision == Precision::fp8_block) {
      act_scales_ = scales(tokens_ * blocks_);
      weight_scales_ = scales(experts * div_ceil(shape_.n, cutlass::kScaleBlock) * blocks_);
    }
    act_memory_ = upload(act_.bytes);
    weight_memory_ = upload(weight_.bytes);
    offsets_memory_ = upload(offsets_);
    index_memory_ = upload(index_);
    if (!act_scales_.empty()) {
      act_scales_memory_ = upload(act_scales_);
      weight_scales_memory_ = upload(weight_scales_);
    }
    out_stride_ = shape_.n + shape_.out_pad;
    out_memory_ = must(DeviceBuffer::create(backend_, (std::uint64_t{rows_} * out_stride_ + kGuard) * 2));
    poison();
  }

  GroupedCall grouped() const {
    return {.precision = shape_.precision,
            .experts = static_cast<std::uint32_t>(shape_.counts.size()),
            .rows = rows_,
            .tokens = tokens_,
            .n = shape_.n,
            .k = shape_.k,
            .act = act_memory_.ptr(),
            .weight = weight_memory_.ptr(),
            .out = out_memory_.ptr(),
            .act_scales = act_scales_memory_.ptr(),
            .weight_scales = weight_scales_memory_.ptr(),
            .row_index = shape_.tokens != 0 ? index_memory_.ptr() : DevicePtr{},
            .offsets = offsets_memory_.ptr(),
            .host_offsets = {},
            .act_stride = shape_.k + shape_.act_pad,
            .out_stride = out_stride_,
            .alpha = shape_.alpha};
  }
  DenseCall dense() const {
    return {.precision = shape_.precision,
            .m = rows_,
            .n = shape_.n,
            .k = shape_.k,
            .act = act_memory_.ptr(),
            .weight = weight_memory_.ptr(),
            .out = out_memory_.ptr(),
            .act_scales = act_scales_memory_.ptr(),
            .weight_scales = weight_scales_memory_.ptr(),
            .act_stride = shape_.k + shape_.act_pad,
            .out_stride = out_stride_,
            .alpha = shape_.alpha};
  }

  void poison() { must(backend_.memset(out_memory_.ptr(), 0xFF, out_memory_.size_bytes())); }
  void set_offsets(std::vector<std::int32_t> offsets) {
    offsets_ = std::move(offsets);
    must(backend_.copy_h2d(offsets_memory_.ptr(), std::as_bytes(std::span(offsets_))));
  }
  void set_index(std::vector<std::int32_t> index) {
    index_ = std::move(index);
    must(backend_.copy_h2d(index_memory_.ptr(), std::as_bytes(std::span(index_))));
  }
  std::span<const std::int32_t> offsets() const { return offsets_; }
  std::uint32_t rows() const { return rows_; }
  std::uint32_t tokens() const { return tokens_; }

  /// Compares the output behind `stream` with float64, by relative L2 and by the ratio of norms; expects what no expert has, and
  /// what lies beside and behind the matrix, to be as it was.
  void expect_right(StreamHandle stream, const std::string& what) const {
    std::vector<std::uint16_t> out(out_memory_.size_bytes() / 2);
    must(backend_.copy_d2h_on_stream(std::as_writable_bytes(std::span(out)), out_memory_.ptr(), stream));
    double difference = 0;
    double got_norm = 0;
    double want_norm = 0;
    std::size_t touched = 0;
    std::vector<double> want(shape_.n);
    for (std::uint32_t row = 0; row < rows_; ++row) {
      const std::uint16_t* got = out.data() + std::uint64_t{row} * out_stride_;
      for (std::uint32_t c = shape_.n; c < out_stride_; ++c) touched += got[c] != kPoison;
      const int expert = expert_of(static_cast<std::int32_t>(row));
      if (expert < 0) {
        for (std::uint32_t c = 0; c < shape_.n; ++c) touched += got[c] != kPoison;
        continue;
      }
      product(row, static_cast<std::uint32_t>(expert), want);
      for (std::uint32_t c = 0; c < shape_.n; ++c) {
        const double value = from_bf16(got[c]);
        difference += (value - want[c]) * (value - want[c]);
        got_norm += value * value;
        want_norm += want[c] * want[c];
      }
    }
    for (std::size_t i = std::uint64_t{rows_} * out_stride_; i < out.size(); ++i) touched += out[i] != kPoison;
    EXPECT_EQ(touched, 0U) << what << ": values were written outside the rows and columns of the output";
    if (want_norm == 0) {
      EXPECT_EQ(got_norm, 0) << what;
      return;
    }
    EXPECT_LT(std::sqrt(difference / want_norm), 3e-3) << what << ": relative L2";
    EXPECT_NEAR(std::sqrt(got_norm / want_norm), 1, 3e-3) << what << ": ratio of norms";
  }

 private:
  static constexpr std::uint16_t kPoison = 0xFFFF;
  static constexpr std::uint64_t kGuard = 4096;  ///< Elements behind the output.

  CutlassMatrix matrix(std::uint64_t rows, std::uint64_t columns, std::uint64_t pad) {
    std::normal_distribution<float> normal(0, 1);
    const std::uint64_t element = shape_.precision == Precision::bf16 ? 2 : 1;
    CutlassMatrix m;
    m.bytes.assign(rows * (columns + pad) * element, std::byte{0xFF});  // padding is NaN in both types
    for (std::uint64_t r = 0; r < rows; ++r) {
      for (std::uint64_t c = 0; c < columns; ++c) {
        const std::uint64_t at = (r * (columns + pad) + c) * element;
        if (element == 2) {
          const std::uint16_t bits = to_bf16(normal(random_));
          std::memcpy(m.bytes.data() + at, &bits, 2);
          m.values.push_back(from_bf16(bits));
        } else {
          auto code = static_cast<std::uint8_t>(random_());
          if ((code & 0x7F) == 0x7F) code ^= 1;  // a NaN becomes 416
          m.bytes[at] = std::byte{code};
          m.values.push_back(from_e4m3(code));
        }
      }
    }
    return m;
  }
  /// Spread over three decades, so that one in the wrong place shows.
  std::vector<float> scales(std::uint64_t count) {
    std::uniform_real_distribution<float> exponent(-3, 0);
    std::vector<float> all(count);
    for (float& scale : all) scale = std::pow(10.0F, exponent(random_));
    return all;
  }
  template <class T>
  DeviceBuffer upload(const std::vector<T>& data) {
    DeviceBuffer buffer = must(DeviceBuffer::create(backend_, data.size() * sizeof(T)));
    must(backend_.copy_h2d(buffer.ptr(), std::as_bytes(std::span(data))));
    return buffer;
  }

  /// As the device makes offsets sound.
  int expert_of(std::int32_t row) const {
    const auto limit = static_cast<std::int32_t>(rows_);
    std::int32_t begin = std::clamp(offsets_[0], 0, limit);
    for (std::size_t e = 0; e + 1 < offsets_.size(); ++e) {
      const std::int32_t end = std::min(std::max(offsets_[e + 1], begin), limit);
      if (row >= begin && row < end) return static_cast<int>(e);
      begin = end;
    }
    return -1;
  }
  void product(std::uint32_t row, std::uint32_t expert, std::vector<double>& want) const {
    const std::int32_t token = shape_.tokens != 0 ? index_[row] : static_cast<std::int32_t>(row);
    std::fill(want.begin(), want.end(), 0.0);
    if (token < 0 || static_cast<std::uint32_t>(token) >= tokens_) return;
    const float* x = act_.values.data() + static_cast<std::uint64_t>(token) * shape_.k;
    for (std::uint32_t c = 0; c < shape_.n; ++c) {
      const float* w = weight_.values.data() + (std::uint64_t{expert} * shape_.n + c) * shape_.k;
      double sum = 0;
      for (std::uint64_t block = 0; block < blocks_; ++block) {
        double part = 0;
        const std::uint32_t end = std::min<std::uint32_t>(shape_.k, static_cast<std::uint32_t>((block + 1) * cutlass::kScaleBlock));
        for (auto i = static_cast<std::uint32_t>(block * cutlass::kScaleBlock); i < end; ++i)
          part += static_cast<double>(x[i]) * w[i];
        if (!act_scales_.empty()) {
          part *= static_cast<double>(act_scales_[static_cast<std::uint64_t>(token) * blocks_ + block]) *
                  weight_scales_[(expert * div_ceil(shape_.n, cutlass::kScaleBlock) + c / cutlass::kScaleBlock) * blocks_ + block];
        }
        sum += part;
      }
      want[c] = sum * static_cast<double>(shape_.alpha);
    }
  }

  GpuBackend& backend_;
  CutlassShape shape_;
  std::mt19937 random_;
  std::uint32_t rows_ = 0;
  std::uint32_t tokens_ = 0;
  std::uint32_t out_stride_ = 0;
  std::uint64_t blocks_ = 0;
  CutlassMatrix act_;
  CutlassMatrix weight_;
  std::vector<float> act_scales_;
  std::vector<float> weight_scales_;
  std::vector<std::int32_t> offsets_;
  std::vector<std::int32_t> index_;
  DeviceBuffer act_memory_;
  DeviceBuffer weight_memory_;
  DeviceBuffer act_scales_memory_;
  DeviceBuffer weight_scales_memory_;
  DeviceBuffer offsets_memory_;
  DeviceBuffer index_memory_;
  DeviceBuffer out_memory_;
};

}  // namespace metrale::test
