// SPDX-License-Identifier: Apache-2.0
//
// Safetensors: tensor table and free-text metadata of one .safetensors file, and the index of a sharded set. The parser reads the
// header only. It is as strict as the format's reference implementation: ranges must match shapes, may not overlap, and must cover
// the data part without gaps. Results own their memory; after parsing any number of threads may read them.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "metrale/byte_source.h"
#include "metrale/result.h"
#include "metrale/tensor_info.h"

namespace metrale {

/// Largest JSON header or index that is read; the limit of the reference implementation.
inline constexpr std::uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

/// Everything that a safetensors header says.
struct SafetensorsHeader {
  std::map<std::string, std::string, std::less<>> metadata;  ///< The `__metadata__` object.
  std::uint64_t data_offset = 0;                             ///< Where tensor data starts, from the start of the file.
  TensorTable tensors;  ///< A tensor may be empty (a dimension of 0). Types metrale cannot load are listed without a dtype.
};

/// Reads and checks the header at the start of `source`.
/// Errors: bad_format (truncated, lying or hostile: the message names the file and the tensor or the position), io, out_of_memory.
/// Nothing is kept of a refused file.
/// Threads: any.
/// Source: the format section of the safetensors repository's README.
Result<SafetensorsHeader> parse_safetensors(const ByteSource& source);

/// Which shard holds which tensor.
struct SafetensorsIndex {
  std::map<std::string, std::string, std::less<>> weight_map;  ///< Tensor name to the file name of its shard.
};

/// Reads and checks a `model.safetensors.index.json`. Shard names are plain file names: one with a path in it is refused.
/// Errors: bad_format (no JSON of that form, a name twice), io, out_of_memory.
Result<SafetensorsIndex> parse_safetensors_index(const ByteSource& source);

}  // namespace metrale
