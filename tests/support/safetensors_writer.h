// SPDX-License-Identifier: Apache-2.0
//
// SafetensorsWriter: makes small safetensors files in memory; `safetensors_file` makes one from any header text, right or wrong.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/byte_writer.h"

namespace metrale::test {

/// Length, header, data.
inline std::vector<std::byte> safetensors_file(std::string_view header, std::span<const std::byte> data = {}) {
  return ByteWriter().put(std::uint64_t{header.size()}).put_text(header).put_bytes(data).take();
}

class SafetensorsWriter {
 public:
  SafetensorsWriter& tensor(std::string_view name, std::string_view dtype, const std::vector<std::uint64_t>& shape,
                            const std::vector<std::byte>& data) {
    if (!entries_.empty()) entries_ += ',';
    entries_.append("\"").append(name).append("\":{\"dtype\":\"").append(dtype).append("\",\"shape\":[");
    for (std::size_t i = 0; i < shape.size(); ++i) entries_.append(i == 0 ? "" : ",").append(std::to_string(shape[i]));
    entries_.append("],\"data_offsets\":[").append(std::to_string(data_.size())).append(",");
    entries_.append(std::to_string(data_.size() + data.size())).append("]}");
    data_.insert(data_.end(), data.begin(), data.end());
    return *this;
  }

  SafetensorsWriter& metadata(std::string_view key, std::string_view value) {
    if (!metadata_.empty()) metadata_ += ',';
    metadata_.append("\"").append(key).append("\":\"").append(value).append("\"");
    return *this;
  }

  std::string header() const {
    std::string text = "{";
    if (!metadata_.empty()) text.append("\"__metadata__\":{").append(metadata_).append(entries_.empty() ? "}" : "},");
    text.append(entries_).append("}");
    while (text.size() % 8 != 0) text += ' ';
    return text;
  }
  std::vector<std::byte> bytes() const { return safetensors_file(header(), data_); }

 private:
  std::string entries_;
  std::string metadata_;
  std::vector<std::byte> data_;
};

}  // namespace metrale::test
