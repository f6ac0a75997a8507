// SPDX-License-Identifier: Apache-2.0
//
// What must hold for any file that a weight parser accepts, and for any that it refuses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "metrale/dequantise.h"
#include "metrale/weight_file.h"

namespace metrale::fuzz {

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

inline void check_error(const Error& error) {
  require(error.message().find("input") == 0, "the message names the file");
  require(error.message().size() < 1000, "the message is short");
  for (const char c : error.message()) require(static_cast<unsigned char>(c) >= 0x20, "the message is one printable line");
  require(error.code() == Errc::bad_format || error.code() == Errc::unsupported, "the code tells a bad file");
}

/// Opens the input as a weight file and reads all it lists.
inline void check_weight_file(std::span<const std::byte> bytes) {
  const auto file = WeightFile::open(std::make_unique<MemorySource>(bytes, "input"));
  if (!file) return check_error(file.error());
  std::uint64_t end = 0;
  for (const TensorInfo& tensor : (*file)->tensors().tensors()) {
    require(tensor.offset >= end || tensor.size_bytes == 0, "tensors do not overlap");
    require(tensor.offset <= bytes.size() && tensor.size_bytes <= bytes.size() - tensor.offset, "tensors lie in the file");
    if (tensor.size_bytes != 0) end = tensor.offset + tensor.size_bytes;
    require((*file)->find(tensor.name) == &tensor, "each name leads to its tensor");
    require(tensor.num_rows() * tensor.num_cols() == tensor.num_elements(), "rows times columns are the elements");
    const auto data = (*file)->read(tensor);
    require(data.has_value(), "every tensor can be read");
    if (!tensor.dtype) continue;
    require(size_bytes(*tensor.dtype, tensor.num_elements()) == tensor.size_bytes, "size and shape agree");
    if (!can_dequantise(*tensor.dtype)) continue;
    std::vector<float> values(tensor.num_elements());
    require(dequantise(*tensor.dtype, *data, values).has_value(), "every known type converts");
  }
  require(!(*file)->get("no such tensor \n"), "a missing name is an error");
}

}  // namespace metrale::fuzz
