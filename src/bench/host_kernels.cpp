// SPDX-License-Identifier: Apache-2.0
//
// Module "bench" on the host backend: those of kernels/cuda/common/bench.cu.
#include <array>
#include <chrono>
#include <cstdint>
#include <thread>

#include "bench/suites.h"

namespace metrale::bench {
namespace {

using host::BlockContext;

constexpr std::uint64_t kWordBytes = 16;

/// This block's share of `count`.
std::pair<std::uint64_t, std::uint64_t> share(const BlockContext& c, std::uint64_t count) {
  return {count * c.index.x / c.grid.x, count * (c.index.x + 1) / c.grid.x};
}

void nop8(const BlockContext&) {}

void nop_waits(const BlockContext& c) { c.ptr<float>(0)[c.index.x] += 1.0F; }

void touch(const BlockContext& c) {
  constexpr std::uint64_t kLanes = kWordBytes / sizeof(std::uint32_t);
  const auto [begin, end] = share(c, c.arg<std::uint64_t>(1) * kLanes);
  const auto* src = c.ptr<const std::uint32_t>(0);
  std::uint32_t all = 0;
  for (std::uint64_t i = begin; i < end; ++i) all ^= src[i];
  if (all == 0x9e3779b9U) *c.ptr<std::uint32_t>(2) = all;
}

void fill(const BlockContext& c) {
  constexpr std::uint64_t kLanes = kWordBytes / sizeof(std::uint32_t);
  const auto [begin, end] = share(c, c.arg<std::uint64_t>(1) * kLanes);
  auto* dst = c.ptr<std::uint32_t>(0);
  const std::uint32_t seed = c.arg<std::uint32_t>(2) * 0x9e3779b9U;
  for (std::uint64_t i = begin; i < end; ++i) {
    std::uint32_t h = static_cast<std::uint32_t>(i) * 2654435761U ^ seed;
    h = (h ^ h >> 16) * 0x85ebca6bU;
    h = (h ^ h >> 13) * 0xc2b2ae35U;
    dst[i] = ((h ^ h >> 16) & 0x83ff83ffU) | 0x3c003c00U;
  }
}

void hold(const BlockContext& c) { std::this_thread::sleep_for(std::chrono::nanoseconds(c.arg<std::uint64_t>(0))); }

constexpr std::array<std::uint32_t, 8> kNop8{8, 8, 8, 8, 4, 4, 4, 4};
constexpr std::array<std::uint32_t, 1> kNopWaits{8};
constexpr std::array<std::uint32_t, 3> kTouch{8, 8, 8};
constexpr std::array<std::uint32_t, 3> kFill{8, 8, 4};
constexpr std::array<std::uint32_t, 1> kHold{8};

}  // namespace

std::span<const host::HostKernel> host_kernels() noexcept {
  static constexpr std::array<host::HostKernel, 5> kKernels{{
      {.module = kBenchModule, .function = "nop8", .fn = nop8, .param_bytes = kNop8},
      {.module = kBenchModule, .function = "nop_waits", .fn = nop_waits, .param_bytes = kNopWaits, .waits_for_dependency = true},
      {.module = kBenchModule, .function = "touch", .fn = touch, .param_bytes = kTouch},
      {.module = kBenchModule, .function = "fill", .fn = fill, .param_bytes = kFill},
      {.module = kBenchModule, .function = "hold", .fn = hold, .param_bytes = kHold},
  }};
  return kKernels;
}

}  // namespace metrale::bench
