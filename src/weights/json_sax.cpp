// SPDX-License-Identifier: Apache-2.0
#include "weights/json_sax.h"

#include <fmt/format.h>

#include "core/text.h"

namespace metrale::weights {

bool JsonSax::fail(std::string_view text) {
  if (problem_.empty()) {
    const std::string place = where();
    problem_ = place.empty() ? std::string(text) : fmt::format("{}: {}", place, text);
  }
  return false;
}

bool JsonSax::refuse(std::string_view what) { return fail(fmt::format("{} where the format has none", what)); }

bool JsonSax::deeper() {
  if (++depth_ > kMaxDepth) return fail(fmt::format("JSON nested deeper than {} levels", kMaxDepth));
  return true;
}

bool JsonSax::parse_error(std::size_t position, const std::string& token, const nlohmann::detail::exception&) {
  // The library's own text repeats the offending input, which may hold anything.
  return fail(fmt::format("no valid JSON at byte {}, near {}", position, detail::quote(token)));
}

Result<> parse_json(std::string_view text, JsonSax& sax, std::string_view label) {
  if (nlohmann::json::sax_parse(text.begin(), text.end(), &sax)) return {};
  const std::string& problem = sax.problem();
  return Error(Errc::bad_format, fmt::format("{}: {}", label, problem.empty() ? "no valid JSON" : problem));
}

}  // namespace metrale::weights
