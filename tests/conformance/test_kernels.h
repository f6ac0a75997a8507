// SPDX-License-Identifier: Apache-2.0
//
// The kernels that the cases launch. Each backend that computes has a build of them under these names, with these arguments and
// facts; a backend that only records has the facts. Plain values.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace metrale::conformance {

inline constexpr std::string_view kModule = "conformance";

/// Stands in for a 128-byte tensor map.
struct Wide {
  std::array<std::uint64_t, 16> words;
};
static_assert(sizeof(Wide) == 128);

/// With one buffer beside it, exactly the 4 KiB that a launch may carry.
struct Largest {
  std::array<std::uint64_t, 511> words;
};
/// With one buffer beside it, eight bytes too many.
struct TooLarge {
  std::array<std::uint64_t, 512> words;
};

/// One argument of each width, in this order.
struct Widths {
  std::uint8_t u8;
  std::uint16_t u16;
  std::uint32_t u32;
  std::uint64_t u64;
  float f32;
};

// Functions of kModule:                 arguments and what they do. u32* and the like are buffers.
inline constexpr std::string_view kFill = "fill";      // u32* dst, u32 value, u64 count: dst[0, count) = value, over all blocks
inline constexpr std::string_view kAxpy = "axpy";      // f32* y, f32* x, f32 a, u32 count: y += a * x, over all blocks
inline constexpr std::string_view kAppend = "append";  // u32* log, u32 value: log[++log[0]] = value; one block of one thread
inline constexpr std::string_view kHold = "hold";      // u32* flag: runs until *flag is not 0, at most 20 s; one block
inline constexpr std::string_view kFault = "fault";    // u32* ptr, u32 value: loses the device
inline constexpr std::string_view kEcho = "echo";      // u64* out, Wide value, u32 tag: out[0, 16) = value, out[16] = tag
inline constexpr std::string_view kEchoWidths = "echo_widths";    // u64* out, u8, u16, u32, u64, f32: one each, f32 as its bits
inline constexpr std::string_view kEchoLargest = "echo_largest";  // u64* out, Largest value
inline constexpr std::string_view kTooLarge = "too_large";        // u64* out, TooLarge value: cannot be launched
inline constexpr std::string_view kGeometry = "geometry";  // u32* out: ++out[i] for the linear index i of each thread of each block
inline constexpr std::string_view kShared = "shared";      // u32* out, u32 words: fills its shared memory, out[block] = sum of it
inline constexpr std::string_view kMeet = "meet";          // u32* counter, u32* out: every block waits until all have come
inline constexpr std::string_view kTiled = "tiled";        // u32* out; publishes an n_tile of 64
inline constexpr std::string_view kTiledZero = "tiled_zero";  // u32* out; publishes an n_tile of 0
inline constexpr std::string_view kCasts = "casts";           // u32* out; publishes that it casts A to E4M3
inline constexpr std::string_view kWaiter = "waiter";         // u32* log, u32 value: as append; waits for its predecessor itself
inline constexpr std::uint32_t kTile = 64;

// A global of kModule that no kernel touches, where the backend has device symbols.
inline constexpr std::string_view kSymbol = "conformance_table";
inline constexpr std::uint64_t kSymbolBytes = 96;

}  // namespace metrale::conformance
