// SPDX-License-Identifier: Apache-2.0
//
// What kernels/cuda/include/layers_device.cuh has, for the emulated GPU: the words of CUDA that the kernels of module "layers" use,
// and their instructions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "metrale/models/decoder_kernels.h"
#include "support/emulated_gpu/emulated_gpu.h"

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define METRALE_CLUSTER_OF(blocks)
#define METRALE_PUBLISH_WAITS(entry) static_assert(true)

// ---- CUDA ----
struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct ulonglong2 {
  std::uint64_t x, y;
};
struct EmulatedThreadIndex {
  struct {
    operator std::uint32_t() const { return metrale::test::emulated::thread_index(); }
  } x;
};
struct EmulatedBlockIndex {
  struct {
    operator std::uint32_t() const { return metrale::test::emulated::block_index(); }
  } x;
};
inline const EmulatedThreadIndex threadIdx{};
inline const EmulatedBlockIndex blockIdx{};

using std::max;
using std::min;

template <class T>
struct EmulatedShuffle {
  T value;
  std::uint32_t from;
};
template <class T>
T emulated_shuffle(T value, std::uint32_t from) {
  const EmulatedShuffle<T> in{value, from};
  T out{};
  metrale::test::emulated::meet("a shuffle", &in, &out, [](metrale::test::emulated::Warp& w) {
    const auto given = [&](std::uint32_t lane) { return *static_cast<const EmulatedShuffle<T>*>(w.in[lane]); };
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
      const std::uint32_t source = given(lane).from < 32 ? given(lane).from : lane;
      *static_cast<T*>(w.out[lane]) = given(source).value;
    }
  });
  return out;
}
template <class T>
T __shfl_sync(std::uint32_t, T value, std::uint32_t lane) {
  return emulated_shuffle(value, lane % 32);
}
template <class T>
T __shfl_xor_sync(std::uint32_t, T value, std::uint32_t mask) {
  return emulated_shuffle(value, (threadIdx.x % 32) ^ mask);
}
template <class T>
T __shfl_down_sync(std::uint32_t, T value, std::uint32_t delta) {
  return emulated_shuffle(value, threadIdx.x % 32 + delta);
}
inline void __syncwarp() {
  metrale::test::emulated::meet("a barrier", nullptr, nullptr, [](metrale::test::emulated::Warp&) {});
}
inline std::uint32_t __float_as_uint(float x) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float __uint_as_float(std::uint32_t bits) {
  float x = 0;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline std::uint32_t __byte_perm(std::uint32_t low, std::uint32_t high, std::uint32_t selector) {
  const std::uint64_t all = low | std::uint64_t{high} << 32;
  std::uint32_t bytes = 0;
  for (std::uint32_t i = 0; i < 4; ++i)
    bytes |= static_cast<std::uint32_t>(all >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
  return bytes;
}
inline float emulated_rsqrtf(float x) { return 1 / std::sqrt(x); }
inline void emulated_sincosf(float x, float* sine, float* cosine) {
  *sine = std::sin(x);
  *cosine = std::cos(x);
}
// Some C libraries have functions of these names.
#define rsqrtf emulated_rsqrtf
#define sincosf emulated_sincosf
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
[[noreturn]] inline void __trap() { metrale::test::emulated::fail("the kernel gave up"); }

namespace metrale {

inline void let_dependents_start() {}
inline void wait_for_predecessor() {}

// ---- decoder_common.cuh ----
namespace cuda::decoder {

namespace emulated = test::emulated;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
inline constexpr u32 kAllLanes = 0xffffffffU;
inline constexpr float kMasked = -1e30F;

inline float from_bf16(std::uint16_t bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }
inline float low_bf16(u32 word) { return __uint_as_float(word << 16); }
inline float high_bf16(u32 word) { return __uint_as_float(word & 0xffff0000U); }
inline std::uint16_t to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  return std::isnan(x) ? std::uint16_t{0x7fff} : static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline u32 pack_bf16(float low, float high) { return to_bf16(low) | static_cast<u32>(to_bf16(high)) << 16; }
inline uint2 pack_quad(float4 x) { return {pack_bf16(x.x, x.y), pack_bf16(x.z, x.w)}; }
inline uint2 pack_rest(float4 x, uint2 rounded) {
  return {pack_bf16(x.x - low_bf16(rounded.x), x.y - high_bf16(rounded.x)),
          pack_bf16(x.z - low_bf16(rounded.y), x.w - high_bf16(rounded.y))};
}
inline float exp2_near(float x) { return std::exp2(x); }
inline u32 lane_id() { return threadIdx.x % 32; }
inline u32 warp_id() { return threadIdx.x / 32; }
inline float warp_sum(float x) {
  for (u32 w = 16; w > 0; w /= 2) x += __shfl_xor_sync(kAllLanes, x, w);
  return x;
}
inline u32 shared_address(const void* p) { return emulated::shared_address(p); }
inline void cluster_arrive() {}
inline void cluster_wait() { emulated::cluster_barrier(); }
inline void expect_bytes(u32 barrier, u32 bytes) {
  emulated::ByteBarrier& b = emulated::byte_barrier_at(barrier);
  b.bytes += bytes;
  --b.pending;
  b.turn();
  emulated::yield(true);
}
inline void count_bytes(u32 barrier, u32 bytes) {
  emulated::ByteBarrier& b = emulated::byte_barrier_at(barrier);
  b.bytes -= bytes;
  b.turn();
  emulated::yield(true);
}
inline void send_to(u32 shared, u32 barrier, u32 rank, float2 x) {
  const u32 block = (rank + 1) << 24;
  std::memcpy(emulated::shared_at(shared | block, 8), &x, 8);
  count_bytes(barrier | block, 8);
}

struct EmulatedProduct {
  u32 a[4];
  u32 b[2];
  float* d;
};
inline void multiply_add(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const EmulatedProduct in{{a0, a1, a2, a3}, {b0, b1}, d};
  emulated::meet("a product", &in, nullptr, [](emulated::Warp& w) {
    float a[16][16];
    float b[16][8];
    const auto given = [&](u32 lane) { return *static_cast<const EmulatedProduct*>(w.in[lane]); };
    for (u32 lane = 0; lane < 32; ++lane) {
      const u32 row = lane / 4;
      const u32 at = 2 * (lane % 4);
      for (u32 i = 0; i < 4; ++i) {
        a[row + 8 * (i % 2)][at + 8 * (i / 2)] = low_bf16(given(lane).a[i]);
        a[row + 8 * (i % 2)][at + 8 * (i / 2) + 1] = high_bf16(given(lane).a[i]);
      }
      for (u32 i = 0; i < 2; ++i) {
        b[at + 8 * i][row] = low_bf16(given(lane).b[i]);
        b[at + 8 * i + 1][row] = high_bf16(given(lane).b[i]);
      }
    }
    for (u32 lane = 0; lane < 32; ++lane) {
      for (u32 i = 0; i < 4; ++i) {
        float& sum = given(lane).d[i];
        for (u32 k = 0; k < 16; ++k) sum += a[lane / 4 + 8 * (i / 2)][k] * b[k][2 * (lane % 4) + i % 2];
      }
    }
  });
}

struct CacheRows {
  const std::int32_t* table;
  u64 block_stride;
  u64 head_offset;
  u32 token_stride;
  u32 block_tokens;

  static CacheRows create(const CacheLayout& c, const std::int32_t* table, u32 head) {
    return {table, c.block_stride, static_cast<u64>(head) * c.head_stride, c.token_stride, c.block_tokens};
  }
  u64 offset(u32 token) const {
    return static_cast<u64>(table[token / block_tokens]) * block_stride + static_cast<u64>(token % block_tokens) * token_stride +
           head_offset;
  }
};

}  // namespace cuda::decoder

// ---- layers_device.cuh ----
namespace cuda::layers {

namespace emulated = test::emulated;
using decoder::kAllLanes;
using decoder::lane_id;
using decoder::shared_address;
using decoder::u32;
using decoder::u64;
using decoder::warp_id;

inline char* dynamic_shared() { return emulated::block().shared; }

inline uint4 load_words(const float* p) {
  emulated::yield(false);
  uint4 words{};
  std::memcpy(&words, p, sizeof(words));
  return words;
}
inline void store_word(float* p, u32 word) {
  std::memcpy(p, &word, sizeof(word));
  emulated::yield(true);
}
inline float4 load_early(const float* p) {
  float4 x{};
  std::memcpy(&x, p, sizeof(x));
  return x;
}
inline uint4 load_piece(const uint4* from, bool present) { return present ? *from : uint4{0, 0, 0, 0}; }

inline void barrier_arrive(u32 id, u32 threads) { emulated::block_barrier(id, threads, false); }
inline void barrier_wait(u32 id, u32 threads) { emulated::block_barrier(id, threads, true); }

inline void init_barrier_of(u32 barrier, u32 arrivals) {
  emulated::block().byte_barriers[barrier] = {.arrivals = arrivals, .pending = arrivals};
}
inline void fence_barriers() {}
inline void arrive_at(u32 barrier) {
  emulated::ByteBarrier& b = emulated::byte_barrier_at(barrier);
  --b.pending;
  b.turn();
  emulated::yield(true);
}
inline void wait_here(u32 barrier, u32 phase) {
  while (emulated::byte_barrier_at(barrier).phase == phase) emulated::yield(false);
}
inline void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  if (to % 16 != 0 || reinterpret_cast<std::uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) emulated::fail("an unaligned bulk copy");
  std::memcpy(emulated::shared_at(to, bytes), from, bytes);
  decoder::count_bytes(barrier, bytes);
}
inline void send(u32 to, u32 rank, float x, u32 barrier) {
  const u32 block = (rank + 1) << 24;
  std::memcpy(emulated::shared_at(to | block, 4), &x, 4);
  decoder::count_bytes(barrier | block, 4);
}
inline uint2 load_half_row(u32 address) {
  uint2 words{};
  std::memcpy(&words, emulated::shared_at(address, 8), sizeof(words));
  return words;
}

}  // namespace cuda::layers
}  // namespace metrale
