// SPDX-License-Identifier: Apache-2.0
//
// The registered functions: decode and check the arguments of one block, then run the code of the instruction set. A check that
// fails is a fault, since the launch was wrong.
#include <array>
#include <cstdint>
#include <optional>

#include "matmul.h"
#include "ops.h"

namespace metrale::host::matmul {
namespace {

template <Isa isa>
const Ops& ops() noexcept {
#if defined(__x86_64__)
  if constexpr (isa == Isa::avx2) return kOpsAvx2;
  if constexpr (isa == Isa::avx512) return kOpsAvx512;
  if constexpr (isa == Isa::amx) return kOpsAmx;
#endif
  return kOpsGeneric;
}

bool is_bad(const BlockContext& block, const char* text) noexcept {
  *block.fault = text;
  return true;
}

/// Shapes that no kernel can run.
bool refuses(const BlockContext& block, const LinearParams& p, std::uint32_t matrices) noexcept {
  if (p.m == 0 || p.k == 0) return is_bad(block, "matmul: m and k must be positive");
  const auto precision = static_cast<Precision>(p.precision);
  if (p.precision > 1) return is_bad(block, "matmul: unknown precision");
  for (std::uint32_t i = 0; i < matrices; ++i) {
    const auto type = static_cast<DType>(p.w[i].dtype);
    if (!supports(type)) return is_bad(block, "matmul: weights of this type are not supported");
    if ((is_quantised(type) || p.w[i].packed) && !can_repack(type, p.k))
      return is_bad(block, "matmul: k is no whole number of weight blocks");
    if (activation_class(type, precision) != activation_class(static_cast<DType>(p.w[0].dtype), precision))
      return is_bad(block, "matmul: the weights of one launch need different activations");
  }
  return false;
}

Call start(const BlockContext& block, const LinearParams& p) noexcept {
  Call call;
  call.p = p;
  call.block = block.index.x;
  call.blocks = block.grid.x;
  call.shared = block.shared.data();
  return call;
}

template <Isa isa>
void prepare(const BlockContext& block) {
  const auto p = block.arg<LinearParams>(3);
  if (refuses(block, p, 1)) return;
  if (block.shared.size() < plan_prepare(p.m, p.k).shared_bytes)
    return void(is_bad(block, "matmul prepare: too little shared memory"));
  Call call = start(block, p);
  call.x = block.ptr<const void>(0);
  call.norm = block.ptr<const void>(1);
  call.prepared_out = block.ptr<void>(2);
  ops<isa>().prepare(call);
}

template <Isa isa>
void run_linear(const BlockContext& block, const Call& call, std::string_view function) {
  if (!call.p.prepared && call.p.m > kFusedRows) return void(is_bad(block, "matmul: more than 8 rows need prepare"));
  if (block.shared.size() < plan_linear(function, call.p, 1).shared_bytes)
    return void(is_bad(block, "matmul: too little shared memory"));
  ops<isa>().linear(call);
}

template <Isa isa>
void linear(const BlockContext& block) {
  const auto p = block.arg<LinearParams>(6);
  if (refuses(block, p, 1)) return;
  Call call = start(block, p);
  call.x = block.ptr<const void>(0);
  call.norm = block.ptr<const void>(1);
  call.w[0] = block.ptr<const std::byte>(2);
  call.bias[0] = block.ptr<const float>(3);
  call.residual = block.ptr<const float>(4);
  call.y[0] = block.ptr<float>(5);
  call.matrices = 1;
  run_linear<isa>(block, call, "linear");
}

template <Isa isa>
void linear4(const BlockContext& block) {
  const auto p = block.arg<LinearParams>(14);
  std::uint32_t matrices = 0;
  while (matrices < kMaxMatrices && p.w[matrices].n > 0) ++matrices;
  if (matrices == 0) return void(is_bad(block, "matmul linear4: no matrix"));
  if (refuses(block, p, matrices)) return;
  Call call = start(block, p);
  call.x = block.ptr<const void>(0);
  call.norm = block.ptr<const void>(1);
  for (std::uint32_t i = 0; i < matrices; ++i) {
    call.w[i] = block.ptr<const std::byte>(2 + i);
    call.bias[i] = block.ptr<const float>(6 + i);
    call.y[i] = block.ptr<float>(10 + i);
  }
  call.matrices = matrices;
  run_linear<isa>(block, call, "linear4");
}

template <Isa isa>
void swiglu(const BlockContext& block) {
  const auto p = block.arg<LinearParams>(5);
  if (refuses(block, p, 2)) return;
  if (p.w[0].n != p.w[1].n) return void(is_bad(block, "matmul swiglu: gate and up differ in rows"));
  Call call = start(block, p);
  call.x = block.ptr<const void>(0);
  call.norm = block.ptr<const void>(1);
  call.w[0] = block.ptr<const std::byte>(2);
  call.w[1] = block.ptr<const std::byte>(3);
  call.y[0] = block.ptr<float>(4);
  call.matrices = 2;
  call.swiglu = true;
  run_linear<isa>(block, call, "swiglu");
}

void repack(const BlockContext& block) {
  const auto p = block.arg<RepackParams>(1);
  const auto type = static_cast<DType>(p.dtype);
  if (!can_repack(type, p.k)) return void(is_bad(block, "matmul repack: this type or k stays as rows"));
  const auto bytes = static_cast<std::size_t>(kGroupRows * row_bytes(type, p.k));
  if (block.shared.size() < bytes) return void(is_bad(block, "matmul repack: too little shared memory"));
  for (std::uint32_t g = block.index.x; g < p.n / kGroupRows; g += block.grid.x) {
    std::byte* group = block.ptr<std::byte>(0) + g * bytes;
    pack_group(type, group, 0, kGroupRows, p.k, block.shared.data());
    std::memcpy(group, block.shared.data(), bytes);
  }
}

void gather(const BlockContext& block) {
  const auto p = block.arg<GatherParams>(3);
  const auto type = static_cast<DType>(p.dtype);
  if (!supports(type) || ((is_quantised(type) || p.packed) && !can_repack(type, p.k)))
    return void(is_bad(block, "matmul gather: this type or k is not supported"));
  const auto bytes = static_cast<std::size_t>(row_bytes(type, p.k));
  for (std::uint32_t i = block.index.x; i < p.m; i += block.grid.x) {
    std::int32_t id;
    std::memcpy(&id, block.ptr<const std::byte>(0) + std::size_t{i} * 4, 4);
    if (id < 0 || static_cast<std::uint32_t>(id) >= p.n) return void(is_bad(block, "matmul gather: an id is outside the matrix"));
    const auto row = static_cast<std::uint32_t>(id), group = row / kGroupRows;
    const bool packed = p.packed && group < p.n / kGroupRows;
    unpack_row(type, block.ptr<const std::byte>(1) + group * kGroupRows * bytes, row % kGroupRows, p.k, !packed,
               block.ptr<float>(2) + std::size_t{i} * p.ld_y);
  }
}

constexpr std::uint32_t kRepackBytes[] = {8, sizeof(RepackParams)};
constexpr std::uint32_t kGatherBytes[] = {8, 8, 8, sizeof(GatherParams)};
constexpr std::uint32_t kPrepareBytes[] = {8, 8, 8, sizeof(LinearParams)};
constexpr std::uint32_t kLinearBytes[] = {8, 8, 8, 8, 8, 8, sizeof(LinearParams)};
constexpr std::uint32_t kLinear4Bytes[] = {8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, sizeof(LinearParams)};
constexpr std::uint32_t kSwigluBytes[] = {8, 8, 8, 8, 8, sizeof(LinearParams)};

template <Isa isa>
constexpr std::array<HostKernel, 6> table() noexcept {
  return {{{kModule, "repack", repack, kRepackBytes, std::nullopt, false},
           {kModule, "gather", gather, kGatherBytes, std::nullopt, false},
           {kModule, "prepare", prepare<isa>, kPrepareBytes, std::nullopt, false},
           {kModule, "linear", linear<isa>, kLinearBytes, kGroupRows, false},
           {kModule, "linear4", linear4<isa>, kLinear4Bytes, kGroupRows, false},
           {kModule, "swiglu", swiglu<isa>, kSwigluBytes, kGroupRows, false}}};
}

}  // namespace

std::span<const HostKernel> kernels(Isa isa) noexcept {
  static constexpr auto kGeneric = table<Isa::generic>();
#if defined(__x86_64__)
  static constexpr auto kAvx2 = table<Isa::avx2>();
  static constexpr auto kAvx512 = table<Isa::avx512>();
  static constexpr auto kAmx = table<Isa::amx>();
  if (isa == Isa::avx2) return kAvx2;
  if (isa == Isa::avx512) return kAvx512;
  if (isa == Isa::amx) return kAmx;
#endif
  (void)isa;
  return kGeneric;
}

}  // namespace metrale::host::matmul
