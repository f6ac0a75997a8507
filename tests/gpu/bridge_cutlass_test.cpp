// SPDX-License-Identifier: Apache-2.0
//
// The CUTLASS bridge on a device, against products in float64. Outputs are NaN beforehand, padding included, so that what was not
// written, and what was written beside the matrix, shows.
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "gpu/gpu_fixture.h"
#include "metrale/bridges/cutlass.h"
#include "metrale/device_buffer.h"
#include "metrale/graph.h"
#include "metrale/op_cache.h"
#include "metrale/stream.h"

namespace metrale::test {
namespace {

using cutlass::Bridge;
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

float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
float from_e4m3(std::uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                        : std::ldexp(1.0F + static_cast<float>(mantissa) / 8.0F, exponent - 7);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

/// A matrix as it lies in memory, and its values.
struct Matrix {
  std::vector<std::byte> bytes;
  std::vector<float> values;  ///< [rows, columns], without padding.
};

struct Shape {
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
class Case {
 public:
  Case(GpuBackend& backend, Shape shape, std::uint32_t seed) : backend_(backend), shape_(std::move(shape)), random_(seed) {
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
    EXPECT_NEAR(std::sqrt(got_norm / want_norm), 1, 1e-3) << what << ": ratio of norms";
  }

 private:
  static constexpr std::uint16_t kPoison = 0xFFFF;
  static constexpr std::uint64_t kGuard = 4096;  ///< Elements behind the output.

  Matrix matrix(std::uint64_t rows, std::uint64_t columns, std::uint64_t pad) {
    std::normal_distribution<float> normal(0, 1);
    const std::uint64_t element = shape_.precision == Precision::bf16 ? 2 : 1;
    Matrix m;
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
  Shape shape_;
  std::mt19937 random_;
  std::uint32_t rows_ = 0;
  std::uint32_t tokens_ = 0;
  std::uint32_t out_stride_ = 0;
  std::uint64_t blocks_ = 0;
  Matrix act_;
  Matrix weight_;
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

class CutlassOnDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    METRALE_NEEDS_DEVICE();
    if (!cutlass::status().is_available) GTEST_SKIP() << cutlass::status().text;
    if (device_name() != "cuda") GTEST_SKIP() << "CUTLASS runs on CUDA alone";
    backend = must(open_device());
    bridge = must(Bridge::create(*backend));
    stream = must(Stream::create(*backend));
  }
  void TearDown() override {
    if (!backend) return;
    stream = {};
    bridge.reset();
    must(backend->op_cache().release(*backend));
    EXPECT_EQ(backend->live_bytes(), 0U) << backend->alloc_report();
  }
  void needs_hopper() {
    if (bridge && bridge->kernels() != "sm_90a") GTEST_SKIP() << "the device uses the kernels for every chip";
  }

  std::unique_ptr<GpuBackend> backend;
  std::unique_ptr<Bridge> bridge;
  Stream stream;
};

std::string name_of(const Shape& s) {
  std::int64_t rows = 0;
  for (const std::int32_t count : s.counts) rows += count;
  return fmt::format("{}, {} experts, {} rows of {}, n {}, k {}", cutlass::to_string(s.precision), s.counts.size(), rows, s.tokens,
                     s.n, s.k);
}

// The smallest; ragged in each dimension; one tile and a row more; more tiles than processors; padded rows.
const std::vector<Shape> kDenseShapes{{.counts = {1}, .n = 8, .k = 16},
                                      {.counts = {7}, .n = 72, .k = 48, .act_pad = 16, .out_pad = 24, .alpha = 0.5F},
                                      {.counts = {129}, .n = 264, .k = 208},
                                      {.counts = {300}, .n = 520, .k = 1040, .out_pad = 8},
                                      {.counts = {1100}, .n = 4104, .k = 80}};

TEST_F(CutlassOnDevice, DenseProductsAreThoseOfFloat64) {
  for (const Precision precision : {Precision::bf16, Precision::fp8_block}) {
    if (precision == Precision::fp8_block && bridge->kernels() != "sm_90a") continue;
    for (Shape shape : kDenseShapes) {
      shape.precision = precision;
      Case data(*backend, shape, 11);
      must(bridge->dense(data.dense(), stream.handle()));
      data.expect_right(stream.handle(), name_of(shape));
    }
  }
}

TEST_F(CutlassOnDevice, TheKernelForEveryChipGivesDenseProductsOfFloat64) {
  auto common = Bridge::create(*backend, {.common_kernels = true});
  if (!common) GTEST_SKIP() << common.error().to_string();
  EXPECT_EQ((*common)->kernels(), "common");
  for (const Shape& shape : kDenseShapes) {
    Case data(*backend, shape, 12);
    must((*common)->dense(data.dense(), stream.handle()));
    data.expect_right(stream.handle(), name_of(shape));
  }
  Case fp8(*backend, {.precision = Precision::fp8_block, .counts = {4}, .n = 8, .k = 16}, 1);
  EXPECT_EQ((*common)->dense(fp8.dense(), stream.handle()).error().code(), Errc::unsupported);
  EXPECT_EQ((*common)->grouped(fp8.grouped(), stream.handle()).error().code(), Errc::unsupported);
}

std::vector<Shape> grouped_shapes() {
  std::vector<std::int32_t> many(150);
  for (std::size_t i = 0; i < many.size(); ++i) many[i] = static_cast<std::int32_t>(i * 7 % 11);
  return {{.counts = {5}, .n = 8, .k = 16},
          {.counts = {0, 0, 3, 0}, .n = 72, .k = 48, .tokens = 2},
          {.counts = {64, 65, 0, 127, 128, 129, 1},
           .n = 200,
           .k = 336,
           .tokens = 90,
           .act_pad = 16,
           .out_pad = 8,
           .spare_rows = 9,
           .alpha = 2},
          {.counts = {300, 0, 17}, .n = 264, .k = 128},
          {.counts = many, .n = 264, .k = 144, .tokens = 33},
          {.counts = {0, 0, 0}, .n = 64, .k = 64, .spare_rows = 4}};
}

TEST_F(CutlassOnDevice, GroupedProductsAreThoseOfFloat64) {
  needs_hopper();
  for (const Precision precision : {Precision::bf16, Precision::fp8_block}) {
    for (Shape shape : grouped_shapes()) {
      shape.precision = precision;
      Case data(*backend, shape, 21);
      must(bridge->grouped(data.grouped(), stream.handle()));
      data.expect_right(stream.handle(), name_of(shape));
      data.poison();
      GroupedCall call = data.grouped();
      call.offsets = {};
      call.host_offsets = data.offsets();
      must(bridge->grouped(call, stream.handle()));
      data.expect_right(stream.handle(), name_of(shape) + ", host offsets");
    }
  }
}

TEST_F(CutlassOnDevice, HostileOffsetsOnTheDeviceWriteNothingOutsideTheOutput) {
  needs_hopper();
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min();
  Case data(*backend, {.counts = {40, 40, 40, 40}, .n = 136, .k = 64, .tokens = 20, .out_pad = 8}, 31);
  for (const std::vector<std::int32_t>& offsets : {std::vector<std::int32_t>{5, -3, 100'000, 7, kMost},
                                                   {kMost, kMost, kMost, kMost, kMost},
                                                   {kLeast, 50, kLeast, kMost, 0},
                                                   {-1, -1, -1, -1, -1},
                                                   {160, 0, 0, 0, 0}}) {
    data.poison();
    data.set_offsets(offsets);
    must(bridge->grouped(data.grouped(), stream.handle()));
    data.expect_right(stream.handle(), "hostile offsets");
  }
}

TEST_F(CutlassOnDevice, TokensThatDoNotExistReadAsZeros) {
  needs_hopper();
  for (const Precision precision : {Precision::bf16, Precision::fp8_block}) {
    Case data(*backend, {.precision = precision, .counts = {30, 100}, .n = 64, .k = 96, .tokens = 20}, 32);
    std::vector<std::int32_t> index(data.rows());
    for (std::size_t i = 0; i < index.size(); ++i) {
      constexpr std::array<std::int32_t, 5> kTokens{3, -1, 20, std::numeric_limits<std::int32_t>::max(),
                                                    std::numeric_limits<std::int32_t>::min()};
      index[i] = kTokens[i % kTokens.size()];
    }
    data.set_index(index);
    must(bridge->grouped(data.grouped(), stream.handle()));
    data.expect_right(stream.handle(), "tokens that do not exist");
  }
}

TEST_F(CutlassOnDevice, OperandsOutsideTheirMemoryAreRefused) {
  Case data(*backend, {.counts = {16}, .n = 64, .k = 64}, 33);
  DenseCall call = data.dense();
  call.m = 1U << 20;
  EXPECT_EQ(bridge->dense(call, stream.handle()).error().code(), Errc::out_of_range);
  must(backend->synchronize(stream.handle()));
}

TEST_F(CutlassOnDevice, AGraphReplaysWithTheOffsetsOfTheMoment) {
  needs_hopper();
  Case data(*backend, {.counts = {40, 0, 200, 16}, .n = 264, .k = 128, .tokens = 70}, 41);
  Case fixed(*backend, {.precision = Precision::fp8_block, .counts = {9, 70}, .n = 64, .k = 128}, 42);
  Case dense(*backend, {.counts = {33}, .n = 72, .k = 80}, 43);
  GroupedCall from_host = fixed.grouped();
  from_host.offsets = {};
  from_host.host_offsets = fixed.offsets();
  {
    CaptureScope capture = must(CaptureScope::begin(*backend, stream.handle()));
    EXPECT_EQ(bridge->grouped(data.grouped(), stream.handle()).error().code(), Errc::capture_unsafe) << "there is no scratch yet";
    must(capture.abort());
  }
  must(bridge->prepare(stream.handle()));
  CaptureScope capture = must(CaptureScope::begin(*backend, stream.handle()));
  must(bridge->grouped(data.grouped(), stream.handle()));
  must(bridge->grouped(from_host, stream.handle()));
  must(bridge->dense(dense.dense(), stream.handle()));
  Graph graph = must(capture.end());
  for (const std::vector<std::int32_t>& offsets :
       {std::vector<std::int32_t>{0, 40, 40, 240, 256}, {0, 0, 256, 256, 256}, {0, 100, 101, 102, 103}}) {
    for (Case* one : {&data, &fixed, &dense}) one->poison();
    data.set_offsets(offsets);
    must(graph.launch(stream.handle()));
    data.expect_right(stream.handle(), "replayed");
    fixed.expect_right(stream.handle(), "replayed, offsets of the host");
    dense.expect_right(stream.handle(), "replayed, dense");
  }
}

TEST_F(CutlassOnDevice, TwoStreamsAtOnceDoNotDisturbEachOther) {
  needs_hopper();
  const Stream other = must(Stream::create(*backend));
  Case first(*backend, {.counts = {300, 20, 90}, .n = 264, .k = 512, .tokens = 100}, 51);
  Case second(*backend, {.precision = Precision::fp8_block, .counts = {7, 260}, .n = 264, .k = 512, .tokens = 60}, 52);
  const auto run = [&](const Case& data, const Stream& on) {
    for (int i = 0; i < 200; ++i) must(bridge->grouped(data.grouped(), on.handle()));
  };
  std::thread beside([&] { run(second, other); });
  run(first, stream);
  beside.join();
  first.expect_right(stream.handle(), "first stream");
  second.expect_right(other.handle(), "second stream");
}

}  // namespace
}  // namespace metrale::test
