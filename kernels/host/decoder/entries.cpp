// SPDX-License-Identifier: Apache-2.0
//
// The kernels as the backend calls them: arguments decoded, limits checked, then the code of one instruction set.
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "decoder/decoder.h"
#include "decoder/ops.h"

namespace metrale::host::decoder {

float softplus(float x) noexcept { return x > 20.0F ? x : std::log1p(std::exp(x)); }
float exponential(float x) noexcept { return std::exp(x); }
float inverse_sqrt(double x) noexcept { return static_cast<float>(1.0 / std::sqrt(x)); }

namespace {

constexpr auto kF32 = static_cast<std::uint32_t>(DType::f32);
constexpr auto kBf16 = static_cast<std::uint32_t>(DType::bf16);
constexpr auto kF16 = static_cast<std::uint32_t>(DType::f16);

void fail(const BlockContext& c, const char* text) { *c.fault = text; }

bool too_little_shared(const BlockContext& c, std::uint64_t bytes) {
  if (c.shared.size() >= bytes) return false;
  fail(c, "the launch reserved less shared memory than decoder.h asks for");
  return true;
}

bool bad_cache(const BlockContext& c, const CacheLayout& layout) {
  if ((layout.dtype == kF32 || layout.dtype == kBf16) && layout.block_tokens != 0) return false;
  fail(c, "the cache layout has no block size, or a type that is neither f32 nor bf16");
  return true;
}

float* shared_floats(const BlockContext& c) { return reinterpret_cast<float*>(c.shared.data()); }

float from_f16(std::uint16_t h) {
  // Exponent and mantissa in place, then rescaled: exact for subnormals; infinities and NaN keep all ones.
  const std::uint32_t magnitude = (h & 0x7fffU) << 13;
  float value = std::bit_cast<float>(magnitude) * 0x1p112F;
  if (magnitude >= (0x7c00U << 13)) value = std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | 0x7f800000U);
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | (static_cast<std::uint32_t>(h & 0x8000U) << 16));
}

float load_element(const void* base, std::uint32_t dtype, std::uint64_t i) {
  const auto* bytes = static_cast<const std::byte*>(base);
  if (dtype == kF32) {
    float x = 0;
    std::memcpy(&x, bytes + 4 * i, 4);
    return x;
  }
  std::uint16_t h = 0;
  std::memcpy(&h, bytes + 2 * i, 2);
  return dtype == kF16 ? from_f16(h) : std::bit_cast<float>(static_cast<std::uint32_t>(h) << 16);
}

void widen(const BlockContext& c) {
  const auto p = c.arg<WidenParams>(2);
  if (p.dtype != kF32 && p.dtype != kF16 && p.dtype != kBf16) return fail(c, "widen takes f32, f16 and bf16");
  const void* from = c.ptr<const void>(0);
  float* to = c.ptr<float>(1);
  const std::uint64_t n = std::uint64_t{p.rows} * p.cols;
  const std::uint64_t share = div_ceil(n, c.grid.x);
  for (std::uint64_t i = c.index.x * share; i < n && i < (c.index.x + 1) * share; ++i) {
    float x = load_element(from, p.dtype, i);
    if (p.op == WidenOp::plus_one) x += 1.0F;
    if (p.op == WidenOp::negative_exp) x = -std::exp(x);
    to[p.transpose ? i % p.cols * p.rows + i / p.cols : i] = x;
  }
}

void rotary(const BlockContext& c) {
  const auto p = c.arg<RotaryParams>(3);
  const auto* step = c.ptr<const StepHeader>(0);
  const float* frequencies = c.ptr<const float>(1);
  float* row = c.ptr<float>(2) + std::size_t{c.index.x} * 2 * p.pairs;
  const auto position = static_cast<float>(step->position + static_cast<std::int32_t>(c.index.x));
  for (std::uint32_t j = 0; j < p.pairs; ++j) {
    const float angle = position * frequencies[j];
    row[j] = std::cos(angle);
    row[p.pairs + j] = std::sin(angle);
  }
}

template <const Ops& ops>
void rotate_store(const BlockContext& c) {
  RotateStoreCall call{.p = c.arg<RotateStoreParams>(10),
                       .q = c.ptr<float>(0),
                       .k = c.ptr<float>(1),
                       .v = c.ptr<const float>(2),
                       .q_norm = c.ptr<const float>(3),
                       .k_norm = c.ptr<const float>(4),
                       .rotary = c.ptr<const float>(5),
                       .step = c.ptr<const StepHeader>(6),
                       .block_table = c.ptr<const std::int32_t>(7),
                       .key_cache = c.ptr<void>(8),
                       .value_cache = c.ptr<void>(9),
                       .token = c.index.x};
  if (bad_cache(c, call.p.cache)) return;
  ops.rotate_store(call);
}

AttendCall attend_call(const BlockContext& c) {
  return {.p = c.arg<AttendParams>(6),
          .q = c.ptr<const float>(0),
          .key_cache = c.ptr<const void>(1),
          .value_cache = c.ptr<const void>(2),
          .step = c.ptr<const StepHeader>(3),
          .block_table = c.ptr<const std::int32_t>(4),
          .out = c.ptr<float>(5),
          .head = c.index.x,
          .heads_blocks = c.grid.x,
          .tile = c.index.y,
          .shared = shared_floats(c)};
}

template <const Ops& ops>
void attend(const BlockContext& c) {
  const AttendCall call = attend_call(c);
  if (bad_cache(c, call.p.cache) || too_little_shared(c, attend_shared_bytes(call.p.head_dim))) return;
  ops.attend(call);
}

template <const Ops& ops>
void attend_one(const BlockContext& c) {
  const AttendCall call = attend_call(c);
  if (call.p.m != 1) return fail(c, "attend_one takes one token");
  if (bad_cache(c, call.p.cache) || too_little_shared(c, attend_one_shared_bytes(call.p.head_dim))) return;
  ops.attend_one(call);
}

template <const Ops& ops>
void conv(const BlockContext& c) {
  const ConvCall call{.p = c.arg<ConvParams>(4),
                      .x = c.ptr<float>(0),
                      .weight = c.ptr<const float>(1),
                      .state = c.ptr<float>(2),
                      .step = c.ptr<const StepHeader>(3),
                      .tile = c.index.x,
                      .shared = shared_floats(c)};
  if (call.p.kernel == 0) return fail(c, "a convolution of no taps");
  if (too_little_shared(c, conv_shared_bytes(call.p.kernel))) return;
  ops.conv(call);
}

template <const Ops& ops>
void delta(const BlockContext& c) {
  const DeltaCall call{.p = c.arg<DeltaParams>(10),
                       .qkv = c.ptr<const float>(0),
                       .z = c.ptr<const float>(1),
                       .a = c.ptr<const float>(2),
                       .b = c.ptr<const float>(3),
                       .decay = c.ptr<const float>(4),
                       .dt_bias = c.ptr<const float>(5),
                       .norm = c.ptr<const float>(6),
                       .state = c.ptr<float>(7),
                       .step = c.ptr<const StepHeader>(8),
                       .out = c.ptr<float>(9),
                       .head = c.index.x,
                       .shared = shared_floats(c)};
  if (too_little_shared(c, delta_shared_bytes(call.p.key_dim, call.p.value_dim))) return;
  ops.delta(call);
}

template <const Ops& ops>
void argmax(const BlockContext& c) {
  const auto p = c.arg<RowsParams>(2);
  c.ptr<std::int32_t>(1)[c.index.x] = ops.argmax({c.ptr<const float>(0) + std::size_t{c.index.x} * p.ld, p.n});
}

template <const Ops& ops>
void score(const BlockContext& c) {
  const auto p = c.arg<RowsParams>(3);
  const float* logits = c.ptr<const float>(0) + std::size_t{c.index.x} * p.ld;
  const std::int32_t target = c.ptr<const std::int32_t>(1)[c.index.x];
  if (target < 0 || static_cast<std::uint32_t>(target) >= p.n) return fail(c, "a target outside the row of logits");
  const RowFacts facts = ops.row_facts({logits, p.n});
  const double loss = facts.best < 0 ? std::nan("") : std::log(facts.sum) + static_cast<double>(facts.largest) - logits[target];
  c.ptr<RowScore>(2)[c.index.x] = {static_cast<float>(loss), facts.best};
}

constexpr std::array<std::uint32_t, 3> kWiden{8, 8, sizeof(WidenParams)};
constexpr std::array<std::uint32_t, 4> kRotary{8, 8, 8, sizeof(RotaryParams)};
constexpr std::array<std::uint32_t, 11> kRotateStore{8, 8, 8, 8, 8, 8, 8, 8, 8, 8, sizeof(RotateStoreParams)};
constexpr std::array<std::uint32_t, 7> kAttend{8, 8, 8, 8, 8, 8, sizeof(AttendParams)};
constexpr std::array<std::uint32_t, 5> kConv{8, 8, 8, 8, sizeof(ConvParams)};
constexpr std::array<std::uint32_t, 11> kDelta{8, 8, 8, 8, 8, 8, 8, 8, 8, 8, sizeof(DeltaParams)};
constexpr std::array<std::uint32_t, 3> kArgmax{8, 8, sizeof(RowsParams)};
constexpr std::array<std::uint32_t, 4> kScore{8, 8, 8, sizeof(RowsParams)};

template <const Ops& ops>
std::span<const HostKernel> table() {
  static constexpr std::array<HostKernel, 9> kKernels{{
      {kDecoderModule, "widen", widen, kWiden, {}, false},
      {kDecoderModule, "rotary", rotary, kRotary, {}, false},
      {kDecoderModule, "rotate_store", rotate_store<ops>, kRotateStore, {}, false},
      {kDecoderModule, "attend", attend<ops>, kAttend, kAttendTile, false},
      {kDecoderModule, "attend_one", attend_one<ops>, kAttend, {}, false},
      {kDecoderModule, "conv", conv<ops>, kConv, kConvTile, false},
      {kDecoderModule, "delta", delta<ops>, kDelta, {}, false},
      {kDecoderModule, "argmax", argmax<ops>, kArgmax, {}, false},
      {kDecoderModule, "score", score<ops>, kScore, {}, false},
  }};
  return kKernels;
}

}  // namespace

std::span<const HostKernel> kernels([[maybe_unused]] matmul::Isa isa) noexcept {
#if defined(__x86_64__)
  if (isa >= matmul::Isa::avx512) return table<kOpsAvx512>();
  if (isa == matmul::Isa::avx2) return table<kOpsAvx2>();
#endif
  return table<kOpsGeneric>();
}

}  // namespace metrale::host::decoder
