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
    : body_(new Body{code, 0, {}, std::move(message), site, {}}) {}

Error::Error(const Error& other) : body_(other.is_shared() ? other.body_.get() : new Body(*other.body_)) {}

Error Error::no_memory() noexcept { return Error(Owner(&shared_body())); }

// Made when the program starts, when there is memory, and never destroyed: destructors that run at exit may fail too.
Error::Body& Error::shared_body() noexcept {
  // NOLINTNEXTLINE(bugprone-unhandled-exception-at-new): a program that starts without memory may as well end
  static Body& body = *new Body{Errc::out_of_memory, 0, {}, "the host has no memory left, not even for a message", {}, {}};
  return body;
}

bool Error::is_shared() const noexcept { return body_.get() == &shared_body(); }

void Error::Drop::operator()(Body* body) const noexcept {
  if (body != &shared_body()) delete body;
}

namespace {
[[maybe_unused]] const bool kMadeAtStart = (static_cast<void>(Error::no_memory()), true);
}  // namespace

Error Error::with_native(std::int64_t code, std::string text) && {
  if (is_shared()) return std::move(*this);
  body_->native_code = code;
  body_->native_text = std::move(text);
  return std::move(*this);
}

Error Error::with_site(std::source_location site) && {
  if (!is_shared()) body_->site = site;
  return std::move(*this);
}

Error Error::with_note(std::string note) && {
  if (!is_shared()) body_->notes.push_back(std::move(note));
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
