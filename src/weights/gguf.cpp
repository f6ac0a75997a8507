// SPDX-License-Identifier: Apache-2.0
#include "metrale/gguf.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <tuple>

#include "core/text.h"
#include "metrale/types.h"
#include "weights/ggml_type.h"
#include "weights/header_reader.h"
#include "weights/tensor_table.h"

namespace metrale {
namespace {

using detail::quote;
using weights::GgmlType;
using weights::HeaderReader;

constexpr std::array<char, 4> kMagic{'G', 'G', 'U', 'F'};
constexpr std::uint64_t kMaxNameBytes = 65535;
constexpr std::uint32_t kMaxDims = 4;
constexpr std::uint64_t kLeastKeyBytes = 8 + 4 + 1;         // length, type, a one-byte value
constexpr std::uint64_t kLeastTensorBytes = 8 + 4 + 4 + 8;  // length, dimension count, type, offset
// More keys or tensors than any model has; each costs several times its bytes in the file.
constexpr std::uint64_t kMaxKeys = std::uint64_t{1} << 16;
constexpr std::uint64_t kMaxTensors = std::uint64_t{1} << 20;
constexpr std::uint64_t kMaxEndOffset = std::uint64_t{1} << 62;  // keeps sums of offsets and sizes from wrapping

// Value types in the order of the format's numbers.
enum class ValueType : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };

template <class T>
Result<GgufValue> read_scalar(HeaderReader& reader) {
  return GgufValue(METRALE_TRY(reader.value<T>()));
}

Result<bool> read_bool(HeaderReader& reader) {
  const std::uint8_t byte = METRALE_TRY(reader.value<std::uint8_t>());
  if (byte > 1) return reader.fail(Errc::bad_format, fmt::format("{} is no boolean; 0 or 1 is", byte));
  return byte != 0;
}

template <class T>
Result<GgufValue> read_array(HeaderReader& reader, std::uint64_t count) {
  METRALE_TRY(reader.expect(count, sizeof(T), "array elements"));
  std::vector<T> values(static_cast<std::size_t>(count));
  METRALE_TRY(reader.bytes(std::as_writable_bytes(std::span(values))));
  return GgufValue(std::move(values));
}

Result<GgufValue> read_bool_array(HeaderReader& reader, std::uint64_t count) {
  METRALE_TRY(reader.expect(count, 1, "array elements"));
  std::vector<bool> values;
  values.reserve(static_cast<std::size_t>(count));
  for (std::uint64_t i = 0; i < count; ++i) values.push_back(METRALE_TRY(read_bool(reader)));
  return GgufValue(std::move(values));
}

Result<GgufValue> read_string_array(HeaderReader& reader, std::uint64_t count) {
  METRALE_TRY(reader.expect(count, sizeof(std::uint64_t), "strings"));
  std::vector<std::string> values;
  values.reserve(static_cast<std::size_t>(count));
  for (std::uint64_t i = 0; i < count; ++i) values.push_back(METRALE_TRY(reader.string()));
  return GgufValue(std::move(values));
}

Result<GgufValue> read_array(HeaderReader& reader) {
  const auto type = METRALE_TRY(reader.value<std::uint32_t>());
  const auto count = METRALE_TRY(reader.value<std::uint64_t>());
  switch (static_cast<ValueType>(type)) {
    case ValueType::u8: return read_array<std::uint8_t>(reader, count);
    case ValueType::i8: return read_array<std::int8_t>(reader, count);
    case ValueType::u16: return read_array<std::uint16_t>(reader, count);
    case ValueType::i16: return read_array<std::int16_t>(reader, count);
    case ValueType::u32: return read_array<std::uint32_t>(reader, count);
    case ValueType::i32: return read_array<std::int32_t>(reader, count);
    case ValueType::f32: return read_array<float>(reader, count);
    case ValueType::boolean: return read_bool_array(reader, count);
    case ValueType::string: return read_string_array(reader, count);
    case ValueType::u64: return read_array<std::uint64_t>(reader, count);
    case ValueType::i64: return read_array<std::int64_t>(reader, count);
    case ValueType::f64: return read_array<double>(reader, count);
    case ValueType::array: return reader.fail(Errc::bad_format, "an array of arrays, which metrale does not read");
  }
  return reader.fail(Errc::bad_format, fmt::format("array elements of unknown type {}", type));
}

Result<GgufValue> read_value(HeaderReader& reader) {
  const auto type = METRALE_TRY(reader.value<std::uint32_t>());
  switch (static_cast<ValueType>(type)) {
    case ValueType::u8: return read_scalar<std::uint8_t>(reader);
    case ValueType::i8: return read_scalar<std::int8_t>(reader);
    case ValueType::u16: return read_scalar<std::uint16_t>(reader);
    case ValueType::i16: return read_scalar<std::int16_t>(reader);
    case ValueType::u32: return read_scalar<std::uint32_t>(reader);
    case ValueType::i32: return read_scalar<std::int32_t>(reader);
    case ValueType::f32: return read_scalar<float>(reader);
    case ValueType::boolean: return GgufValue(METRALE_TRY(read_bool(reader)));
    case ValueType::string: return GgufValue(METRALE_TRY(reader.string()));
    case ValueType::array: return read_array(reader);
    case ValueType::u64: return read_scalar<std::uint64_t>(reader);
    case ValueType::i64: return read_scalar<std::int64_t>(reader);
    case ValueType::f64: return read_scalar<double>(reader);
  }
  return reader.fail(Errc::bad_format, fmt::format("a value of unknown type {}", type));
}

Result<std::string> read_name(HeaderReader& reader) {
  std::string name = METRALE_TRY(reader.string(kMaxNameBytes));
  if (name.empty()) return reader.fail(Errc::bad_format, "an empty name");
  if (!detail::valid_utf8(name)) return reader.fail(Errc::bad_format, fmt::format("the name {} is not UTF-8", quote(name)));
  return name;
}

Result<GgufMetadata::Map> read_metadata(HeaderReader& reader, std::uint64_t count) {
  GgufMetadata::Map values;
  for (std::uint64_t i = 0; i < count; ++i) {
    reader.set_context({"metadata key", i, count, {}});
    std::string name = METRALE_TRY(read_name(reader));
    reader.set_context({"metadata key", i, count, name});
    if (values.find(name) != values.end()) return reader.fail(Errc::bad_format, "the key occurs twice");
    GgufValue value = METRALE_TRY(read_value(reader));
    values.emplace(std::move(name), std::move(value));
  }
  reader.set_context({});
  return values;
}

Result<std::uint32_t> read_alignment(const GgufMetadata::Map& values, HeaderReader& reader) {
  const auto at = values.find("general.alignment");
  if (at == values.end()) return kGgufDefaultAlignment;
  reader.set_context({"metadata", 0, 0, at->first});
  const auto* alignment = std::get_if<std::uint32_t>(&at->second);
  if (alignment == nullptr) return reader.fail(Errc::bad_format, fmt::format("is {}, must be u32", gguf_type_name(at->second)));
  if (!std::has_single_bit(*alignment)) return reader.fail(Errc::bad_format, fmt::format("{} is no power of two", *alignment));
  return *alignment;
}

// Reads one entry of the tensor table. `offset` stays relative to the data part; the size of an unknown type stays 0.
Result<TensorInfo> read_tensor(HeaderReader& reader, std::uint64_t index, std::uint64_t count, std::uint32_t alignment) {
  TensorInfo tensor;
  reader.set_context({"tensor", index, count, {}});
  tensor.name = METRALE_TRY(read_name(reader));
  reader.set_context({"tensor", index, count, tensor.name});

  const auto dims = METRALE_TRY(reader.value<std::uint32_t>());
  if (dims > kMaxDims) return reader.fail(Errc::bad_format, fmt::format("{} dimensions; at most {} are allowed", dims, kMaxDims));
  tensor.shape.resize(dims);
  for (std::uint32_t i = 0; i < dims; ++i) {
    std::uint64_t& dim = tensor.shape[dims - 1 - i];  // the file lists the innermost first
    dim = METRALE_TRY(reader.value<std::uint64_t>());
    if (dim == 0) return reader.fail(Errc::bad_format, "a dimension of 0");
  }
  const auto type = METRALE_TRY(reader.value<std::uint32_t>());
  tensor.offset = METRALE_TRY(reader.value<std::uint64_t>());

  const std::optional<std::uint64_t> elements = weights::element_count(tensor.shape);
  if (!elements) return reader.fail(Errc::bad_format, fmt::format("the shape {} overflows", shape_text(tensor.shape)));
  if (tensor.offset % alignment != 0) {
    return reader.fail(Errc::bad_format, fmt::format("the offset {} is no multiple of the alignment {}", tensor.offset, alignment));
  }
  const GgmlType* ggml = weights::find_ggml_type(type);
  if (ggml == nullptr) {
    tensor.type_name = fmt::format("type {}", type);
    return tensor;
  }
  tensor.type_name = ggml->name;
  tensor.dtype = ggml->dtype;
  if (tensor.num_cols() % ggml->block_elements != 0) {
    return reader.fail(Errc::bad_format, fmt::format("rows of {} elements are no whole number of {} blocks of {}",
                                                     tensor.num_cols(), ggml->name, ggml->block_elements));
  }
  const std::uint64_t blocks = *elements / ggml->block_elements;
  if (blocks > kMaxEndOffset / ggml->block_bytes) {
    return reader.fail(Errc::bad_format, fmt::format("the shape {} overflows", shape_text(tensor.shape)));
  }
  tensor.size_bytes = blocks * ggml->block_bytes;
  return tensor;
}

// Turns offsets into offsets from the start of the file and checks every range against the file.
Result<> place_tensors(std::vector<TensorInfo>& tensors, std::uint64_t data_offset, const ByteSource& source) {
  std::sort(tensors.begin(), tensors.end(),
            [](const auto& a, const auto& b) { return std::tie(a.offset, a.name) < std::tie(b.offset, b.name); });
  if (!tensors.empty() && data_offset > source.size_bytes()) {
    return Error(Errc::bad_format, fmt::format("{}: tensor {} starts at {} or later, the file ends at {}", source.label(),
                                               quote(tensors.front().name), data_offset, source.size_bytes()));
  }
  const std::uint64_t data_bytes = tensors.empty() ? 0 : source.size_bytes() - data_offset;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    TensorInfo& tensor = tensors[i];
    if (tensor.offset > data_bytes || tensor.size_bytes > data_bytes - tensor.offset) {
      return Error(Errc::bad_format, fmt::format("{}: tensor {} needs {} bytes at data offset {}, the file holds {} bytes of data",
                                                 source.label(), quote(tensor.name), tensor.size_bytes, tensor.offset, data_bytes));
    }
    // The size of a type nobody here knows is whatever lies before the next tensor.
    if (tensor.size_bytes == 0) {
      const std::uint64_t next = i + 1 < tensors.size() ? std::min(tensors[i + 1].offset, data_bytes) : data_bytes;
      tensor.size_bytes = next - tensor.offset;
    }
  }
  for (TensorInfo& tensor : tensors) tensor.offset += data_offset;
  return weights::check_no_overlap(tensors, source.label());
}

Result<std::uint32_t> read_version(HeaderReader& reader) {
  std::array<char, 4> magic{};
  METRALE_TRY(reader.bytes(std::as_writable_bytes(std::span(magic))));
  if (magic != kMagic) return reader.fail(Errc::bad_format, "no GGUF file: it does not start with the letters GGUF");
  const auto version = METRALE_TRY(reader.value<std::uint32_t>());
  if (version == 2 || version == 3) return version;
  if (version == 0x02000000 || version == 0x03000000)
    return reader.fail(Errc::unsupported, "big-endian; convert it to little-endian");
  return reader.fail(Errc::unsupported, fmt::format("GGUF version {}; 2 and 3 are read", version));
}

Result<> check_count(const HeaderReader& reader, std::uint64_t count, std::uint64_t least_bytes, std::uint64_t most,
                     std::string_view what) {
  METRALE_TRY(reader.expect(count, least_bytes, what));
  if (count > most) return reader.fail(Errc::bad_format, fmt::format("{} {}; at most {} are read", count, what, most));
  return {};
}

Result<GgufHeader> parse(const ByteSource& source) {
  HeaderReader reader(source, kMaxGgufHeaderBytes);
  GgufHeader header;
  header.version = METRALE_TRY(read_version(reader));
  const auto num_tensors = METRALE_TRY(reader.value<std::uint64_t>());
  const auto num_keys = METRALE_TRY(reader.value<std::uint64_t>());
  METRALE_TRY(check_count(reader, num_tensors, kLeastTensorBytes, kMaxTensors, "tensors"));
  METRALE_TRY(check_count(reader, num_keys, kLeastKeyBytes, kMaxKeys, "metadata keys"));

  GgufMetadata::Map values = METRALE_TRY(read_metadata(reader, num_keys));
  header.alignment = METRALE_TRY(read_alignment(values, reader));
  header.metadata = GgufMetadata(std::move(values), source.label());

  std::vector<TensorInfo> tensors;
  for (std::uint64_t i = 0; i < num_tensors; ++i) {
    tensors.push_back(METRALE_TRY(read_tensor(reader, i, num_tensors, header.alignment)));
  }
  reader.set_context({});
  header.data_offset = round_up(reader.position(), header.alignment);
  METRALE_TRY(place_tensors(tensors, header.data_offset, source));
  header.tensors = METRALE_TRY(TensorTable::create(std::move(tensors), source.label()));
  return header;
}

}  // namespace

Result<GgufHeader> parse_gguf(const ByteSource& source) {
  return detail::guarded(source.label(), [&] { return parse(source); });
}

bool is_gguf(const ByteSource& source) noexcept {
  std::array<char, 4> magic{};
  return source.size_bytes() >= magic.size() && source.read(0, std::as_writable_bytes(std::span(magic))) && magic == kMagic;
}

}  // namespace metrale
