// SPDX-License-Identifier: Apache-2.0
//
// WeightFile: the tensors of a model on disk, whatever the layout: one GGUF file, one safetensors file, or a Hugging Face folder
// with model.safetensors or with model.safetensors.index.json and its shards. Opening reads and checks every header and no tensor
// data; the files stay open until the object dies. Nothing changes after opening, so any number of threads may use one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "metrale/byte_source.h"
#include "metrale/gguf.h"
#include "metrale/result.h"
#include "metrale/safetensors.h"
#include "metrale/tensor_info.h"

namespace metrale {

class WeightFile {
 public:
  enum class Format : std::uint8_t { gguf, safetensors };

  /// Opens `path`, a file or a folder, and reads its headers.
  /// Errors: not_found (no such file, a folder without weights, a shard that is named and not there), bad_format (as the parsers; a
  /// tensor that the index names and its shard lacks; a name in two shards), unsupported, io, out_of_memory. One line that
  /// names the thing.
  static Result<std::unique_ptr<WeightFile>> open(const std::filesystem::path& path);
  /// The same from one source in the format that its first bytes tell, e.g. a block of memory.
  static Result<std::unique_ptr<WeightFile>> open(std::unique_ptr<ByteSource> source);

  /// What was asked for: the file or the folder.
  const std::filesystem::path& path() const noexcept { return path_; }
  Format format() const noexcept { return gguf_ ? Format::gguf : Format::safetensors; }
  /// The header of a GGUF file, with its metadata; null for safetensors.
  const GgufHeader* gguf_header() const noexcept { return gguf_ ? &*gguf_ : nullptr; }
  /// The `__metadata__` texts of a safetensors file, of the first shard in a set; empty for GGUF.
  const std::map<std::string, std::string, std::less<>>& safetensors_metadata() const noexcept { return safetensors_metadata_; }

  /// Every tensor, in the order in which reading each file once from start to end meets them.
  const TensorTable& tensors() const noexcept { return tensors_; }
  const TensorInfo* find(std::string_view name) const noexcept { return tensors_.find(name); }
  /// As `find`. Errors: not_found, with the names that come nearest.
  Result<const TensorInfo*> get(std::string_view name) const;

  std::size_t num_files() const noexcept { return files_.size(); }
  /// The path of file `TensorInfo::file`.
  const std::string& file_label(std::uint32_t file) const { return files_.at(file)->label(); }
  /// Sum of the sizes of all files.
  std::uint64_t file_bytes() const noexcept;

  /// Reads `dst.size()` bytes of `tensor`, from byte `offset` of it on. `tensor` belongs to this file's table.
  /// Errors: out_of_range (leaves the tensor), io.
  Result<> read(const TensorInfo& tensor, std::uint64_t offset, std::span<std::byte> dst) const;
  /// All bytes of `tensor`. Errors: io, out_of_memory.
  Result<std::vector<std::byte>> read(const TensorInfo& tensor) const;
  /// The same by position in file `file`, for readers that take several tensors at once.
  /// Errors: invalid_argument (no such file), out_of_range (leaves the file), io.
  Result<> read_file(std::uint32_t file, std::uint64_t offset, std::span<std::byte> dst) const;
  /// Tells the system that these bytes will not be read again.
  void drop_cached(std::uint32_t file, std::uint64_t offset, std::uint64_t bytes) const noexcept;

 private:
  WeightFile() = default;
  Result<> add_file(std::unique_ptr<ByteSource> source, std::vector<TensorInfo>& tensors);
  Result<> add_folder(std::vector<TensorInfo>& tensors);
  Result<> add_shards(const std::filesystem::path& index_path, std::vector<TensorInfo>& tensors);

  std::filesystem::path path_;
  std::vector<std::unique_ptr<ByteSource>> files_;
  TensorTable tensors_;
  std::optional<GgufHeader> gguf_;
  std::map<std::string, std::string, std::less<>> safetensors_metadata_;
};

}  // namespace metrale
