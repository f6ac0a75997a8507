// SPDX-License-Identifier: Apache-2.0
//
// Attention of one token, as a cluster of blocks for each cache head (and set of its query heads): every warp takes keys here and
// there over the whole context (decoder_one_fast.cuh, decoder_one_general.cuh), and decoder_one_join.cuh joins what they found. At
// short context all that counts is the chain of one step after another: keys and values are on their way before the wait, and
// between the wait and the result there are two barriers of the block and one message across the cluster.
#pragma once

#include "decoder_one_fast.cuh"
#include "decoder_one_gather.cuh"
#include "decoder_one_general.cuh"
#include "decoder_one_join.cuh"

namespace metrale::cuda::decoder {

/// Where every device that runs this code has the shared memory for it, the layout is known when it is compiled.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
inline constexpr bool kFixedLayout = true;
#else
inline constexpr bool kFixedLayout = false;
#endif

/// This block's share; nothing where it has none, or where its launch was planned for another device.
__device__ __forceinline__ bool find_share(const OneCall& c, const RotateAttendParams& p, u32 head_dim, u32 key_tile,
                                           OneShare& share) {
  u32 shared_bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(shared_bytes));
  const u32 warps = kFixedLayout ? key_warps(head_dim, kFullShared) : planned_key_warps(head_dim, shared_bytes);
  return shared_bytes >= 4 * one_layout(head_dim, warps).end &&
         share.find(p.rotate, c.step, c.scratch != nullptr, head_dim, warps, key_tile);
}

template <int head_dim, bool fused>
__device__ __forceinline__ void attend_fast(const OneCall& c, const RotateAttendParams& p) {
  extern __shared__ __align__(16) float shared[];
  OneShare share;
  if (!find_share(c, p, head_dim, kKeyTile, share)) return;
  const OneLayout l = one_layout(head_dim, share.warps);
  FastKeys<head_dim> keys(share, p.rotate.cache, c.block_table, c.key_cache, c.value_cache, shared, l);
  keys.start();
  leave_nothing(share, l, shared);
  Gather<head_dim, fused> gather(c, p.rotate, share, l, p.scale * kLog2E, shared);
  Finish<head_dim> finish(c, p.rotate, share, l, warp_id());
  asm volatile("" : "+l"(finish.to), "+l"(finish.gate), "+r"(finish.left));  // not to be worked out after the wait
  open_inbox<head_dim>(share, l, shared);
  wait_for_predecessor();
  float2 gates{0, 0};
  if (p.gated) gates = finish.gates();
  gather.run();
  keys.run();
  __syncthreads();
  send_chunks<head_dim>(share, l, shared);
  finish_chunks<head_dim>(c, p.rotate, p.gated, share, l, finish, gates, shared);
}

/// A function of its own, so that the others have registers enough.
template <class T, bool fused>
__device__ __noinline__ void attend_general(const OneCall& c, const RotateAttendParams& p) {
  extern __shared__ __align__(16) float shared[];
  OneShare share;
  if (!find_share(c, p, p.rotate.head_dim, kGeneralTile, share)) return;
  const OneLayout l = one_layout(p.rotate.head_dim, share.warps);
  const CacheRows rows = CacheRows::create(p.rotate.cache, c.block_table, share.kv_head);
  const GeneralKeys<T> keys{share, rows, c.key_cache, c.value_cache, shared, l, p.rotate.head_dim};
  keys.start();
  leave_nothing(share, l, shared);
  open_inbox<0>(share, l, shared);
  wait_for_predecessor();
  const Finish<0> finish(c, p.rotate, share, l, warp_id());
  float2 gates{0, 0};
  if (p.gated) gates = finish.gates();
  gather_floats<T, fused>(c, p.rotate, share, l, p.scale * kLog2E, shared);
  keys.run();
  __syncthreads();
  send_chunks<0>(share, l, shared);
  finish_chunks<0>(c, p.rotate, p.gated, share, l, finish, gates, shared);
}

/// One step's attention. `fused`: normed, rotated and stored here; otherwise q and the cache are complete.
template <bool fused>
__device__ __forceinline__ void attend_token(const OneCall& c, const RotateAttendParams& p) {
  if (p.rotate.head_dim > kMaxHeadDim) return;
  const CacheLayout& cache = p.rotate.cache;
  const bool is_bf16 = cache.dtype == kBf16;
  const bool aligned = (cache.block_stride | cache.token_stride | cache.head_stride) % 8 == 0 &&
                       (reinterpret_cast<u64>(c.key_cache) | reinterpret_cast<u64>(c.value_cache)) % 16 == 0;
  if (!is_bf16 || !aligned || !has_fast_attention(p.rotate.head_dim)) {
    const OneCall call = c;  // the address of `c` itself is given to nobody, so that it stays in registers
    const RotateAttendParams params = p;
    if (is_bf16) {
      attend_general<std::uint16_t, fused>(call, params);
    } else {
      attend_general<float, fused>(call, params);
    }
  } else if (p.rotate.head_dim == 64) {
    attend_fast<64, fused>(c, p);
  } else if (p.rotate.head_dim == 128) {
    attend_fast<128, fused>(c, p);
  } else {
    attend_fast<256, fused>(c, p);
  }
}

}  // namespace metrale::cuda::decoder
