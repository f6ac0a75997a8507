// SPDX-License-Identifier: Apache-2.0
//
// Host kernels of module "decoder" (metrale/models/decoder_kernels.h): attention over a paged cache, rotary embedding, convolution
// and gated delta rule, and the last step to a token. This header is the table of them and what a launch must reserve. It owns
// nothing; every function may be called from any thread.
#pragma once

#include <cstdint>
#include <span>

#include "matmul/matmul.h"
#include "metrale/backends/host_kernel.h"
#include "metrale/models/decoder_kernels.h"

namespace metrale::host::decoder {

/// Query rows that one block of `attend` takes.
inline constexpr std::uint32_t kAttendTile = 32;
/// Keys that attention looks at between two adjustments of its running maximum.
inline constexpr std::uint32_t kKeyTile = 64;
/// Channels that one block of `conv` takes.
inline constexpr std::uint32_t kConvTile = 64;
/// Tokens that `delta` normalises ahead.
inline constexpr std::uint32_t kDeltaTile = 16;
/// Largest convolution kernel and head sizes; larger ones are reported as a fault.
inline constexpr std::uint32_t kMaxConvKernel = 64;
inline constexpr std::uint32_t kMaxHeadDim = 1024;

/// The kernels compiled for `isa`, which must be one that `matmul::select_isa` returned. Lifetime: static.
std::span<const HostKernel> kernels(matmul::Isa isa) noexcept;

// Dynamic shared memory of a launch, in bytes; less is a fault.
static constexpr std::uint32_t attend_shared_bytes(std::uint32_t head_dim) noexcept {
  return 4 * (2 * kAttendTile * head_dim + kKeyTile * kAttendTile + 2 * kKeyTile * head_dim);
}
/// attend_one keeps four heads at a time; its grid may be anything up to num_heads, each block takes an equal range of heads.
static constexpr std::uint32_t attend_one_shared_bytes(std::uint32_t head_dim) noexcept {
  return 4 * (4 * (2 * head_dim + kKeyTile) + 2 * kKeyTile * head_dim);
}
static constexpr std::uint32_t conv_shared_bytes(std::uint32_t kernel) noexcept { return 4 * kConvTile * kernel; }
static constexpr std::uint32_t delta_shared_bytes(std::uint32_t key_dim, std::uint32_t value_dim) noexcept {
  return 4 * kDeltaTile * (2 * key_dim + value_dim + 4);
}

}  // namespace metrale::host::decoder
