// SPDX-License-Identifier: Apache-2.0
//
// Between the bridge's host code and what nvcc compiles: plain values, addresses of the device, and the codes of CUDA's runtime and
// of CUTLASS as they are. Every function is to be called with the device current.
#pragma once

#include <cstddef>
#include <cstdint>

namespace metrale::cutlass {

/// What a foreign call said. `text` is static.
struct Foreign {
  enum class Origin : std::uint8_t { none, cuda, cutlass };
  Origin origin = Origin::none;
  int code = 0;
  const char* text = "";
  const char* call = "";
  bool ok() const noexcept { return origin == Origin::none; }
};

struct Chip {
  int major = 0;
  int minor = 0;
  int sm_count = 0;
};
Foreign query_chip(Chip& chip) noexcept;

/// A CUtensorMap.
struct alignas(64) WeightMap {
  std::byte bytes[128];
};
/// The map by which a kernel reads boxes of `box_rows` rows by 128 bytes, swizzled, of a packed matrix [rows, k].
Foreign make_weight_map(WeightMap& map, std::uint64_t address, std::uint64_t rows, std::uint64_t k, int element_bytes,
                        int box_rows) noexcept;

// ---- kernels for Hopper ----

/// Most groups of one launch: where they begin is kept in shared memory.
inline constexpr int kMaxGroups = 1024;

struct HopperArguments {
  const void* act = nullptr;                ///< [tokens, k]
  const std::int32_t* row_index = nullptr;  ///< [rows] or null: row i is token i.
  const std::int32_t* offsets = nullptr;    ///< [groups + 1] or null: one group of all rows.
  /// 0 when the kernel starts: counts the tiles that were taken. Null: tiles are shared out evenly beforehand.
  unsigned* next_tile = nullptr;
  void* out = nullptr;                   ///< [rows, n] bf16
  const float* act_scales = nullptr;     ///< [tokens, ceil(k / 128)]
  const float* weight_scales = nullptr;  ///< [groups, weight_scale_rows, ceil(k / 128)]
  std::uint64_t act_stride = 0;          ///< Bytes.
  std::uint64_t act_scale_stride = 0;    ///< Elements.
  std::uint64_t out_stride = 0;          ///< Elements.
  std::int32_t groups = 1;
  std::int32_t rows = 0;
  std::int32_t tokens = 0;
  std::int32_t n = 0;
  std::int32_t k = 0;
  std::int32_t column_tiles = 0;
  std::int32_t weight_scale_rows = 0;
  float alpha = 1;
};

/// One compiled kernel.
struct HopperKernel {
  int columns = 0;                        ///< Of a tile; the rows of a weight map's box.
  Foreign (*ready)() noexcept = nullptr;  ///< To be called once for each device.
  Foreign (*launch)(const WeightMap& map, const HopperArguments& arguments, unsigned blocks,
                    std::uint64_t stream) noexcept = nullptr;
};
extern const HopperKernel kHopperBf16Wide;    ///< 256 columns.
extern const HopperKernel kHopperBf16Narrow;  ///< 128 columns.
extern const HopperKernel kHopperFp8;         ///< 128 columns.

// ---- kernels for every chip ----

struct CommonArguments {
  const void* act = nullptr;
  const void* weight = nullptr;
  void* out = nullptr;
  std::int64_t act_stride = 0;  ///< Elements.
  std::int64_t out_stride = 0;  ///< Elements.
  int m = 0;
  int n = 0;
  int k = 0;
  float alpha = 1;
};
/// Whether the kernel was compiled for this chip.
Foreign common_bf16_ready() noexcept;
Foreign launch_common_bf16(const CommonArguments& arguments, std::uint64_t stream) noexcept;

struct Nvfp4Arguments {
  void* plain = nullptr;           ///< [rows, cols] bf16
  std::uint8_t* values = nullptr;  ///< [rows, cols / 2]
  std::uint8_t* scales = nullptr;  ///< [rows, cols / 16], or their tiles
  std::uint32_t rows = 0;
  std::uint32_t cols = 0;
  float alpha = 1;
  bool tiled = false;
};
/// Plain to packed, or back.
Foreign launch_nvfp4(const Nvfp4Arguments& arguments, bool pack, std::uint64_t stream) noexcept;

// ---- kernels for SM100 and SM120 ----

struct Nvfp4GemmArguments {
  const void* act = nullptr;            ///< [m, k / 2]
  const void* act_scales = nullptr;     ///< In tiles.
  const void* weight = nullptr;         ///< [n, k / 2]
  const void* weight_scales = nullptr;  ///< In tiles.
  void* out = nullptr;                  ///< [m, n] bf16
  std::int64_t out_stride = 0;          ///< Elements.
  int m = 0;
  int n = 0;
  int k = 0;
  int sm_count = 0;
  float alpha = 1;
};
struct Nvfp4Kernel {
  std::size_t (*workspace_bytes)(const Nvfp4GemmArguments& arguments) noexcept = nullptr;
  Foreign (*launch)(const Nvfp4GemmArguments& arguments, void* workspace, std::uint64_t stream) noexcept = nullptr;
};
extern const Nvfp4Kernel kNvfp4Sm100;
extern const Nvfp4Kernel kNvfp4Sm120;

}  // namespace metrale::cutlass
