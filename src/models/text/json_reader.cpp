// SPDX-License-Identifier: Apache-2.0
#include "models/text/json_reader.h"

#include <fmt/format.h>

#include <cmath>

#include "core/text.h"
#include "metrale/byte_source.h"

namespace metrale::text {
namespace {

using nlohmann::json;

// nlohmann's parser keeps no call stack, but whoever walks or prints a deep document would, and a document of nothing but brackets
// takes thirty times its length in memory. Both are cheaper to see before parsing.
Result<> check_limits(std::string_view text, std::string_view file, JsonLimits limits) {
  std::size_t depth = 0;
  std::size_t values = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
      continue;
    }
    switch (c) {
      case '"': in_string = true; break;
      case '[':
      case '{':
        if (++depth > limits.depth)
          return Error(Errc::bad_format, fmt::format("{}: nested deeper than {} levels at byte {}", file, limits.depth, i));
        ++values;
        break;
      case ']':
      case '}':
        if (depth > 0) --depth;
        break;
      case ',': ++values; break;
      default: break;
    }
    if (values > limits.values)
      return Error(Errc::bad_format, fmt::format("{}: more than {} values by byte {}", file, limits.values, i));
  }
  return {};
}

// The parser's words without its own name and number, and without the token it read last, which is the file's own bytes.
std::string reason_of(const json::exception& error) {
  std::string_view what = error.what();
  if (const auto bracket = what.find("] "); bracket != std::string_view::npos) what.remove_prefix(bracket + 2);
  if (const auto last_read = what.find("; last read"); last_read != std::string_view::npos) what = what.substr(0, last_read);
  const std::string quoted = detail::quote(what);
  return quoted.substr(1, quoted.size() - 2);
}

std::string shown(const json& value) {
  switch (value.type()) {
    case json::value_t::string: return detail::quote(value.get_ref<const std::string&>());
    case json::value_t::object: return "an object";
    case json::value_t::array: return fmt::format("an array of {}", value.size());
    default: return value.dump();
  }
}

}  // namespace

Result<json> parse_json(std::string_view text, std::string_view file, JsonLimits limits) {
  METRALE_TRY(check_limits(text, file, limits));
  return detail::guarded(file, [&]() -> Result<json> {
    try {
      return json::parse(text.begin(), text.end());
    } catch (const json::exception& error) {
      return Error(Errc::bad_format, fmt::format("{}: no valid JSON: {}", file, reason_of(error)));
    }
  });
}

Result<std::string> read_text_file(const std::filesystem::path& path, std::uint64_t max_bytes) {
  const auto source = METRALE_TRY(FileSource::open(path));
  if (source->size_bytes() > max_bytes)
    return Error(Errc::bad_format,
                 fmt::format("{}: {} bytes; at most {} are read", source->label(), source->size_bytes(), max_bytes));
  return detail::guarded(source->label(), [&]() -> Result<std::string> {
    std::string text(source->size_bytes(), '\0');
    METRALE_TRY(source->read(0, std::as_writable_bytes(std::span(text))));
    return text;
  });
}

std::optional<JsonNode> JsonNode::find(std::string_view key) const {
  if (!value_->is_object()) return std::nullopt;
  const auto it = value_->find(key);
  if (it == value_->end() || it->is_null()) return std::nullopt;
  return JsonNode(*it, file_, place_.empty() ? std::string(key) : fmt::format("{}.{}", place_, key));
}

Result<JsonNode> JsonNode::require(std::string_view key) const {
  METRALE_TRY(require_object());
  if (auto member = find(key)) return *std::move(member);
  return Error(Errc::bad_format,
               fmt::format("{}: {} is missing", file_, place_.empty() ? std::string(key) : place_ + "." + std::string(key)));
}

JsonNode JsonNode::at(std::size_t index) const { return JsonNode((*value_)[index], file_, fmt::format("{}[{}]", place_, index)); }

Error JsonNode::error(Errc code, std::string_view reason) const {
  return Error(code, fmt::format("{}: {} is {}: {}", file_, place_.empty() ? "the document" : detail::quote(place_), shown(*value_),
                                 reason));
}

Result<> JsonNode::require_object() const {
  if (!value_->is_object()) return error(Errc::bad_format, "an object is needed");
  return {};
}

Result<> JsonNode::require_array() const {
  if (!value_->is_array()) return error(Errc::bad_format, "an array is needed");
  return {};
}

Result<std::int64_t> JsonNode::integer(std::int64_t low, std::int64_t high) const {
  const auto refuse = [&] { return error(Errc::bad_format, fmt::format("an integer from {} to {} is needed", low, high)); };
  if (value_->is_number_unsigned()) {
    const auto value = value_->get<std::uint64_t>();
    if (high < 0 || value > static_cast<std::uint64_t>(high) || (low > 0 && value < static_cast<std::uint64_t>(low)))
      return refuse();
    return static_cast<std::int64_t>(value);
  }
  if (!value_->is_number_integer()) return refuse();
  const auto value = value_->get<std::int64_t>();
  if (value < low || value > high) return refuse();
  return value;
}

Result<double> JsonNode::number() const {
  if (!value_->is_number()) return error(Errc::bad_format, "a number is needed");
  const auto value = value_->get<double>();
  if (!std::isfinite(value)) return error(Errc::bad_format, "a finite number is needed");
  return value;
}

Result<bool> JsonNode::flag() const {
  if (!value_->is_boolean()) return error(Errc::bad_format, "true or false is needed");
  return value_->get<bool>();
}

Result<std::string_view> JsonNode::string() const {
  if (!value_->is_string()) return error(Errc::bad_format, "a string is needed");
  return std::string_view(value_->get_ref<const std::string&>());
}

Result<std::uint32_t> JsonNode::count(std::string_view key, std::uint32_t low, std::uint32_t high) const {
  const auto member = METRALE_TRY(require(key));
  return static_cast<std::uint32_t>(METRALE_TRY(member.integer(low, high)));
}

Result<std::uint32_t> JsonNode::count_or(std::string_view key, std::uint32_t fallback, std::uint32_t low,
                                         std::uint32_t high) const {
  if (!find(key)) return fallback;
  return count(key, low, high);
}

Result<double> JsonNode::number_of(std::string_view key) const {
  const auto member = METRALE_TRY(require(key));
  return member.number();
}

Result<double> JsonNode::number_or(std::string_view key, double fallback) const {
  const auto member = find(key);
  if (!member) return fallback;
  return member->number();
}

Result<bool> JsonNode::flag_or(std::string_view key, bool fallback) const {
  const auto member = find(key);
  if (!member) return fallback;
  return member->flag();
}

Result<std::string_view> JsonNode::string_or(std::string_view key, std::string_view fallback) const {
  const auto member = find(key);
  if (!member) return fallback;
  return member->string();
}

}  // namespace metrale::text
