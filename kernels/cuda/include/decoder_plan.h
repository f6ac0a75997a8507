// SPDX-License-Identifier: Apache-2.0
//
// How the CUDA kernels of module "decoder" (metrale/models/decoder_kernels.h) are launched: grid, block and dynamic shared memory
// for given parameters, and the sizes that host and kernels agree on. Plain C++ without CUDA, so that the host may include it. Pure
// functions; any thread.
//
// Grids are those of the module's header, widened where one block a head or a row would leave the chip idle: kernels that need
// several blocks for one result use clusters of kClusterBlocks, built into their code. Code for devices before sm_90 has no
// clusters; there the first block of each does all the work and the others end at once, so the plans are the same.
//
// Dependent launch. Every kernel waits for its predecessor before it writes anything and before it reads what a kernel of the same
// step writes. Before that wait it reads weights, the step's header and block table, cached keys and values of earlier positions,
// and recurrent states. So between the last kernel that writes one of those and the next step's first kernel there must be one full
// dependency: a copy, an event, or the end of a graph.
#pragma once

#include <cstdint>

#include "metrale/models/decoder_kernels.h"

namespace metrale::cuda::decoder {

/// What the plans need to know of the device.
struct Chip {
  std::uint32_t sm_count = 1;
  /// Dynamic shared memory that a block may ask for; this much every device since sm_80 has.
  std::uint32_t max_shared_bytes = 99 * 1024;
};

/// One launch: a grid of {grid_x, grid_y} blocks of `threads`. No cluster attribute is to be set.
struct Plan {
  std::uint32_t grid_x = 1;
  std::uint32_t grid_y = 1;
  std::uint32_t threads = 32;
  std::uint32_t shared_bytes = 0;
};

// ---- sizes shared with the kernels ----
inline constexpr std::uint32_t kClusterBlocks = 8;  ///< Of attend_one, rotate_attend, argmax and score.
inline constexpr std::uint32_t kAttendTile = 64;    ///< Query rows of one block of attend.
inline constexpr std::uint32_t kConvTile = 64;      ///< Channels of one block of conv.
inline constexpr std::uint32_t kConvSegments = 8;   ///< Most runs of tokens that a block of conv works on at once.
inline constexpr std::uint32_t kMaxConvKernel = 64;
inline constexpr std::uint32_t kMaxHeadDim = 256;    ///< Of attention; larger heads are left unwritten.
inline constexpr std::uint32_t kDeltaBlocks = 4;     ///< Blocks, and parts of value_dim, that share a value head in delta.
inline constexpr std::uint32_t kHeadSet = 8;         ///< Query heads of one cache head that attend_one takes at once.
inline constexpr std::uint32_t kKeyTile = 16;        ///< Keys that a warp of attend_one takes at once.
inline constexpr std::uint32_t kOneWarps = 8;        ///< Of a block of attend_one; those that take keys are fewer.
inline constexpr std::uint32_t kSumsPad = 4;         ///< Floats between the sums of two heads.
inline constexpr std::uint32_t kScratchRecord = 72;  ///< Floats for each cluster and chunk in scratch.
inline constexpr std::uint32_t kMostClusters = 16;   ///< That share a cache head in rotate_attend.

constexpr std::uint32_t divide_up(std::uint64_t a, std::uint64_t b) noexcept { return static_cast<std::uint32_t>((a + b - 1) / b); }
constexpr std::uint32_t smaller(std::uint32_t a, std::uint32_t b) noexcept { return a < b ? a : b; }
constexpr std::uint32_t larger(std::uint32_t a, std::uint32_t b) noexcept { return a > b ? a : b; }

/// Whether attention over a bf16 cache has a tensor-core path for this head size; other sizes take the general one.
constexpr bool has_fast_attention(std::uint32_t head_dim) noexcept { return head_dim == 64 || head_dim == 128 || head_dim == 256; }

/// Runs of up to kHeadSet query heads of each cache head.
constexpr std::uint32_t head_sets(std::uint32_t num_heads, std::uint32_t num_kv_heads) noexcept {
  return divide_up(num_heads / num_kv_heads, kHeadSet);
}

/// Keys and values on their way to one warp of attend_one: one key tile of the larger head sizes, two of the smallest.
constexpr std::uint32_t ring_bytes(std::uint32_t head_dim) noexcept { return head_dim > 128 ? 16384 : 8192; }
/// Dynamic shared memory of a block on devices that have much of it: as much as the matrix kernels ask for.
inline constexpr std::uint32_t kFullShared = 160 * 1024;
/// Warps of a block that take keys. With these a block of the common head sizes runs beside one of the matrix kernels, which leave
/// 66 KiB, and two blocks of any size run on one multiprocessor.
constexpr std::uint32_t key_warps(std::uint32_t head_dim, std::uint32_t max_shared_bytes) noexcept {
  return max_shared_bytes < kFullShared ? 4 : head_dim > 128 ? 5 : 6;
}
/// Keys for which another cluster joins in: as many as one has on their way at once.
constexpr std::uint32_t cluster_keys(std::uint32_t head_dim, std::uint32_t num_key_warps) noexcept {
  return kClusterBlocks * num_key_warps * ring_bytes(head_dim) / (4 * (divide_up(head_dim, 64) * 64));
}

/// Shared memory of attend_one and rotate_attend, in floats from its start. `width` is head_dim rounded up to 64.
struct OneLayout {
  std::uint32_t ring;  ///< [key warps, ring_bytes]; in the end the sums [kHeadSet, width + kSumsPad] of each warp, in its part
  std::uint32_t ring_floats;  ///< Of one warp.
  std::uint32_t width;
  std::uint32_t queries;  ///< Scaled: bf16 [2, kHeadSet, width + 8], rounded and what that left; in general f32 [kHeadSet, width]
  std::uint32_t key;      ///< [width] of the step's own token, as the cache will hold it
  std::uint32_t value;    ///< [width] likewise
  std::uint32_t inbox;    ///< [chunks, kClusterBlocks, 64] what the cluster's blocks send of each chunk that this one owns
  std::uint32_t softmax;  ///< [chunks, kClusterBlocks, 2] their largest scores and totals
  std::uint32_t warps;    ///< [kHeadSet, 2, kOneWarps] the same of this block's warps
  std::uint32_t barrier;  ///< Of the inbox.
  std::uint32_t end;
};
constexpr OneLayout one_layout(std::uint32_t head_dim, std::uint32_t num_key_warps) noexcept {
  const std::uint32_t width = divide_up(head_dim, 64) * 64;
  OneLayout l{};
  l.ring = 0;
  l.ring_floats = ring_bytes(head_dim) / 4;
  l.width = width;
  l.queries = num_key_warps * l.ring_floats;
  l.key = l.queries + kHeadSet * (width + 8);
  l.value = l.key + width;
  l.inbox = l.value + width;
  l.softmax = l.inbox + kHeadSet * width;
  l.warps = l.softmax + kHeadSet * width / 32;
  l.barrier = l.warps + 2 * kHeadSet * kOneWarps;
  l.end = l.barrier + 2;
  return l;
}

/// What the plan chose, of the shared memory that a launch has.
constexpr std::uint32_t planned_key_warps(std::uint32_t head_dim, std::uint32_t shared_bytes) noexcept {
  return key_warps(head_dim, shared_bytes > 4 * one_layout(head_dim, 4).end ? kFullShared : 0);
}

// ---- launches ----
constexpr Plan plan_widen(std::uint64_t elements, const Chip& chip) noexcept {
  return {larger(1, smaller(divide_up(elements, 1024), 8 * chip.sm_count)), 1, 256, 0};
}
constexpr Plan plan_rotary(const RotaryParams& p) noexcept {
  return {p.m, 1, smaller(128, larger(32, divide_up(p.pairs, 32) * 32)), 0};
}
constexpr Plan plan_rotate_store(const RotateStoreParams& p) noexcept {
  return {p.m, divide_up(std::uint64_t{p.num_heads} + p.num_kv_heads, 4), 128, 4 * 4 * p.head_dim};
}

constexpr std::uint32_t attend_shared_bytes(std::uint32_t head_dim) noexcept {
  // Two stages of keys and values, rows padded by 16 bytes; the general path is the larger of the two for small heads.
  const std::uint32_t keys = head_dim == 256 ? 32 : 64;
  const std::uint32_t fast = has_fast_attention(head_dim) ? 4 * keys * (head_dim + 8) * 2 : 0;
  const std::uint32_t general = 4 * (2 * 32 * (head_dim + 1) + 32 * 33);
  return larger(fast, general);
}
constexpr Plan plan_attend(const AttendParams& p) noexcept {
  return {p.num_heads, divide_up(p.m, kAttendTile), 128, attend_shared_bytes(p.head_dim)};
}

constexpr std::uint32_t one_shared_bytes(std::uint32_t head_dim, const Chip& chip) noexcept {
  return 4 * one_layout(head_dim, key_warps(head_dim, chip.max_shared_bytes)).end;
}
constexpr Plan plan_attend_one(const AttendParams& p, const Chip& chip) noexcept {
  return {kClusterBlocks * p.num_kv_heads * head_sets(p.num_heads, p.num_kv_heads), 1, 32 * kOneWarps,
          one_shared_bytes(p.head_dim, chip)};
}

/// Clusters that may share a cache head in rotate_attend: as many as the chip surely runs at once, two blocks a multiprocessor,
/// where some multiprocessors are too few for a cluster. How many do is decided by the position.
constexpr std::uint32_t attend_clusters(std::uint32_t num_heads, std::uint32_t num_kv_heads, const Chip& chip) noexcept {
  const std::uint32_t at_once = chip.sm_count < 16 ? 1 : 2 * (chip.sm_count / kClusterBlocks - 1);
  return larger(1, smaller(kMostClusters, at_once / (num_kv_heads * head_sets(num_heads, num_kv_heads))));
}
/// Without scratch one cluster takes a cache head however long the context.
constexpr Plan plan_rotate_attend(const RotateStoreParams& p, bool has_scratch, const Chip& chip) noexcept {
  const std::uint32_t clusters = has_scratch ? attend_clusters(p.num_heads, p.num_kv_heads, chip) : 1;
  return {kClusterBlocks * p.num_kv_heads * head_sets(p.num_heads, p.num_kv_heads) * clusters, 1, 32 * kOneWarps,
          one_shared_bytes(p.head_dim, chip)};
}
/// Scratch of rotate_attend: counters, then what each cluster found of each chunk of 64 elements. Zeroed once, when it is made;
/// every launch leaves the counters at zero. Launches that may overlap need a scratch each.
constexpr std::uint64_t attend_counters(std::uint32_t num_heads, std::uint32_t num_kv_heads, std::uint32_t head_dim) noexcept {
  return std::uint64_t{num_kv_heads} * head_sets(num_heads, num_kv_heads) * kHeadSet * divide_up(head_dim, 64);
}
constexpr std::uint64_t attend_scratch_bytes(std::uint32_t num_heads, std::uint32_t num_kv_heads, std::uint32_t head_dim,
                                             const Chip& chip) noexcept {
  return 4 * attend_counters(num_heads, num_kv_heads, head_dim) *
         (1 + std::uint64_t{attend_clusters(num_heads, num_kv_heads, chip)} * kScratchRecord);
}

constexpr Plan plan_conv(const ConvParams& p) noexcept {
  const bool windowed = p.kernel >= 2 && p.kernel <= 4;
  const std::uint32_t segments = windowed ? larger(1, smaller(kConvSegments, p.m / 4)) : 1;
  return {divide_up(p.channels, kConvTile), 1, kConvTile * segments, windowed ? 0 : 4 * kConvTile * (p.kernel - 1)};
}

/// Whether delta keeps a head's state in registers; other sizes take one block a head that works on the state where it lies.
constexpr bool has_fast_delta(std::uint32_t key_dim, std::uint32_t value_dim) noexcept {
  return key_dim == 128 && value_dim == 128;
}
inline constexpr std::uint32_t kDeltaScanTokens = 32;  ///< Steps of more go by chunks.
inline constexpr std::uint32_t kDeltaScanBytes = 21 * 1024;
inline constexpr std::uint32_t kDeltaChunkThreads = 256;
inline constexpr std::uint32_t kDeltaChunkBytes = 80 * 1024;
constexpr Plan plan_delta(const DeltaParams& p) noexcept {
  const std::uint32_t grid = kDeltaBlocks * p.num_value_heads;
  if (!has_fast_delta(p.key_dim, p.value_dim)) return {grid, 1, 128, 4 * (2 * p.key_dim + p.value_dim + 32)};
  if (p.m <= kDeltaScanTokens) return {grid, 1, 128, kDeltaScanBytes};
  return {grid, 1, kDeltaChunkThreads, kDeltaChunkBytes};
}

/// argmax and score.
constexpr Plan plan_rows(const RowsParams& p) noexcept { return {kClusterBlocks * p.rows, 1, 512, 0}; }

}  // namespace metrale::cuda::decoder
