// SPDX-License-Identifier: Apache-2.0
#include "metrale/weight_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <system_error>

#include "core/text.h"
#include "weights/tensor_table.h"

namespace metrale {
namespace {

constexpr std::string_view kSingleFile = "model.safetensors";
constexpr std::string_view kIndexFile = "model.safetensors.index.json";

// A GGUF file in `folder`, to suggest it; empty when there is none.
std::string some_gguf_in(const std::filesystem::path& folder) {
  std::error_code ignored;
  for (std::filesystem::directory_iterator at(folder, ignored), end; !ignored && at != end; at.increment(ignored)) {
    if (at->path().extension() == ".gguf") return at->path().filename().native();
  }
  return {};
}

Error no_weights(const std::filesystem::path& folder) {
  const std::string gguf = some_gguf_in(folder);
  const std::string hint = gguf.empty() ? "" : fmt::format("; to use {} name the file itself", detail::quote(gguf));
  return Error(Errc::not_found,
               fmt::format("{}: a folder with neither {} nor {}{}", folder.native(), kSingleFile, kIndexFile, hint));
}

bool file_exists(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

}  // namespace

Result<> WeightFile::add_file(std::unique_ptr<ByteSource> source, std::vector<TensorInfo>& tensors) {
  const auto file = static_cast<std::uint32_t>(files_.size());
  TensorTable table;
  if (is_gguf(*source)) {
    gguf_ = METRALE_TRY(parse_gguf(*source));
    table = gguf_->tensors;
  } else {
    SafetensorsHeader header = METRALE_TRY(parse_safetensors(*source));
    if (file == 0) safetensors_metadata_ = std::move(header.metadata);
    table = std::move(header.tensors);
  }
  for (TensorInfo tensor : table.tensors()) {
    tensor.file = file;
    tensors.push_back(std::move(tensor));
  }
  files_.push_back(std::move(source));
  return {};
}

Result<> WeightFile::add_shards(const std::filesystem::path& index_path, std::vector<TensorInfo>& tensors) {
  const std::unique_ptr<FileSource> index_source = METRALE_TRY(FileSource::open(index_path));
  const SafetensorsIndex index = METRALE_TRY(parse_safetensors_index(*index_source));
  std::map<std::string_view, std::uint32_t> shards;
  for (const auto& [tensor, shard] : index.weight_map) shards.emplace(shard, 0);
  for (auto& [shard, file] : shards) {
    const std::filesystem::path shard_path = path_ / shard;
    if (!file_exists(shard_path)) {
      return Error(Errc::not_found,
                   fmt::format("{}: names shard {}, which is not in the folder", index_path.native(), detail::quote(shard)));
    }
    std::unique_ptr<FileSource> source = METRALE_TRY(FileSource::open(shard_path));
    if (is_gguf(*source))
      return Error(Errc::bad_format, fmt::format("{}: a GGUF file where a safetensors shard belongs", shard_path.native()));
    file = static_cast<std::uint32_t>(files_.size());
    METRALE_TRY(add_file(std::move(source), tensors));
  }
  // Which shards hold which name; a name that two shards hold is ambiguous whatever the index says.
  std::map<std::string_view, std::uint32_t> found;
  for (const TensorInfo& tensor : tensors) {
    const auto [at, added] = found.emplace(tensor.name, tensor.file);
    if (!added) {
      return Error(Errc::bad_format, fmt::format("{}: tensor {} is in both {} and {}", path_.native(), detail::quote(tensor.name),
                                                 file_label(at->second), file_label(tensor.file)));
    }
  }
  for (const auto& [name, shard] : index.weight_map) {
    const auto at = found.find(name);
    if (at == found.end() || at->second != shards.at(shard)) {
      return Error(Errc::bad_format, fmt::format("{}: puts tensor {} in shard {}, which lacks it", index_path.native(),
                                                 detail::quote(name), detail::quote(shard)));
    }
  }
  return {};
}

Result<> WeightFile::add_folder(std::vector<TensorInfo>& tensors) {
  if (file_exists(path_ / kSingleFile)) return add_file(METRALE_TRY(FileSource::open(path_ / kSingleFile)), tensors);
  if (file_exists(path_ / kIndexFile)) return add_shards(path_ / kIndexFile, tensors);
  return no_weights(path_);
}

Result<std::unique_ptr<WeightFile>> WeightFile::open(const std::filesystem::path& path) {
  return detail::guarded(path.native(), [&]() -> Result<std::unique_ptr<WeightFile>> {
    std::unique_ptr<WeightFile> self(new WeightFile);
    self->path_ = path;
    std::vector<TensorInfo> tensors;
    std::error_code ignored;
    if (std::filesystem::is_directory(path, ignored)) {
      METRALE_TRY(self->add_folder(tensors));
    } else {
      std::unique_ptr<FileSource> source = METRALE_TRY(FileSource::open(path));
      const bool known = is_gguf(*source) || path.extension() == ".safetensors";
      if (!known && path.extension() == ".gguf") METRALE_TRY(parse_gguf(*source));  // says what is wrong with it
      if (!known) {
        return Error(Errc::bad_format,
                     fmt::format("{}: neither a GGUF nor a .safetensors file; for a sharded model name its folder", path.native()));
      }
      METRALE_TRY(self->add_file(std::move(source), tensors));
    }
    self->tensors_ = METRALE_TRY(TensorTable::create(std::move(tensors), path.native()));
    return self;
  });
}

Result<std::unique_ptr<WeightFile>> WeightFile::open(std::unique_ptr<ByteSource> source) {
  if (!source) return Error(Errc::invalid_argument, "open weights: no source");
  const std::string label = source->label();
  return detail::guarded(label, [&]() -> Result<std::unique_ptr<WeightFile>> {
    std::unique_ptr<WeightFile> self(new WeightFile);
    self->path_ = label;
    std::vector<TensorInfo> tensors;
    METRALE_TRY(self->add_file(std::move(source), tensors));
    self->tensors_ = METRALE_TRY(TensorTable::create(std::move(tensors), label));
    return self;
  });
}

Result<const TensorInfo*> WeightFile::get(std::string_view name) const {
  const TensorInfo* tensor = find(name);
  if (tensor != nullptr) return tensor;
  return Error(Errc::not_found, fmt::format("{}: no tensor {} among {}{}", path_.native(), detail::quote(name), tensors_.size(),
                                            weights::nearest_text(tensors_.nearest(name))));
}

std::uint64_t WeightFile::file_bytes() const noexcept {
  std::uint64_t total = 0;
  for (const std::unique_ptr<ByteSource>& file : files_) total += file->size_bytes();
  return total;
}

Result<> WeightFile::read(const TensorInfo& tensor, std::uint64_t offset, std::span<std::byte> dst) const {
  if (tensor.file >= files_.size()) {
    return Error(Errc::invalid_argument,
                 fmt::format("{}: tensor {} is not from this file", path_.native(), detail::quote(tensor.name)));
  }
  if (offset > tensor.size_bytes || dst.size() > tensor.size_bytes - offset) {
    return Error(Errc::out_of_range, fmt::format("{}: {} bytes at offset {} leave the {} bytes of tensor {}", path_.native(),
                                                 dst.size(), offset, tensor.size_bytes, detail::quote(tensor.name)));
  }
  return files_[tensor.file]->read(tensor.offset + offset, dst);
}

Result<std::vector<std::byte>> WeightFile::read(const TensorInfo& tensor) const {
  return detail::guarded(path_.native(), [&]() -> Result<std::vector<std::byte>> {
    std::vector<std::byte> bytes(static_cast<std::size_t>(tensor.size_bytes));
    METRALE_TRY(read(tensor, 0, bytes));
    return bytes;
  });
}

Result<> WeightFile::read_file(std::uint32_t file, std::uint64_t offset, std::span<std::byte> dst) const {
  if (file >= files_.size()) {
    return Error(Errc::invalid_argument, fmt::format("{}: file {} of {}", path_.native(), file, files_.size()));
  }
  return files_[file]->read(offset, dst);
}

void WeightFile::drop_cached(std::uint32_t file, std::uint64_t offset, std::uint64_t bytes) const noexcept {
  if (file < files_.size()) files_[file]->drop_cached(offset, bytes);
}

}  // namespace metrale
