// SPDX-License-Identifier: Apache-2.0
//
// JsonSax: base of the handlers that read JSON from weight files without building a document, so that memory follows what is kept
// and not what is sent. Every event is refused unless the handler overrides it; nesting is limited; the first problem ends
// the parse.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "metrale/result.h"

namespace metrale::weights {

class JsonSax : public nlohmann::json_sax<nlohmann::json> {
 public:
  /// Deepest nesting of objects and arrays that any of these formats has.
  static constexpr std::size_t kMaxDepth = 4;

  bool null() override { return refuse("null"); }
  bool boolean(bool) override { return refuse("a boolean"); }
  bool number_integer(std::int64_t) override { return refuse("a negative number"); }
  bool number_unsigned(std::uint64_t) override { return refuse("a number"); }
  bool number_float(double, const std::string&) override { return refuse("a number that is no 64-bit integer"); }
  bool string(std::string&) override { return refuse("a string"); }
  bool binary(nlohmann::json::binary_t&) override { return refuse("binary data"); }
  bool start_object(std::size_t) override { return deeper() && enter_object(); }
  bool key(std::string&) override { return refuse("a key"); }
  bool end_object() override { return depth_-- > 0 && leave_object(); }
  bool start_array(std::size_t) override { return deeper() && enter_array(); }
  bool end_array() override { return depth_-- > 0 && leave_array(); }
  bool parse_error(std::size_t position, const std::string& token, const nlohmann::detail::exception& error) override;

  /// What went wrong, e.g. "tensor "a": dtype occurs twice". Empty while all is well.
  const std::string& problem() const noexcept { return problem_; }
  std::size_t depth() const noexcept { return depth_; }

 protected:
  virtual bool enter_object() { return refuse("an object"); }
  virtual bool leave_object() { return true; }
  virtual bool enter_array() { return refuse("an array"); }
  virtual bool leave_array() { return true; }
  /// Where the parse stands, for messages; "" at the top.
  virtual std::string where() const { return {}; }

  /// Records the problem and ends the parse.
  bool fail(std::string_view text);
  bool refuse(std::string_view what);

 private:
  bool deeper();

  std::size_t depth_ = 0;
  std::string problem_;
};

/// Feeds `text` to `sax`. Errors: bad_format with the label and the problem.
Result<> parse_json(std::string_view text, JsonSax& sax, std::string_view label);

}  // namespace metrale::weights
