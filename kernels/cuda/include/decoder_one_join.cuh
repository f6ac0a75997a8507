// SPDX-License-Identifier: Apache-2.0
//
// How what the warps of attend_one and rotate_attend found becomes a result: joined within the block, sent in chunks of 64 elements
// to the blocks of the cluster that own them, joined there, and, where several clusters share a cache head, through scratch by the
// cluster that comes last. A chunk's sender says with the data itself that it is there, so that nothing but the data crosses the
// cluster; each join sums in the same order every time.
#pragma once

#include "decoder_one_share.cuh"

namespace metrale::cuda::decoder {

inline constexpr u32 kChunk = 64;  // elements of one head, two for each lane of a warp

/// The chunks of a block's heads and which of them this block finishes: those that leave its rank modulo kRanks.
template <u32 fixed_width>
struct Chunks {
  u32 per_head;
  u32 count;
  u32 owned;
  __device__ Chunks(const OneShare& share, const OneLayout& l)
      : per_head((fixed_width ? fixed_width : l.width) / kChunk),
        count(share.heads * per_head),
        owned((count + kRanks - 1 - share.rank) / kRanks) {}
};

__device__ inline float* inbox_at(float* shared, const OneLayout& l, u32 slot, u32 from) {
  return shared + l.inbox + (slot * kRanks + from) * kChunk;
}
__device__ inline float* inbox_softmax_at(float* shared, const OneLayout& l, u32 slot, u32 from) {
  return shared + l.softmax + (slot * kRanks + from) * 2;
}

/// Before anything is sent: says how much this block will be sent. Every thread calls it; the others of the cluster run when it
/// returns.
template <u32 fixed_width>
__device__ __forceinline__ void open_inbox(const OneShare& share, const OneLayout& l, float* shared) {
#if METRALE_CLUSTERS
  if (threadIdx.x == 0) {
    const Chunks<fixed_width> chunks(share, l);
    const u32 barrier = shared_address(shared + l.barrier);
    init_barrier(barrier);
    if (chunks.owned > 0) expect_bytes(barrier, chunks.owned * kRanks * (kChunk + 2) * 4);
  }
  cluster_arrive();
#endif
  cluster_wait();
}

/// A part of a chunk: two elements, and the softmax they are relative to, in units of 2.
struct Part {
  float2 sum{0, 0};
  float top = kMasked;
  float total = 0;
};
/// The sum of `count` parts; `at(i)` and `softmax(i)` are called for all of them first.
template <u32 count, class At, class Softmax>
__device__ __forceinline__ Part join_parts(At at, Softmax softmax) {
  Part joined;
  float2 tops[count];
  float2 sums[count];
#pragma unroll
  for (u32 i = 0; i < count; ++i) tops[i] = softmax(i);
#pragma unroll
  for (u32 i = 0; i < count; ++i) sums[i] = at(i);
#pragma unroll
  for (u32 i = 0; i < count; ++i) joined.top = fmaxf(joined.top, tops[i].x);
#pragma unroll
  for (u32 i = 0; i < count; ++i) {
    const float weight = exp2_near(tops[i].x - joined.top);
    joined.sum.x = fmaf(sums[i].x, weight, joined.sum.x);
    joined.sum.y = fmaf(sums[i].y, weight, joined.sum.y);
    joined.total = fmaf(tops[i].y, weight, joined.total);
  }
  return joined;
}

/// This lane's two elements of a chunk that this block owns: where they go, and where their gates are.
template <u32 fixed_width>
struct Finish {
  float* to = nullptr;
  const float* gate = nullptr;
  u32 left = 0;  ///< Of the head's elements from there.
  __device__ Finish(const OneCall& c, const RotateStoreParams& p, const OneShare& share, const OneLayout& l, u32 slot) {
    const Chunks<fixed_width> chunks(share, l);
    if (slot >= chunks.owned) return;
    const u32 chunk = slot * kRanks + share.rank;
    const u32 head = chunk / chunks.per_head;
    const u32 d = (chunk - head * chunks.per_head) * kChunk + 2 * lane_id();
    to = c.out + static_cast<u64>(share.first_head + head) * p.head_dim + d;
    gate = c.q + static_cast<u64>(share.first_head + head) * p.q_head_stride + p.head_dim + d;
    left = d < p.head_dim ? p.head_dim - d : 0;
  }
  __device__ float2 gates() const { return {left > 0 ? gate[0] : 0.0F, left > 1 ? gate[1] : 0.0F}; }
};

/// This block's part of every chunk to the chunk's owner. After a barrier of the block.
template <u32 fixed_width>
__device__ __forceinline__ void send_chunks(const OneShare& share, const OneLayout& l, float* shared) {
  const Chunks<fixed_width> chunks(share, l);
#pragma unroll 1
  for (u32 chunk = warp_id(); chunk < chunks.count; chunk += kOneWarps) {
    const u32 head = chunk / chunks.per_head;
    const float* sums = warp_sums(shared, l, 0, head) + (chunk - head * chunks.per_head) * kChunk + 2 * lane_id();
    const float* softmax = warp_softmax(shared, l, head);
    const auto at = [&](u32 w) { return *reinterpret_cast<const float2*>(sums + w * l.ring_floats); };
    const auto softmax_of = [&](u32 w) { return float2{softmax[w], softmax[kOneWarps + w]}; };
    Part part;
    switch (share.warps) {
      case 4: part = join_parts<4>(at, softmax_of); break;
      case 5: part = join_parts<5>(at, softmax_of); break;
      default: part = join_parts<6>(at, softmax_of); break;
    }
    const u32 slot = chunk / kRanks;
    const u32 owner = chunk % kRanks;
    const u32 barrier = shared_address(shared + l.barrier);
    send_to(shared_address(inbox_at(shared, l, slot, share.rank) + 2 * lane_id()), barrier, owner, part.sum);
    if (lane_id() == 0)
      send_to(shared_address(inbox_softmax_at(shared, l, slot, share.rank)), barrier, owner, float2{part.top, part.total});
  }
#if !METRALE_CLUSTERS
  __syncthreads();
#endif
}

/// Scratch: a counter for each unit and chunk, then for each of those and each cluster a record of kChunk sums, top and total.
struct ScratchChunk {
  u32* counter;
  float* records;
  __device__ ScratchChunk(const OneCall& c, const OneShare& share, const OneLayout& l, u32 chunk) {
    const u32 chunks = kHeadSet * l.width / kChunk;
    const u64 place = static_cast<u64>(share.unit) * chunks + chunk;
    counter = reinterpret_cast<u32*>(c.scratch) + place;
    records = c.scratch + static_cast<u64>(share.units) * chunks + place * share.clusters * kScratchRecord;
  }
  __device__ float* record(u32 cluster) const { return records + static_cast<u64>(cluster) * kScratchRecord; }
};

/// True in the warp of the last cluster to come here, with the sum of all.
__device__ __forceinline__ bool join_clusters(const OneCall& c, const OneShare& share, const OneLayout& l, u32 chunk, Part& part) {
  const ScratchChunk scratch(c, share, l, chunk);
  float* own = scratch.record(share.cluster);
  reinterpret_cast<float2*>(own)[lane_id()] = part.sum;
  if (lane_id() == 0) *reinterpret_cast<float2*>(own + kChunk) = {part.top, part.total};
  __threadfence();
  __syncwarp();
  u32 before = 0;
  if (lane_id() == 0) before = atomicInc(scratch.counter, share.active - 1);
  if (__shfl_sync(kAllLanes, before, 0) != share.active - 1) return false;
  __threadfence();
  // Those past the last repeat it with a weight of nothing.
  const auto place = [&](u32 r) { return scratch.record(smaller(r, share.active - 1)); };
  part = join_parts<kMostClusters>([&](u32 r) { return __ldcg(reinterpret_cast<const float2*>(place(r)) + lane_id()); },
                                   [&](u32 r) {
                                     const float2 softmax = __ldcg(reinterpret_cast<const float2*>(place(r) + kChunk));
                                     return r < share.active ? softmax : float2{2 * kMasked, 0};
                                   });
  return true;
}

/// Joins and writes the chunks that this block owns. `first` and `first_gates` are of the warp's first one.
template <u32 fixed_width>
__device__ __forceinline__ void finish_chunks(const OneCall& c, const RotateStoreParams& p, u32 gated, const OneShare& share,
                                              const OneLayout& l, Finish<fixed_width> first, float2 first_gates, float* shared) {
  const Chunks<fixed_width> chunks(share, l);
#pragma unroll 1
  for (u32 slot = warp_id(); slot < chunks.owned; slot += kOneWarps) {
#if METRALE_CLUSTERS
    wait_barrier(shared_address(shared + l.barrier), 0);
#endif
    Part part = join_parts<kRanks>([&](u32 r) { return reinterpret_cast<const float2*>(inbox_at(shared, l, slot, r))[lane_id()]; },
                                   [&](u32 r) { return *reinterpret_cast<const float2*>(inbox_softmax_at(shared, l, slot, r)); });
    if (share.active > 1 && !join_clusters(c, share, l, slot * kRanks + share.rank, part)) continue;
    if (slot != warp_id()) {
      first = Finish<fixed_width>(c, p, share, l, slot);
      if (gated) first_gates = first.gates();
    }
    float2 x = {__fdividef(part.sum.x, part.total), __fdividef(part.sum.y, part.total)};
    if (gated) {
      x.x *= sigmoid(first_gates.x);
      x.y *= sigmoid(first_gates.y);
    }
    if (first.left > 0) first.to[0] = x.x;
    if (first.left > 1) first.to[1] = x.y;
  }
}

}  // namespace metrale::cuda::decoder
