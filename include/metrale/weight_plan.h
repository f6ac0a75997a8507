// SPDX-License-Identifier: Apache-2.0
//
// WeightPlan: which tensors of a file go to the device, in what type, and where in the arena. It is made once, from a policy,
// before a byte is read, and is what both the estimate and the load go by, so that the two cannot differ. A plan is plain data
// about one WeightFile, which must outlive it; it never changes, and any number of threads may read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/backend.h"
#include "metrale/result.h"
#include "metrale/tensor_info.h"
#include "metrale/weight_file.h"

namespace metrale {

/// Changes a tensor on its way to the device, some rows at a time.
struct TensorTransform {
  /// Type of the result, which has the shape of the source.
  DType dtype = DType::f32;
  /// Every call gets a multiple of this many rows, and the tensor's last rows whatever their number.
  std::uint64_t granule_rows = 1;
  /// Reads the rows from `first_row` on in `src`, as the file has them, and fills `dst`: whole rows of the result in any order
  /// within the call. `dst` is host memory that is copied to the device afterwards. An error ends the load.
  std::function<Result<>(const TensorInfo& tensor, std::uint64_t first_row, std::span<const std::byte> src,
                         std::span<std::byte> dst)>
      apply;
};

/// Converts to `dtype`, f32 or bf16, from any type that `dequantise` knows. Rounds to nearest even.
TensorTransform convert_to(DType dtype);

/// A part of a tensor of one or two dimensions; a vector is one row.
struct TensorSlice {
  std::uint64_t first_row = 0;
  std::uint64_t num_rows = 0;
  std::uint64_t first_col = 0;
  std::uint64_t num_cols = 0;
};

enum class TensorUse : std::uint8_t {
  load,   ///< Into the arena.
  skip,   ///< Not needed.
  defer,  ///< Listed for later; stays on disk.
};

/// What a policy wants of one tensor.
struct TensorChoice {
  TensorUse use = TensorUse::load;
  /// Tensors of one segment share one allocation and can only be freed together. 0 unless parts of the weights are freed early.
  std::uint32_t segment = 0;
  std::optional<TensorTransform> transform;
  /// Load this part alone, as if it were the tensor. Of rows that are cut, the rest is read along and dropped.
  std::optional<TensorSlice> slice = {};
};
using TensorPolicy = std::function<TensorChoice(const TensorInfo&)>;

class WeightPlan {
 public:
  struct Entry {
    const TensorInfo* tensor = nullptr;  ///< Of a slice: its whole rows.
    DType dtype = DType::f32;            ///< On the device.
    std::vector<std::uint64_t> shape;    ///< On the device.
    std::uint64_t size_bytes = 0;
    std::uint32_t segment = 0;
    std::uint64_t offset = 0;  ///< In the segment; a multiple of kDeviceAlignment.
    std::optional<TensorTransform> transform;
  };

  /// Asks `policy` about each tensor of `file` in file order; without one, everything is loaded.
  /// Errors: unsupported (a tensor to be loaded has a type that metrale cannot load: names both), invalid_argument (a transform
  ///   that cannot apply to the shape; a slice that leaves the tensor, cuts a block, or has a transform), out_of_range (sizes
  ///   overflow).
  static Result<WeightPlan> create(const WeightFile& file, const TensorPolicy& policy = {});
  /// Loads the tensors of these names into one segment and skips all others.
  /// Errors: as above; not_found (no such tensor; with the names that come nearest).
  static Result<WeightPlan> create(const WeightFile& file, std::span<const std::string> names);

  /// What is loaded, in file order.
  std::span<const Entry> entries() const noexcept { return entries_; }
  /// What is deferred, by name, with numbers in names in numeric order: "table.2" before "table.10".
  std::span<const TensorInfo* const> deferred() const noexcept { return deferred_; }
  std::size_t num_skipped() const noexcept { return num_skipped_; }
  /// Device bytes of each segment, padding included; none is 0.
  const std::map<std::uint32_t, std::uint64_t>& segments() const noexcept { return segments_; }
  /// Device bytes in all.
  std::uint64_t device_bytes() const noexcept;
  /// Bytes of tensor data that a load reads, dropped columns of slices included.
  std::uint64_t read_bytes() const noexcept;

  /// Checks that the device has room for the plan and `reserve_bytes` besides.
  /// Errors: out_of_memory (says how much is missing), or what `GpuBackend::free_memory` returns.
  Result<> check_fits(GpuBackend& backend, std::uint64_t reserve_bytes = 0) const;

 private:
  std::string label_;
  std::vector<Entry> entries_;
  std::vector<std::shared_ptr<const TensorInfo>> sliced_;  ///< The rows of slices, which entries point to.
  std::vector<const TensorInfo*> deferred_;
  std::map<std::uint32_t, std::uint64_t> segments_;
  std::size_t num_skipped_ = 0;
};

}  // namespace metrale
