// SPDX-License-Identifier: Apache-2.0
//
// The host kernels of the tests of backends.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <thread>

#include "metrale/backends/host.h"

namespace metrale::test {

struct Wide {
  std::uint64_t words[16];
};

// u32* out, u32 value: one block
inline void store(const host::BlockContext& c) { *c.ptr<std::uint32_t>(0) = c.arg<std::uint32_t>(1); }
// u32* counter: each block adds one
inline void count_blocks(const host::BlockContext& c) {
  std::atomic_ref(*c.ptr<std::uint32_t>(0)).fetch_add(1, std::memory_order_relaxed);
}
// u32* out: ++out[linear index of the block]; faults when the index is not below the grid
inline void mark_block(const host::BlockContext& c) {
  if (c.index.x >= c.grid.x || c.index.y >= c.grid.y || c.index.z >= c.grid.z) {
    *c.fault = "index beyond the grid";
    return;
  }
  const std::size_t linear = (std::size_t{c.index.z} * c.grid.y + c.index.y) * c.grid.x + c.index.x;
  std::atomic_ref(c.ptr<std::uint32_t>(0)[linear]).fetch_add(1, std::memory_order_relaxed);
}
// u64* out, Wide value, u8 small, u64 large
inline void echo(const host::BlockContext& c) {
  const auto wide = c.arg<Wide>(1);
  auto* out = c.ptr<std::uint64_t>(0);
  for (int i = 0; i < 16; ++i) out[i] = wide.words[i];
  out[16] = c.arg<std::uint8_t>(2);
  out[17] = c.arg<std::uint64_t>(3);
}
// u64* out: size of the shared memory and its address modulo 64; writes all of it
inline void shared(const host::BlockContext& c) {
  for (std::byte& b : c.shared) b = std::byte{1};
  c.ptr<std::uint64_t>(0)[2 * c.index.x] = c.shared.size();
  c.ptr<std::uint64_t>(0)[2 * c.index.x + 1] = reinterpret_cast<std::uintptr_t>(c.shared.data()) % 64;
}
// u32* arrived: waits until two blocks have arrived, for ten seconds at most
inline void meet(const host::BlockContext& c) {
  std::atomic_ref arrived(*c.ptr<std::uint32_t>(0));
  arrived.fetch_add(1);
  for (int i = 0; i < 10'000 && arrived.load() < 2; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (arrived.load() < 2) *c.fault = "the other block never came";
}
// u32* flag: waits until it is 1, for ten seconds at most
inline void hold(const host::BlockContext& c) {
  std::atomic_ref flag(*c.ptr<std::uint32_t>(0));
  for (int i = 0; i < 10'000 && flag.load() != 1; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (flag.load() != 1) *c.fault = "nobody raised the flag";
}
inline void fault(const host::BlockContext& c) { *c.fault = "told to"; }
inline void throw_up(const host::BlockContext&) { throw std::runtime_error("a kernel must not"); }

inline constexpr std::uint32_t kPtr[] = {8};
inline constexpr std::uint32_t kPtrWord[] = {8, 4};
inline constexpr std::uint32_t kEcho[] = {8, sizeof(Wide), 1, 8};
inline constexpr host::HostKernel kKernels[] = {
    {"test", "store", store, kPtrWord},
    {"test", "count_blocks", count_blocks, kPtr},
    {"test", "mark_block", mark_block, kPtr},
    {"test", "echo", echo, kEcho},
    {"test", "shared", shared, kPtr},
    {"test", "meet", meet, kPtr},
    {"test", "hold", hold, kPtr},
    {"test", "fault", fault, {}},
    {"test", "throw_up", throw_up, {}, 64, true, true},
};

inline host::Options host_options(std::uint32_t num_threads = 2) {
  host::Options options;
  options.num_threads = num_threads;
  options.kernels = {kKernels};
  return options;
}

}  // namespace metrale::test
