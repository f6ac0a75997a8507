// SPDX-License-Identifier: Apache-2.0
//
// What a block of attend_one or rotate_attend takes of a step: its query heads, its keys, and where its warps leave what they
// found.
#pragma once

#include "decoder_common.cuh"

namespace metrale::cuda::decoder {

struct OneCall {
  const float* q;
  const float* k;  ///< From here to `rotary`: null where q is rotated and the cache complete.
  const float* v;
  const float* q_norm;
  const float* k_norm;
  const float* rotary;
  const StepHeader* step;
  const std::int32_t* block_table;
  void* key_cache;
  void* value_cache;
  float* out;
  float* scratch;  ///< Or null.
};

inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr u32 kRanks = METRALE_CLUSTERS ? kClusterBlocks : 1;

/// A unit is a set of query heads of one cache head. Tiles of keys are dealt to the blocks of a unit in turn, and those of a block
/// to its warps.
struct OneShare {
  u32 units;
  u32 unit;
  u32 kv_head;
  u32 first_head;
  u32 heads;
  u32 clusters;  ///< Launched for each unit;
  u32 active;    ///< of them at work,
  u32 cluster;   ///< this one's place, and
  u32 rank;      ///< the block's in it.
  u32 position;  ///< Of the step's token, the last key.
  u32 tiles;
  u32 blocks;  ///< At work on the unit,
  u32 block;   ///< this one's place.
  u32 warps;   ///< Of a block, that take keys.
  bool keeps;  ///< This set is the one of its cache head that stores the step's key and value.

  /// False for a block that has nothing to do. Reads the step's header.
  __device__ bool find(const RotateStoreParams& p, const StepHeader* step, bool has_scratch, u32 head_dim, u32 num_warps,
                       u32 key_tile) {
    const u32 sets = head_sets(p.num_heads, p.num_kv_heads);
    const u32 group = p.num_heads / p.num_kv_heads;
    units = p.num_kv_heads * sets;
    clusters = gridDim.x / (kClusterBlocks * units);
    unit = blockIdx.x / kClusterBlocks % units;
    cluster = blockIdx.x / (kClusterBlocks * units);
    kv_head = unit / sets;
    const u32 set = unit - kv_head * sets;
    first_head = kv_head * group + set * kHeadSet;
    heads = smaller(kHeadSet, group - set * kHeadSet);
    keeps = set == 0;
    position = static_cast<u32>(step->position);
    tiles = position / key_tile + 1;
    warps = num_warps;
    active = has_scratch ? smaller(clusters, position / cluster_keys(head_dim, warps) + 1) : 1;
    rank = cluster_rank();
    blocks = active * kRanks;
    block = cluster * kRanks + rank;
    return cluster < active && (METRALE_CLUSTERS || blockIdx.x % kClusterBlocks == 0);
  }
  __device__ bool has_last_tile() const { return (tiles - 1) % blocks == block; }
  /// Of this warp; not below `tiles` for a warp that has none.
  __device__ u32 first_tile() const { return warp_id() < warps ? block + blocks * warp_id() : tiles; }
  __device__ u32 tile_step() const { return blocks * warps; }
};

// ---- what warps leave for the join: sums over their keys of value times weight, and of their weights, each relative to 2 to the
// power of their largest score ----
/// Of one head by one warp; written there by the warp that owns this part of the ring, when it has read its last tile.
__device__ inline float* warp_sums(float* shared, const OneLayout& l, u32 warp, u32 head) {
  return shared + l.ring + warp * l.ring_floats + head * (l.width + kSumsPad);
}
/// [2, kOneWarps] of one head: largest scores, then the sums of weights.
__device__ inline float* warp_softmax(float* shared, const OneLayout& l, u32 head) {
  return shared + l.warps + head * 2 * kOneWarps;
}
/// Where a warp has no tile: what changes nothing. Before the wait.
__device__ __forceinline__ void leave_nothing(const OneShare& share, const OneLayout& l, float* shared) {
  if (warp_id() >= share.warps || share.first_tile() < share.tiles) return;
  float* sums = warp_sums(shared, l, warp_id(), 0);
  for (u32 i = lane_id(); i < share.heads * (l.width + kSumsPad); i += kWarp) sums[i] = 0;
  if (lane_id() < share.heads) {
    warp_softmax(shared, l, lane_id())[warp_id()] = kMasked;
    warp_softmax(shared, l, lane_id())[kOneWarps + warp_id()] = 0;
  }
}

}  // namespace metrale::cuda::decoder
