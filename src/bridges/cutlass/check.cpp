// SPDX-License-Identifier: Apache-2.0
//
// What of a call can be refused without a device.
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "metrale/bridges/cutlass.h"
#include "metrale/bridges/nvfp4.h"

namespace metrale::cutlass {
namespace {

using Site = std::source_location;

// The kernels count rows, tiles and columns in 32 bits with a sign.
constexpr std::uint32_t kMostRows = 1U << 30;

struct Operand {
  std::string_view name;
  DevicePtr ptr;
  std::uint64_t alignment = kMatrixAlignment;
};

/// What both calls have in common.
struct Shape {
  Precision precision;
  std::uint32_t experts;
  std::uint32_t rows;
  std::uint32_t tokens;
  std::uint32_t n;
  std::uint32_t k;
  std::uint64_t act_stride;
  std::uint64_t out_stride;
  float alpha;
};

Error refuse(std::string text, Site site) { return Error(Errc::invalid_argument, std::move(text), site); }

Result<> check_shape(const Shape& s, Site site) {
  const std::uint32_t multiple = s.precision == Precision::bf16 ? 8 : 16;
  const std::uint64_t element = s.precision == Precision::bf16 ? 2 : 1;
  if (s.precision != Precision::bf16 && s.precision != Precision::fp8_block) {
    return refuse(fmt::format("precision {} is none", static_cast<int>(s.precision)), site);
  }
  if (s.rows == 0 || s.tokens == 0 || s.n == 0 || s.k == 0) {
    return refuse(
        fmt::format("{} rows of {} tokens, n {}, k {}: none may be 0; make no call for an empty batch", s.rows, s.tokens, s.n, s.k),
        site);
  }
  if (s.k % multiple != 0) {
    return refuse(fmt::format("k is {}, which is no multiple of {}, as {} needs; pad both operands with zeros", s.k, multiple,
                              to_string(s.precision)),
                  site);
  }
  if (s.n % 8 != 0) return refuse(fmt::format("n is {}, which is no multiple of 8; pad the weights with rows of zeros", s.n), site);
  if (s.experts == 0 || s.rows > kMostRows || s.tokens > kMostRows || s.k > kMostRows ||
      std::uint64_t{s.experts} * s.n > std::uint64_t{kMostRows}) {
    return refuse(
        fmt::format("{} rows, {} tokens, {} experts of n {}, k {}: rows, tokens, k, and experts times n end at {}; split the call",
                    s.rows, s.tokens, s.experts, s.n, s.k, kMostRows),
        site);
  }
  // Each expert may end in a tile that is not full.
  const std::uint64_t tiles = (s.rows / 128 + std::uint64_t{s.experts}) * div_ceil(s.n, 128);
  if (tiles >= std::uint64_t{1} << 31) {
    return refuse(fmt::format("{} rows by n {} are {} tiles, and a launch ends at 2^31; split the rows", s.rows, s.n, tiles), site);
  }
  if (s.act_stride < s.k || s.out_stride < s.n) {
    return refuse(fmt::format("strides {} of act and {} of out are shorter than their rows of {} and {}", s.act_stride,
                              s.out_stride, s.k, s.n),
                  site);
  }
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 46;
  if (s.act_stride > kMostBytes / s.tokens / element || s.out_stride > kMostBytes / s.rows / 2) {
    return refuse(fmt::format("strides {} of act and {} of out go beyond any memory", s.act_stride, s.out_stride), site);
  }
  if (s.act_stride * element % kMatrixAlignment != 0 || s.out_stride * 2 % kMatrixAlignment != 0) {
    return refuse(
        fmt::format("strides {} of act and {} of out are no multiples of {} bytes", s.act_stride, s.out_stride, kMatrixAlignment),
        site);
  }
  if (!std::isfinite(s.alpha)) return refuse(fmt::format("alpha is {}; it must be finite", s.alpha), site);
  return {};
}

Result<> check_operands(std::span<const Operand> operands, Site site) {
  for (const Operand& operand : operands) {
    if (!operand.ptr) return refuse(fmt::format("{} is null", operand.name), site);
    if (operand.ptr.address % operand.alignment != 0) {
      return refuse(fmt::format("{} at {:#x} is not aligned to {} bytes", operand.name, operand.ptr.address, operand.alignment),
                    site);
    }
  }
  return {};
}

/// Bytes of an operand in memory, last row included. Sizes were checked before: nothing overflows.
std::uint64_t extent(std::uint64_t rows, std::uint64_t stride, std::uint64_t columns, std::uint64_t element) {
  return ((rows - 1) * stride + columns) * element;
}

Result<> check_overlap(const Shape& s, DevicePtr out, DevicePtr act, DevicePtr weight, Site site) {
  const std::uint64_t element = s.precision == Precision::bf16 ? 2 : 1;
  const struct {
    std::string_view name;
    DevicePtr ptr;
    std::uint64_t bytes;
  } inputs[] = {{"act", act, extent(s.tokens, s.act_stride, s.k, element)},
                {"weight", weight, std::uint64_t{s.experts} * s.n * s.k * element}};
  const std::uint64_t out_bytes = extent(s.rows, s.out_stride, s.n, 2);
  for (const auto& input : inputs) {
    if (out_bytes > ~out.address || input.bytes > ~input.ptr.address) {
      return refuse(
          fmt::format("out at {:#x} or {} at {:#x} ends beyond all addresses", out.address, input.name, input.ptr.address), site);
    }
    if (out.address < input.ptr.address + input.bytes && input.ptr.address < out.address + out_bytes) {
      return refuse(
          fmt::format("out at {:#x} overlaps {} at {:#x}; give it memory of its own", out.address, input.name, input.ptr.address),
          site);
    }
  }
  return {};
}

Result<> check_scales(Precision precision, DevicePtr act_scales, DevicePtr weight_scales, Site site) {
  if (precision == Precision::fp8_block) {
    const Operand scales[] = {{"act_scales", act_scales, 4}, {"weight_scales", weight_scales, 4}};
    return check_operands(scales, site);
  }
  if (act_scales || weight_scales) return refuse("bf16 has no scales: act_scales and weight_scales must be null", site);
  return {};
}

}  // namespace

std::string_view to_string(Precision precision) noexcept { return precision == Precision::bf16 ? "bf16" : "fp8_block"; }

Result<> check(const DenseCall& call, Site site) {
  const Shape shape{.precision = call.precision,
                    .experts = 1,
                    .rows = call.m,
                    .tokens = call.m,
                    .n = call.n,
                    .k = call.k,
                    .act_stride = call.act_stride != 0 ? call.act_stride : call.k,
                    .out_stride = call.out_stride != 0 ? call.out_stride : call.n,
                    .alpha = call.alpha};
  METRALE_TRY(check_shape(shape, site));
  const Operand operands[] = {{"act", call.act}, {"weight", call.weight}, {"out", call.out}};
  METRALE_TRY(check_operands(operands, site));
  METRALE_TRY(check_overlap(shape, call.out, call.act, call.weight, site));
  return check_scales(call.precision, call.act_scales, call.weight_scales, site);
}

Result<> check(const GroupedCall& call, Site site) {
  if (call.experts == 0 || call.experts > kMaxExperts) {
    return refuse(fmt::format("{} experts; a call has 1 to {}", call.experts, kMaxExperts), site);
  }
  const Shape shape{.precision = call.precision,
                    .experts = call.experts,
                    .rows = call.rows,
                    .tokens = call.tokens,
                    .n = call.n,
                    .k = call.k,
                    .act_stride = call.act_stride != 0 ? call.act_stride : call.k,
                    .out_stride = call.out_stride != 0 ? call.out_stride : call.n,
                    .alpha = call.alpha};
  METRALE_TRY(check_shape(shape, site));
  const Operand operands[] = {{"act", call.act}, {"weight", call.weight}, {"out", call.out}};
  METRALE_TRY(check_operands(operands, site));
  METRALE_TRY(check_overlap(shape, call.out, call.act, call.weight, site));
  METRALE_TRY(check_scales(call.precision, call.act_scales, call.weight_scales, site));
  if (call.row_index) {
    const Operand index[] = {{"row_index", call.row_index, 4}};
    METRALE_TRY(check_operands(index, site));
  } else if (call.tokens < call.rows) {
    return refuse(fmt::format("{} rows of {} tokens need a row_index that says which token each row reads", call.rows, call.tokens),
                  site);
  }
  if (call.offsets && !call.host_offsets.empty()) return refuse("offsets are on the device or on the host, not both", site);
  if (!call.offsets) return check_offsets(call.host_offsets, call.experts, call.rows, site);
  const Operand offsets[] = {{"offsets", call.offsets, 4}};
  return check_operands(offsets, site);
}

Result<> check(const Nvfp4Call& call, Site site) {
  if (call.rows == 0 || call.cols == 0 || call.cols % kNvfp4Group != 0) {
    return refuse(fmt::format("a matrix of {} by {}: it has rows, and columns in groups of {}", call.rows, call.cols, kNvfp4Group),
                  site);
  }
  if (call.rows > kMostRows || call.cols > kMostRows || tiled_scale_bytes(call.rows, call.cols) > std::uint64_t{1} << 38) {
    return refuse(fmt::format("a matrix of {} by {} is more than a launch takes; split the rows", call.rows, call.cols), site);
  }
  if (!std::isfinite(call.alpha) || call.alpha <= 0) {
    return refuse(fmt::format("alpha is {}; it is finite and above 0", call.alpha), site);
  }
  const Operand operands[] = {{"plain", call.plain}, {"values", call.values, 8}, {"scales", call.scales, 1}};
  return check_operands(operands, site);
}

Result<> check(const Nvfp4DenseCall& call, Site site) {
  const std::uint64_t out_stride = call.out_stride != 0 ? call.out_stride : call.n;
  if (call.m == 0 || call.n == 0 || call.k == 0) {
    return refuse(fmt::format("m {}, n {}, k {}: none may be 0; make no call for an empty batch", call.m, call.n, call.k), site);
  }
  if (call.k % 32 != 0) return refuse(fmt::format("k is {}, which is no multiple of 32, as NVFP4 needs", call.k), site);
  if (call.n % 8 != 0) return refuse(fmt::format("n is {}, which is no multiple of 8; pad the weights", call.n), site);
  if (call.m > kMostRows || call.n > kMostRows || call.k > kMostRows || out_stride > kMostRows) {
    return refuse(fmt::format("m {}, n {}, k {}, stride {}: each ends at {}", call.m, call.n, call.k, out_stride, kMostRows), site);
  }
  if (out_stride < call.n || out_stride % 8 != 0) {
    return refuse(fmt::format("stride {} of out: it is a multiple of 8 and no shorter than the row of {}", out_stride, call.n),
                  site);
  }
  if (!std::isfinite(call.alpha)) return refuse(fmt::format("alpha is {}; it must be finite", call.alpha), site);
  const Operand operands[] = {{"act", call.act},
                              {"act_scales", call.act_scales},
                              {"weight", call.weight},
                              {"weight_scales", call.weight_scales},
                              {"out", call.out}};
  return check_operands(operands, site);
}

Result<> check_offsets(std::span<const std::int32_t> offsets, std::uint32_t experts, std::uint32_t rows, Site site) {
  if (offsets.size() != std::size_t{experts} + 1) {
    return refuse(fmt::format("{} offsets for {} experts; there is one more than experts", offsets.size(), experts), site);
  }
  if (offsets[0] != 0) return refuse(fmt::format("offset 0 is {}; the first is 0", offsets[0]), site);
  for (std::size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1]) {
      return refuse(fmt::format("offset {} is {}, below the {} before it", i, offsets[i], offsets[i - 1]), site);
    }
  }
  if (static_cast<std::uint32_t>(offsets.back()) > rows) {
    return refuse(fmt::format("offsets end at {}, and there are {} rows", offsets.back(), rows), site);
  }
  return {};
}

}  // namespace metrale::cutlass
