// SPDX-License-Identifier: Apache-2.0
#include "metrale/result.h"

#include <fmt/format.h>

namespace metrale {

std::string_view to_string(Errc code) noexcept {
  switch (code) {
    case Errc::invalid_argument: return "invalid_argument";
    case Errc::out_of_range: return "out_of_range";
    case Errc::out_of_memory: return "out_of_memory";
    case Errc::not_found: return "not_found";
    case Errc::unsupported: return "unsupported";
    case Errc::capture_unsafe: return "capture_unsafe";
    case Errc::in_use: return "in_use";
    case Errc::device_lost: return "device_lost";
    case Errc::timeout: return "timeout";
    case Errc::busy: return "busy";
    case Errc::io: return "io";
    case Errc::bad_format: return "bad_format";
    case Errc::internal: return "internal";
  }
  return "unknown";
}

Error::Error(Errc code, std::string message, std::source_location site)
    : body_(std::make_unique<Body>(Body{code, 0, {}, std::move(message), site, {}})) {}

Error Error::with_native(std::int64_t code, std::string text) && {
  body_->native_code = code;
  body_->native_text = std::move(text);
  return std::move(*this);
}

Error Error::with_site(std::source_location site) && {
  body_->site = site;
  return std::move(*this);
}

Error Error::with_note(std::string note) && {
  body_->notes.push_back(std::move(note));
  return std::move(*this);
}

std::string Error::to_string() const {
  std::string text = fmt::format("{}: {}", metrale::to_string(body_->code), body_->message);
  if (body_->native_code != 0) text += fmt::format(" [driver {}: {}]", body_->native_code, body_->native_text);
  text += fmt::format(" ({}:{})", body_->site.file_name(), body_->site.line());
  for (const std::string& note : body_->notes) text += "; " + note;
  return text;
}

}  // namespace metrale
