// SPDX-License-Identifier: Apache-2.0
#include "conformance/backends/host_kernels.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include "conformance/test_kernels.h"

namespace metrale::conformance {
namespace {

using host::BlockContext;

std::uint64_t linear_block(const BlockContext& c) {
  return (std::uint64_t{c.index.z} * c.grid.y + c.index.y) * c.grid.x + c.index.x;
}

/// The part of [0, count) that is this block's.
std::pair<std::uint64_t, std::uint64_t> part(const BlockContext& c, std::uint64_t count) {
  const std::uint64_t per_block = div_ceil(count, c.grid.count());
  const std::uint64_t begin = std::min(count, linear_block(c) * per_block);
  return {begin, std::min(count, begin + per_block)};
}

void fill(const BlockContext& c) {
  const auto [begin, end] = part(c, c.arg<std::uint64_t>(2));
  std::fill(c.ptr<std::uint32_t>(0) + begin, c.ptr<std::uint32_t>(0) + end, c.arg<std::uint32_t>(1));
}

void axpy(const BlockContext& c) {
  const auto [begin, end] = part(c, c.arg<std::uint32_t>(3));
  for (std::uint64_t i = begin; i < end; ++i) c.ptr<float>(0)[i] += c.arg<float>(2) * c.ptr<float>(1)[i];
}

void append(const BlockContext& c) {
  auto* log = c.ptr<std::uint32_t>(0);
  log[++log[0]] = c.arg<std::uint32_t>(1);
}

void hold(const BlockContext& c) {
  const std::atomic_ref<std::uint32_t> flag(*c.ptr<std::uint32_t>(0));
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (flag.load() == 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
}

void fault(const BlockContext& c) { *c.fault = "an illegal access, on purpose"; }

void echo(const BlockContext& c) {
  const auto value = c.arg<Wide>(1);
  std::copy(value.words.begin(), value.words.end(), c.ptr<std::uint64_t>(0));
  c.ptr<std::uint64_t>(0)[value.words.size()] = c.arg<std::uint32_t>(2);
}

void echo_widths(const BlockContext& c) {
  auto* out = c.ptr<std::uint64_t>(0);
  out[0] = c.arg<std::uint8_t>(1);
  out[1] = c.arg<std::uint16_t>(2);
  out[2] = c.arg<std::uint32_t>(3);
  out[3] = c.arg<std::uint64_t>(4);
  out[4] = c.arg<std::uint32_t>(5);
}

void echo_largest(const BlockContext& c) {
  const auto value = c.arg<Largest>(1);
  std::copy(value.words.begin(), value.words.end(), c.ptr<std::uint64_t>(0));
}

void geometry(const BlockContext& c) {
  const std::uint64_t threads = c.block.count();
  for (std::uint64_t t = 0; t < threads; ++t) ++c.ptr<std::uint32_t>(0)[linear_block(c) * threads + t];
}

void shared(const BlockContext& c) {
  const auto words = c.arg<std::uint32_t>(1);
  if (c.shared.size() < words * sizeof(std::uint32_t)) return;  // the sum stays what it was
  auto* mine = reinterpret_cast<std::uint32_t*>(c.shared.data());
  const auto value = static_cast<std::uint32_t>(linear_block(c) + 1);
  std::fill(mine, mine + words, value);
  std::uint32_t sum = 0;
  for (std::uint32_t i = 0; i < words; ++i) sum += mine[i];
  c.ptr<std::uint32_t>(0)[linear_block(c)] = sum;
}

void nothing(const BlockContext&) {}

constexpr std::array<std::uint32_t, 3> kFillBytes{8, 4, 8};
constexpr std::array<std::uint32_t, 4> kAxpyBytes{8, 8, 4, 4};
constexpr std::array<std::uint32_t, 2> kPtrWord{8, 4};
constexpr std::array<std::uint32_t, 1> kPtr{8};
constexpr std::array<std::uint32_t, 2> kPtrPtr{8, 8};
constexpr std::array<std::uint32_t, 3> kEchoBytes{8, sizeof(Wide), 4};
constexpr std::array<std::uint32_t, 6> kWidthsBytes{8, 1, 2, 4, 8, 4};
constexpr std::array<std::uint32_t, 2> kLargestBytes{8, sizeof(Largest)};
constexpr std::array<std::uint32_t, 2> kTooLargeBytes{8, sizeof(TooLarge)};

alignas(16) std::array<std::byte, kSymbolBytes> symbol_bytes{};

}  // namespace

std::span<const host::HostKernel> host_test_kernels() {
  static const std::array<host::HostKernel, 16> table{{
      {kModule, kFill, fill, kFillBytes, {}, false, false},
      {kModule, kAxpy, axpy, kAxpyBytes, {}, false, false},
      {kModule, kAppend, append, kPtrWord, {}, false, false},
      {kModule, kHold, hold, kPtr, {}, false, false},
      {kModule, kFault, fault, kPtrWord, {}, false, false},
      {kModule, kEcho, echo, kEchoBytes, {}, false, false},
      {kModule, kEchoWidths, echo_widths, kWidthsBytes, {}, false, false},
      {kModule, kEchoLargest, echo_largest, kLargestBytes, {}, false, false},
      {kModule, kTooLarge, nothing, kTooLargeBytes, {}, false, false},
      {kModule, kGeometry, geometry, kPtr, {}, false, false},
      {kModule, kShared, shared, kPtrWord, {}, false, false},
      {kModule, kMeet, nothing, kPtrPtr, {}, false, false},  // needs cooperative launch, which the host lacks
      {kModule, kTiled, nothing, kPtr, kTile, false, false},
      {kModule, kTiledZero, nothing, kPtr, 0u, false, false},
      {kModule, kCasts, nothing, kPtr, {}, true, false},
      {kModule, kWaiter, append, kPtrWord, {}, false, true},
  }};
  return table;
}

std::span<const host::HostSymbol> host_test_symbols() {
  static const std::array<host::HostSymbol, 1> table{{{kModule, kSymbol, symbol_bytes.data(), symbol_bytes.size()}}};
  return table;
}

}  // namespace metrale::conformance
