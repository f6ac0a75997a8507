// SPDX-License-Identifier: Apache-2.0
//
// The bridge to CUTLASS: matrix products of a token batch with the weights of one layer (dense) or of its experts (grouped), in
// bf16 and in FP8 with block scales. `Bridge::create` gives the object for one backend, which must outlive it. Any thread may call;
// calls for one stream come from one thread at a time.
//
// All products are out[m, n] = alpha · act[m, k] · weight[n, k]ᵀ, row-major, added up in float32, rounded once to bf16.
#pragma once

#include <cstdint>
#include <memory>
#include <source_location>
#include <span>
#include <string_view>
#include <vector>

#include "metrale/bridges/bridge_status.h"
#include "metrale/result.h"
#include "metrale/types.h"

namespace metrale {
class GpuBackend;
}

namespace metrale::cutlass {

/// Most experts of one call.
inline constexpr std::uint32_t kMaxExperts = 1024;
/// Values that share a scale in Precision::fp8_block.
inline constexpr std::uint32_t kScaleBlock = 128;
/// Addresses of matrices, and their strides in bytes, are multiples of this.
inline constexpr std::uint64_t kMatrixAlignment = 16;

/// What the build has of CUTLASS. Whether a device can run it is what `Bridge::create` answers.
BridgeStatus status();

/// Of activations and weights; the output is bf16.
enum class Precision : std::uint8_t {
  bf16,
  /// E4M3 with a float32 scale for each 1×128 of the activations, [tokens, ceil(k / 128)], and for each 128×128 of the weights,
  /// [ceil(n / 128), ceil(k / 128)] for each expert; both row-major as a quantiser and a checkpoint write them.
  fp8_block,
};
std::string_view to_string(Precision precision) noexcept;

/// One product.
struct DenseCall {
  Precision precision = Precision::bf16;
  std::uint32_t m = 0;           ///< Rows. At least 1.
  std::uint32_t n = 0;           ///< Output columns, a multiple of 8.
  std::uint32_t k = 0;           ///< A multiple of 8 (bf16) or 16 (fp8_block).
  DevicePtr act;                 ///< [m, k]
  DevicePtr weight;              ///< [n, k], packed
  DevicePtr out;                 ///< [m, n] bf16; overlaps no input.
  DevicePtr act_scales;          ///< fp8_block: [m, ceil(k / 128)] float32. Otherwise null.
  DevicePtr weight_scales;       ///< fp8_block: [ceil(n / 128), ceil(k / 128)] float32. Otherwise null.
  std::uint64_t act_stride = 0;  ///< Elements from row to row; 0: packed.
  std::uint64_t out_stride = 0;  ///< Elements from row to row; 0: packed.
  float alpha = 1;
};

/// The products of a mixture of experts: rows [offsets[e], offsets[e + 1]) go through expert e.
struct GroupedCall {
  Precision precision = Precision::bf16;
  std::uint32_t experts = 0;  ///< 1 to kMaxExperts.
  std::uint32_t rows = 0;     ///< Of the output: routed rows, sorted by expert; at least 1. Rows of no expert are left as they are.
  std::uint32_t tokens = 0;   ///< Rows of `act`. Without `row_index`: at least `rows`.
  std::uint32_t n = 0;        ///< As in DenseCall.
  std::uint32_t k = 0;        ///< As in DenseCall.
  DevicePtr act;              ///< [tokens, k]
  DevicePtr weight;           ///< [experts, n, k], packed
  DevicePtr out;              ///< [rows, n] bf16; overlaps no input.
  DevicePtr act_scales;       ///< fp8_block: [tokens, ceil(k / 128)] float32. Otherwise null.
  DevicePtr weight_scales;    ///< fp8_block: [experts, ceil(n / 128), ceil(k / 128)] float32. Otherwise null.
  /// [rows] int32: the token that each row reads; no copy is made. Null: row i reads token i. A token that does not exist reads as
  /// zeros.
  DevicePtr row_index;
  /// [experts + 1] int32 on the device, so that a graph replays with other sizes. Not checked: an offset below the one before it,
  /// or above `rows`, is taken as that bound, and nothing outside `out` is written.
  DevicePtr offsets;
  /// Instead of `offsets`, and checked: experts + 1 values, the first 0, none below the one before it, the last at most `rows`.
  /// Read during the call; a graph keeps them.
  std::span<const std::int32_t> host_offsets;
  std::uint64_t act_stride = 0;  ///< Elements from row to row; 0: packed.
  std::uint64_t out_stride = 0;  ///< Elements from row to row; 0: packed.
  float alpha = 1;
};

/// A matrix in bf16 and in NVFP4 (nvfp4.h), both on the device.
struct Nvfp4Call {
  std::uint32_t rows = 0;
  std::uint32_t cols = 0;     ///< A multiple of 16.
  DevicePtr plain;            ///< [rows, cols] bf16
  DevicePtr values;           ///< [rows, cols / 2]
  DevicePtr scales;           ///< [rows, cols / 16], or `tiled_scale_bytes` of them in tiles.
  bool tiled_scales = false;  ///< As tensor cores read them; padding is written as 0.
  float alpha = 1;
};

/// One product of matrices in NVFP4, whose scales are in tiles (`tile_nvfp4_scales`, or `Bridge::pack` with `tiled_scales`). Needs
/// tensor cores of SM100 or SM120.
struct Nvfp4DenseCall {
  std::uint32_t m = 0;           ///< At least 1.
  std::uint32_t n = 0;           ///< A multiple of 8.
  std::uint32_t k = 0;           ///< A multiple of 32.
  DevicePtr act;                 ///< [m, k / 2]
  DevicePtr act_scales;          ///< Tiles of [m, k / 16].
  DevicePtr weight;              ///< [n, k / 2]
  DevicePtr weight_scales;       ///< Tiles of [n, k / 16].
  DevicePtr out;                 ///< [m, n] bf16
  std::uint64_t out_stride = 0;  ///< Elements from row to row; 0: packed.
  float alpha = 1;               ///< Of the activations, times that of the weights.
};

/// Whether the call can be made at all: shapes, alignment, strides, sizes that fit. Needs no device and reads no memory.
/// Errors: invalid_argument, with what to change.
Result<> check(const DenseCall& call, std::source_location site = std::source_location::current());
Result<> check(const GroupedCall& call, std::source_location site = std::source_location::current());
Result<> check(const Nvfp4Call& call, std::source_location site = std::source_location::current());
Result<> check(const Nvfp4DenseCall& call, std::source_location site = std::source_location::current());
/// Whether `offsets` are those of `experts` experts over at most `rows` rows. Errors: invalid_argument, naming the first bad one.
Result<> check_offsets(std::span<const std::int32_t> offsets, std::uint32_t experts, std::uint32_t rows,
                       std::source_location site = std::source_location::current());

struct BridgeOptions {
  /// Uses the kernels that every chip has where this one has its own too: to compare them.
  bool common_kernels = false;
};

class Bridge {
 public:
  using Site = std::source_location;

  /// Looks at the device and takes what it can run. `backend` must outlive the bridge.
  /// Errors: unsupported (built without CUTLASS, a backend without native work, a chip that nothing here was compiled for).
  static Result<std::unique_ptr<Bridge>> create(GpuBackend& backend, const BridgeOptions& options = {},
                                                Site site = Site::current());
  virtual ~Bridge() = default;

  /// "sm_90a" or "common": the kernels that are used.
  virtual std::string_view kernels() const noexcept = 0;
  /// Takes what calls on `stream` need of scratch, so that the first of them may be in a capture.
  /// Errors: as `OpCache::scratch`.
  virtual Result<> prepare(StreamHandle stream, Site site = Site::current()) = 0;
  /// Enqueues the product. Legal in a capture.
  /// Lifetime: the operands until the work is done; for graphs, as long as they live.
  /// Errors: those of `check`; out_of_range (an operand leaves its memory); unsupported (the chip lacks the precision); those of
  ///   `GpuBackend::enqueue_native`.
  virtual Result<> dense(const DenseCall& call, StreamHandle stream, Site site = Site::current()) = 0;
  /// Enqueues the products of all experts as one launch. Legal in a capture, after `prepare` or an earlier call on the stream.
  /// Ordering: calls on a stream share its scratch, so replays of graphs that captured them come after one another too.
  /// Lifetime, errors: as `dense`; capture_unsafe (no scratch yet).
  virtual Result<> grouped(const GroupedCall& call, StreamHandle stream, Site site = Site::current()) = 0;
  /// Enqueues the packing of `plain`, or back the unpacking, to the bits of `pack_nvfp4` and `unpack_nvfp4`; what is not finite
  /// becomes the largest code. Legal in a capture. Lifetime, errors: as `dense`.
  virtual Result<> pack(const Nvfp4Call& call, StreamHandle stream, Site site = Site::current()) = 0;
  virtual Result<> unpack(const Nvfp4Call& call, StreamHandle stream, Site site = Site::current()) = 0;
  /// Enqueues the product. Legal in a capture, after an earlier call on the stream that needed as much scratch.
  /// Lifetime, errors: as `dense`; unsupported (not compiled for the chip, or the chip has no such tensor cores).
  virtual Result<> dense_nvfp4(const Nvfp4DenseCall& call, StreamHandle stream, Site site = Site::current()) = 0;
};

}  // namespace metrale::cutlass
