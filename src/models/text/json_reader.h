// SPDX-License-Identifier: Apache-2.0
//
// Reading JSON that nobody vouches for: parsing within limits, and typed access whose failures name file, place and value on one
// line. JsonNode is a view: the document must outlive it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "metrale/result.h"

namespace metrale::text {

struct JsonLimits {
  std::size_t depth = 32;
  std::size_t values = 1U << 20;  ///< Counts what separates values, so it bounds them from above.
};

/// Parses one JSON document. Errors: bad_format.
Result<nlohmann::json> parse_json(std::string_view json, std::string_view file, JsonLimits limits);

/// Reads a whole file of at most `max_bytes`. Errors: not_found, invalid_argument, io, bad_format (longer).
Result<std::string> read_text_file(const std::filesystem::path& path, std::uint64_t max_bytes);

/// A value with its place in the document. Keys that are absent and keys that are null are treated alike.
class JsonNode {
 public:
  JsonNode(const nlohmann::json& value, std::string_view file, std::string place = {})
      : value_(&value), file_(file), place_(std::move(place)) {}

  const nlohmann::json& value() const noexcept { return *value_; }
  const std::string& place() const noexcept { return place_; }
  std::string_view file() const noexcept { return file_; }

  /// The member `key` of an object; nothing when it is absent or null, or this is no object.
  std::optional<JsonNode> find(std::string_view key) const;
  /// The member `key`, of this object. Errors: bad_format (absent, null, or this is no object).
  Result<JsonNode> require(std::string_view key) const;
  /// The `index`-th element; the caller has checked that this is an array with so many.
  JsonNode at(std::size_t index) const;

  Result<> require_object() const;
  Result<> require_array() const;
  /// An integer within [low, high]. A number with a fraction or exponent is refused.
  Result<std::int64_t> integer(std::int64_t low, std::int64_t high) const;
  Result<double> number() const;
  Result<bool> flag() const;
  /// A string, viewed.
  Result<std::string_view> string() const;

  Result<std::uint32_t> count(std::string_view key, std::uint32_t low, std::uint32_t high) const;
  Result<std::uint32_t> count_or(std::string_view key, std::uint32_t fallback, std::uint32_t low, std::uint32_t high) const;
  Result<double> number_of(std::string_view key) const;
  Result<double> number_or(std::string_view key, double fallback) const;
  Result<bool> flag_or(std::string_view key, bool fallback) const;
  Result<std::string_view> string_or(std::string_view key, std::string_view fallback) const;

  /// `<file>: <place> is <value>: <reason>`.
  Error error(Errc code, std::string_view reason) const;

 private:
  const nlohmann::json* value_;
  std::string_view file_;
  std::string place_;
};

}  // namespace metrale::text
