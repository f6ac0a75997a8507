// SPDX-License-Identifier: Apache-2.0
//
// The bridge to cuBLASLt, which is loaded at run time: matrix products of a batch of tokens with the weights of one layer, in
// bf16 and in FP8. `CublasLt::create` gives the object for one backend, which must outlive it. Any thread may call; calls for one
// stream come from one thread at a time.
//
// All products are out[m, n] = activation(alpha · act[m, k] · weight[n, k]ᵀ + bias[n] + beta · residual[m, n]), row-major, added
// up in float32, rounded once.
//
// What is slow to make (descriptors, the algorithm) is a plan, kept for each shape with m in classes (`m_class`). The algorithm is
// the fastest of the library's candidates, measured once on the device at the first call of a plan outside captures, or read from a
// file that an earlier process wrote.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/bridges/bridge_status.h"
#include "metrale/dtype.h"
#include "metrale/model_resource.h"
#include "metrale/result.h"
#include "metrale/types.h"

namespace metrale {
class GpuBackend;
}

namespace metrale::cublaslt {

/// Values that share a scale in Precision::fp8_block.
inline constexpr std::uint32_t kScaleBlock = 128;
/// The library takes rows of Precision::fp8_block in multiples of this.
inline constexpr std::uint32_t kBlockRows = 4;
/// Addresses of operands, and strides of `act` and `weight` in bytes, are multiples of this.
inline constexpr std::uint64_t kAlignment = 16;

/// The library as this process finds it; loads it.
BridgeStatus status();

/// Of activations and weights.
enum class Precision : std::uint8_t {
  bf16,
  /// E4M3 with a float32 scale for each row: act_scales [m], weight_scales [n].
  fp8_row,
  /// E4M3 with a float32 scale for each 1×128 of the activations, [m, ceil(k / 128)], and for each 128×128 of the weights,
  /// [ceil(n / 128), ceil(k / 128)]; both row-major as a quantiser and a checkpoint write them. ceil(k / 128) is a multiple of 4.
  fp8_block,
};
std::string_view to_string(Precision precision) noexcept;

enum class Epilogue : std::uint8_t {
  none,
  relu,
  gelu,  ///< The tanh form.
};
std::string_view to_string(Epilogue epilogue) noexcept;

/// One product, or `batch` of them at equal distances. Strides are in elements.
struct Call {
  Precision precision = Precision::bf16;
  DType out_type = DType::bf16;  ///< bf16; of Precision::bf16 also f32.
  Epilogue epilogue = Epilogue::none;
  std::uint32_t m = 0;  ///< Rows. At least 1.
  std::uint32_t n = 0;  ///< Output columns; FP8: a multiple of 8.
  std::uint32_t k = 0;  ///< A multiple of 8, FP8: 16.
  std::uint32_t batch = 1;
  DevicePtr act{};     ///< [m, k]
  DevicePtr weight{};  ///< [n, k], packed
  /// [m, n]. Overlaps no input, but may be the residual where their strides agree. Of each product (m - 1)·out_stride + n elements
  /// are written or kept, none beyond.
  DevicePtr out{};
  DevicePtr bias{};                    ///< [n] of `out_type`, the same for the whole batch; may be null.
  DevicePtr residual{};                ///< bf16: [m, n] of `out_type`; may be null.
  DevicePtr act_scales{};              ///< FP8; otherwise null.
  DevicePtr weight_scales{};           ///< FP8; otherwise null.
  std::uint64_t act_stride = 0;        ///< From row to row; 0: packed.
  std::uint64_t out_stride = 0;        ///< Also known as ldc; 0: packed, otherwise at least n.
  std::uint64_t residual_stride = 0;   ///< 0: that of `out`.
  std::uint64_t act_batch_stride = 0;  ///< From product to product; 0: all read the same `act`. Batches are of bf16.
  std::uint64_t weight_batch_stride = 0;
  std::uint64_t out_batch_stride = 0;  ///< Not 0 where `batch` is more than 1.
  std::uint64_t residual_batch_stride = 0;
  /// fp8_block: `act` and `out` have rows up to the next multiple of kBlockRows, which may be read and overwritten. Otherwise an
  /// m that is no such multiple costs a copy of both.
  bool rows_padded = false;
  /// fp8_block: `act_scales` is [ceil(k / 128), m up to a multiple of kBlockRows] already, as `transpose_scales` gives it.
  /// Otherwise the bridge transposes them, into scratch of the stream.
  bool scales_transposed = false;
  float alpha = 1;
  float beta = 1;  ///< Of the residual.
};

/// Whether the call can be made at all: shapes, alignment, strides, sizes that fit, overlaps. Needs no device and looks at no
/// memory.
/// Errors: invalid_argument, with what to change.
Result<> check(const Call& call, std::source_location site = std::source_location::current());

/// The largest m of those that share a plan with `m`: each m up to 8, then four classes to an octave.
std::uint32_t m_class(std::uint32_t m) noexcept;

/// What the library wants of activation scales: [blocks, padded_m], that is transposed, with zeros behind m. `scales` is [m,
/// blocks]. The bridge does this on the device; here it is for the host. Empty where `scales` has not m · blocks values.
std::vector<float> transpose_scales(std::span<const float> scales, std::uint32_t m, std::uint32_t blocks);

struct Options {
  /// Of each stream whose products need one, on the ledger. Algorithms that want more are not considered.
  std::uint64_t workspace_bytes = std::uint64_t{32} << 20;
  /// Measure the candidates. Otherwise the library's first choice is taken.
  bool measure = true;
  std::uint32_t candidates = 16;  ///< At most; 1 to 64.
  /// One algorithm for every m of a plan, chosen so that a row's bits do not depend on how many rows there are: a prefix computed
  /// alone and as part of a longer batch is the same. An m that it cannot serve gets another one, with a warning for each shape.
  bool row_invariant = false;
  /// Folder of measured algorithms, one file for each device, driver and library version. A file that is damaged or of another
  /// machine is ignored with a warning. Empty: none. Default METRALE_CUBLASLT_CACHE.
  std::optional<std::string> cache_folder{};
};

/// How plans came about, since creation.
struct Counts {
  std::uint64_t plans = 0;
  std::uint64_t measured = 0;
  std::uint64_t from_file = 0;
  std::uint64_t exceptions = 0;  ///< Made for one m because the algorithm of its class or of all rows refused it.
};

class CublasLt : public ModelResource {
 public:
  using Site = std::source_location;

  /// Loads the library, unless this process has done so, and makes a handle on the backend's device.
  /// Errors: unsupported (left out of this build, no library: each name with the loader's words, another major version, or a
  /// backend that is not CUDA's), invalid_argument (options), those of the library.
  static Result<std::unique_ptr<CublasLt>> create(GpuBackend& backend, Options options = {}, Site site = Site::current());
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  /// Enqueues the product. Legal in a capture, but see `prepare`. The first call of a plan outside captures measures: it waits,
  /// and takes up to some hundred milliseconds and some hundred MiB of device memory, which it gives back. Later calls allocate
  /// nothing.
  /// Lifetime: the operands until the work is done; for graphs, as long as they live.
  /// Errors: those of `check`; out_of_range (an operand leaves its memory); unsupported (the library has no algorithm);
  /// capture_unsafe (see `prepare`); those of `GpuBackend::enqueue_native`.
  virtual Result<> matmul(const Call& call, StreamHandle stream, Site site = Site::current()) = 0;

  /// Makes the plan of a shape, and what its calls on `stream` need of workspace, so that a capture finds it. Addresses count
  /// only as null or not. Without it a call in a capture takes the library's first choice of algorithm, or is capture_unsafe
  /// where the workspace would grow. Not legal on a thread that holds a capture. Errors: as `matmul`.
  virtual Result<> prepare(const Call& shape, StreamHandle stream, Site site = Site::current()) = 0;

  /// One small product, so that the first request does not pay for loading kernels. False, with a warning, where it failed.
  virtual bool prewarm(StreamHandle stream, Site site = Site::current()) = 0;

  virtual Counts counts() const = 0;
  /// "13.1.0 as libcublasLt.so.13"
  virtual std::string_view version() const noexcept = 0;

  std::string_view label() const noexcept override { return "cuBLASLt plans"; }
  /// Forgets the plans, which later calls make anew. Workspaces are the op cache's to release.
  Result<> release(GpuBackend& backend) override = 0;

 protected:
  CublasLt() = default;
};

}  // namespace metrale::cublaslt
