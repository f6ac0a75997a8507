// SPDX-License-Identifier: Apache-2.0
//
// Module "sampling": what stands between two steps of a decoder. Contracts: metrale/models/sampling_kernels.h.
#include <cstdint>

#include "decoder_common.cuh"
#include "metrale/models/sampling_kernels.h"
#include "metrale/models/sampling_math.h"
#include "publish.cuh"
#include "sampling_plan.h"

METRALE_PUBLISH_WAITS(advance);
METRALE_PUBLISH_WAITS(sample);

namespace metrale::cuda::sampling {
namespace {

using decoder::cluster_arrive;
using decoder::cluster_arrive_relaxed;
using decoder::cluster_rank;
using decoder::cluster_wait;
using decoder::kAllLanes;
using decoder::kWarp;
using decoder::lane_id;
using decoder::u32;
using decoder::u64;
using decoder::warp_id;
using namespace metrale::sampling;

constexpr u32 kWarps = kSampleThreads / kWarp;
/// Ways in which a range of keys is cut at once, less one.
constexpr u32 kCuts = 7;

struct Shared {
  u64 warps[kWarps][kCuts];
  u64 inbox[2][kSampleBlocks][kCuts];
  /// Of each warp of the cluster, in the first block: weight above the key, and logits that equal it.
  u64 above[kSampleBlocks * kWarps];
  u64 ties[kSampleBlocks * kWarps];
};

/// Stores to the same shared variable of block `rank` of the cluster, which must have started.
__device__ inline void store_word_at(u64* shared, u32 rank, u64 value) {
#if METRALE_CLUSTERS
  u32 at;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(decoder::shared_address(shared)), "r"(rank));
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(at), "l"(value) : "memory");
#else
  *shared = value;
#endif
}

__device__ inline u64 warp_sum(u64 x) {
  for (u32 w = kWarp / 2; w > 0; w /= 2) x += __shfl_xor_sync(kAllLanes, x, w);
  return x;
}

/// What is kept of a row: every logit above `key`, and the first `ties` of those that equal it.
struct Kept {
  u32 key = 0;
  u64 ties = 0;
};

/// One row, cut into equal runs of logits, one for each warp of the cluster, by rising id.
class Row {
 public:
  __device__ Row(const float* logits, u64* weights, u32 n, u32 blocks, Shared& shared)
      : logits_(logits), weights_(weights), n_(n), blocks_(blocks), rank_(blocks == 1 ? 0 : cluster_rank()), shared_(shared) {
    run_ = static_cast<u32>((static_cast<u64>(n) + blocks * kSampleThreads - 1) / (blocks * kSampleThreads)) * kWarp;
  }

  /// Each warp makes and later reads the weights of its own run.
  __device__ void weigh(float largest, double inverse_temperature) {
    const int bits = weight_bits(n_);
    each_of_run(run(), [&](float x, u32 i) { weights_[i] = weight_of(x, largest, inverse_temperature, bits); });
  }

  /// The largest key for which the logits of this key and above reach `goal` together, in number or in weight; `end` is above all
  /// keys. The keys between are cut in eight until one is left.
  template <bool by_weight>
  __device__ Kept reach(u64 goal, u32 from, u32 end) {
    u32 key = from;
    u64 above = 0;  // what those from `end` on reach, less than the goal
    while (end - key > 1) {
      const u32 width = (end - key + kCuts) / (kCuts + 1);
      u32 cuts[kCuts];
      u64 sums[kCuts];
#pragma unroll
      for (u32 j = 0; j < kCuts; ++j) {
        cuts[j] = end - key > (j + 1) * width ? key + (j + 1) * width : end;
        sums[j] = 0;
      }
      each_of_run(run(), [&](float x, u32 i) {
        const u32 at = order_key(x);
        const u64 amount = by_weight ? weights_[i] : 1;
#pragma unroll
        for (u32 j = 0; j < kCuts; ++j) sums[j] += at >= cuts[j] ? amount : 0;
      });
      sum_over_cluster(sums);
      u32 next_key = key, next_end = end;
#pragma unroll
      for (u32 j = kCuts; j-- > 0;) {
        if (sums[j] < goal) {
          next_end = cuts[j];
          above = sums[j];
        } else if (next_key == key) {
          next_key = cuts[j];
        }
      }
      key = next_key;
      end = next_end;
    }
    if constexpr (!by_weight) return {key, goal - above};
    // Equal logits have equal weights.
    u64 facts[kCuts] = {};
    each_of_run(run(), [&](float x, u32 i) {
      if (order_key(x) != key) return;
      facts[0] += weights_[i];
      facts[1] += 1;
    });
    sum_over_cluster(facts);
    const u64 each = facts[1] == 0 ? 0 : facts[0] / facts[1];
    return {key, each == 0 ? 0 : (goal - above + each - 1) / each};
  }

  /// The weight of what is kept, in every thread.
  __device__ u64 total(const Kept& kept) {
    count(kept);
    u64 sums[kCuts] = {run_above_, run_ties_, run_tie_weight_};
    if (lane_id() != 0) sums[0] = sums[1] = sums[2] = 0;
    sum_over_cluster(sums);
    return sums[0] + (sums[1] == 0 ? 0 : sums[2] / sums[1] * (kept.ties < sums[1] ? kept.ties : sums[1]));
  }

  /// The token at `target` of the running sum over what is kept, or `otherwise`. In the first thread of the first block.
  __device__ std::int32_t find(const Kept& kept, u64 target, std::int32_t otherwise) {
    count(kept);
    u64 sums[kCuts] = {lane_id() == 0 ? run_ties_ : 0, lane_id() == 0 ? run_tie_weight_ : 0};
    if (lane_id() == 0) {
      store_word_at(&shared_.above[run()], 0, run_above_);
      store_word_at(&shared_.ties[run()], 0, run_ties_);
    }
    sum_over_cluster(sums);  // and a barrier behind the stores
    if (rank_ != 0 || warp_id() != 0) return otherwise;
    const u64 each = sums[0] == 0 ? 0 : sums[1] / sums[0];
    u64 passed = 0, ties_left = kept.ties;
    for (u32 r = 0; r < blocks_ * kWarps; ++r) {
      const u64 here = shared_.ties[r] < ties_left ? shared_.ties[r] : ties_left;
      const u64 weight = shared_.above[r] + here * each;
      if (passed + weight > target) return find_in_run(r, kept.key, ties_left, passed, target, otherwise);
      passed += weight;
      ties_left -= here;
    }
    return otherwise;
  }

 private:
  __device__ u32 run() const { return rank_ * kWarps + warp_id(); }

  template <class Visit>
  __device__ void each_of_run(u32 r, Visit visit) const {
    const u64 first = static_cast<u64>(r) * run_;
    const u64 last = first + run_ < n_ ? first + run_ : n_;
#pragma unroll 4
    for (u64 i = first + lane_id(); i < last; i += kWarp) visit(logits_[i], static_cast<u32>(i));
  }

  /// What is above the key and what equals it in this warp's run, in every lane.
  __device__ void count(const Kept& kept) {
    u64 above = 0, ties = 0, tie_weight = 0;
    each_of_run(run(), [&](float x, u32 i) {
      const u32 at = order_key(x);
      if (at > kept.key) above += weights_[i];
      if (at == kept.key) ties += 1, tie_weight += weights_[i];
    });
    run_above_ = warp_sum(above);
    run_ties_ = warp_sum(ties);
    run_tie_weight_ = warp_sum(tie_weight);
  }

  /// By one warp. Weights of another warp's run are made anew by the caller's rule, so they are read through memory: every store to
  /// them lies behind a barrier of the cluster.
  __device__ std::int32_t find_in_run(u32 r, u32 key, u64 ties_left, u64 passed, u64 target, std::int32_t otherwise) const {
    const u64 first = static_cast<u64>(r) * run_;
    for (u64 at = first; at < first + run_; at += kWarp) {
      const u64 i = at + lane_id();
      const u32 mine = i < n_ ? order_key(logits_[i]) : 0;
      const bool tie = i < n_ && mine == key;
      const u32 tie_lanes = __ballot_sync(kAllLanes, tie);
      const u32 before = __popc(tie_lanes & ((1U << lane_id()) - 1));
      const bool kept = i < n_ && (mine > key || (tie && before < ties_left));
      const u64 weight = kept ? __ldcg(reinterpret_cast<const unsigned long long*>(weights_) + i) : 0;
      u64 sum = weight;
      for (u32 w = 1; w < kWarp; w *= 2) {
        const u64 other = __shfl_up_sync(kAllLanes, sum, w);
        sum += lane_id() >= w ? other : 0;
      }
      const u32 hit = __ballot_sync(kAllLanes, passed + sum > target);
      if (hit != 0) return static_cast<std::int32_t>(at + __ffs(static_cast<int>(hit)) - 1);
      passed += __shfl_sync(kAllLanes, sum, kWarp - 1);
      const u64 ties = __popc(tie_lanes);
      ties_left -= ties < ties_left ? ties : ties_left;
    }
    return otherwise;
  }

  /// Sums over all threads of the cluster, in each of them. Also a barrier.
  __device__ void sum_over_cluster(u64 (&sums)[kCuts]) {
#pragma unroll
    for (u32 j = 0; j < kCuts; ++j) sums[j] = warp_sum(sums[j]);
    if (lane_id() == 0) {
#pragma unroll
      for (u32 j = 0; j < kCuts; ++j) shared_.warps[warp_id()][j] = sums[j];
    }
    __syncthreads();
    if (threadIdx.x < kCuts) {
      u64 sum = 0;
      for (u32 w = 0; w < kWarps; ++w) sum += shared_.warps[w][threadIdx.x];
      for (u32 b = 0; b < blocks_; ++b) store_word_at(&shared_.inbox[turn_][rank_][threadIdx.x], b, sum);
    }
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (u32 j = 0; j < kCuts; ++j) {
      sums[j] = 0;
      for (u32 b = 0; b < blocks_; ++b) sums[j] += shared_.inbox[turn_][b][j];
    }
    turn_ ^= 1;
  }

  const float* logits_;
  u64* weights_;
  u32 n_, blocks_, rank_, run_;
  u32 turn_ = 0;
  Shared& shared_;
  u64 run_above_ = 0, run_ties_ = 0, run_tie_weight_ = 0;
};

}  // namespace
}  // namespace metrale::cuda::sampling

extern "C" __global__ void METRALE_CLUSTER_OF(8) __launch_bounds__(512)
    sample(const float* logits, const metrale::SamplingInputs* inputs, std::int32_t* token, metrale::cuda::decoder::u64* scratch,
           const __grid_constant__ metrale::SampleParams p) {
  using namespace metrale::cuda::sampling;
  __shared__ Shared shared;
  metrale::let_dependents_start();
#if METRALE_CLUSTERS
  constexpr u32 kBlocks = kSampleBlocks;
#else
  constexpr u32 kBlocks = 1;
  if (blockIdx.x != 0) return;
#endif
  cluster_arrive_relaxed();
  metrale::wait_for_predecessor();
  cluster_wait();  // the others run, and may be written to
  const std::int32_t best = *token;
  // Every block must have read it before the first writes it, which lies behind the barriers below.
  if (best < 0) return;
  const float largest = logits[best];
  Row row(logits, scratch, p.n, kBlocks, shared);
  row.weigh(largest, inputs->inverse_temperature);
  const u32 end = order_key(largest) + 1;
  Kept kept;
  if (inputs->top_k != 0 && inputs->top_k < p.n) kept = row.reach<false>(inputs->top_k, 0, end);
  u64 total = row.total(kept);
  if (inputs->top_p < 1.0F) {
    kept = row.reach<true>(wanted_weight(total, inputs->top_p), kept.key, end);
    total = row.total(kept);
  }
  const std::int32_t chosen = row.find(kept, draw_target(total, reinterpret_cast<const double*>(inputs + 1)[p.draw]), best);
  if (cluster_rank() == 0 && threadIdx.x == 0) *token = chosen;
}

// What follows reads the step's header before its own wait, so it is launched behind the end of this kernel.
extern "C" __global__ void __launch_bounds__(1) advance(const std::int32_t* token, metrale::StepHeader* step, std::int32_t* ids,
                                                        std::int32_t* tokens, const __grid_constant__ metrale::AdvanceParams p) {
  metrale::wait_for_predecessor();
  const std::int32_t chosen = *token;
  tokens[p.index] = chosen;
  *ids = chosen < 0 ? 0 : chosen;
  step->position += 1;
}
