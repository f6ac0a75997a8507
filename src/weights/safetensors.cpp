// SPDX-License-Identifier: Apache-2.0
#include "metrale/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <tuple>

#include "core/text.h"
#include "weights/header_reader.h"
#include "weights/json_sax.h"
#include "weights/tensor_table.h"

namespace metrale {
namespace {

using detail::quote;
using weights::JsonSax;

// Longest dtype that is kept for messages; published ones have 8 bytes at most.
constexpr std::size_t kMaxTypeName = 32;

struct SafetensorsType {
  std::string_view name;
  DType dtype;
};
constexpr std::array<SafetensorsType, 14> kTypes{{{"BF16", DType::bf16},
                                                  {"BOOL", DType::boolean},
                                                  {"F16", DType::f16},
                                                  {"F32", DType::f32},
                                                  {"F64", DType::f64},
                                                  {"F8_E4M3", DType::f8_e4m3},
                                                  {"F8_E5M2", DType::f8_e5m2},
                                                  {"I16", DType::i16},
                                                  {"I32", DType::i32},
                                                  {"I64", DType::i64},
                                                  {"I8", DType::i8},
                                                  {"U16", DType::u16},
                                                  {"U32", DType::u32},
                                                  {"U8", DType::u8}}};

std::optional<DType> find_type(std::string_view name) noexcept {
  if (name == "U64") return DType::u64;
  const auto at = std::ranges::find(kTypes, name, &SafetensorsType::name);
  return at == kTypes.end() ? std::nullopt : std::optional(at->dtype);
}

// {"__metadata__": {text: text}, name: {"dtype": text, "shape": [n…], "data_offsets": [begin, end]}}
class HeaderSax final : public JsonSax {
 public:
  explicit HeaderSax(SafetensorsHeader& header) : header_(header) {}

  bool key(std::string& text) override {
    if (depth() == 1) {
      name_ = std::move(text);
      in_metadata_ = name_ == "__metadata__";
      if (!in_metadata_) return true;
      if (seen_metadata_) return fail("__metadata__ occurs twice");
      seen_metadata_ = true;
      return true;
    }
    if (in_metadata_) {
      metadata_key_ = std::move(text);
      if (header_.metadata.find(metadata_key_) != header_.metadata.end()) return fail(quote(metadata_key_) + " occurs twice");
      return true;
    }
    field_ = text == "dtype"          ? Field::dtype
             : text == "shape"        ? Field::shape
             : text == "data_offsets" ? Field::offsets
                                      : Field::none;
    if (field_ == Field::none) return fail(fmt::format("unknown field {}", quote(text)));
    bool& seen = seen_[static_cast<std::size_t>(field_)];
    if (seen) return fail(fmt::format("{} occurs twice", text));
    seen = true;
    return true;
  }

  bool string(std::string& text) override {
    if (depth() != 2) return refuse("a string");
    if (in_metadata_) {
      header_.metadata.emplace(std::move(metadata_key_), std::move(text));
      return true;
    }
    if (field_ != Field::dtype) return refuse("a string");
    if (text.size() > kMaxTypeName) return fail(fmt::format("a dtype of {} bytes", text.size()));
    tensor_.dtype = find_type(text);
    tensor_.type_name = std::move(text);
    return true;
  }

  bool number_unsigned(std::uint64_t value) override {
    if (depth() != 3) return refuse("a number");
    if (field_ == Field::shape) {
      if (tensor_.shape.size() == kMaxTensorRank) return fail(fmt::format("more than {} dimensions", kMaxTensorRank));
      tensor_.shape.push_back(value);
    } else {
      if (num_offsets_ == offsets_.size()) return fail("data_offsets with more than two numbers");
      offsets_[num_offsets_++] = value;
    }
    return true;
  }

  std::vector<TensorInfo> take_tensors() { return std::move(tensors_); }

 private:
  enum class Field : std::size_t { dtype, shape, offsets, none };

  bool enter_object() override {
    if (depth() > 2) return refuse("an object");
    if (depth() == 2) {
      tensor_ = TensorInfo{};
      seen_ = {};
      num_offsets_ = 0;
    }
    return true;
  }

  bool leave_object() override {
    if (depth() != 1 || in_metadata_) return true;
    if (!seen_[0] || !seen_[1] || !seen_[2]) return fail("dtype, shape and data_offsets are not all there");
    if (num_offsets_ != 2) return fail("data_offsets without two numbers");
    if (offsets_[0] > offsets_[1]) return fail(fmt::format("data_offsets run backwards, {} to {}", offsets_[0], offsets_[1]));
    tensor_.offset = offsets_[0];
    tensor_.size_bytes = offsets_[1] - offsets_[0];
    const std::optional<std::uint64_t> elements = weights::element_count(tensor_.shape);
    if (!elements) return fail(fmt::format("the shape {} overflows", shape_text(tensor_.shape)));
    if (tensor_.dtype) {
      const std::optional<std::uint64_t> bytes = size_bytes(*tensor_.dtype, *elements);
      if (!bytes) return fail(fmt::format("the shape {} overflows", shape_text(tensor_.shape)));
      if (*bytes != tensor_.size_bytes) {
        return fail(fmt::format("{} {} takes {} bytes, data_offsets give it {}", tensor_.type_name, shape_text(tensor_.shape),
                                *bytes, tensor_.size_bytes));
      }
    }
    tensor_.name = name_;
    tensors_.push_back(std::move(tensor_));
    return true;
  }

  bool enter_array() override {
    const bool expected = depth() == 3 && !in_metadata_ && (field_ == Field::shape || field_ == Field::offsets);
    return expected || refuse("an array");
  }

  std::string where() const override {
    if (name_.empty() && tensors_.empty()) return "header";
    return in_metadata_ ? name_ : "tensor " + quote(name_);
  }

  SafetensorsHeader& header_;
  std::vector<TensorInfo> tensors_;
  std::string name_;
  bool in_metadata_ = false;
  bool seen_metadata_ = false;
  std::string metadata_key_;
  Field field_ = Field::none;
  std::array<bool, 3> seen_{};
  TensorInfo tensor_;
  std::array<std::uint64_t, 2> offsets_{};
  std::size_t num_offsets_ = 0;
};

// {"metadata": {…}, "weight_map": {tensor name: shard file name}}
class IndexSax final : public JsonSax {
 public:
  explicit IndexSax(SafetensorsIndex& index) : index_(index) {}

  bool seen_weight_map() const noexcept { return seen_weight_map_; }

  // Everything outside weight_map is for people and is passed over.
  bool null() override { return !in_weight_map() || refuse("null"); }
  bool boolean(bool) override { return !in_weight_map() || refuse("a boolean"); }
  bool number_integer(std::int64_t) override { return !in_weight_map() || refuse("a number"); }
  bool number_unsigned(std::uint64_t) override { return !in_weight_map() || refuse("a number"); }
  bool number_float(double, const std::string&) override { return !in_weight_map() || refuse("a number"); }

  bool key(std::string& text) override {
    if (depth() == 1) {
      section_ = std::move(text);
      if (section_ != "weight_map") return true;
      if (seen_weight_map_) return fail("weight_map occurs twice");
      seen_weight_map_ = true;
      return true;
    }
    if (!in_weight_map()) return true;
    name_ = std::move(text);
    if (index_.weight_map.find(name_) != index_.weight_map.end()) return fail("the name occurs twice");
    return true;
  }

  bool string(std::string& text) override {
    if (!in_weight_map()) return true;
    if (depth() != 2) return refuse("a string");
    // A path would let an index read files outside its own folder.
    if (text.empty() || text == "." || text == ".." || text.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos) {
      return fail(fmt::format("{} is no plain file name", quote(text)));
    }
    index_.weight_map.emplace(std::move(name_), std::move(text));
    return true;
  }

 private:
  bool in_weight_map() const noexcept { return depth() == 0 || section_ == "weight_map"; }
  bool enter_object() override { return depth() == 1 || !in_weight_map() || depth() == 2 || refuse("an object"); }
  bool enter_array() override { return (depth() > 1 && !in_weight_map()) || refuse("an array"); }
  std::string where() const override {
    return !in_weight_map() || name_.empty() ? std::string() : fmt::format("weight_map {}", quote(name_));
  }

  SafetensorsIndex& index_;
  std::string section_;
  bool seen_weight_map_ = false;
  std::string name_;
};

// The reference implementation refuses files whose data part is not covered end to end; so does this one, which catches a file that
// lost or gained bytes.
Result<> place_tensors(std::vector<TensorInfo>& tensors, std::uint64_t data_offset, const ByteSource& source) {
  std::sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.offset, a.size_bytes, a.name) < std::tie(b.offset, b.size_bytes, b.name);
  });
  const std::uint64_t data_bytes = source.size_bytes() - data_offset;
  std::uint64_t covered = 0;
  for (TensorInfo& tensor : tensors) {
    if (tensor.offset > data_bytes || tensor.size_bytes > data_bytes - tensor.offset) {
      return Error(Errc::bad_format, fmt::format("{}: tensor {} needs {} bytes at data offset {}, the file holds {} bytes of data",
                                                 source.label(), quote(tensor.name), tensor.size_bytes, tensor.offset, data_bytes));
    }
    if (tensor.offset > covered) {
      return Error(Errc::bad_format, fmt::format("{}: no tensor claims the {} bytes before tensor {}", source.label(),
                                                 tensor.offset - covered, quote(tensor.name)));
    }
    if (tensor.size_bytes != 0 && tensor.offset == covered) covered += tensor.size_bytes;
  }
  for (TensorInfo& tensor : tensors) tensor.offset += data_offset;
  METRALE_TRY(weights::check_no_overlap(tensors, source.label()));
  if (covered != data_bytes) {
    return Error(Errc::bad_format, fmt::format("{}: {} bytes after the last tensor", source.label(), data_bytes - covered));
  }
  return {};
}

Result<std::string> read_text(const ByteSource& source, std::uint64_t offset, std::uint64_t bytes, std::string_view what) {
  if (bytes > kMaxSafetensorsHeaderBytes) {
    return Error(Errc::bad_format,
                 fmt::format("{}: {} of {} bytes; the limit is {}", source.label(), what, bytes, kMaxSafetensorsHeaderBytes));
  }
  std::string text(static_cast<std::size_t>(bytes), '\0');
  METRALE_TRY(source.read(offset, std::as_writable_bytes(std::span(text))));
  // The JSON library takes a zero byte for the end of its input and would pass over what follows.
  const std::size_t zero = text.find('\0');
  if (zero != std::string::npos)
    return Error(Errc::bad_format, fmt::format("{}: a zero byte at {} of the {}", source.label(), zero, what));
  return text;
}

Result<SafetensorsHeader> parse(const ByteSource& source) {
  std::uint64_t length = 0;
  if (source.size_bytes() < sizeof(length)) {
    return Error(Errc::bad_format,
                 fmt::format("{}: {} bytes are too few for a safetensors file", source.label(), source.size_bytes()));
  }
  METRALE_TRY(source.read(0, std::as_writable_bytes(std::span(&length, 1))));
  if (length > source.size_bytes() - sizeof(length)) {
    return Error(Errc::bad_format,
                 fmt::format("{}: a header of {} bytes in a file of {}", source.label(), length, source.size_bytes()));
  }
  const std::string text = METRALE_TRY(read_text(source, sizeof(length), length, "header"));
  if (!text.starts_with('{')) return Error(Errc::bad_format, fmt::format("{}: the header does not start with {{", source.label()));

  SafetensorsHeader header;
  header.data_offset = sizeof(length) + length;
  HeaderSax sax(header);
  METRALE_TRY(weights::parse_json(text, sax, source.label()));
  std::vector<TensorInfo> tensors = sax.take_tensors();
  METRALE_TRY(place_tensors(tensors, header.data_offset, source));
  header.tensors = METRALE_TRY(TensorTable::create(std::move(tensors), source.label()));
  return header;
}

Result<SafetensorsIndex> parse_index(const ByteSource& source) {
  const std::string text = METRALE_TRY(read_text(source, 0, source.size_bytes(), "index"));
  SafetensorsIndex index;
  IndexSax sax(index);
  METRALE_TRY(weights::parse_json(text, sax, source.label()));
  if (!sax.seen_weight_map()) return Error(Errc::bad_format, fmt::format("{}: no weight_map", source.label()));
  if (index.weight_map.empty()) return Error(Errc::bad_format, fmt::format("{}: weight_map is empty", source.label()));
  return index;
}

}  // namespace

Result<SafetensorsHeader> parse_safetensors(const ByteSource& source) {
  return detail::guarded(source.label(), [&] { return parse(source); });
}

Result<SafetensorsIndex> parse_safetensors_index(const ByteSource& source) {
  return detail::guarded(source.label(), [&] { return parse_index(source); });
}

}  // namespace metrale
