// SPDX-License-Identifier: Apache-2.0
#include "metrale/dequantise.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

namespace metrale {
namespace {

std::uint16_t load_u16(const std::byte* at) noexcept {
  std::uint16_t value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}
float load_f16(const std::byte* at) noexcept { return f16_to_f32(load_u16(at)); }
int low_nibble(std::byte b) noexcept { return std::to_integer<int>(b & std::byte{0x0F}); }
int high_nibble(std::byte b) noexcept { return std::to_integer<int>(b >> 4); }
int as_signed(std::byte b) noexcept { return static_cast<std::int8_t>(std::to_integer<std::uint8_t>(b)); }

// One block each, from `b` to `y`; layouts in the order of their bytes.

// f16 scale, 16 bytes: element j in the low half of byte j, element j + 16 in the high half.
void q4_0_block(const std::byte* b, float* y) noexcept {
  const float scale = load_f16(b);
  for (int j = 0; j < 16; ++j) {
    y[j] = static_cast<float>(low_nibble(b[2 + j]) - 8) * scale;
    y[j + 16] = static_cast<float>(high_nibble(b[2 + j]) - 8) * scale;
  }
}

// f16 scale, f16 minimum, 16 bytes as in q4_0.
void q4_1_block(const std::byte* b, float* y) noexcept {
  const float scale = load_f16(b);
  const float minimum = load_f16(b + 2);
  for (int j = 0; j < 16; ++j) {
    y[j] = static_cast<float>(low_nibble(b[4 + j])) * scale + minimum;
    y[j + 16] = static_cast<float>(high_nibble(b[4 + j])) * scale + minimum;
  }
}

// f16 scale, 32 signed bytes.
void q8_0_block(const std::byte* b, float* y) noexcept {
  const float scale = load_f16(b);
  for (int j = 0; j < 32; ++j) y[j] = static_cast<float>(as_signed(b[2 + j])) * scale;
}

// Scale and minimum of sub-block `j` of 8, six bits each, from 12 bytes: the first four sub-blocks in the low six bits of bytes j
// and j + 4; the last four with their low halves in byte j + 4 and their top two bits above the first four's.
std::pair<int, int> q4_k_scale(const std::byte* s, int j) noexcept {
  const auto at = [&](int i) { return std::to_integer<int>(s[i]); };
  if (j < 4) return {at(j) & 63, at(j + 4) & 63};
  return {(at(j + 4) & 0xF) | ((at(j - 4) >> 6) << 4), (at(j + 4) >> 4) | ((at(j) >> 6) << 4)};
}

// f16 scale, f16 minimum, 12 bytes of sub-block scales, 128 bytes: 32 bytes hold one sub-block in their low and the next in their
// high halves.
void q4_k_block(const std::byte* b, float* y) noexcept {
  const float scale = load_f16(b);
  const float minimum = load_f16(b + 2);
  const std::byte* quants = b + 16;
  for (int j = 0; j < 8; ++j) {
    const auto [sub_scale, sub_minimum] = q4_k_scale(b + 4, j);
    const float d = scale * static_cast<float>(sub_scale);
    const float m = minimum * static_cast<float>(sub_minimum);
    const std::byte* q = quants + 32 * (j / 2);
    for (int i = 0; i < 32; ++i) y[32 * j + i] = d * static_cast<float>(j % 2 == 0 ? low_nibble(q[i]) : high_nibble(q[i])) - m;
  }
}

// 128 bytes of low halves, 64 bytes of top bit pairs, 16 signed scales, f16 scale. Each half of 128 elements is four runs of 32:
// run r has its low half in bytes 32·(r % 2) on (low nibble for r < 2), its top bits at 2·r of byte i, and one scale for every
// 16 elements.
void q6_k_block(const std::byte* b, float* y) noexcept {
  const float scale = load_f16(b + 208);
  for (int half = 0; half < 2; ++half) {
    const std::byte* low = b + 64 * half;
    const std::byte* top = b + 128 + 32 * half;
    const std::byte* scales = b + 192 + 8 * half;
    for (int run = 0; run < 4; ++run) {
      for (int i = 0; i < 32; ++i) {
        const std::byte l = low[32 * (run % 2) + i];
        const int bits = (run < 2 ? low_nibble(l) : high_nibble(l)) | (((std::to_integer<int>(top[i]) >> (2 * run)) & 3) << 4);
        const float d = scale * static_cast<float>(as_signed(scales[2 * run + i / 16]));
        y[128 * half + 32 * run + i] = d * static_cast<float>(bits - 32);
      }
    }
  }
}

using BlockFn = void (*)(const std::byte*, float*) noexcept;

BlockFn block_function(DType type) noexcept {
  switch (type) {
    case DType::f32: return [](const std::byte* b, float* y) noexcept { std::memcpy(y, b, sizeof(float)); };
    case DType::f16: return [](const std::byte* b, float* y) noexcept { *y = load_f16(b); };
    case DType::bf16: return [](const std::byte* b, float* y) noexcept { *y = bf16_to_f32(load_u16(b)); };
    case DType::q4_0: return q4_0_block;
    case DType::q4_1: return q4_1_block;
    case DType::q8_0: return q8_0_block;
    case DType::q4_k: return q4_k_block;
    case DType::q6_k: return q6_k_block;
    default: return nullptr;
  }
}

}  // namespace

bool can_dequantise(DType type) noexcept { return block_function(type) != nullptr; }

Result<> dequantise(DType type, std::span<const std::byte> src, std::span<float> dst) {
  const BlockFn block = block_function(type);
  if (block == nullptr) return Error(Errc::unsupported, fmt::format("dequantise {}: no such conversion", to_string(type)));
  if (size_bytes(type, dst.size()) != src.size()) {
    return Error(Errc::invalid_argument,
                 fmt::format("dequantise {}: {} bytes are not {} elements", to_string(type), src.size(), dst.size()));
  }
  const DTypeFacts& f = dtype_facts(type);
  for (std::size_t i = 0; i < dst.size() / f.block_elements; ++i)
    block(src.data() + i * f.block_bytes, dst.data() + i * f.block_elements);
  return {};
}

}  // namespace metrale
