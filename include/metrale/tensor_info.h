// SPDX-License-Identifier: Apache-2.0
//
// TensorInfo and TensorTable: what a weight file says about its tensors, in one form for every file format. A table is built once
// by a parser, which has checked it against the file: every range lies inside the file, no two overlap, no name occurs twice. After
// that it never changes and any number of threads may read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/dtype.h"
#include "metrale/result.h"

namespace metrale {

/// Most dimensions of one tensor.
inline constexpr std::size_t kMaxTensorRank = 8;

/// One tensor of a file.
struct TensorInfo {
  std::string name;
  std::string type_name;             ///< As the file calls it, unchecked, e.g. "BF16", "Q4_1"; "type 99" for a number.
  std::optional<DType> dtype;        ///< None when metrale cannot load the type; such a tensor is listed and refused when needed.
  std::vector<std::uint64_t> shape;  ///< Row-major, outermost first: a matrix is [rows, cols] whatever the format's own order.
  std::uint64_t offset = 0;          ///< Of the first byte, from the start of the file.
  std::uint64_t size_bytes = 0;
  std::uint32_t file = 0;  ///< Which file of a sharded set.

  /// Product of the shape; 1 for a scalar. The parser has checked that it fits.
  std::uint64_t num_elements() const noexcept;
  /// Elements in a row: the innermost dimension, 1 for a scalar.
  std::uint64_t num_cols() const noexcept { return shape.empty() ? 1 : shape.back(); }
  /// Product of all dimensions but the innermost, 1 for a vector or a scalar.
  std::uint64_t num_rows() const noexcept;
};

/// Tensors in file order with look-up by name.
class TensorTable {
 public:
  TensorTable() = default;

  /// Takes the tensors, sorts them by (file, offset) and checks that names are unique. `label` names the file in messages.
  /// Errors: bad_format (a name occurs twice).
  static Result<TensorTable> create(std::vector<TensorInfo> tensors, std::string_view label);

  /// All tensors, by rising (file, offset): the order in which one sequential read meets them.
  std::span<const TensorInfo> tensors() const noexcept { return tensors_; }
  std::size_t size() const noexcept { return tensors_.size(); }
  /// The tensor of that name, or null. Valid while the table lives and is not assigned to.
  const TensorInfo* find(std::string_view name) const noexcept;
  /// Sum of `size_bytes` over all tensors.
  std::uint64_t total_bytes() const noexcept;
  /// Up to `limit` names that resemble `name`, most similar first; for messages.
  std::vector<std::string> nearest(std::string_view name, std::size_t limit = 3) const;

 private:
  std::vector<TensorInfo> tensors_;
  std::vector<std::uint32_t> by_name_;  // indices into tensors_, sorted by name
};

/// "[49152, 576]".
std::string shape_text(std::span<const std::uint64_t> shape);

}  // namespace metrale
