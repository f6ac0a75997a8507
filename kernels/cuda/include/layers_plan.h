// SPDX-License-Identifier: Apache-2.0
//
// How the kernels of module "layers" (metrale/models/decoder_kernels.h) are launched, and the sizes that host and kernel agree on.
// One kernel runs all layers of a decoder for one token: a block on each multiprocessor, in clusters of kClusterBlocks. A cluster
// each takes the attention of one cache head, the others share the MLP. Plain C++ without CUDA. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string_view>

#include "metrale/models/decoder_kernels.h"

namespace metrale::cuda::layers {

inline constexpr std::uint32_t kClusterBlocks = 8;
inline constexpr std::uint32_t kKeyWarps = 7;      ///< Warps of a block that hold keys and values, and finish sums.
inline constexpr std::uint32_t kMatrixWarps = 12;  ///< Warps that multiply.
inline constexpr std::uint32_t kThreads = 32 * (kKeyWarps + kMatrixWarps + 1);  ///< The last warp fetches weights.
inline constexpr std::uint32_t kMostLayers = 64;
/// Bytes between the end of a row of weights in shared memory and the next: half-warps then read 16 rows without conflicts.
inline constexpr std::uint32_t kRowPad = 32;

/// A model that there is an entry for, and how its rows are dealt.
struct Small {
  static constexpr std::string_view kEntry = "layers_576_9_3_64_1536";
  static constexpr std::uint32_t kHidden = 576;
  static constexpr std::uint32_t kHeads = 9;
  static constexpr std::uint32_t kKvHeads = 3;
  static constexpr std::uint32_t kHeadDim = 64;
  static constexpr std::uint32_t kFf = 1536;
  static constexpr std::uint32_t kMlpClusters = 12;
  static constexpr std::uint32_t kAttentionDepth = 2;  ///< Layers whose weights are in shared memory at once.
  static constexpr std::uint32_t kMlpDepth = 3;
};

/// What follows from a model's sizes.
template <class Model>
struct Sizes : Model {
  using Model::kFf;
  using Model::kHeadDim;
  using Model::kHeads;
  using Model::kHidden;
  using Model::kKvHeads;

  static constexpr std::uint32_t kGroup = kHeads / kKvHeads;  ///< Query heads of a cache head.
  static constexpr std::uint32_t kAttentionBlocks = kKvHeads * kClusterBlocks;
  static constexpr std::uint32_t kMlpBlocks = Model::kMlpClusters * kClusterBlocks;
  static constexpr std::uint32_t kBlocks = kAttentionBlocks + kMlpBlocks;

  // ---- rows of a block ----
  static constexpr std::uint32_t kQueryWidth = kGroup * kHeadDim;
  static constexpr std::uint32_t kQueryPairs = kQueryWidth / 2 / kClusterBlocks;
  static constexpr std::uint32_t kKeyPairs = kHeadDim / 2 / kClusterBlocks;
  static constexpr std::uint32_t kPairs = kQueryPairs + 2 * kKeyPairs;  ///< Pairs of rows: of queries, of a key, of a value.
  static constexpr std::uint32_t kQkvRows = 2 * kPairs;                 ///< Pair i is rows i and kPairs + i.
  static constexpr std::uint32_t kOutRows = kHidden / kClusterBlocks;   ///< Of the output matrix, kQueryWidth of their columns.
  static constexpr std::uint32_t kGateRows = kFf / kMlpBlocks;          ///< And as many of the up matrix.
  static constexpr std::uint32_t kDownRows = kHidden / kMlpBlocks;
  static constexpr std::uint32_t kHiddenSteps = kHidden / 16 / kMatrixWarps;  ///< Of 16 columns, for each matrix warp.
  static constexpr std::uint32_t kFfLoads = kFf / 64 / kMatrixWarps;          ///< Of 64 columns.
  static_assert(kHidden == 16 * kMatrixWarps * kHiddenSteps && kHiddenSteps < 4);
  static_assert(kFf == 64 * kMatrixWarps * kFfLoads && kFf == kGateRows * kMlpBlocks && kGateRows == 16);
  static_assert(kHidden == kDownRows * kMlpBlocks && kDownRows <= 8);
  static_assert(kQueryWidth == 16 * kMatrixWarps && kHeadDim == 64 && kPairs <= 32 && kGroup <= 8);
  static_assert(kQkvRows % 8 == 0 && kOutRows % 8 == 0 && kOutRows <= 96);

  // ---- shared memory, in bytes from its start ----
  static constexpr std::uint32_t kHiddenRow = 2 * kHidden + kRowPad;
  static constexpr std::uint32_t kFfRow = 2 * kFf + kRowPad;
  static constexpr std::uint32_t kOutRow = 2 * kQueryWidth + kRowPad;
  static constexpr std::uint32_t kQkvBytes = kQkvRows * kHiddenRow;
  static constexpr std::uint32_t kOutBytes = kOutRows * kOutRow;
  static constexpr std::uint32_t kGateBytes = 2 * kGateRows * kHiddenRow;
  static constexpr std::uint32_t kDownBytes = kDownRows * kFfRow;
  static constexpr std::uint32_t kAttentionRing = Model::kAttentionDepth * (kQkvBytes + kOutBytes);
  static constexpr std::uint32_t kMlpRing = Model::kMlpDepth * (kGateBytes + kDownBytes);
  static constexpr std::uint32_t kRing = kAttentionRing > kMlpRing ? kAttentionRing : kMlpRing;
  static constexpr std::uint32_t kSmall = 28 * 1024;  ///< What the structs behind the ring take at most.
  static constexpr std::uint32_t kSharedBytes = kRing + kSmall;
  static_assert(kSharedBytes <= 227 * 1024);

  // ---- device memory through which blocks exchange numbers, in floats; zeroed once, when it is made ----
  static constexpr std::uint32_t kExchangeCount = 0;                            ///< Layers done so far.
  static constexpr std::uint32_t kExchangeX = 64;                               ///< [hidden] the residual stream after a layer
  static constexpr std::uint32_t kExchangeY = kExchangeX + kHidden;             ///< [kv heads, hidden] what attention adds
  static constexpr std::uint32_t kExchangeH = kExchangeY + kKvHeads * kHidden;  ///< [ff]
  static constexpr std::uint32_t kExchangeFloats = kExchangeH + kFf;
};

/// An entry as the host sees it.
struct Entry {
  std::string_view name;
  std::uint32_t hidden, heads, kv_heads, head_dim, ff;
  std::uint32_t blocks;
  std::uint32_t shared_bytes;
  std::uint64_t exchange_bytes;
  std::uint32_t most_layers = kMostLayers;
};
template <class Model>
constexpr Entry entry_of() noexcept {
  using S = Sizes<Model>;
  return {Model::kEntry, S::kHidden, S::kHeads,       S::kKvHeads,           S::kHeadDim,
          S::kFf,        S::kBlocks, S::kSharedBytes, 4 * S::kExchangeFloats};
}
inline constexpr Entry kEntries[] = {entry_of<Small>()};

/// Whether the clusters of an entry surely run at once on a device of so many multiprocessors, some of which are too few in their
/// group for a cluster.
constexpr bool fits(const Entry& entry, std::uint32_t sm_count) noexcept {
  return entry.blocks <= (sm_count / kClusterBlocks - 1) * kClusterBlocks;
}

}  // namespace metrale::cuda::layers
