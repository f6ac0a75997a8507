// SPDX-License-Identifier: Apache-2.0
//
// What of a call can be refused without a device, and what of it needs no library.
#include <array>
#include <bit>
#include <cmath>

#include <fmt/format.h>

#include "bridges/cublaslt/shape.h"
#include "metrale/bridges/cublaslt.h"

namespace metrale::cublaslt {
namespace {

using Site = std::source_location;

// The library counts rows, columns and products in 32 bits with a sign.
constexpr std::uint32_t kMost = 1U << 30;
// Elements between rows or products: far beyond any memory, and no sum below overflows.
constexpr std::uint64_t kMostStride = std::uint64_t{1} << 42;
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 48;

Error refuse(std::string text, Site site) { return Error(Errc::invalid_argument, std::move(text), site); }

Result<> check_operand(std::string_view name, DevicePtr ptr, Site site, std::uint64_t alignment = kAlignment) {
  if (!ptr) return refuse(fmt::format("{} is null", name), site);
  if (ptr.address % alignment != 0) {
    return refuse(fmt::format("{} at {:#x} is not aligned to {} bytes", name, ptr.address, alignment), site);
  }
  return {};
}

Result<> check_sizes(const Call& c, Site site) {
  const std::pair<std::string_view, std::uint32_t> sizes[] = {{"m", c.m}, {"n", c.n}, {"k", c.k}, {"batch", c.batch}};
  for (const auto& [name, value] : sizes) {
    if (value == 0 || value > kMost) return refuse(fmt::format("{} is {}; it is 1 to {}", name, value, kMost), site);
  }
  const bool fp8 = c.precision != Precision::bf16;
  const std::uint32_t multiple = fp8 ? 16 : 8;
  if (c.k % multiple != 0) {
    return refuse(
        fmt::format("k is {}; in {} it is a multiple of {}: pad act and weight with zeros", c.k, to_string(c.precision), multiple),
        site);
  }
  if (fp8 && c.n % 8 != 0) return refuse(fmt::format("n is {}; in {} it is a multiple of 8", c.n, to_string(c.precision)), site);
  if (c.precision == Precision::fp8_block && div_ceil(c.k, kScaleBlock) % 4 != 0) {
    return refuse(
        fmt::format("k is {}, that is {} scales to a row; cuBLASLt reads them in fours: use another bridge for this layer", c.k,
                    div_ceil(c.k, kScaleBlock)),
        site);
  }
  return {};
}

Result<> check_kind(const Call& c, Site site) {
  if (c.precision > Precision::fp8_block || c.epilogue > Epilogue::gelu)
    return refuse("precision or epilogue is none that there is", site);
  if (c.out_type != DType::bf16 && (c.out_type != DType::f32 || c.precision != Precision::bf16)) {
    return refuse(
        fmt::format("out of type {} from {}; there is bf16, and f32 from bf16", to_string(c.out_type), to_string(c.precision)),
        site);
  }
  if (c.precision != Precision::bf16 && (c.batch != 1 || c.residual || c.epilogue != Epilogue::none)) {
    return refuse(fmt::format("{} has no batch, residual or epilogue", to_string(c.precision)), site);
  }
  if (!std::isfinite(c.alpha) || !std::isfinite(c.beta)) {
    return refuse(fmt::format("alpha {} and beta {} must be finite", c.alpha, c.beta), site);
  }
  return {};
}

Result<> check_strides(const Call& c, Site site) {
  const Strides s = strides_of(c);
  if (s.act < c.k || s.act > kMostStride || s.act * element_bytes(c.precision) % kAlignment != 0) {
    return refuse(fmt::format("act_stride {} must be at least k, {}, and a multiple of {} bytes", s.act, c.k, kAlignment), site);
  }
  if (s.out < c.n || s.out > kMostStride) {
    return refuse(fmt::format("out_stride {} must be at least n, {}: rows may not overlap", s.out, c.n), site);
  }
  if (c.residual && (s.residual < c.n || s.residual > kMostStride)) {
    return refuse(fmt::format("residual_stride {} must be at least n, {}", s.residual, c.n), site);
  }
  for (const std::uint64_t stride : {c.act_batch_stride, c.weight_batch_stride, c.out_batch_stride, c.residual_batch_stride}) {
    if (stride > kMostStride) return refuse(fmt::format("a batch stride of {} is beyond any memory", stride), site);
  }
  if (c.batch == 1) return {};
  if (c.act_batch_stride % 8 != 0 || c.weight_batch_stride % 8 != 0) {
    return refuse(
        fmt::format("batch strides {} of act and {} of weight must be multiples of 8", c.act_batch_stride, c.weight_batch_stride),
        site);
  }
  const std::uint64_t one = (std::uint64_t{c.m} - 1) * s.out + c.n;
  if (c.out_batch_stride < one) {
    return refuse(fmt::format("out_batch_stride {} must be at least {}: products may not overlap", c.out_batch_stride, one), site);
  }
  return {};
}

Result<> check_overlap(const Call& c, const Extents& e, Site site) {
  struct Range {
    std::string_view name;
    DevicePtr ptr;
    std::uint64_t bytes;
  };
  const std::array inputs{Range{"act", c.act, e.act},
                          Range{"weight", c.weight, e.weight},
                          Range{"bias", c.bias, e.bias},
                          Range{"residual", c.residual, e.residual},
                          Range{"act_scales", c.act_scales, e.act_scales},
                          Range{"weight_scales", c.weight_scales, e.weight_scales}};
  if (e.out > ~c.out.address) return refuse(fmt::format("out at {:#x} ends beyond all addresses", c.out.address), site);
  for (const Range& in : inputs) {
    if (!in.ptr) continue;
    if (in.bytes > ~in.ptr.address)
      return refuse(fmt::format("{} at {:#x} ends beyond all addresses", in.name, in.ptr.address), site);
    if (c.out.address >= in.ptr.address + in.bytes || in.ptr.address >= c.out.address + e.out) continue;
    const Strides s = strides_of(c);
    const bool in_place = in.ptr == c.out && in.name == "residual" && s.residual == s.out &&
                          (c.batch == 1 || c.residual_batch_stride == c.out_batch_stride);
    if (in_place) continue;
    return refuse(
        fmt::format("out at {:#x} overlaps {} at {:#x}; give it memory of its own", c.out.address, in.name, in.ptr.address), site);
  }
  return {};
}

}  // namespace

std::string_view to_string(Precision precision) noexcept {
  switch (precision) {
    case Precision::bf16: return "bf16";
    case Precision::fp8_row: return "fp8_row";
    case Precision::fp8_block: return "fp8_block";
  }
  return "unknown";
}

std::string_view to_string(Epilogue epilogue) noexcept {
  switch (epilogue) {
    case Epilogue::none: return "none";
    case Epilogue::relu: return "relu";
    case Epilogue::gelu: return "gelu";
  }
  return "unknown";
}

Result<> check_shape(const Call& c, Site site) {
  METRALE_TRY(check_kind(c, site));
  METRALE_TRY(check_sizes(c, site));
  METRALE_TRY(check_strides(c, site));
  // Sizes first in floating point: products of what was let through so far may not fit 64 bits.
  const Strides s = strides_of(c);
  const auto bytes = [&](std::uint64_t rows, std::uint64_t stride, std::uint64_t batch_stride, std::uint64_t element) {
    return (static_cast<double>(rows) * static_cast<double>(stride) + (c.batch - 1.0) * static_cast<double>(batch_stride)) *
           static_cast<double>(element);
  };
  const double most = static_cast<double>(kMostBytes);
  if (bytes(c.m, s.act, c.act_batch_stride, 2) > most || bytes(c.n, c.k, c.weight_batch_stride, 2) > most ||
      bytes(c.m, s.out, c.out_batch_stride, 4) > most || bytes(c.m, s.residual, c.residual_batch_stride, 4) > most) {
    return refuse(
        fmt::format("{} products of {} rows x {}x{} with these strides are larger than any memory", c.batch, c.m, c.n, c.k), site);
  }
  return {};
}

Result<> check(const Call& c, Site site) {
  METRALE_TRY(check_shape(c, site));
  METRALE_TRY(check_operand("act", c.act, site));
  METRALE_TRY(check_operand("weight", c.weight, site));
  METRALE_TRY(check_operand("out", c.out, site));
  if (c.bias) METRALE_TRY(check_operand("bias", c.bias, site));
  if (c.residual) METRALE_TRY(check_operand("residual", c.residual, site));
  if (c.precision == Precision::bf16) {
    if (c.act_scales || c.weight_scales) return refuse("bf16 has no scales: act_scales and weight_scales must be null", site);
  } else {
    const bool read_by_us = c.precision == Precision::fp8_block && !c.scales_transposed;
    METRALE_TRY(check_operand("act_scales", c.act_scales, site, read_by_us ? sizeof(float) : kAlignment));
    METRALE_TRY(check_operand("weight_scales", c.weight_scales, site));
  }
  return check_overlap(c, extents_of(c), site);
}

std::uint32_t m_class(std::uint32_t m) noexcept {
  if (m <= 8) return m;
  const std::uint32_t step = 1U << (std::bit_width(m - 1) - 3);
  return static_cast<std::uint32_t>(round_up(m, step));
}

std::vector<float> transpose_scales(std::span<const float> scales, std::uint32_t m, std::uint32_t blocks) {
  if (scales.size() != std::size_t{m} * blocks) return {};
  const std::size_t padded = round_up(m, kBlockRows);
  std::vector<float> out(padded * blocks, 0.0F);
  for (std::size_t row = 0; row < m; ++row) {
    for (std::size_t block = 0; block < blocks; ++block) out[block * padded + row] = scales[row * blocks + block];
  }
  return out;
}

}  // namespace metrale::cublaslt
