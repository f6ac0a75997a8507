// SPDX-License-Identifier: Apache-2.0
//
// Which query heads and which keys a block of attend_one or rotate_attend takes.
#pragma once

#include "decoder_common.cuh"

namespace metrale::cuda::decoder {

/// A unit is a set of query heads of one cache head. Tiles of kKeyTile keys are dealt to the blocks of a unit in turn, and those of
/// a block to its warps.
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

  /// False for a block that has nothing to do. Reads the step's header.
  __device__ bool find(const RotateStoreParams& p, const StepHeader* step, bool has_scratch) {
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
    position = static_cast<u32>(step->position);
    tiles = position / kKeyTile + 1;
    active = has_scratch ? larger(1, smaller(clusters, position / kClusterKeys)) : 1;
    const u32 ranks = METRALE_CLUSTERS ? kClusterBlocks : 1;
    rank = cluster_rank();
    blocks = active * ranks;
    block = cluster * ranks + rank;
    return cluster < active && (METRALE_CLUSTERS || blockIdx.x % kClusterBlocks == 0);
  }
  __device__ bool has_last_tile() const { return (tiles - 1) % blocks == block; }
  __device__ u32 first_tile() const { return block + blocks * warp_id(); }
  __device__ u32 tile_step() const { return blocks * (blockDim.x / kWarp); }
};

}  // namespace metrale::cuda::decoder
